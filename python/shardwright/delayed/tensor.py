"""Tensors without values: operations on them are recorded, and reading them computes the values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardwright.delayed.draws import advanced
from shardwright.delayed.memory import scratch_like
from shardwright.delayed.operations import DelayedMemory, Operation, Value, default_generator, evaluate, overwrites
from shardwright.devices import with_index
from shardwright.dispatch_mode import write_positions
from shardwright.errors import ShardwrightError

_ATEN = torch.ops.aten
#: Noted wherever they are called; other operators that read values run at once outside of creation.
_COPIES = frozenset((_ATEN.clone.default, _ATEN._to_copy.default))
_SAME = frozenset((_ATEN.detach.default, _ATEN.alias.default))
#: Attributes that are not the user's.
_OWN = ("value", "meta", "_is_param")
_DATA_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: Python functions that would look for memory past the dispatcher.
_READING = frozenset(
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "__array__", "untyped_storage", "storage", "data_ptr", "share_memory_", "apply_")
)


def wrapper_like(cls: type[torch.Tensor], meta: torch.Tensor, device: torch.device) -> Any:
    """Make a tensor of a subclass, without memory, like one on the meta device but said to be on another device."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        meta.shape,
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        layout=meta.layout,
        device=with_index(device),
    )


class DelayedTensor(torch.Tensor):
    """A tensor without values, such as a delayed parameter.

    It has the shape, dtype and device of what it will be. What is written to it is noted. Whatever reads it gets the
    values that an ordinary tensor would have, made for this one operation: exact, but slow.

    Attributes:
        value: What it will be.
        meta: A tensor without memory that has its shape and is a view where it is one.
    """

    value: Value
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, value: Value, meta: torch.Tensor, device: torch.device) -> DelayedTensor:
        """Make one for a value."""
        made: DelayedTensor = wrapper_like(cls, meta, device)
        made.value = value
        made.meta = meta
        return made

    def __init__(self, value: Value, meta: torch.Tensor, device: torch.device) -> None:
        """All is done in ``__new__``."""
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle what never gets to the dispatcher."""
        kwargs = kwargs or {}
        if func == _DATA_SET and isinstance(args[0], DelayedTensor):
            return become(args[0], args[1].detach())
        if func in _READING:
            args, kwargs = tree_map(_real, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the operator, or run it with the values."""
        return dispatch(func, args, kwargs or {}, creating=False)

    @property
    def is_written(self) -> bool:
        """Whether other values were written to it, so that it has memory."""
        return self.value.memory.real is not None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it will be."""
        kind = "parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"delayed {kind} without values yet, shape={tuple(self.shape)}, dtype={self.dtype}"

    def __format__(self, format_spec: str) -> str:
        """Format the text of ``repr``."""
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy that is delayed as well, unless values were written to it."""
        if id(self) not in memo:
            copy = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copy = nn.Parameter(copy)
            copy.requires_grad_(self.requires_grad)
            copy.__dict__.update({name: of for name, of in self.__dict__.items() if name not in _OWN})
            memo[id(self)] = copy
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        """Pickle the values."""
        values = real(self)
        plain = nn.Parameter(values, self.requires_grad) if isinstance(self, nn.Parameter) else values
        return plain.__reduce_ex__(proto)  # type: ignore[no-untyped-call]


def real(tensor: DelayedTensor) -> torch.Tensor:
    """Compute the values of a delayed tensor, which stays delayed."""
    return evaluate([tensor.value])[0]


def noted(function: Callable[..., Any], inputs: Sequence[torch.Tensor], meta: torch.Tensor) -> DelayedTensor:
    """Make a delayed tensor of what a function returns for others, delayed or not.

    Args:
        function: Returns one tensor, with memory of its own. It is called without modes and functions of torch.
        inputs: The others.
        meta: What it returns, on the meta device.
    """
    leaves, structure = tree_flatten((tuple(inputs), {}))
    leaves = [leaf.value if isinstance(leaf, DelayedTensor) else leaf for leaf in leaves]
    operation = Operation(function, leaves, structure)
    value = Value(DelayedMemory(), operation)
    value.memory.first, operation.results = value, [value]
    return DelayedTensor(value, meta, torch.device("cpu"))


