"""A rank's part of a job: its configuration, place, connection, execution server and models."""

from __future__ import annotations

import contextlib
import contextvars
import os
import socket
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from shardwright import _core, logs
from shardwright.data_parallel.weights import StepWeights
from shardwright.errors import PeerLostError, ShardwrightError
from shardwright.execution import reproducible, stays
from shardwright.execution.results import sites_of
from shardwright.execution.serve import FrameTable
from shardwright.execution.worker import WorkerPool
from shardwright.frames import Leaves
from shardwright.progress import Progress
from shardwright.scheduling import Scheduling
from shardwright.updates import Updates
from shardwright.waiting import Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwright.data_parallel.collectives import Collectives
    from shardwright.execution.call import RemoteModule
    from shardwright.launch import LaunchInfo
    from shardwright.model.distributed import DistributedModel
    from shardwright.model.placement import Placement
    from shardwright.picture import Photographer
    from shardwright.tensor_parallel.group import TensorGroup
    from shardwright.timeline import Traced


class Runtime:
    """One rank of one job. ``smp.*`` finds the current one; several may live in one process.

    Attributes:
        cfg: The effective configuration.
        topology: Ranks and groups.
        launch: How this process was started.
        node: The connection to the other ranks, None for a job of one rank.
        server: The execution server.
        step: The number of the current or last step, counted from 1.
        progress: Says what rank 0 does where a start takes long.
    """

    logger = logs.logger

    def __init__(
        self, *, cfg: Any, topology: _core.Topology, launch: LaunchInfo, node: Any, server: _core.Server
    ) -> None:
        """Take over the parts; see :func:`shardwright.start.init`."""
        self.cfg = cfg
        self.topology = topology
        self.launch = launch
        self.node = node
        self.server = server
        self.rank: int = launch.rank
        self.pp_ranks: list[int] = topology.group("PP_GROUP", self.rank)
        self.pp_size = len(self.pp_ranks)
        self.pp_rank: int = self.pp_ranks.index(self.rank)
        self.dp_ranks: list[int] = topology.group("DP_GROUP", self.rank)
        self.tp_ranks: list[int] = topology.group("TP_GROUP", self.rank)
        self.rdp_ranks: list[int] = topology.group("RDP_GROUP", self.rank)
        self.num_microbatches: int = cfg.microbatches
        #: How much the microbatches of the current or last step count.
        self.weights = StepWeights(self.rank, cfg.microbatches)
        self._scheduling: Scheduling | None = None
        self._models: list[weakref.ref[DistributedModel]] = []
        self.optimizers: list[Any] = []
        self.frames = FrameTable()
        #: Told of every call to another rank: the module, its positional arguments, and which children of a sequential.
        self.watch_requests: Callable[[RemoteModule, Any, tuple[int, int] | None], None] | None = None
        #: What is known of calls to other ranks, and how far that is relied on.
        self.sites = sites_of(cfg)
        self.state_order = stays.StateOrder()
        #: Steps that were run again because a module had departed from what it did before.
        self.departures = 0
        #: Frames that successful steps left to be cleared away; anything but 0 is a bug.
        self.unclosed_frames = 0
        self.leaves = Leaves()
        self.workers = WorkerPool(self)
        self.progress = Progress(self.rank)
        self.recorder = _core.AloneRecorder()
        #: What ``smp.trace`` records, while it does.
        self.traced: Traced | None = None
        self.step = 0
        #: Steps that only looked, of verifications; the script's own steps do not count them.
        self.steps_apart = 0
        #: The microbatch that a pipeline of one rank runs, or ran last.
        self.microbatch = 0
        self.in_step = False
        #: Whether the step's tasks are over and its gradients are being finished.
        self.committing = False
        #: Whether other ranks may already know that the step has succeeded.
        self.voted = False
        self.updates = Updates(self)
        #: Whether the execution server has begun the step.
        self.entered = False
        self.process_groups: dict[str, Any] = {}
        #: Over DP_GROUP, where it has several ranks.
        self.collectives: Collectives | None = None
        #: Over RDP_GROUP, where it has several ranks and is not DP_GROUP.
        self.rdp_collectives: Collectives | None = None
        #: The ranks that divide modules among them; None until a job of degree 1 asks for them.
        self.tensor_group: TensorGroup | None = None
        self.pending_controls: list[int] = []
        #: How often the ranks of a group have gathered something, by channel, since they last waited for one another
        #: in vain; and how often they did that.
        self.gathers: Counter[str] = Counter()
        self.gather_epoch = 0
        self.owns_process_group = False
        self.pid = os.getpid()
        #: What the main thread waits for outside the execution server, the innermost last.
        self.waits: list[Wait] = []
        #: Makes pictures of the job; None in a job of one rank.
        self.photographer: Photographer | None = None
        #: Takes away what was put in place for this rank in the process: replaced functions, handlers.
        self.installed = contextlib.ExitStack()
        #: Why this rank leaves the job, when an exception ended its script.
        self.farewell: dict[str, str] | None = None

    def add_model(self, model: DistributedModel) -> int:
        """Number a model; the script alone keeps it alive."""
        self._models.append(weakref.ref(model))
        return len(self._models) - 1

    @property
    def num_models(self) -> int:
        """How many models there have been."""
        return len(self._models)

    @property
    def models(self) -> list[DistributedModel]:
        """Each ``DistributedModel`` that is still in use, or that no garbage collection has found yet."""
        return [model for reference in self._models if (model := reference()) is not None]

    @property
    def placements(self) -> list[Placement]:
        """Where the modules of each of the models live. A placement's model lives only while somebody holds it."""
        return [model.placement for model in self.models]

    def placement(self, model_id: int) -> Placement:
        """Where the modules of the model with this id live.

        Raises:
            ShardwrightError: This rank has no such model (any more).
        """
        model = self._models[model_id]() if model_id < len(self._models) else None
        if model is None:
            raise ShardwrightError(
                f"rank {self.rank} was asked for model {model_id}, which it has not or no longer; every rank must build"
                " the same models in the same order and keep them as long as the others do"
            )
        placement: Placement = model.placement
        return placement

    @property
    def scheduling(self) -> Scheduling:
        """Which schedule the steps run with."""
        if self._scheduling is None or self._scheduling.cfg is not self.cfg:
            self._scheduling = Scheduling(self.cfg, self.pp_size)
        return self._scheduling

    @property
    def splits_backward(self) -> bool:
        """Whether weights' gradients are computed apart from what others wait for.

        Not where microbatches run one after another: a module may then write to what an earlier one has saved.
        """
        return self.scheduling.splits_backward and not stays.one_at_a_time(self)

    @property
    def all_collectives(self) -> list[Collectives]:
        """Over replicas, those of all groups."""
        return [one for one in (self.collectives, self.rdp_collectives) if one is not None]

    @property
    def is_root(self) -> bool:
        """Whether this rank runs the step function."""
        return self.pp_rank == 0

    @property
    def tensor_divisor(self) -> int:
        """What gradients of the whole TP_GROUP's samples are divided by for the mean over data-parallel ranks.

        With ``prescaled_batch`` its ranks have the same samples, whose loss counts once.
        """
        return 1 if self.cfg.prescaled_batch else len(self.tp_ranks)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def training_step(self) -> int:
        """The number of the script's current or last step, counted from 1: what its random numbers depend on."""
        return self.step - self.steps_apart

    def report_wait(self) -> None:
        """Something here has waited for ``stall_report_seconds``, or for twice that, and so on."""
        if self.photographer is not None:
            self.photographer.want()

    def describe(self) -> str:
        """What this rank does at the moment, in one line; for any thread."""
        if self.pp_size == 1 and self.in_step and not self.committing:
            place = f"rank {self.rank} on host {socket.gethostname()!r}"
            text = f"step {self.step}: {place}: runs microbatch {self.microbatch} in the script's thread"
        else:
            text = self.server.describe()
        return "; ".join([text, *(wait.describe() for wait in list(self.waits))])

    def usage(self) -> tuple[_core.Usage, _core.Usage]:
        """Where this rank's time went in all steps, and in the newest one."""
        return self.recorder.usage() if self.pp_size == 1 else self.server.usage()

    def next_step(self) -> None:
        """Count a step; ranks stay in lockstep because all of them call every step function."""
        self.step += 1
        if self.traced is not None:
            self.traced.begin_step()

    def microbatch_seed(self, script_seed: int, microbatch: int, dp_rank: int | None = None) -> int:
        """What the random numbers of a microbatch of this step start from.

        Args:
            script_seed: What the script last seeded the default generator with; not used with ``reproducible_rng``.
            microbatch: The microbatch of this rank; with ``reproducible_rng`` it counts over data-parallel ranks.
            dp_rank: Another data-parallel rank, whose microbatch it is.
        """
        if not self.cfg.reproducible_rng:
            return reproducible.root_seed(script_seed, self.training_step, microbatch)
        replica = self.dp_ranks.index(self.rank) if dp_rank is None else dp_rank
        earlier = replica * self.num_microbatches
        return reproducible.root_seed(self.cfg.seed, self.training_step, earlier + microbatch)

    def begin_step_alone(self, name: str) -> None:
        """Begin a step of a pipeline of one rank."""
        if self.launch.world_size > 1:
            self.server.begin_alone(step=self.step, function=name)

    def end_tasks(self) -> None:
        """Clear away what the tasks of a step left, once all of them are over."""
        self.unclosed_frames += len(self.frames)
        self.frames.clear()
        self.workers.end_step()

    def other_roots(self) -> list[int]:
        """The global ranks that run the step function in the other replicas."""
        return [rank for rank in self.dp_ranks if rank != self.rank]

    def optimizer_of(self, model: DistributedModel) -> Any:
        """The distributed optimizer that trains a model, None when there is none yet."""
        return next((optimizer for optimizer in self.optimizers if optimizer.trains(model)), None)

    def check_abort(self, needed: list[int]) -> None:
        """Raise if the step that runs here, or else the next one, has failed, or one of the ranks needed is gone."""
        self.server.check_abort(self.step if self.in_step else self.step + 1, needed)

    def next_gather(self, channel: str) -> tuple[int, int]:
        """The number of the gather on a channel that begins now; on all ranks of the group the same."""
        self.gathers[channel] += 1
        return self.gather_epoch, self.gathers[channel]

    def begin_gathers(self, epoch: int) -> None:
        """Count gathers anew, on all ranks: some had begun those that others will not call."""
        self.gathers.clear()
        self.gather_epoch = epoch

    def send_object(self, rank: int, channel: str, spec: _core.Spec, parts: _core.TensorParts) -> None:
        """Send an encoded object to a rank, which takes it by :meth:`receive_object`; does not wait for it.

        Raises:
            PeerLostError: A rank is gone: this one, or whose loss made this one leave.
        """
        try:
            self.node.send_object(rank, channel, spec, parts)
        except PeerLostError:
            self.check_abort([])  # what made a rank leave it has told before its goodbye
            raise

    def receive_object(self, rank: int, channel: str, deadline: float | None = None, what: str | None = None) -> Any:
        """Wait for an object of another rank, watching for a failure of the step.

        Args:
            rank: The sender.
            channel: The channel it sent it on.
            deadline: On the monotonic clock; by default it waits as long as the sender lives.
            what: What is waited for, in reports; by default the object.

        Raises:
            TimeoutError: It did not come before ``deadline``, on the monotonic clock.
        """
        # Most come soon: so short a wait is nobody's business.
        if (received := self._received(rank, channel, 0.1 if deadline is None else 0.0)) is not None:
            return received
        what = f"an object from rank {rank} on channel {channel!r}" if what is None else what
        with Wait(self, what, [rank], is_for_ever=deadline is None) as wait:
            while True:
                if (received := self._received(rank, channel, 0.1)) is not None:
                    return received
                if deadline is None:
                    wait.check()
                elif time.monotonic() > deadline:
                    raise TimeoutError(f"rank {self.rank} waited in vain for {what}")

    def _received(self, rank: int, channel: str, seconds: float) -> Any:
        try:
            return self.node.recv_object(rank, channel, seconds)
        except PeerLostError:
            self.check_abort([])  # as in send_object
            raise

    def wait_collective(self, work: Any, ranks: list[int], number: int | None = None) -> None:
        """Wait for a collective of ``torch.distributed``, watching for a failure elsewhere.

        Args:
            work: The collective's.
            ranks: Who takes part.
            number: Which of the group's collectives it is, where they are counted.
        """
        if not work.is_completed():
            with Wait(self, f"a collective of ranks {ranks}", ranks, collective=number) as wait:
                wait.until_completed(work, self.device)
        try:
            work.wait()
        except RuntimeError:
            self._raise_loss(ranks)
            raise

    def _raise_loss(self, ranks: list[int]) -> None:
        """Say which rank is gone, where a collective only says that something is."""
        deadline = time.monotonic() + self.cfg.liveness_timeout_seconds
        while time.monotonic() < deadline:
            self.check_abort(ranks)
            time.sleep(0.01)

    def check_process(self, what: str) -> None:
        """Refuse to do something in a forked process, which has none of the rank's threads.

        Raises:
            ShardwrightError: This is not the process that called ``smp.init``.
        """
        if (pid := os.getpid()) != self.pid:
            raise ShardwrightError(
                f"{what} was called in process {pid}, which was forked from rank {self.rank} (process {self.pid}) and "
                "is no rank of the job: call it in the rank itself, and use forked processes, such as those of a "
                "DataLoader, for data; for a job of its own, let the process be started anew (multiprocessing's start "
                'method "spawn") and call smp.init there'
            )

    def vote(self) -> None:
        """Agree with all ranks of the job that the step has succeeded; see :func:`shardwright.step.vote.vote`."""
        # Imported late: objects between ranks need the runtime.
        from shardwright.step.vote import vote

        vote(self)


_current: contextvars.ContextVar[Runtime | None] = contextvars.ContextVar("shardwright_runtime", default=None)
_default: Runtime | None = None


def current_runtime() -> Runtime:
    """The runtime of the calling context.

    Raises:
        ShardwrightError: ``smp.init`` was not called.
    """
    if (runtime := find_runtime()) is None:
        raise ShardwrightError("call smp.init(...) before anything else of shardwright")
    return runtime


def find_runtime() -> Runtime | None:
    """The runtime of the calling context, or None before ``smp.init``."""
    return _current.get() or _default


def set_default_runtime(runtime: Runtime | None) -> None:
    """Set the process's runtime."""
    global _default
    _default = runtime


def set_current_runtime(runtime: Runtime | None) -> contextvars.Token[Runtime | None]:
    """Set the calling context's runtime, for several ranks in one process."""
    return _current.set(runtime)
