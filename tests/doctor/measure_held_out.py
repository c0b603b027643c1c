"""Measures what a script of the held-out corpus computes, without the doctor.

    python -m tests.doctor.measure_held_out NAME...             prints these scripts' numbers
    python -m tests.doctor.measure_held_out --write [NAME...]   also stores them, in
                                                                held_out/measured.json and in
                                                                each script's line `# measured:`

A script runs unchanged, with the ranks its header names, while `probe/sitecustomize.py` records
every optimizer step. `references/NAME.py` then computes in one process what is right:

- `gradient(script, load)` returns a model that holds the gradients of one process with the full
  batch. `script` is the script's own namespace; `load(model)` fills in the weights rank 0 had.
  `STEP` and `OPTIMIZER` (both 0 by default) select the step and the optimizer to compare;
  `parameters(model)` is needed only if the optimizer has them in another order than the model.
- `value(script, run)` returns (quantity, the run's number, the right number) where a gradient
  cannot show the problem.

Without a reference only the replicas' last weights are compared and the exit code is reported.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labkit.launch.nodes import reserved_port

from .forked_rank import keep_groups_until_the_end

HERE = Path(__file__).resolve().parent
HELD_OUT = HERE / "corpus" / "held_out"
STORED = HELD_OUT / "measured.json"
TIME_LIMIT = 120.0


@dataclass(frozen=True)
class Header:
    """The first lines of a script: which codes the doctor owes it, and how it starts."""

    expected: tuple[str, ...]
    accepted: tuple[str, ...]
    ranks: int
    launch: str
    measured: str

    @classmethod
    def of(cls, path: Path) -> Self:
        lines = path.read_text().splitlines()
        if not lines[0].startswith("# doctor: ") or not lines[1].startswith("# measured: "):
            raise ValueError(f"{path}: the first two lines must be '# doctor:' and '# measured:'")
        fields = dict(item.split("=") for item in lines[0].removeprefix("# doctor: ").split())
        also = lines[2].removeprefix("# also: ") if lines[2].startswith("# also: ") else ""
        return cls(
            expected=() if fields["expect"] == "none" else tuple(fields["expect"].split(",")),
            accepted=tuple(code for code in also.split(",") if code),
            ranks=int(fields["ranks"]),
            launch=fields["launch"],
            measured=lines[1].removeprefix("# measured: "),
        )


@dataclass
class Run:
    """What the probe saw: `ranks[r]` has the steps, the last weights and the bytes of rank r."""

    exit_code: int
    seconds: float
    output: str
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def step(self, rank: int, optimizer: int = 0, step: int = 0) -> dict[str, Any]:
        try:
            return self.ranks[rank]["steps"][optimizer][step]
        except IndexError:
            raise ValueError(
                f"rank {rank} took no step {step} with optimizer {optimizer}:\n{self.output}"
            ) from None

    def printed(self, label: str) -> float:
        """The number after the last `label` in the script's output."""
        if label not in self.output:
            raise ValueError(f"the script printed no {label!r}:\n{self.output}")
        return float(self.output.rsplit(label, 1)[1].split()[0].rstrip(",%"))


def scripts() -> list[Path]:
    return sorted(HELD_OUT.glob("broken/*.py")) + sorted(HELD_OUT.glob("correct/*.py"))


def script_path(name: str) -> Path:
    found = [path for path in scripts() if path.stem == name]
    if len(found) != 1:
        raise ValueError(f"{len(found)} scripts of the held-out corpus are named {name!r}, not one")
    return found[0]


def run(path: Path) -> Run:
    """Runs the script with the probe; ends it after TIME_LIMIT seconds."""
    header = Header.of(path)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if header.launch == "torchrun":
            exit_code = run_ranks(path, header.ranks, Path(folder))
        else:
            exit_code = run_command(path, Path(folder))
        output = "".join(log.read_text() for log in sorted(Path(folder).glob("*.log")))
        files = sorted(Path(folder).glob("*-*.pt"), key=lambda file: int(file.stem.split("-")[0]))
        ranks = [torch.load(file, weights_only=False) for file in files]
    return Run(exit_code, time.monotonic() - start, output, ranks)