def become(delayed: DelayedTensor, other: torch.Tensor) -> None:
    """Replace the contents of a delayed tensor in place, by those of a tensor with values or of another delayed one.

    It stays the same object, and a parameter if it is one, with its gradient, hooks and attributes. Values are shared
    afterwards. If a view of it, which a graph of autograd may hold, is still alive, :class:`ShardwrightError` is
    raised.
    """
    if isinstance(other, DelayedTensor) and other.value is delayed.value:
        return
    is_parameter = isinstance(delayed, nn.Parameter)
    own: dict[str, Any] = {}
    if isinstance(other, DelayedTensor):
        made: torch.Tensor = DelayedTensor(other.value, other.meta, other.device)
        made.requires_grad_(delayed.requires_grad)
        if is_parameter:
            made._is_param = True
    elif isinstance(other, nn.Parameter) and type(other) is not nn.Parameter:  # of few bits, with scales
        made, own = other, dict(vars(other))
    elif is_parameter:
        made = nn.Parameter(other, delayed.requires_grad)
    else:
        made = other.detach().requires_grad_(delayed.requires_grad)
    made.grad = delayed.grad
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(delayed, hooks, None):
            setattr(made, hooks, getattr(delayed, hooks))
    refuse_views(delayed)
    exchange(delayed, made)
    delayed.__dict__.update(own)


def refuse_views(delayed: torch.Tensor) -> None:
    """Raise :class:`ShardwrightError` if a view of a tensor, which a graph of autograd may hold, is still alive."""
    if delayed._use_count() > 1:  # type: ignore[attr-defined]
        gc.collect()  # a graph that nobody needs any more, which hooks keep in a cycle
    if delayed._use_count() > 1:  # type: ignore[attr-defined]
        raise ShardwrightError(
            f"a delayed parameter of shape {tuple(delayed.shape)} cannot get its values: a view of it that autograd "
            "follows is still alive (make it in torch.no_grad(), or of parameter.detach())"
        )


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two tensors are; the first stays the same object, and keeps the attributes that users gave it."""
    # As torch.utils.swap_tensors does, which refuses tensors with weak references to them: torch's recurrent layers
    # have some, and they are to see the values too.
    own, others = ({name: of for name, of in each.__dict__.items() if name in _OWN} for each in (one, other))
    attributes = {name: of for name, of in one.__dict__.items() if name not in _OWN}
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = {**others, **attributes}, own
    torch._C._swap_tensor_impl(one, other)


def dispatch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, creating: bool) -> Any:
    """Record an operator on delayed tensors, or run it with their values.

    Views, copies and writes of what is no tensor with values are noted. While modules are created, so is everything
    that makes a floating-point tensor of nothing but delayed tensors and numbers.
    """
    if not isinstance(function, torch._ops.OpOverload):
        return function(*tree_map(_real, args), **tree_map(_real, kwargs))
    if function in _SAME and isinstance(args[0], DelayedTensor):
        return DelayedTensor(args[0].value, function(args[0].meta), args[0].device)
    if function is _ATEN.set_.source_Tensor and _are_alike(args[0], args[1]):
        args[0].value, args[0].meta = args[1].value, args[1].meta
        return args[0]
    if torch.Tag.inplace_view in function.tags and isinstance(args[0], DelayedTensor):
        return _reshaped(function, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    delayed = [leaf for leaf in leaves if isinstance(leaf, DelayedTensor)]
    others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DelayedTensor)]
    if others and not delayed:
        return function(*args, **kwargs)
    outputs = _outputs(function, args, kwargs)
    written = [output for output in outputs if isinstance(output, DelayedTensor)]
    only_delayed = len(written) == len(outputs) and all(other.dim() == 0 for other in others)
    if only_delayed and _is_noted(function, delayed, written, creating=creating):
        noted = _noted(function, args, dict(kwargs), delayed, written)
        if noted is not NotImplemented:
            return noted
    for tensor in written:
        _settle(tensor.value.memory)
    result = function(*tree_map(_real, args), **tree_map(_real, kwargs))
    return written[0] if len(written) == 1 and isinstance(result, torch.Tensor) else result


def _reshaped(function: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Run an operator that turns a tensor into a view of itself."""
    tensor: DelayedTensor = args[0]
    packet = getattr(_ATEN, function.overloadpacket.__name__.removesuffix("_"), None)
    view = None if packet is None else getattr(packet, function._overloadname, None)
    if view is None or not view.is_view:
        raise ShardwrightError(
            f"{function} was called for a delayed parameter of shape {tuple(tensor.shape)}, which cannot be noted: "
            "create the module outside smp.delay_param_initialization"
        )
    made = dispatch(view, args, kwargs, creating=False)
    with no_dispatch():
        function(*args, **kwargs)
    tensor.value, tensor.meta = made.value, made.meta
    return tensor


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        isinstance(one, DelayedTensor)
        and isinstance(other, DelayedTensor)
        and ((one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype))
    )


