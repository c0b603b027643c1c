"""`run_ranks` for many small functions in a row: the ranks stay, with a new process group per call.

A function finds the modules, the collectives, the random numbers, and the filters of warnings as
they were at the start, and the garbage collector on. It is not isolated otherwise, so only a fresh
start shows what else it has left behind: ranks that raise, or wait for each other forever, are
replaced.
"""

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any
from unittest import mock

import cloudpickle
import torch
import torch.distributed as dist

from labkit.launch import ranks
from labkit.launch.rank_states import Stillness
from labkit.launch.ranks import RanksError, RanksTimeoutError
from labkit.launch.supervisor import bind

STUCK = 1.5  # seconds without a move
START = ranks.run_ranks


class PersistentRanks:
    """`run` has the arguments and the results of `run_ranks` on the CPU."""

    def __init__(self) -> None:
        self.pools: dict[int, list[tuple[int, Connection]]] = {}
        self.folder = tempfile.TemporaryDirectory()

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        pool = self._pool(world_size)
        with ranks._SHIPPING, ranks._by_value(fn):
            payload = cloudpickle.dumps((fn, args))
        replies: dict[int, Any] = {}
        try:
            for _, connection in pool:
                connection.send_bytes(payload)
            self._collect(pool, replies, options)
        except BaseException:
            if len(replies) < world_size:
                self._stop(world_size)
            raise
        return [replies[rank] for rank in range(world_size)]

    def _pool(self, world_size: int) -> list[tuple[int, Connection]]:
        pool = self.pools.get(world_size, [])
        if pool and not self._regroup(pool):
            self._stop(world_size)
        return self.pools.get(world_size) or self._start(world_size)

    def _collect(
        self, pool: list[tuple[int, Connection]], replies: dict[int, Any], options: dict[str, Any]
    ) -> None:
        """Fill `replies`, by rank. Raises what a rank raised, or RanksTimeoutError."""
        until = time.monotonic() + options.get("timeout", 60)
        patience = max(STUCK, options.get("stuck_after", 0))
        waiting = {connection: rank for rank, (_, connection) in enumerate(pool)}
        error: BaseException | None = None
        stillness = Stillness([pid for pid, _ in pool])
        while waiting:
            for connection in wait(list(waiting), 0.05):
                rank = waiting.pop(connection)
                try:
                    kind, found = cloudpickle.loads(connection.recv_bytes())
                except EOFError:
                    raise error or RanksError(f"rank {rank} has ended") from None
                if kind == "raised":
                    error = error or found
                    until = min(until, time.monotonic() + 0.3)
                replies[rank] = found
            if waiting and (stillness.seconds() > patience or time.monotonic() > until):
                others = f"ranks {sorted(waiting.values())} wait for others"
                raise error or RanksTimeoutError(others)
        if error:
            raise error

    def _start(self, world_size: int) -> list[tuple[int, Connection]]:
        key = os.urandom(16)
        with Listener(("127.0.0.1", 0), backlog=16, authkey=key) as listener:
            address = listener.address

            def stay() -> None:
                with contextlib.suppress(RanksError):
                    START(_serve, world_size, address, key, timeout=3600)
                with contextlib.suppress(OSError):  # if they have not come, nobody waits for them
                    Client(address, authkey=key).close()

            threading.Thread(target=stay, daemon=True).start()
            found = {}
            for _ in range(world_size):
                connection = listener.accept()
                rank, pid = connection.recv()
                found[rank] = pid, connection
        self.pools[world_size] = [found[rank] for rank in range(world_size)]
        return self.pools[world_size]

    def _regroup(self, pool: list[tuple[int, Connection]]) -> bool:
        """Give the ranks a new process group; False if one does not answer."""
        with ranks._by_value(_new_group):
            payload = cloudpickle.dumps((_new_group, (tempfile.mktemp(dir=self.folder.name),)))
        try:
            for _, connection in pool:
                connection.send_bytes(payload)
            return all(connection.poll(2) and connection.recv_bytes() for _, connection in pool)
        except (OSError, EOFError):  # a rank has ended
            return False

    def _stop(self, world_size: int) -> None:
        for pid, connection in self.pools.pop(world_size, []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            connection.close()

    def close(self) -> None:
        for world_size in list(self.pools):
            self._stop(world_size)
        self.folder.cleanup()


@contextlib.contextmanager
def persistent_ranks() -> Iterator[PersistentRanks]:
    """Whatever calls `run_ranks`, in a module that is loaded by then or later, uses these ranks."""
    staying = PersistentRanks()
    with contextlib.ExitStack() as patches:
        for module in list(sys.modules.values()):
            if vars(module).get("run_ranks") is START:
                patches.enter_context(mock.patch.object(module, "run_ranks", staying.run))
        try:
            yield staying
        finally:
            staying.close()
            for module in list(sys.modules.values()):  # those that were loaded since
                if vars(module).get("run_ranks") == staying.run:
                    module.run_ranks = START


def _new_group(rank: int, world_size: int, path: str) -> None:
    dist.destroy_process_group()
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _serve(rank: int, world_size: int, address: tuple[str, int], key: bytes) -> None:
    connection = Client(address, authkey=key)
    connection.send((rank, os.getpid()))
    collectives, random_numbers = dict(vars(dist)), torch.get_rng_state()
    given = {"rank": rank, "world_size": world_size, "device": torch.device("cpu")}
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        try:
            fn, args = cloudpickle.loads(payload)
            bound = bind(fn, args, given)
            with warnings.catch_warnings():
                reply = "returned", fn(*bound.args, **bound.kwargs)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # `pytest.raises` fails with one that is no Exception
            error.add_note(f"Raised on rank {rank} of {world_size}:\n{traceback.format_exc()}")
            reply = "raised", error
        try:
            connection.send_bytes(cloudpickle.dumps(reply))
        except Exception as error:
            connection.send_bytes(cloudpickle.dumps(("raised", RanksError(str(error)))))
        vars(dist).update(collectives)
        torch.set_rng_state(random_numbers)
        gc.enable()
