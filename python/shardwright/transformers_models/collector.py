"""Outputs that ``transformers`` collects: hidden states, attentions, router logits.

Since version 5 it collects them by forward hooks and a context variable, which does not reach another rank. So a
request carries the collector's keys and how much each has collected; the executing rank collects into lists of its
own, padded to those lengths, because the hooks treat the first entry in a special way; the response brings what was
added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from shardwright import _core
from shardwright.errors import UnsupportedValueError
from shardwright.values.registry import registry

Collected = dict[str, list[Any]]
#: What a request carries of a collector: for each list how long it is, else the value.
Wanted = list[tuple[str, int | _core.Spec]]


def _variable() -> Any:
    module = sys.modules.get("transformers.utils.output_capturing")
    return None if module is None else module._active_collector


def collects(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of those by which ``transformers`` collects."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] == "transformers"


def _active() -> dict[str, Any] | None:
    variable = _variable()
    return None if variable is None else variable.get()


def collected_names() -> list[str]:
    """What the calling code collects, or is told to."""
    return list(_active() or ())


def outgoing() -> Wanted | None:
    """What a request carries: the length of each list and the other entries; None when nothing is collected.

    Raises:
        UnsupportedValueError: One of the other entries holds a tensor, or is of a type that cannot cross ranks.
    """
    active = _active()
    if not active:
        return None
    return [
        (key, len(value) if isinstance(value, list) else _without_tensors(key, value)) for key, value in active.items()
    ]


def _without_tensors(key: str, value: Any) -> _core.Spec:
    spec, tensors = _core.flatten(value, registry)
    if tensors:
        raise UnsupportedValueError(f"the entry {key!r} of what transformers collects holds a tensor", "tensor")
    return spec


_NOTHING: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)


def executing(wanted: Wanted | None) -> AbstractContextManager[Callable[[], Collected | None]]:
    """Collect around the execution of a request; the function given tells what was added."""
    return _NOTHING if wanted is None else _executing(wanted)


@contextmanager
def _executing(wanted: Wanted) -> Iterator[Callable[[], Collected]]:
    variable = _variable()
    if variable is None:
        import transformers.utils.output_capturing  # noqa: F401

        variable = _variable()
    lengths = {key: value for key, value in wanted if isinstance(value, int)}
    own: dict[str, Any] = {
        key: [None] * value if isinstance(value, int) else value.build([], registry) for key, value in wanted
    }
    token = variable.set(own)
    try:
        yield lambda: {key: own[key][length:] for key, length in lengths.items()}
    finally:
        variable.reset(token)


def incoming(additions: Collected) -> None:
    """Take over what the executing rank has collected."""
    active = _variable().get()
    for key, values in additions.items():
        active[key].extend(values)


def install(module: nn.Module) -> None:
    """Install the hooks that collect, which ``transformers`` would do on the rank of the outermost model only.

    A model that has collected before it was wrapped has some of them: those of the inner model that collected. What is
    installed from the outer one would collect there a second time, since ``transformers`` looks at the outermost only.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    models = sys.modules.get("transformers.modeling_utils")
    if capturing is None or models is None:
        return
    for part in module.modules():
        if isinstance(part, models.PreTrainedModel) and not _is_hooked(part):
            before = {inner: set(inner._forward_hooks) for inner in _hooked_inside(part, models.PreTrainedModel)}
            capturing.maybe_install_capturing_hooks(part)
            for inner, hooks in before.items():
                for added in inner._forward_hooks.keys() - hooks:
                    del inner._forward_hooks[added]


def _is_hooked(model: nn.Module) -> bool:
    return getattr(model, "_output_capturing_hooks_installed", False)


def _hooked_inside(model: nn.Module, base: type[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules inside a model whose nearest model, themselves or one above them, has its hooks already."""
    reached: set[nn.Module] = set()
    above = [(model, False)]
    while above:
        module, hooked = above.pop()
        if module in reached:
            continue
        reached.add(module)
        if isinstance(module, base):
            hooked = _is_hooked(module)
        if hooked:
            yield module
        above += [(child, hooked) for child in module.children()]