def _real(leaf: object) -> object:
    return real(leaf) if isinstance(leaf, DelayedTensor) else leaf


def _settle(memory: DelayedMemory) -> None:
    """Compute the values, to be written to directly."""
    if memory.real is None:
        assert memory.first is not None, "set when it was made"
        memory.real = evaluate([memory.first])[0]


def _outputs(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for index, name in write_positions(function):
        given = args[index] if index < len(args) else kwargs.get(name)
        found.extend(given if isinstance(given, (list, tuple)) else [given])
    return [tensor for tensor in found if tensor is not None]


def _is_noted(
    function: torch._ops.OpOverload, delayed: list[DelayedTensor], written: list[DelayedTensor], *, creating: bool
) -> bool:
    if function.is_view:
        return True
    if any(tensor.is_written for tensor in delayed):
        return False
    return creating or bool(written) or function in _COPIES


def _noted(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    delayed: list[DelayedTensor],
    written: list[DelayedTensor],
) -> Any:
    """Record an operator; return NotImplemented if its result depends on values or cannot be delayed."""
    named = {argument.name for argument in function._schema.arguments}
    device = kwargs.get("device") or (delayed[0].device if delayed else torch.device("cpu"))
    on_meta = {"device": torch.device("meta")} if "device" in kwargs or (not delayed and "device" in named) else {}
    unused = {name: None for name in ("generator", "pin_memory") if kwargs.get(name) is not None}
    meta_args, meta_kwargs = tree_map(_meta, (args, {**kwargs, **on_meta, **unused}))
    try:
        result = function(*meta_args, **meta_kwargs)
    except (RuntimeError, NotImplementedError):
        return NotImplemented  # run with values, it either works or fails in the same way
    results, structure_of_results = tree_flatten(result)
    if not all(isinstance(each, torch.Tensor) for each in results):
        return NotImplemented
    if not delayed and not all(_to_be_delayed(each) for each in results):
        return NotImplemented
    if not delayed and "dtype" in named:  # the default may be another one when it is run
        kwargs["dtype"] = results[0].dtype
    leaves, structure = tree_flatten((args, kwargs))
    state = _draw(function, args, kwargs, torch.device(device), written)
    operation = Operation(
        function,
        [_argument(leaf) for leaf in leaves],
        structure,
        state,
        torch.device(device),
        covers=bool(written) and overwrites(function) and _is_all(written[0].meta),
    )
    memories = {_storage(tensor.meta): tensor.value.memory for tensor in delayed}
    made = [_result(each, operation, memories, written, torch.device(device)) for each in results]
    operation.results = [each.value for each in made]
    for tensor in written:
        tensor.value.memory.writes.append(operation)
    return tree_unflatten(made, structure_of_results)


def _result(
    meta: torch.Tensor,
    operation: Operation,
    memories: dict[int, DelayedMemory],
    written: list[DelayedTensor],
    device: torch.device,
) -> DelayedTensor:
    for tensor in written:
        if meta is tensor.meta:
            return tensor
    memory = memories.get(_storage(meta))
    value = Value(DelayedMemory() if memory is None else memory, operation)
    if memory is None:
        value.memory.first = value
    return DelayedTensor(value, meta, device)


def _draw(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, written: list[DelayedTensor]
) -> torch.Tensor | None:
    """Advance the generator, by running the operator on temporary memory if it has to run for that."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    generator = kwargs.get("generator") or default_generator(device)
    state: torch.Tensor = generator.get_state()
    after = advanced(function, written[0].meta, state) if written and device.type == "cpu" else None
    if after is not None:
        generator.set_state(after)
        return state

    def scratch(leaf: object) -> object:
        if not isinstance(leaf, DelayedTensor):
            return leaf
        if any(leaf is tensor for tensor in written) and overwrites(function):
            return scratch_like(leaf.meta, device)
        return real(leaf).clone()

    function(*tree_map(scratch, args), **tree_map(scratch, kwargs))
    return state


def _meta(leaf: object) -> object:
    return leaf.meta if isinstance(leaf, DelayedTensor) else leaf


def _argument(leaf: object) -> object:
    if isinstance(leaf, DelayedTensor):
        return leaf.value
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _to_be_delayed(meta: torch.Tensor) -> bool:
    return meta.numel() > 0 and (meta.is_floating_point() or meta.is_complex())


def _is_all(meta: torch.Tensor) -> bool:
    return meta.numel() * meta.element_size() == meta.untyped_storage().nbytes()


def _storage(meta: torch.Tensor) -> int:
    key: int = meta.untyped_storage()._cdata
    return key
