"""One model's sharded parameters on a rank, by PyTorch's ``fully_shard``: its hooks, or its units without them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.data_parallel.reducer import GradientListener, Reducer
from shardwright.data_parallel.shards import ParameterShards
from shardwright.job.runtime import Runtime
from shardwright.sharded_data_parallel.communication import ShardCollectives
from shardwright.sharded_data_parallel.groups import SHARDS
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of
from shardwright.sharded_data_parallel.units import buckets, choose, may_gather_ahead, units

_BUCKET_BYTES = 25 << 20
#: Of one collective in a pipeline, for which all of its parameters, or gradients, are in memory twice.
_MAX_BUCKET_ELEMENTS = 1 << 24


class ModelSharding:
    """The sharded parameters of a model on this rank.

    In a pipeline of one rank each unit gathers its parameters when it is called, by the hooks of ``fully_shard``. In
    longer pipelines, where replicas run modules in different orders, all are gathered before a step's tasks and reduced
    after them.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, parameters: Sequence[nn.Parameter], name: str) -> None:
        """Shard those of a rank's ``parameters`` that are large enough. All replicas have the same values in them."""
        cfg = runtime.place.cfg
        self._runtime = runtime
        self._module = module
        self._by_hooks = runtime.place.pp_size == 1
        self._stage = int(cfg.sdp_stage)
        self._max_elements = int(cfg.sdp_reduce_bucket_size)
        self._modules: list[FSDPModule] = []
        self._groups: list[Any] = []  # of FSDPParamGroup, which has no types
        self._used: set[FSDPParam] = set()
        self._names: dict[nn.Parameter, str] = {}
        registry = runtime[ShardedParameters]
        self._collectives = registry.collectives
        if registry.mesh is None:
            registry.mesh = DeviceMesh.from_group(runtime.process_groups[SHARDS], runtime.place.device.type)
        chosen = choose(module, parameters, int(cfg.sdp_param_persistence_threshold))
        known = {id(one) for one in chosen}
        for parameter in parameters:
            if id(parameter) not in known:
                registry.add_whole(parameter)
        if chosen:
            places = _places(module, chosen)
            names = {parameter: name for name, parameter in module.named_parameters()}
            if self._by_hooks:
                self._shard_by_hooks(chosen, registry.mesh)
            else:
                self._shard_in_groups(chosen, registry.mesh)
            for original in chosen:
                holder, attribute = places[original][0]
                sharded = holder._parameters[attribute]
                assert sharded is not None, "it has taken the place of another"
                _move_hooks(original, sharded)
                registry.add(original, sharded, places[original])
                self._names[sharded] = names[original]
                if original.grad is not None:  # of the step that has divided the model
                    sharded.grad, original.grad = registry.distributed(original.grad), None
        groups = runtime[ReplicaCollectives].groups
        self._reducer = (
            None if groups is None else Reducer(groups, ParameterShards(), f"{name}, shards", _BUCKET_BYTES, False)
        )

    def _shard_by_hooks(self, chosen: list[nn.Parameter], mesh: DeviceMesh) -> None:
        sharded = set(chosen)
        ignored = {one for one in self._module.parameters() if one not in sharded}
        found = units(self._module, sharded, self._max_elements)
        reshards = None if self._stage == 3 else False
        self._modules = [
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshards, ignored_params=ignored) for unit in found
        ]
        for module in self._modules:
            kind: Any = type(module)  # errors name the class of the script's module, and not what PyTorch derives of it
            kind.__name__, kind.__qualname__ = kind.__bases__[-1].__name__, kind.__bases__[-1].__qualname__
            module.set_custom_all_gather(_Gather(self._collectives))
            module.set_custom_reduce_scatter(_Scatter(self._collectives))
            module.set_force_sum_reduction_for_comms(True)
        self._modules[-1]._get_fsdp_state()._lazy_init()
        self._module.register_forward_hook(self._after_forward)
        if hasattr(self._module, "generate"):  # of transformers; calls parts of a model by themselves
            register_fsdp_forward_method(self._module, "generate")
        self._limit_prefetching()
        for module in self._modules:
            if (group := module._get_fsdp_state()._fsdp_param_group) is not None:
                self._groups.append(group)
        for each in self._groups:
            each.post_backward = functools.partial(self._post_backward, each)
            each.unshard = _outside_inference_mode(each.unshard)
            each.wait_for_unshard = _outside_inference_mode(each.wait_for_unshard)

    def _after_forward(self, *_: Any) -> None:
        """Have the model's parameters be shards after a call outside steps, since an optimizer may see them next."""
        if not self._runtime.step.running and torch._C._current_graph_task_id() == -1:  # nor in a backward
            for group in self._groups:
                group._to_sharded()

    def _limit_prefetching(self) -> None:
        """Have units gather the next one's parameters while their own are whole only where that is of use.

        Where a gather does not overlap computation, one ahead of its turn would only take memory.
        """
        sizes = [_elements(unit) for unit in self._modules]
        ahead = may_gather_ahead(sizes, int(self._runtime.place.cfg.sdp_max_live_parameters))
        for unit, may in zip(self._modules, ahead, strict=True):
            if not may or self._collectives.waits_at_once:
                unit.set_modules_to_backward_prefetch([unit])
                if (group := unit._get_fsdp_state()._fsdp_param_group) is not None:
                    group.unshard_async_op = True  # on the computation's own stream

    def _shard_in_groups(self, chosen: list[nn.Parameter], mesh: DeviceMesh) -> None:
        device = self._runtime.place.device
        context: Any = FSDPCommContext()
        context.lazy_init(device)
        for together in buckets(chosen, min(self._max_elements, _MAX_BUCKET_ELEMENTS)):
            group: Any = FSDPParamGroup(
                together,
                (self._module,),
                FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0),
                None,
                device,
                None,
                MixedPrecisionPolicy(),
                OffloadPolicy(),
            )
            group.comm_ctx = context
            group._all_gather_comm = _Gather(self._collectives)
            group._reduce_scatter_comm = _Scatter(self._collectives)
            group.force_sum_reduction_for_comms = True
            group.lazy_init()
            self._groups.append(group)

    # --- one step

    def reset(self) -> None:
        """Make all parameters sharded ones again, and forget what a step has left. Between steps nothing is lost."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
            group._all_gather_result = None
            group._post_reduce_event = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
            group.reduce_grads = group.reshard_after_backward = True
            context = group.comm_ctx
            context.all_gather_state = context.reduce_scatter_state = None
            context.post_forward_order.clear()
        for module in self._modules:
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
        self._used.clear()

    def begin_tasks(self) -> None:
        """Prepare for the tasks of a step; without hooks, gather all parameters.

        Raises:
            ShardwrightError: The script has changed a parameter in a way that has no effect.
        """
        registry = self._runtime[ShardedParameters]
        for parameter, name in self._names.items():
            registry.check(parameter, name)
        if not self._by_hooks:
            with torch.inference_mode(False):  # what is made here stays, for training too
                for group in self._groups:
                    group.unshard()
                    group.wait_for_unshard()
        elif self._stage < 3:
            for group in self._groups:
                group.reshard_after_backward = False
                group.reduce_grads = self._stage == 2

    def trained(self) -> Iterator[nn.Parameter]:
        """Return the whole parameters that modules compute with now, where they have been gathered."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    yield parameter._unsharded_param

    def reduce_gradients(self) -> None:
        """Give each sharded parameter the mean over replicas of its gradients. All replicas call this after a step."""
        if torch.is_grad_enabled() and self._groups:
            at_end = not self._by_hooks or self._stage == 1
            parameters = [one for group in self._groups for one in group.fsdp_params]
            if at_end:
                self._used.update(one for one in parameters if _has_gradient(one))
            used = self._used_anywhere(parameters)
            for group in self._groups:
                if at_end:
                    self._reduce(group, [one for one in group.fsdp_params if one in used])
                for one in group.fsdp_params:
                    if one not in used:
                        one.sharded_param.grad = None
            self._collectives.finish()
            self._average_over_groups(parameters)
        self._collectives.finish()
        self.reset()

    def _used_anywhere(self, parameters: list[FSDPParam]) -> set[FSDPParam]:
        collectives = self._runtime[ReplicaCollectives].dp
        assert collectives is not None, "there are several replicas"
        flags = [one in self._used for one in parameters]
        notes = torch.tensor(flags, dtype=torch.uint8, device=self._runtime.place.device)
        collectives.maximum(notes)
        return {one for one, flag in zip(parameters, notes.tolist(), strict=True) if flag}

    def _reduce(self, group: Any, used: list[FSDPParam]) -> None:
        if not used:
            return
        for parameter in used:
            _fill(parameter)
        group.reduce_grads = True
        FSDPParamGroup.post_backward(group)
        group.finalize_backward()

    def _post_backward(self, group: FSDPParamGroup, *_: Any) -> None:
        """Reduce a unit's gradients after its backward, the same ones on all ranks."""
        if group.reduce_grads and any(map(_has_gradient, group.fsdp_params)):
            for parameter in group.fsdp_params:
                if _has_gradient(parameter):
                    self._used.add(parameter)
                elif parameter.sharded_param.requires_grad:
                    _fill(parameter)
        FSDPParamGroup.post_backward(group)
        if self._collectives.waits_at_once:
            group.comm_ctx.reduce_scatter_state = None  # kept for streams; the reduction is over

    def _average_over_groups(self, parameters: list[FSDPParam]) -> None:
        """Average gradients, which are means over the ranks that shard them, over the groups of such ranks."""
        if self._reducer is None:
            return
        registry, collectives = self._runtime[ShardedParameters], self._runtime[ReplicaCollectives].groups
        assert collectives is not None, "there is a reducer over it"
        shards: list[tuple[FSDPParam, Any]] = []
        for parameter in parameters:
            local = registry.local(parameter.sharded_param)
            gradient = parameter.sharded_param.grad
            if local.numel():
                local.grad = None if gradient is None else shard_of(gradient)
                shards.append((parameter, local))
        self._reducer.begin_step([one for _, one in shards if one.requires_grad or one.grad is not None], False)
        self._reducer.reduce(len(collectives.ranks), 1.0, False, 0)
        for parameter, local in shards:
            gradient, local.grad = local.grad, None
            if gradient is not None:
                parameter.sharded_param.grad = parameter.to_sharded_dtensor(gradient)


