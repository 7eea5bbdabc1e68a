"""Remote tensors: tensors of this rank's graph whose values are still on the rank that computed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright import _core
from shardwright.errors import FrameError
from shardwright.frames.compiler import register_with_compiler, uncompiled, untraced

#: Disables ``__torch_function__`` of subclasses in a block.
quiet: Any = torch._C.DisableTorchFunctionSubclass


class Source(Protocol):
    """The source of a remote tensor's values."""

    def take(self) -> torch.Tensor:
        """Wait for the values, and return them as a new tensor."""
        ...

    def arrived(self, before: Node | None, after: Node | None) -> None:
        """Handle the arrival of the values, which replaces the gradient node of the tensor."""
        ...


class Arrival(torch.autograd.Function):
    """Replace a remote tensor by its values, and pass the gradient to the remote tensor."""

    @staticmethod
    def forward(ctx: Any, _remote: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensor in the box."""
        ctx.set_materialize_grads(False)
        return box.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Return its gradient for the remote tensor."""
        return gradients[0], None


def _describing() -> frozenset[Any]:
    """Return the functions that need no values, because they only query a tensor's metadata."""
    attributes = "shape dtype device requires_grad grad_fn is_leaf ndim layout itemsize nbytes output_nr retains_grad"
    attributes += " is_cuda is_cpu is_meta is_nested is_sparse is_quantized is_mkldnn _version _base"
    methods = "size dim ndimension numel nelement element_size stride is_contiguous __len__ storage_offset get_device"
    methods += " is_floating_point is_complex is_inference is_conj is_neg is_signed _is_view"
    found = {getattr(torch.Tensor, name).__get__ for name in attributes.split()}
    found |= {getattr(torch.Tensor, name) for name in methods.split()}
    found |= {torch.is_floating_point, torch.is_complex, torch.is_conj, torch.is_neg, torch.is_inference, torch.numel}
    return frozenset(found)


class RemoteTensor(torch.Tensor):
    """A result of a module on another rank whose values are still on that rank.

    Its metadata is available without communication. Any operation that needs its values fetches them; from then on it
    is an ordinary tensor: the same object, of class :class:`torch.Tensor`. As an argument of a module on another rank,
    it is sent there directly by the rank that holds it.
    """

    source: Source
    #: The ordinary tensor, if native code used this tensor first or keeps a reference to it.
    here: torch.Tensor | None
    #: The end of the graph for the slot of the cut; None without a gradient.
    end: object
    #: Functions to call with the tensor once its values have arrived.
    actions: list[Callable[[torch.Tensor], None]]

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fetch the values of all remote tensors among the arguments, unless the function needs none."""
        if func in _DESCRIBING and args[0].here is None:
            with quiet():
                return func(*args, **(kwargs or {}))
        return _call_with_values(func, args, kwargs)

    @uncompiled
    def as_subclass(self, cls: Any) -> Any:
        """Fetch the values as a tensor of a subclass; torch's method does not call ``__torch_function__``."""
        return bring(self).as_subclass(cls)

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Fetch the values for an operation; called from native code only."""
        if func._schema.is_mutable:
            raise FrameError(
                f"native code wrote to a result of a module on another rank ({func}) before anything had read it: use "
                "it in Python first, for example by clone()"
            )
        args, kwargs = tree_map_only(RemoteTensor, _for_native_code, (args, kwargs or {}))
        return func(*args, **kwargs)


_DESCRIBING = _describing()
#: Arguments of these types contain no tensors.
_FLAT = frozenset(
    (torch.Tensor, torch.nn.Parameter, RemoteTensor, int, float, bool, str, type(None), torch.dtype, torch.device)
)


def made_by(node: Node) -> Node:
    """Return the node of the cut, given the node of a tensor that was remote; any other node itself."""
    if getattr(type(node), "_forward_cls", None) is not Arrival:
        return node
    made = node.next_functions[0][0]
    assert made is not None, "it takes the tensor that was remote"
    return made


def remote_tensor(
    shape: list[int], strides: list[int], dtype: torch.dtype, device: torch.device, source: Source
) -> Any:
    """Create a remote tensor from a description, without a graph.

    Its device is the one that its values will be on, index included: in a graph it has a node on that device.
    """
    register_with_compiler()
    with _core.GradMode(False):
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            RemoteTensor, shape, strides=strides, dtype=dtype, device=device
        )
    tensor.source, tensor.here, tensor.end, tensor.actions = source, None, None, []
    return tensor


def is_remote(value: object) -> bool:
    """Return whether a value is a remote tensor whose values have not arrived."""
    return type(value) is RemoteTensor and value.here is None


def has_graph(tensor: torch.Tensor) -> bool:
    """Return whether an operation made a tensor whose values are here, so that it keeps a graph alive."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # one of several views, whose base was written to
        return True


def needs_gradient(tensor: torch.Tensor) -> bool:
    """Return whether a tensor requires a gradient; for a remote one, without calling torch."""
    return tensor.end is not None if type(tensor) is RemoteTensor and tensor.here is None else tensor.requires_grad


def when_here(tensor: torch.Tensor, action: Callable[[torch.Tensor], None]) -> None:
    """Call a function with a tensor, now or as soon as its values have arrived."""
    if isinstance(tensor, RemoteTensor) and tensor.here is None:
        tensor.actions.append(action)
    else:
        action(tensor)


def bring(value: Any) -> Any:
    """Fetch the values of all remote tensors in a tree, and return the tree with ordinary tensors."""
    leaves = [leaf for leaf in tree_leaves(value) if type(leaf) is RemoteTensor]
    for leaf in leaves:
        _bring(leaf)
    if all(type(leaf) is torch.Tensor for leaf in leaves):
        return value
    return tree_map_only(RemoteTensor, lambda tensor: tensor.here, value)


def bring_all(values: list[Any]) -> list[Any]:
    """Fetch the values of remote tensors in a list, which rarely contains any."""
    for value in values:
        if type(value) is RemoteTensor:
            break
    else:
        return values
    for value in values:
        if type(value) is RemoteTensor:
            _bring(value)
    return [value.here if type(value) is RemoteTensor else value for value in values]


@uncompiled
def _call_with_values(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not kwargs and _FLAT.issuperset(map(type, args)):
        return func(*bring_all(list(args)))
    args, kwargs = bring((args, kwargs or {}))
    return func(*args, **kwargs)


@uncompiled
def _bring(tensor: RemoteTensor) -> None:
    if type(tensor) is not RemoteTensor or tensor.here is not None:
        return  # it occurs several times, or its values have been fetched
    source, actions = tensor.source, tensor.actions
    with quiet():
        values = _values_of(tensor)
        try:
            torch._C._swap_tensor_impl(tensor, values)
        except RuntimeError:
            pass  # native code refers to it: it remains a remote tensor that represents another one
        else:
            del tensor.source, tensor.here, tensor.end, tensor.actions
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]
            # The previous tensor may still exist where native code, such as a checkpoint, has saved it.
            values.__class__ = RemoteTensor
            values.source, values.here, values.end, values.actions = source, tensor, None, []  # type: ignore[attr-defined]
    if actions:
        with _OutsideModes():
            for action in actions:
                action(bring(tensor))


def _for_native_code(tensor: RemoteTensor) -> torch.Tensor:
    values = _values_of(tensor)
    actions, tensor.actions = tensor.actions, []
    with _OutsideModes():
        for action in actions:
            action(values)
    return values


def _values_of(tensor: RemoteTensor) -> torch.Tensor:
    """Return the values as an ordinary tensor at the same position in the graph."""
    if tensor.here is not None:
        return tensor.here
    with _OutsideModes():
        return _take_values(tensor)


class _OutsideModes:
    """Run a block outside of torch's modes, because the first use of a tensor may be in another mode."""

    __slots__ = ("_inference", "_transforms")

    def __enter__(self) -> None:
        """Exit inference mode, and all transforms of ``torch.func``."""
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        self._transforms: list[Any] = []
        if self._inference is not None:
            self._inference.__enter__()
        while torch._C._functorch.peek_interpreter_stack() is not None:
            self._transforms.append(torch._C._functorch.pop_dynamic_layer_stack())

    def __exit__(self, *raised: Any) -> None:
        """Enter them again."""
        while self._transforms:
            torch._C._functorch.push_dynamic_layer_stack(self._transforms.pop())
        if self._inference is not None:
            self._inference.__exit__(*raised)


def _take_values(tensor: RemoteTensor) -> torch.Tensor:
    values = tensor.source.take()
    with quiet():
        before = tensor.grad_fn
        if before is not None:
            with torch.enable_grad():
                values = Arrival.apply(tensor, [values])  # type: ignore[no-untyped-call]
    tensor.here = values
    tensor.source.arrived(before, values.grad_fn)
    return values
