"""What the other files ask of torch.distributed: the group, and waiting for a collective."""

from datetime import timedelta
from typing import cast

import torch.distributed as dist

from miniddp import errors


def this_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default one. Raises ValueError on a rank outside the group."""
    if dist.get_world_size(group) < 0:  # collectives would only warn
        raise ValueError(errors.outside_the_group(dist.get_rank()))
    return cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)


def wait_for(work: dist.Work) -> None:
    """Wait for a collective. A group written in Python requires a timeout: 0 means no limit."""
    work.wait(timedelta(0))
