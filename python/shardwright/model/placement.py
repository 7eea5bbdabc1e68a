"""Places a model: the decision is made on rank 0, and each rank applies it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardwright import _core, logs, quantized
from shardwright.activation_checkpointing.interception import intercept_marked
from shardwright.data_parallel import sync_batch_norm
from shardwright.data_parallel.replicas import Replicas
from shardwright.delayed.materialise import materialise
from shardwright.drawing import may_draw
from shardwright.errors import StepAborted
from shardwright.execution import reproducible
from shardwright.execution.call import RemoteModule
from shardwright.execution.encoder import pad_with_zeros
from shardwright.execution.intercept import group_sequential, make_remote, refuse_compiled
from shardwright.execution.locations import module_locations
from shardwright.execution.stateful import StatefulModules
from shardwright.execution.task import RunningTask, running_task
from shardwright.execution.turn import Turn
from shardwright.frames import current_frame, in_frame
from shardwright.frames.guards import divided_modules
from shardwright.half_precision import accumulate_in_float32
from shardwright.job.objects import receive_on, send_on
from shardwright.job.runtime import Runtime
from shardwright.model.adapters import AdaptersOfModel
from shardwright.model.buffers import SavedBuffers
from shardwright.model.hooks import DeferredLoads, PostPartitionHooks
from shardwright.model.models import Models
from shardwright.model.ownership import Ownership, apply_ownership
from shardwright.model.sentinel import PLACEHOLDERS, is_sentinel
from shardwright.partition.decide import decide
from shardwright.partition.decision import Decision
from shardwright.partition.report import announce
from shardwright.partition.saved import partition_path, write_partition
from shardwright.scheduling import Scheduling
from shardwright.sharded_data_parallel.parameters import ShardedParameters
from shardwright.sharded_data_parallel.units import check_live
from shardwright.tensor_parallel.group import current_tensor_group
from shardwright.tensor_parallel.module import ShardedTensors
from shardwright.transformers_models import as_traced, install, prepare
from shardwright.values import decode, encode

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel
    from shardwright.sharded_data_parallel.sharding import ModelSharding


#: Logged once when a model is divided without a trace.
_NOT_TRACED = (
    "skip_tracing: modules that share lists, dicts, other objects, global variables, or tensors that are no "
    "parameters and buffers are not found, and each rank has its own of them; nor are buffers that a divided "
    "module changes, which microbatches would overwrite. Leave it off unless the model has none"
)


class Placement:
    """One rank's view of where the modules of one model are."""

    def __init__(self, runtime: Runtime, model: DistributedModel, module: nn.Module) -> None:
        """Create the placement of a model that is not placed yet."""
        self.runtime = runtime
        self._model = weakref.ref(model)
        self.model_id = model.model_id
        self.options = model._options
        self.module = module
        self.ownership: Ownership | None = None
        self.post_partition_hooks = PostPartitionHooks()
        self.deferred_loads = DeferredLoads()
        self.post_step_hooks = PostPartitionHooks()
        self.buffers = SavedBuffers()
        self._modules: list[nn.Module] = []
        self._names: list[str] = []
        self._placed = False
        self._failed = False
        self.sharded = ShardedTensors(module)
        self.sharded.name_modules()
        self.replicas = Replicas(self, model._options)
        #: The parameters that are sharded over data-parallel ranks; None as long as all are whole.
        self.sharding: ModelSharding | None = None
        self._synchronises = self._spans_state = False
        #: On a root: the decision until all peers have applied it, and the step in which it was last sent.
        self._undelivered: tuple[Decision, int] | None = None
        #: State that the modules on this rank keep; None before the model is divided over ranks.
        self.kept: StatefulModules | None = None
        install(module, self.model_id, runtime.installed, AdaptersOfModel(self), pipelined=runtime.place.pp_size > 1)
        if runtime.place.pp_size > 1:
            sync_batch_norm.refuse_other_groups(module, runtime.place.dp_ranks, runtime.place.device)
            for name, part in module.named_modules():
                module_locations.add(part, name)

    @property
    def model(self) -> DistributedModel:
        """The model, which owns this object."""
        return cast("DistributedModel", self._model())  # which lives as long

    @property
    def partitioned(self) -> bool:
        """Whether the model is placed."""
        return self._placed and not self._failed

    @property
    def is_sharded(self) -> bool:
        """Whether modules are divided over several tensor-parallel ranks."""
        return len(self.runtime.place.tp_ranks) > 1 and bool(self.sharded)

    @property
    def over_rdp(self) -> set[int]:
        """The ``id`` of the parameters and buffers that are divided over tensor-parallel ranks."""
        return {number for number, sharding in self.sharded.by_id().items() if sharding.over_rdp}

    @property
    def one_at_a_time(self) -> bool:
        """Whether microbatches must not overlap: modules keep state, or replicas need one order of collectives."""
        if self.ownership is None:
            return False
        # Ranks that follow a program could wait for a microbatch that the order of kept state holds back.
        waits = self._spans_state and self.runtime[Scheduling].is_program
        return waits or self._synchronises or bool(self.ownership.decision.one_at_a_time)

    def place_whole(self) -> None:
        """Place the whole model on this rank."""
        self._list_modules()
        materialise(self.module.parameters(), self.runtime.place.device)
        self.module.to(self.runtime.place.device)
        self._widen_gradients()
        self._seed_calls(self._modules)
        self.replicas.join_group()
        self.shard()
        self._finish()

    def partition(self, call: Callable[[], Any]) -> None:
        """Divide the model, on the root, inside its first call.

        Rank 0 traces ``call`` and decides. The other ranks of its TP_GROUP take part in the trace, for the collectives
        in their modules. Every other root receives the decision from rank 0, and every peer from its root.
        """
        runtime = self.runtime
        self.deferred_loads.check_unchanged(self.module)
        if 0 in runtime.place.tp_ranks:
            together, path = current_tensor_group().as_first, partition_path(runtime.place.cfg, self.model_id)
            with in_frame(None):
                # Before the trace, so that it sees what training will run.
                prepare(self.module, announce=runtime.place.rank == 0)
            frame = current_frame()
            with in_frame(None if frame is None else frame.trial()), as_traced(self.module):
                decision = decide(
                    self.module,
                    call,
                    runtime.place.cfg,
                    runtime.place.pp_size,
                    self.options,
                    together,
                    runtime.progress,
                    alone=len(runtime.place.tp_ranks) == 1,
                    saved=path if runtime.place.cfg.load_partition else None,
                )
        channel = f"partition of model {self.model_id}"
        if runtime.place.rank == 0:
            for root in runtime.place.other_roots():
                send_on(runtime, root, channel, decision)
        else:
            decision = receive_on(runtime, 0, channel)
        with runtime.progress.phase("delivering the partition"):
            self._send_to_peers(decision)
            if runtime.place.rank == 0:  # while the others apply it
                announce(decision)
                if path is not None and not runtime.place.cfg.load_partition:
                    write_partition(path, decision)
                if runtime.place.cfg.skip_tracing:
                    logs.warn_once(_NOT_TRACED)
            with in_frame(None):  # not an operation of the step function
                self.apply(decision)

    def resend_decision(self) -> None:
        """Send the decision again if the step in which it was sent failed before all peers had applied it."""
        if self._undelivered is not None and self._undelivered[1] != self.runtime.step.number:
            self._send_to_peers(self._undelivered[0])

    def delivered(self) -> None:
        """Record that all peers have confirmed the decision."""
        self._undelivered = None

    def _send_to_peers(self, decision: Decision) -> None:
        """Send the decision through the channel that requests use, so that it arrives before them."""
        task = running_task()
        assert task is not None, "a model is divided inside a step"
        self._undelivered = decision, self.runtime.step.number
        for rank in self.runtime.place.pp_ranks[1:]:
            self.runtime[Models].pending_controls.append(self._send_control(task, rank, "partition", decision))

    def _send_control(self, task: RunningTask, rank: int, control: str, value: Any) -> int:
        place = _core.Place(model=self.model_id, microbatch=task.microbatch)
        return self.runtime.server.send_control(task.worker, rank, place, control, *encode(value))

    def serve_control(self, request: _core.Request) -> None:
        """Answer a control request: the root's decision or, on the root, a peer's query whether it was sent."""
        if request.control == "partition":
            self._serve_partition(request)
        self.runtime.server.respond(request, _core.Answer.done())

    def _serve_partition(self, request: _core.Request) -> None:
        if self.partitioned:
            return  # already applied in a failed step, which may not have reached all peers
        self.deferred_loads.check_unchanged(self.module)
        try:
            self.apply(decode(request.spec, request.parts))
        except BaseException:
            if not self._placed:  # otherwise it is only a hook that failed
                self._failed = self._placed = True
            raise

    def apply(self, decision: Decision) -> None:
        """Release what other ranks own, intercept calls to it, and synchronize data-parallel ranks."""
        runtime = self.runtime
        self._list_modules()
        sync_batch_norm.refuse_other_groups(self.module, runtime.place.dp_ranks, runtime.place.device)
        self._synchronises = sync_batch_norm.synchronises(self.module, runtime.place.dp_ranks)
        prepare(self.module, announce=False)  # rank 0 announced it before the trace
        self.ownership = apply_ownership(self.module, decision, runtime.place.pp_rank, runtime.place.rank)
        self._intercept(decision)
        self._keep(decision)
        kept = {name for state in decision.kept for name in state.names}  # already used in the order of microbatches
        for name in decision.temporaries:
            if name not in kept and runtime.place.pp_rank in decision.attributes[name]:
                path, _, attribute = name.rpartition(".")
                runtime[Turn].attributes.add(self.module.get_submodule(path), attribute)
        if self.one_at_a_time:
            runtime.server.run_microbatches_one_at_a_time()
        if runtime.place.shards_parameters:
            check_live(runtime, self.module, self.owned_parameters())
        materialise(self.ownership.local_parameters(), runtime.place.device)
        if runtime.place.device.type != "cpu":
            self._move_to(runtime.place.device)
        self._widen_gradients()
        for optimizer in runtime[Models].optimizers:
            optimizer.localise(self.model)
        self.replicas.join_group()
        self._finish()
        if runtime.step.running and self.kept is not None:  # parameters and buffers have their values now
            self.buffers.save(self.owned_tensors()[1])
            self.kept.begin_step()

    def _widen_gradients(self) -> None:
        if self.runtime.place.cfg._fp32_grad_accumulation:
            accumulate_in_float32(self.owned_parameters())

    def _list_modules(self) -> None:
        named = list(self.module.named_modules())
        self._names = [name for name, _ in named]
        self._modules = [module for _, module in named]
        self.runtime.server.name_modules(self.model_id, [name or type(self.module).__name__ for name in self._names])

    def _intercept(self, decision: Decision) -> None:
        runtime, ownership = self.runtime, self.ownership
        assert ownership is not None, "set just before"
        ids = {name: index for index, name in enumerate(self._names)}
        targets: dict[int, RemoteModule] = {}

        def target(name: str, pp_rank: int, called: Iterable[nn.Module]) -> RemoteModule:
            draws = sum(map(may_draw, called)) if runtime.place.cfg.reproducible_rng else None
            shown = name or type(self.module).__name__
            return RemoteModule(shown, ids[name], self.model_id, runtime.place.pp_ranks[pp_rank], draws)

        for name, module in zip(self._names, self._modules, strict=True):
            owner = decision.modules[name]
            if owner != runtime.place.pp_rank and name not in decision.follows:
                targets[id(module)] = target(name, owner, [module])
        for module in self._modules:
            if any(id(part) in targets for part in module.modules()):
                divided_modules.add(module)
        for name, module in zip(self._names, self._modules, strict=True):
            remote = targets.get(id(module))
            ranks = tuple(runtime.place.pp_ranks[r] for r in decision.follows.get(name, (decision.modules[name],)))
            module_locations.add(module, name, ranks, here=remote is None, traced=not runtime.place.cfg.skip_tracing)
            if remote is not None:
                make_remote(module, remote, ownership.check)
                continue
            if module in divided_modules:
                refuse_compiled(name, module)
                if isinstance(module, nn.TransformerEncoder):
                    pad_with_zeros(module)
            if isinstance(module, nn.Sequential):
                group_sequential(
                    module,
                    lambda child: targets.get(id(child)),
                    lambda rank, children, name=name: target(  # type: ignore[misc]
                        name, runtime.place.pp_ranks.index(rank), children
                    ),
                )

        self._seed_calls(module for module in self._modules if id(module) not in targets)

    def _keep(self, decision: Decision) -> None:
        """Make microbatches use the state that modules keep on this rank in their order."""
        modules = dict(zip(self._names, self._modules, strict=True))
        self.kept = StatefulModules(self.runtime, self.model_id, modules, decision)
        self._spans_state = any(decision.is_divided(path) for state in decision.kept for path in state.users)
        for name, module in modules.items():
            if decision.modules[name] == self.runtime.place.pp_rank or name in decision.follows:
                module_locations.watch(module, self.kept)

    def _seed_calls(self, modules: Iterable[nn.Module]) -> None:
        if self.runtime.place.cfg.reproducible_rng:
            reproducible.install(self.runtime, modules)

    def _move_to(self, device: torch.device) -> None:
        for module in self._modules:
            for parameter in module._parameters.values():
                if parameter is not None and not is_sentinel(parameter):
                    parameter.data = parameter.data.to(device)
                    quantized.move(parameter, device)
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_sentinel(buffer):
                    module._buffers[name] = buffer.to(device)

    def _finish(self) -> None:
        self._placed = True
        quantized.prepare(self.module)  # weights are made by now
        for observer in self.runtime[Turn].observers:
            observer.placed()
        intercept_marked(module for _, module in self.local_named_modules())
        self.deferred_loads.forget()  # hooks load them
        self.post_partition_hooks.run(self.model, self.runtime[Models].optimizer_of(self.model))

    def wait_until_placed(self, task: RunningTask) -> None:
        """Wait, on a worker of a peer, until the main thread has applied the decision.

        Another peer's request may arrive before the root's decision, which the main thread cannot apply while this task
        has the turn. Waiting for an answer gives up the turn, and the root's answer arrives after its decision.
        """
        if not self._placed:
            query = self._send_control(task, self.runtime.place.pp_ranks[0], "sent partition", None)
            self.runtime.server.wait(task.worker, [query], "forward")
        if self._failed:
            raise StepAborted("the model could not be placed on this rank")

    def module_of(self, module_id: int) -> nn.Module:
        """Return the module with this id."""
        return self._modules[module_id]

    def name_of(self, module_id: int) -> str:
        """Return the name of the module with this id."""
        return self._names[module_id] if self._names else f"module {module_id}"

    def is_divided(self, module: nn.Module) -> bool:
        """Return whether a part of the module lives on another rank."""
        return module in divided_modules

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over the modules that run on this rank, with their names."""
        return iter(self.module.named_modules()) if self.ownership is None else self.ownership.local_named_modules()

    def owned_tensors(self) -> tuple[list[nn.Parameter], list[tuple[nn.Module, str]]]:
        """Return the tensors that a step may change here: each parameter once, and module and name of each buffer."""
        return _core.owned_tensors(self.module, PLACEHOLDERS)

    def owned_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients this rank accumulates, each once, in the model's order."""
        return self.owned_tensors()[0]

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Return those of them that are not sharded over data-parallel ranks."""
        registry = self.runtime[ShardedParameters]
        return [one for one in self.owned_parameters() if not registry.is_sharded(one)]

    def reset_shards(self) -> None:
        """Have all sharded parameters be shards, whatever was gathered between steps."""
        if self.sharding is not None:
            self.sharding.reset()

    def shard(self) -> None:
        """Shard the parameters over data-parallel ranks, once their values are equal, if the job does so.

        In a pipeline this is done between steps: the step that divides a model runs with whole parameters.
        """
        if not self.runtime.place.shards_parameters or self.sharding is not None or self.replicas.is_accumulating:
            return
        from shardwright.sharded_data_parallel.sharding import ModelSharding  # imports much of torch

        with torch.inference_mode(False):  # training may follow
            self.sharding = ModelSharding(self.runtime, self.module, self.owned_parameters(), f"model {self.model_id}")
        for optimizer in self.runtime[Models].optimizers:
            optimizer.take_over_shards()
        self.replicas.leave_shards()

    def owned_buffers(self) -> list[tuple[nn.Module, str]]:
        """Return the module and name of each buffer that this rank holds."""
        return self.owned_tensors()[1]

    def after_step(self) -> None:
        """Run the hooks that were registered for the end of the first step."""
        if self.post_step_hooks:
            self.post_step_hooks.run(self.model, self.runtime[Models].optimizer_of(self.model))
