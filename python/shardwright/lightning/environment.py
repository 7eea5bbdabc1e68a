"""What Lightning knows of a process: its place in the job, which another program has started."""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment

from shardwright.job.ranks import local_rank, local_size, rank, size


class JobEnvironment(ClusterEnvironment):
    """The ranks of the job, whatever started them."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """Where the first rank is."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port there."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return False: a script chooses this by its strategy."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the job has as many ranks as it has."""

    def global_rank(self) -> int:
        """Return this rank."""
        return rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: this rank stays which it is."""

    def local_rank(self) -> int:
        """Return the number of this rank on its host."""
        return local_rank()

    def node_rank(self) -> int:
        """Return the number of the host, where all hosts have as many ranks as this one."""
        return rank() // local_size()
