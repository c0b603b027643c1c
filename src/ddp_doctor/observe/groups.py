"""Process groups: which rank this process is, and of how many."""

from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from ddp_doctor.facts.places import place
from ddp_doctor.observe.patching import Patches
from ddp_doctor.observe.recorder import Recorder


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.open()
        recorder.grouped = False
        session.set_status(f"init_process_group at {place()}")

    def after(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.open()
        session.set_status("running")

    def destroying(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.set_status(f"destroy_process_group at {place()}")

    def destroyed(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.grouped = dist.is_initialized()  # False unless it was another group
        session.set_status("running")

    if not dist.is_available():
        return
    for owner in (distributed_c10d, dist, device_mesh):
        patches.observe(owner, "init_process_group", before, after)
        patches.observe(owner, "destroy_process_group", destroying, destroyed)
