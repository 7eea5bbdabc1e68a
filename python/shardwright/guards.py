"""All functions of torch and Python that the library replaces: by what, when, why, and which tests cover it.

Each is there only while it is needed. What the placement of a model sets on that model's own modules is none of them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._functorch import eager_transforms
from torch.amp.grad_scaler import GradScaler
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, stateless
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizers

from shardwright import interrupts
from shardwright.creation import watch_creation
from shardwright.data_parallel import sync_batch_norm
from shardwright.execution import forward_mode, other_weights, precision
from shardwright.execution.children import CONTAINER_METHODS
from shardwright.exit_handlers import ExitHandlers
from shardwright.frames import guards as frames
from shardwright.generation import multinomial
from shardwright.model import wrapping
from shardwright.partition.audit import Audit
from shardwright.partition.recomputed import Recomputed
from shardwright.partition.regions import Regions
from shardwright.partition.shared_state import SharedState
from shardwright.patches import ANY_CLASS, Guard, How, When
from shardwright.step import guards as steps
from shardwright.step import loss_scaling
from shardwright.tensor_parallel.registry import tp_register
from shardwright.verify.record import Recorder

_SILENTLY_WRONG = "tests/silently_wrong/test_calls.py::test_it_is_exact_or_refused_with_the_cure"
_HOOKS = "tests/frames/test_guards.py"
_HOOK_ELSEWHERE = "tests/state/test_put_back.py::test_a_hook_that_a_later_forward_registers_elsewhere_is_refused"
_WRAPPER = "tests/model/test_wrapper.py::test_the_wrapper_can_be_used_as_the_module"
_CHECKPOINTS = "tests/frames/test_checkpoint.py"
_ATTRIBUTES = "tests/partition/test_decide.py::test_an_attribute_that_one_module_sets_and_another_reads_joins_them"
_OBJECTS = "tests/partition/test_shared_state.py::test_only_who_uses_what_changes_in_an_object_is_joined"
_CHILDREN = "tests/state/test_exchanged_modules.py::test_modules_are_those_of_the_same_microbatch"
_BUFFERS = "tests/state/test_held_otherwise.py::test_what_a_forward_registers_is_of_its_own_microbatch"
_PRECISION = "tests/state/test_precision.py::test_precisions_are_those_of_one_process"
_FORWARD_MODE = "tests/frames/test_forward_mode.py::test_forward_mode_with_a_result_is_exact"
_HALF_PRECISION = "tests/half_precision/test_refusals.py::test_it_is_refused_by_name"
_GENERATION = "tests/generation/test_generate.py::test_sampled_tokens_are_those_of_one_process"
_LAUNCHERS = "tests/failures/test_launchers.py"

_ELSEWHERE = "a hook would be registered on one rank, and the module run on another"
_MICROBATCHES = "it would undo what earlier microbatches of the step have summed"
_OF_BATCH = "microbatches of a generation would draw other numbers than the whole batch"
_OTHERS = "other microbatches would find what is put back later"
_ONE_LEVEL = "torch has one level for all microbatches: nothing may be waited for inside it"
_SETTINGS_READ = "precisions are read again only once one is set, as each call would be slower by reading them"
_PART_OF_NORM = "each rank would clip by the norm of its own part"
_SCALED_NORM = "it would be the norm of gradients that are multiplied by the loss scale"
_SCALED_VALUES = "it would clip gradients that are multiplied by the loss scale"
_READERS = "the audit has to know who reads and changes what modules keep"

TABLE: tuple[Guard, ...] = (
    # Steps, on one rank too.
    Guard(nn.Module, "zero_grad", steps.zero_module, When.JOB, _MICROBATCHES, _SILENTLY_WRONG),
    Guard(Optimizer, "zero_grad", steps.zero_optimizer, When.JOB, _MICROBATCHES, _SILENTLY_WRONG),
    Guard(
        torch_optimizers,
        "register_optimizer_step_pre_hook",
        steps.before_optimizer_step,
        When.JOB,
        "an update in the code of a step would use a part of its gradients; in one that fails, ranks drift apart",
        _SILENTLY_WRONG,
        How.HOOK,
    ),
    # Several ranks.
    Guard(
        torch_optimizers,
        "register_optimizer_step_post_hook",
        steps.after_optimizer_step,
        When.SEVERAL_RANKS,
        "an update that has ended would look like one that failed, after which no step may run",
        "tests/faults/test_faults.py::test_a_fault_is_named_on_every_rank_and_the_next_step_is_exact",
        How.HOOK,
    ),
    Guard(
        DistributedDataParallel,
        "__init__",
        wrapping.make_parallel,
        When.SEVERAL_RANKS,
        "it would overwrite, and average, the parts of tensors that ranks divide among them",
        _WRAPPER,
    ),
    Guard(
        sys,
        "excepthook",
        ExitHandlers,
        When.SEVERAL_RANKS,
        "the other ranks would not learn why this one has left",
        "tests/failures/test_lost.py::test_a_rank_whose_own_code_fails_between_steps_hands_its_traceback_to_the_others",
        How.MADE,
    ),
    Guard(
        signal,
        "SIGTERM",
        ExitHandlers,
        When.SEVERAL_RANKS,
        "the rank would end without leaving its job, and look lost to the others",
        f"{_LAUNCHERS}::test_a_signal_ends_all_ranks_with_a_line_each",
        How.MADE,
    ),
    Guard(
        signal,
        "SIGINT",
        interrupts.install,
        When.SEVERAL_RANKS,
        "Ctrl-C in the middle of a step would leave it done on some ranks, and undone on others",
        "tests/failures/test_interrupts.py::test_a_signal_in_a_step_waits_for_its_end",
        How.MADE,
    ),
    # Parameters that are divided.
    Guard(clip_grad, "_get_total_norm", steps.total_norm, When.DIVIDED, _PART_OF_NORM, _SILENTLY_WRONG),
    Guard(nn.utils, "get_total_norm", steps.total_norm, When.DIVIDED, _PART_OF_NORM, _SILENTLY_WRONG),
    # Losses that are scaled.
    Guard(clip_grad, "_get_total_norm", steps.total_norm, When.FLOAT16, _SCALED_NORM, _HALF_PRECISION),
    Guard(nn.utils, "get_total_norm", steps.total_norm, When.FLOAT16, _SCALED_NORM, _HALF_PRECISION),
    Guard(clip_grad, "clip_grad_value_", steps.clip_values, When.FLOAT16, _SCALED_VALUES, _HALF_PRECISION),
    Guard(nn.utils, "clip_grad_value_", steps.clip_values, When.FLOAT16, _SCALED_VALUES, _HALF_PRECISION),
    # Pipelines: gradients in the code of frames.
    Guard(
        torch.Tensor,
        "register_hook",
        frames.register_hook,
        When.PIPELINED,
        "a hook would see one part of a gradient after another",
        f"{_HOOKS}::test_hook_on_a_shared_tensor_sees_its_whole_gradient_once",
    ),
    Guard(
        torch.Tensor,
        "register_post_accumulate_grad_hook",
        frames.register_post_accumulate_grad_hook,
        When.PIPELINED,
        "a hook of a parameter would run on one rank, and once per microbatch",
        _SILENTLY_WRONG,
    ),
    Guard(
        torch.Tensor,
        "retain_grad",
        frames.retain_grad,
        When.PIPELINED,
        "the gradient that is kept would be a part of it",
        f"{_HOOKS}::test_kept_gradient_is_whole_and_after_hooks",
    ),
    Guard(
        torch.Tensor,
        "requires_grad_",
        frames.requires_grad_,
        When.PIPELINED,
        "a parameter would be frozen on one rank, and in microbatches that run meanwhile",
        _SILENTLY_WRONG,
    ),
    Guard(
        torch.autograd.graph,
        "register_multi_grad_hook",
        frames.register_multi_grad_hook,
        When.PIPELINED,
        "gradients come in several calls of autograd, after the first of which the hook would run",
        "tests/frames/test_first_use.py::test_hook_on_several_gradients_is_refused",
    ),
    Guard(
        torch.autograd,
        "_engine_run_backward",
        frames.run_engine,
        When.PIPELINED,
        "backward and grad would stop at the rank's end, and give a part of the gradient",
        f"{_HOOKS}::test_autograd_grad_through_a_call_is_refused",
    ),
    *(
        Guard(
            torch_checkpoint,
            name,
            replacement,
            When.PIPELINED,
            "backward would call modules on other ranks again",
            f"{_CHECKPOINTS}::test_checkpoint_around_code_with_several_children",
        )
        for name, replacement in (
            (frames.GENERATOR, frames.checkpoint_generator),
            ("CheckpointFunction", frames.ReentrantCheckpoint),
        )
    ),
    Guard(torch, "multinomial", multinomial, When.PIPELINED, _OF_BATCH, _GENERATION),
    Guard(forward_ad, "enter_dual_level", forward_mode.enter_dual_level, When.PIPELINED, _ONE_LEVEL, _FORWARD_MODE),
    Guard(
        eager_transforms, "enter_jvp_nesting", forward_mode.enter_jvp_nesting, When.PIPELINED, _ONE_LEVEL, _FORWARD_MODE
    ),
    Guard(
        stateless,
        "_reparametrize_module",
        other_weights.reparametrize_module,
        When.PIPELINED,
        "other microbatches would find the weights of one call, if its task waits inside",
        "tests/state/test_exchanged_modules.py::test_weights_for_one_call_are_those_of_the_same_microbatch",
    ),
    # Pipelines: settings.
    *(
        Guard(owner, name, replacement, When.PIPELINED, _SETTINGS_READ, _PRECISION)
        for owner, name, replacement in (
            *((torch._C, name, replacement) for name, replacement in precision.SETTERS.items()),
            (torch.backends.ContextProp, "__set__", precision.set_property),
        )
    ),
    # Pipelines: modules and optimizers.
    Guard(
        nn.Module,
        "__setattr__",
        steps.set_attribute,
        When.PIPELINED,
        "copies of the module on other ranks would not see the change",
        _SILENTLY_WRONG,
    ),
    Guard(nn.Module, "__delattr__", steps.delete_attribute, When.PIPELINED, _OTHERS, _CHILDREN),
    Guard(nn.Module, "register_buffer", steps.register_buffer, When.PIPELINED, _OTHERS, _BUFFERS),
    *(
        Guard(owner, name, replacement, When.PIPELINED, _OTHERS, _CHILDREN)
        for (owner, name), replacement in steps.container_methods.items()
    ),
    *(
        Guard(
            nn.Module,
            name,
            replacement,
            When.PIPELINED,
            "a parameter made in a step would be on one rank only, and no optimizer would train it",
            _SILENTLY_WRONG,
        )
        for name, replacement in (
            ("add_module", steps.add_module),
            ("register_parameter", steps.register_parameter),
        )
    ),
    *(
        Guard(nn.Module, name, replacement, When.PIPELINED, _ELSEWHERE, _HOOK_ELSEWHERE)
        for name, replacement in (
            ("register_forward_hook", steps.register_forward_hook),
            ("register_forward_pre_hook", steps.register_forward_pre_hook),
            ("register_full_backward_hook", steps.register_full_backward_hook),
            ("register_full_backward_pre_hook", steps.register_full_backward_pre_hook),
        )
    ),
    Guard(
        Optimizer,
        "state_dict",
        steps.optimizer_state,
        When.PIPELINED,
        "the state of parameters on other ranks would be missing from what is saved",
        _WRAPPER,
    ),
    Guard(
        GradScaler,
        "_unscale_grads_",
        loss_scaling.unscale_grads_,
        When.DIVIDED,
        "ranks without an infinity would update their weights, and the others not",
        _SILENTLY_WRONG,
    ),
    Guard(
        GradScaler,
        "_check_scale_growth_tracker",
        loss_scaling.check_scale_growth_tracker,
        When.PIPELINED,
        "losses are scaled on one rank: the others would have no scale",
        _SILENTLY_WRONG,
    ),
    Guard(
        GradScaler,
        "update",
        loss_scaling.update,
        When.PIPELINED,
        "a scale that is set in the code of a step would be that of one rank",
        _SILENTLY_WRONG,
    ),
    # While models are built, traced and verified.
    Guard(
        nn.Module,
        "__init__",
        watch_creation,
        When.CREATED,
        "subclasses of every kind come there, before their own attributes are set",
        "tests/tensor_parallel/test_marking.py::test_modules_created_inside_are_marked_and_no_others",
        How.MADE,
    ),
    Guard(
        ANY_CLASS,
        "__init__",
        tp_register,
        When.REGISTERED,
        "a substitute is made with the arguments of the module that it takes the place of",
        "tests/tensor_parallel/test_registry.py::test_arguments_are_kept_by_modules_of_exactly_the_class",
        How.MADE,
    ),
    *(
        Guard(nn.Module, name, Audit.watching_attributes, When.TRACED, _READERS, _ATTRIBUTES, How.MADE)
        for name in ("__getattribute__", "__setattr__", "__delattr__", "register_buffer")
    ),
    *(
        Guard(owner, name, Audit.watching_attributes, When.TRACED, _READERS, _CHILDREN, How.MADE)
        for owner, name in ((nn.Module, "add_module"), *CONTAINER_METHODS)
    ),
    *(
        Guard(ANY_CLASS, name, SharedState.watching, When.TRACED, _READERS, _OBJECTS, How.MADE)
        for name in ("__getattribute__", "__setattr__", "__delattr__")
    ),
    Guard(
        torch.autograd.Function,
        "apply",
        Regions.watched,
        When.TRACED,
        "what a custom function calls in its forward it may call again in backward: such calls cannot leave the rank",
        "tests/partition/test_calls.py::test_a_module_whose_call_cannot_cross_ranks_is_joined_with_its_caller",
        How.MADE,
    ),
    *(
        Guard(
            torch_checkpoint,
            name,
            Recomputed.watched,
            When.TRACED,
            "what is changed inside a checkpoint is changed again in backward, which one rank has to do",
            "tests/partition/test_calls.py::test_what_is_changed_inside_a_checkpoint_joins_the_module_with_all_in_it",
            How.MADE,
        )
        for name in (frames.GENERATOR, "CheckpointFunction")
    ),
    Guard(
        nn.SyncBatchNorm,
        "forward",
        sync_batch_norm.on_one_rank,
        When.TRACED,
        "the rank that traces would wait for others, which do not",
        "tests/data_parallel/test_sync_batch_norm.py::test_a_trace_does_not_wait_for_other_ranks",
        How.MADE,
    ),
    *(
        Guard(
            torch_modules,
            name,
            Recorder.recording,
            When.VERIFIED,
            "values of modules are compared wherever they are called",
            "tests/verify/test_verify.py::test_a_planted_fault_is_found_and_its_module_named",
            How.MADE,
        )
        for name in ("register_module_forward_pre_hook", "register_module_forward_hook")
    ),
)


@contextmanager
def installed(*, num_ranks: int, pipelined: bool, divided: bool, scaled: bool = False) -> Iterator[None]:
    """Install the replacements that a rank needs, inside the block.

    Args:
        num_ranks: How many ranks the job has.
        pipelined: Whether modules lie on several ranks.
        divided: Whether parameters do, by pipeline or tensor parallelism, or by data-parallel ranks that shard
            them or their updates.
        scaled: Whether losses are scaled.
    """
    needed = {
        When.JOB: True,
        When.SEVERAL_RANKS: num_ranks > 1,
        When.PIPELINED: pipelined,
        When.DIVIDED: divided,
        When.FLOAT16: scaled,
    }
    with ExitStack() as stack:
        for guard in TABLE:
            if guard.how is not How.MADE and needed.get(guard.when, False):
                stack.enter_context(guard.in_place())
        yield