def run_ranks(path: Path, ranks: int, folder: Path) -> int:
    """Forks one process per rank, with torchrun's environment.

    torch is imported once, here, instead of once per rank and once in torchrun's agent: a tenth of
    the processor time. Nothing here computes with torch before the fork, so no thread is lost.
    """
    with reserved_port() as port:
        return wait_for(start_ranks(path, ranks, folder, port))


def start_ranks(path: Path, ranks: int, folder: Path, port: int) -> dict[int, int]:
    """The ranks by their process; rank 0 listens at `port`."""
    children = {}
    for rank in range(ranks):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "measure",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        child = os.fork()
        if child == 0:
            become_rank(path, folder, {key: str(value) for key, value in environment.items()})
        children[child] = rank
    return children


def import_frameworks(path: Path) -> None:
    """Imports, before any fork, what takes seconds and every rank needs."""
    importlib.import_module("torch._dynamo")
    for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE):
        if name in {"accelerate", "pytorch_lightning", "transformers"}:
            importlib.import_module(name)


def become_rank(path: Path, folder: Path, environment: dict[str, str]) -> NoReturn:
    """Runs the script in this forked process as rank `environment["RANK"]`, and exits."""
    code = 1
    os.environ.update(environment)
    os.chdir(folder)
    log = os.open(f"{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    try:
        torch.set_num_threads(1)
        recorder = probe().Recorder(str(folder))
        register_optimizer_step_pre_hook(recorder.before_step)
        keep_groups_until_the_end()
        sys.argv = [str(path)]
        sys.path[0] = str(path.parent)
        try:
            runpy.run_path(str(path), run_name="__main__")
            code = 0
        finally:
            recorder.dump()
    except SystemExit as stop:
        code = int(bool(stop.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(children: dict[int, int]) -> int:
    """The first exit code that is not 0, or 0; kills what is left after TIME_LIMIT seconds."""
    deadline = time.monotonic() + TIME_LIMIT
    left, codes = dict(children), []
    while left:
        for child in list(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del left[child]
                codes.append(os.waitstatus_to_exitcode(status))
        if left and time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.02)
    return next((code for code in codes if code), 0)


def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe", HERE / "probe" / "sitecustomize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_command(path: Path, folder: Path) -> int:
    """A script that starts its own ranks: they find the probe on PYTHONPATH."""
    environment = {
        **os.environ,
        "MEASURE_FOLDER": str(folder),
        "PYTHONPATH": str(HERE / "probe"),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "output.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(path)],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def namespace(path: Path) -> ModuleType:
    """The script as a module: its classes and functions, without its run."""
    spec = importlib.util.spec_from_file_location(f"held_out_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loader(
    weights: list[Tensor], ordered: Callable[[nn.Module], list[nn.Parameter]]
) -> Callable[[nn.Module], nn.Module]:
    def load(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter, value in zip(ordered(model), weights, strict=True):
                parameter.copy_(value)
        return model

    return load


def flat(gradients: list[Tensor | None], weights: list[Tensor]) -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(w) if g is None else g).double().flatten()
            for g, w in zip(gradients, weights, strict=True)
        ]
    )


def compare(ours: Tensor, right: Tensor) -> tuple[float, float]:
    """Ratio of norms and cosine; a gradient of zeros has the cosine 0."""
    norm, reference = float(ours.norm()), float(right.norm())
    cosine = float(ours @ right) / (norm * reference) if norm and reference else 0.0
    return norm / reference, cosine


def replica_difference(run: Run) -> float | None:
    """Largest |difference| of a last weight between rank 0 and another; None if unknown."""
    largest = 0.0
    for rank in run.ranks[1:]:
        for mine, other in zip(run.ranks[0]["final"], rank["final"], strict=True):
            for a, b in zip(mine, other, strict=True):
                if a is None or b is None:
                    return None
                largest = max(largest, float((a.double() - b.double()).abs().max()))
    return largest if len(run.ranks) > 1 else None


def measure(name: str) -> dict[str, Any]:
    """Runs the script and its reference; every number is rounded to four digits.

    Both run in forked processes, so that this one computes nothing and may fork again.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    path = script_path(name)
    import_frameworks(path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "w") as pipe:
            try:
                json.dump(measure_here(path), pipe)
            except BaseException:
                json.dump({"error": traceback.format_exc()}, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        result = json.load(pipe)
    os.waitpid(child, 0)
    if "error" in result:
        raise RuntimeError(f"{name} could not be measured:\n{result['error']}")
    return result


def measure_here(path: Path) -> dict[str, Any]:
    seen = run(path)
    result: dict[str, Any] = {"exit_code": seen.exit_code, "ranks_that_stepped": len(seen.ranks)}
    difference = replica_difference(seen)
    if difference is not None:
        result["replicas_equal"] = difference == 0.0
        result["replica_difference"] = rounded(difference)
    reference_path = HELD_OUT / "references" / path.name
    if not reference_path.exists():
        return result
    reference = namespace(reference_path)
    torch.set_num_threads(1)
    script = namespace(path)
    if hasattr(reference, "gradient"):
        optimizer, step = getattr(reference, "OPTIMIZER", 0), getattr(reference, "STEP", 0)
        weights = seen.step(0, optimizer, step)["weights"]
        ordered = getattr(reference, "parameters", trained_parameters)
        model = reference.gradient(script, loader(weights, ordered))
        right = flat([parameter.grad for parameter in ordered(model)], weights)
        pairs = [
            compare(flat(seen.step(rank, optimizer, step)["gradients"], weights), right)
            for rank in range(len(seen.ranks))
        ]
        result |= {
            "step": step,
            "ratio": [rounded(ratio) for ratio, _ in pairs],
            "cosine": [rounded(cosine) for _, cosine in pairs],
        }
    if hasattr(reference, "value"):
        quantity, number, right_number = reference.value(script, seen)
        result |= {"quantity": quantity, "run": rounded(number), "right": rounded(right_number)}
    return result


def rounded(number: float) -> float:
    """Four significant digits, and -0.0 as 0.0."""
    return float(f"{number:.4g}") + 0.0 if math.isfinite(number) else number


def describe(result: dict[str, Any]) -> str:
    """The line `# measured:` of these numbers."""
    parts = []
    if "ratio" in result:
        pairs = list(zip(result["ratio"], result["cosine"], strict=True))
        same = len(set(pairs)) == 1
        shown = [
            ("every rank" if same else f"rank {rank}") + f" ratio {ratio:g} cosine {cosine:g}"
            for rank, (ratio, cosine) in enumerate(pairs[:1] if same else pairs)
        ]
        parts.append(
            f"gradient of step {result['step']} against one process with the full batch: "
            + ", ".join(shown)
        )
    if "quantity" in result:
        parts.append(f"{result['quantity']} {result['run']:g}, right is {result['right']:g}")
    if "replicas_equal" in result:
        parts.append(
            "replicas equal at the end"
            if result["replicas_equal"]
            else f"replicas differ at the end by up to {result['replica_difference']:g}"
        )
    if result["exit_code"]:
        parts.append("the run fails, exit code not 0")
    return "; ".join(parts)


def store(name: str, result: dict[str, Any]) -> None:
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored[name] = result
    STORED.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
    path = script_path(name)
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = f"# measured: {describe(result)}\n"
    path.write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure scripts of the held-out corpus.")
    parser.add_argument("names", nargs="*", help="script names without .py; all if none is given")
    parser.add_argument("--write", action="store_true", help="store the numbers")
    parser.add_argument("--show", action="store_true", help="print the script's own output as well")
    arguments = parser.parse_args()
    for name in arguments.names or [path.stem for path in scripts()]:
        if arguments.show:
            seen = run(script_path(name))
            print(f"{seen.output}\nexit code {seen.exit_code} after {seen.seconds:.1f} s")
            continue
        try:
            result = measure(name)
        except RuntimeError as error:
            print(error, flush=True)
            continue
        print(f"{name}: {describe(result)}", flush=True)
        if arguments.write:
            store(name, result)


if __name__ == "__main__":
    main()
