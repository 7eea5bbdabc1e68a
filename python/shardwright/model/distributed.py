"""``smp.DistributedModel``: a module whose parts are on the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import nn

from shardwright.caches import copied
from shardwright.errors import ConfigError, NotOwnedError, ShardwrightError
from shardwright.execution.call import refuse_transforms
from shardwright.execution.task import running_task
from shardwright.half_precision import cast_model, half_dtype, to_float32, to_half
from shardwright.job.explained import explain
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.launch import check_group
from shardwright.model.alike import check_same_model
from shardwright.model.backward import backward
from shardwright.model.divided import DividedTensors
from shardwright.model.forwarding import ForwardsAttributes
from shardwright.model.generating import Generating
from shardwright.model.join import joined
from shardwright.model.layers import name_layers
from shardwright.model.methods import method_of
from shardwright.model.models import Models
from shardwright.model.placement import Placement
from shardwright.model.saving import Saving
from shardwright.model.updates import Updates
from shardwright.model.whole import HINTS, MERGES
from shardwright.model.wrapping import refuse_around, refuse_compiling, refuse_divided, refuse_trainer, refuse_wrapped
from shardwright.nn.entries import built_in
from shardwright.tensor_parallel.replacement import Result, replace
from shardwright.tensor_parallel.report import announce
from shardwright.transformers_models import prepare


class DistributedModel(DividedTensors, Saving, ForwardsAttributes):
    """Wraps a module for pipeline, tensor and data parallelism. Do not wrap it in DistributedDataParallel as well.

    With several pipeline ranks, the module is divided inside the first call of the first step: it is traced and split
    over the ranks by cost, and each rank releases what it does not own. With one pipeline rank, the module is not
    divided. With several tensor-parallel ranks, the constructor replaces modules marked by ``smp.tensor_parallelism``,
    in place, by distributed modules with the same weights. Create optimizers after that.

    With the configuration keys ``fp16`` and ``bf16``, the constructor casts all floating-point parameters and buffers,
    except those of modules that ``smp.keep_float32`` was called on.

    Attributes set on the model (``model.flag = True``) are set on the wrapped module, except for the model's own names:
    the attributes below and its methods.

    Attributes:
        module: The wrapped module.
        model_id: The number of the model in this job, in order of construction.
        average_grads_across_microbatches: Whether gradients are averaged, not summed, over microbatches.
        placement: Where the modules of the model are.
        generating: Its generations that run.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        """Wrap a module.

        Args:
            module: The module, built identically on every rank.
            trace_device: ``"gpu"`` (the CPU where there is none) or ``"cpu"``: where the first forward pass is traced.
            trace_execution_times: Measure forward times for the cost. The partition is then not deterministic.
            overlapping_allreduce: Reduce gradients over data-parallel ranks in buckets during the backward pass.
            backward_passes_per_step: The number of steps per reduction of gradients (gradient accumulation).
            average_grads_across_microbatches: Average gradients over microbatches; False sums them.
            bucket_cap_mb: The size of a bucket, in MiB.
            trace_memory_usage: Measure activation memory while tracing, instead of estimating it from outputs.
            broadcast_buffers: Send buffers from the first data-parallel rank before every training step, not only once.
            find_unused_parameters: Accepted without effect: parameters that a step does not use are always found.
            gradient_as_bucket_view: Keep gradients as views of their buckets.

        Raises:
            ConfigError: An argument has an invalid value; or the module is, or contains, a PyTorch wrapper that reduces
                or shards gradients (such as ``DistributedDataParallel``); or data-parallel or tensor-parallel ranks
                have frozen different parameters, in which case all of them raise it.
        """
        super().__init__()
        _check(module, trace_device, trace_execution_times, backward_passes_per_step)
        runtime = current_runtime()
        check_group(runtime.place.launch)
        self._dtype = half_dtype(runtime.place.cfg)
        if self._dtype is not None:
            cast_model(module, self._dtype)
        divided = _divided(module, runtime)
        self.module = module = divided.module
        self.model_id = runtime[Models].add(self)
        self._replacements = divided.replacements
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self._options = {
            "average_grads_across_microbatches": average_grads_across_microbatches,
            "trace_device": trace_device,
            "trace_execution_times": trace_execution_times,
            "trace_memory_usage": trace_memory_usage,
            "overlapping_allreduce": overlapping_allreduce and runtime.place.cfg.overlapping_allreduce is not False,
            "backward_passes_per_step": backward_passes_per_step,
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._runtime = runtime
        self._updates = runtime[Updates]
        self._passes_on = (
            runtime.place.pp_size == 1 and self._dtype is None and type(self).forward is DistributedModel.forward
        )
        self.generating = Generating()
        self.placement = Placement(runtime, self, module)
        self.register_load_state_dict_post_hook(DistributedModel._forget_children)  # type: ignore[no-untyped-call]
        self._keep_own()
        if runtime.place.pp_size == 1:
            try:
                self.placement.place_whole()
            except BaseException as error:
                explain(runtime, error)
                raise

    # --- running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module like any ``nn.Module``; call the wrapped module directly if that gives the same result."""
        self._updates.check_whole("a call of the model")
        if self._passes_on and not (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or self._compiled_call_impl
        ):
            return self._modules["module"](*args, **kwargs)  # type: ignore[misc]
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. With several pipeline ranks, this is allowed only inside a step function.

        With ``fp16`` or ``bf16``, floating-point arguments are cast to the model's dtype, and results to float32.
        """
        module = self._modules["module"]  # avoids the cost of __getattr__ in every call
        assert module is not None, "set once and for all"
        if self._dtype is not None:
            args, kwargs = to_half((args, kwargs), self._dtype)
        if self._runtime.place.pp_size > 1:
            self._enter(copied(module, args, kwargs))
        result = module(*args, **kwargs)
        return result if self._dtype is None else to_float32(result)

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> None:
        """Run the backward pass from tensors, like ``torch.autograd.backward``, over all ranks (the paper, 4.3).

        With ``fp16``, gradients are those of the loss multiplied by the loss scale of ``smp.DistributedOptimizer``.

        Args:
            tensors: A tensor, or several, that require a gradient, such as the loss.
            grad_tensors: Their gradients. Optional for tensors of one element.
            weight: The weight of this microbatch in the step's gradients, such as the number of labels that its loss is
                the mean of: 0, or from 1e-30 to 1e30. Gradients are then the weighted sum over the microbatches of all
                data-parallel ranks, divided by the sum of the weights. None gives the plain mean over microbatches.
                With ``average_grads_across_microbatches=False``, or with a communication hook, nothing is divided.

        Raises:
            ConfigError: The job's ``pipeline`` is ``_only_forward``.
            ShardwrightError: Called outside a step with several pipeline ranks, or only some microbatches of the step
                have a weight.
            ValueError: The weight is not a single number that is 0 or from 1e-30 to 1e30, or a tensor's dtype cannot
                represent it.
        """
        backward(self._runtime, tensors, grad_tensors, weight)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward pass, like any ``nn.Module``.

        Raises:
            FrameError: The job has several pipeline ranks.
        """
        refuse_compiling(self)
        super().compile(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> NoReturn:
        """Raise an error: ``DataParallel`` copies its module to other GPUs of the process in every forward pass."""
        refuse_around("DataParallel")

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise an error: a copy could not be a model of this job."""
        raise ShardwrightError(
            "copy.deepcopy of a smp.DistributedModel (torch.optim.swa_utils.AveragedModel makes one) cannot work: its "
            "parts live on several ranks. For averaged weights use smp.AveragedModel(model, ...); to copy the module, "
            "copy.deepcopy it before smp.DistributedModel wraps it, or load model.state_dict() into a second one"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise an error: a pickled or copied object could not be a model of this job."""
        raise ShardwrightError(
            "pickling of a smp.DistributedModel (torch.save(model) does it) cannot work: it belongs to a job of "
            f"running ranks; {HINTS['pickling']}"
        )

    def _enter(self, call: Callable[[], Any]) -> None:
        if running_task() is None:
            raise ShardwrightError(
                "with pipeline_parallel_degree > 1 the model can be called only inside a function decorated with "
                "smp.step; on the other ranks its modules are run on request"
            )
        refuse_transforms("the model")
        if not self.placement.partitioned:
            self.placement.partition(call)
        else:
            self.placement.resend_decision()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module. Its methods (``generate``) divide the model first if needed."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "accepts_loss_kwargs":  # which only transformers.Trainer asks for, when it is made
                refuse_trainer()
            if "placement" in self.__dict__:
                self.settle()
            value = getattr(super().__getattr__("module"), name)
        if name in MERGES and self.placement.ownership is not None:
            raise NotOwnedError(f"{name} of a model that is divided over pipeline ranks: {HINTS[name]}")
        if self._runtime.place.pp_size == 1 or not callable(value) or getattr(nn.Module, name, None) is not None:
            return value
        return method_of(self._runtime, self, name, value) if hasattr(type(self.module), name) else value

    # --- data parallelism

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Reduce gradients over data-parallel ranks by ``hook(state, bucket)``, which returns a future of the result.

        The bucket holds gradients summed over microbatches. The hook must average over ranks *and* microbatches itself.

        Raises:
            ConfigError: ``overlapping_allreduce`` is off, or ``shard_optimizer_state`` is on.
        """
        if self._runtime.place.shards_parameters:
            raise ConfigError(
                "register_comm_hook with sharded_data_parallel_degree, whose gradients go to shards: use one of them"
            )
        if self._runtime.place.shards_optimizer_state:
            raise ConfigError(
                "register_comm_hook reduces gradients to all data-parallel ranks, and shard_optimizer_state to their "
                "owners only: use one of them"
            )
        if not self._options["overlapping_allreduce"]:
            raise ConfigError("register_comm_hook needs overlapping_allreduce=True")
        self.placement.replicas.register_comm_hook(state, hook)

    #: The older name, as it was before the method was public.
    _register_comm_hook = register_comm_hook

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context for data-parallel ranks with different numbers of batches.

        A rank that reaches the end of the context early takes part in the collectives of the others until they are
        done, and then receives the weights of a rank that trained longest. All ranks of one pipeline must have the same
        number of batches.

        Args:
            divide_by_initial_world_size: Average over all data-parallel ranks, including those without batches.
            enable: Whether the context has any effect.
            throw_on_early_termination: Raise an error on every rank as soon as one has no batches left.

        Raises:
            ConfigError: The job has no data parallelism, or ``shard_optimizer_state`` is on.
        """
        if not enable:
            return nullcontext()
        if self._runtime.place.shards_parameters:
            raise ConfigError(
                "model.join() with sharded_data_parallel_degree: a rank that has no batches left would not gather the "
                "parameters of which it has shards. Give all data-parallel ranks the same number of batches, as "
                "smp.DistributedSampler does"
            )
        if self._runtime.place.shards_optimizer_state:
            raise ConfigError(
                "model.join() with shard_optimizer_state: a rank that has no batches left would not update its share "
                "of the parameters. Give all data-parallel ranks the same number of batches, as smp.DistributedSampler "
                "does"
            )
        if len(self._runtime.place.dp_ranks) == 1:
            raise ConfigError("model.join() is for data parallelism; this job has one data-parallel rank")
        return joined(self._runtime, self.placement.replicas, divide_by_initial_world_size, throw_on_early_termination)

    # --- ownership

    @property
    def partitioned(self) -> bool:
        """Whether the model has been divided over the ranks."""
        return self.placement.partitioned

    def get_module(self) -> nn.Module:
        """Return the wrapped module."""
        self.settle()
        return self.module

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> torch.utils.hooks.RemovableHandle:
        """Call ``hook(model, optimizer)`` once the model is divided, before its first forward pass."""
        return self.placement.post_partition_hooks.register(hook)

    def register_post_step_hook(self, hook: Callable[..., Any]) -> torch.utils.hooks.RemovableHandle:
        """Call ``hook(model, optimizer)`` once, after the first step. The optimizer may be None."""
        return self.placement.post_step_hooks.register(hook)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over all parameters with their names in the wrapped module.

        Parameters of other ranks are placeholders without values.
        """
        self.settle()
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over all buffers with their names in the wrapped module.

        Buffers of other ranks are placeholders without values.
        """
        self.settle()
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over the modules that this rank runs, with their names."""
        self.settle()
        return self.placement.local_named_modules()

    def settle(self) -> None:
        """Give the model the values of a load that waits for the first step, before they are read or changed."""
        self.placement.deferred_loads.settle(self.placement.module)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function with every module, like any ``nn.Module``."""
        self.settle()
        return super().apply(fn)

    def local_modules(self) -> Iterator[nn.Module]:
        """Return an iterator over the modules that this rank runs, each once, in the model's order."""
        return (module for _, module in self.local_named_modules())


def _check(module: nn.Module, trace_device: str, trace_execution_times: bool, backward_passes_per_step: int) -> None:
    if trace_device not in ("gpu", "cpu"):
        raise ConfigError(f"trace_device is {trace_device!r}; allowed are 'gpu' and 'cpu'")
    if trace_execution_times and trace_device == "cpu" and torch.cuda.is_available():
        raise ConfigError("trace_execution_times must be False with trace_device='cpu'")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step is {backward_passes_per_step}; it must be at least 1")
    if isinstance(module, DistributedModel):
        raise ConfigError("the module is a DistributedModel already")
    refuse_wrapped(module)
    refuse_divided(module)


def _divided(module: nn.Module, runtime: Runtime) -> Result:
    """Replace the modules that are marked for tensor parallelism by distributed modules."""
    runtime.place.check_device()
    check_same_model(module, runtime)
    if runtime.place.device.type == "cuda":
        runtime.node.use_device(runtime.place.device.index)
    divided = replace(module, runtime, built_in)
    if any(each.substitute for each in divided.replacements):
        prepare(divided.module, announce=runtime.place.rank == 0, generates_with_caches=False)
        name_layers(divided.module)
    if runtime.place.rank == 0:
        announce(divided, len(runtime.place.tp_ranks))
    return divided