class _Allocating:
    @staticmethod
    def allocate(size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocating, AllGather):
    """Gathers the parameters of a unit."""

    def __init__(self, collectives: ShardCollectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        self._collectives.gather(output_tensor)  # the input is this rank's part of it


class _Scatter(_Allocating, ReduceScatter):
    """Sums the gradients of a unit, and leaves each rank its shard."""

    def __init__(self, collectives: ShardCollectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._collectives.scatter(input_tensor, output_tensor)


def _outside_inference_mode(gather: Callable[..., None]) -> Callable[..., None]:
    """Have what a gather makes at its first call, and fills from then on, be of use for training."""

    @functools.wraps(gather)
    def gather_outside(*args: Any, **kwargs: Any) -> None:
        with torch.inference_mode(False), torch.no_grad():
            gather(*args, **kwargs)

    return gather_outside


def _elements(unit: FSDPModule) -> int:
    group = unit._get_fsdp_state()._fsdp_param_group
    return 0 if group is None else sum(one.sharded_param.numel() for one in group.fsdp_params)


def _has_gradient(parameter: FSDPParam) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    return hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None


def _fill(parameter: FSDPParam) -> None:
    """Give a whole parameter a gradient of zeros, if it has none."""
    if not _has_gradient(parameter):
        whole = parameter._unsharded_param
        whole.grad = torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)


def _places(module: nn.Module, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {parameter: [] for parameter in parameters}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter in found:
                found[parameter].append((part, name))
    return found


def _move_hooks(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Register the script's hooks of a parameter on what has taken its place."""
    registered: list[tuple[Any, Callable[..., Any]]] = [
        (original._backward_hooks, sharded.register_hook),
        (original._post_accumulate_grad_hooks, sharded.register_post_accumulate_grad_hook),
    ]
    for hooks, register in registered:
        for hook in list((hooks or {}).values()):
            if not isinstance(hook, GradientListener):
                register(hook)
