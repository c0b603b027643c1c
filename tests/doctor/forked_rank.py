"""What the harnesses that fork their ranks need so that no run hangs for a reason of its own."""

import functools


def keep_groups_until_the_end() -> None:
    """Make `destroy_process_group` leave the group's threads to the end of this process.

    If a DDP wrapper holds the last reference to a group, its destructor joins gloo's thread with
    the interpreter's lock held, and that thread may wait for the lock to drop its last collective
    (torch 2.13). On a busy machine, one run in some dozens would hang.
    """
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_but_keep(group: dist.ProcessGroup | None = None) -> None:
        kept.append(group or dist.group.WORLD)
        destroy(group)

    kept: list[dist.ProcessGroup | None] = []
    dist.destroy_process_group = destroy_but_keep
