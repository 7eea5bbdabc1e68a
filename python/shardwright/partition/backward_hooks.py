"""What backward hooks of modules may change that a forward uses: no forward shows it, so their code is read.

A hook runs on the rank of its module. What it changes there, of that module, which it is given, of another one, of an
object or in a variable that its code encloses, a forward on another rank would not see. So it is found by what the code
can get hold of and the names that it mentions, and kept on one rank with who uses it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwright.contents import INTERNAL
from shardwright.partition.reach import Reach
from shardwright.partition.shared_state import AttributeKey, SharedState
from shardwright.partition.tree import ModelTree, join_path

if TYPE_CHECKING:
    from shardwright.partition.audit import Audit


def join_hooks(tree: ModelTree, audit: Audit, shared: SharedState) -> None:
    """Keep modules on one rank with those that use what their backward hooks may change, and microbatches in order.

    Args:
        tree: The model.
        audit: Knows who used what in a forward.
        shared: Objects and variables that modules use.
    """
    hooked = [(entry.path, entry.module, hooks) for entry in tree.modules if (hooks := _backward_hooks(entry.module))]
    if not hooked:
        return
    used = _used_by_functions(tree, audit)
    for place, users in shared.places():
        used.setdefault(place, set()).update(users)

    def changes(path: str, users: set[str], held: Iterable[AttributeKey], what: str) -> None:
        names = sorted(join_path(tree.path_of[module], name) for module, name in held)
        what = names[0] if names else what
        for user in sorted(users):
            audit.join(user, path, f"uses {what}, which a backward hook of the other may change")
        if names:
            audit.keep(names, {*users, path})
        else:  # which no backward is seen to change
            audit.one_at_a_time(f"a backward hook of {path or 'the model'} may change {what}")

    for path, module, hooks in hooked:
        reach = Reach(hooks, given=[module])
        for value, name in reach.attributes():
            holder = tree.path_of.get(id(value))
            held = shared.holders(id(value)) if holder is None else {(id(value), name)}
            users = audit.readers_of((id(value), name))
            if holder is not None and (name in vars(value) or name in value._buffers):
                users |= {holder}
            elif users:
                users |= {tree.path_of[module] for module, _ in held}
            if users - {path}:
                changes(path, users, held, f"attribute {name} of a {type(value).__name__}")
        for place, what in reach.places():
            held = shared.holders(place) if isinstance(place, int) else set()
            users = {user for attribute in held for user in audit.readers_of(attribute)}
            others = used.get(place, set())
            if users | others:
                changes(path, users | others, () if others else held, what)


def _backward_hooks(module: nn.Module) -> list[Any]:
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def _used_by_functions(tree: ModelTree, audit: Audit) -> dict[Hashable, set[str]]:
    """By place, who uses it in a function that a module holds or that is a hook of its forward."""
    used: dict[Hashable, set[str]] = {}
    for entry in tree.modules:
        module = entry.module
        found = [({entry.path}, [*module._forward_hooks.values(), *module._forward_pre_hooks.values()])]
        for name, value in vars(module).items():
            if name not in INTERNAL and isinstance(value, (types.FunctionType, functools.partial)):
                found.append((audit.readers_of((id(module), name)), [value]))
        for users, functions in found:
            if users and functions:
                reach = Reach(functions)
                for place in [*(place for place, _ in reach.places()), *reach.variables]:
                    used.setdefault(place, set()).update(users)
    return used
