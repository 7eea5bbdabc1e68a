"""``smp.memory_report``, and the table that rank 0 prints once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.errors import ShardwrightError
from shardwright.job.objects import gathered, receive_from_others, send_on
from shardwright.job.ranks import WORLD
from shardwright.job.runtime import current_runtime
from shardwright.memory.account import MemoryAccount, RankAccount
from shardwright.memory.table import announce

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

_CHANNEL = "memory account"
#: For how long rank 0 waits for the other ranks' accounts, which they sent before the step that has just ended.
_SECONDS = 10.0


def memory_report() -> list[dict[str, Any]]:
    """Return what fills the memory of each rank. All ranks must call this, between steps.

    Categories are ``parameters``, ``gradients``, ``optimizer_state``, ``activations``, ``buffers`` and
    ``communication`` (host memory that is shared between processes), in bytes; None where a number is not known.

    Returns:
        A dict for each rank, in their order, the same on every rank:

        - ``rank``, ``pp_rank``, ``host`` and ``device``;
        - ``predicted``: the bytes of each category that follow from the partition, the schedule and the optimizer;
        - ``measured``: those that the rank holds now. ``gradients`` and ``activations`` are those of the first step
          that trained: at its end, and the most between its tasks;
        - ``in_flight``: the most microbatches in flight on the rank, as simulated: with stages of equal length, or with
          measured ones once the schedule was chosen by them (``smp.stats()["schedule_decision"]`` says why);
        - ``offloaded``: the most bytes of checkpointed activations that were offloaded at once;
        - ``offloaded_optimizer_state``: the bytes of optimizer state, and of master weights, on a disk or in locked
          host memory, which are not among those measured;
        - ``device_memory``: None on CPU ranks; else the bytes that PyTorch has ``allocated`` and ``reserved`` on the
          device, the ``peak`` of what was allocated, and ``transfers``, the transport's buffer there;
        - ``locked``: the bytes of host memory that are locked for devices, by the transport and by PyTorch: for
          offloading and checkpoints;
        - ``resident``, ``peak``, ``limit``: the bytes of host memory that the process has, had at most, and may have;
        - ``advice``: tuples of a setting that would save memory, the estimated bytes, and its cost, the largest saving
          first.

    Raises:
        PeerLostError: A rank is gone.
        ShardwrightError: Another rank calls a different function, or ``smp.init`` has not been called.
    """
    own = current_runtime()[MemoryAccount].of_rank()
    return gathered("smp.memory_report", own.to_dict(), WORLD)


class Announcement:
    """Prints the accounts of all ranks on rank 0, once, after the first step and its update.

    Ranks send their accounts when the second step begins, so that they include what the optimizer has made. Rank 0
    prints them when that step has succeeded, and all have surely been sent.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Announce nothing yet."""
        self._runtime = runtime
        self._own: RankAccount | None = None
        self._succeeded = 0
        self._is_over = runtime.place.launch.world_size == 1

    def begin_step(self) -> None:
        """Send this rank's account, before the second step."""
        if self._is_over or self._succeeded == 0 or self._own is not None:
            return
        self._own = self._runtime[MemoryAccount].of_rank()
        if self._runtime.place.rank != 0:
            send_on(self._runtime, 0, _CHANNEL, self._own.to_dict())
            self._is_over = True

    def end_step(self) -> None:
        """Print the accounts on rank 0, after the second step; without them if a rank is gone by then."""
        self._succeeded += 1
        if self._is_over or self._own is None:
            return
        self._is_over = True
        runtime = self._runtime
        try:
            others = [RankAccount(**one) for one in receive_from_others(runtime, _CHANNEL, _SECONDS)]
        except (ShardwrightError, TimeoutError) as error:
            runtime.logger.info("the account of memory is not printed: %s", error)
            return
        announce([self._own, *others])
