"""Stands for mpi4py: ranks that a launcher has started, and what they need to find each other."""

import os
from types import SimpleNamespace
from typing import Any


class _World:
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    sent = 0

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def bcast(self, value: Any, root: int = 0) -> Any:
        """The launcher's address, then its port: that is all that the script broadcasts."""
        self.sent += 1
        return os.environ["MASTER_ADDR" if self.sent == 1 else "MASTER_PORT"]


MPI = SimpleNamespace(COMM_WORLD=_World())
