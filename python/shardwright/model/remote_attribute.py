"""Placeholders for attributes that modules on other ranks set in their forward."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils._pytree import tree_leaves

from shardwright.errors import NotOwnedError


class RemoteAttribute:
    """Placeholder for a module attribute whose value is on another rank. Any use raises `NotOwnedError`.

    Without it, code that reads the attribute on this rank (an auxiliary loss that the step function reads, for example)
    would get the value from before the first step.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        """Create the placeholder of the attribute with this full name, which is set on these pp_ranks."""
        self.__dict__.update(_name=name, _ranks=ranks)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        ranks = ", ".join(map(str, self.__dict__["_ranks"]))
        raise NotOwnedError(
            f"attribute {self.__dict__['_name']!r} is set in a forward on pp_rank {ranks}, so this rank does not have "
            "its value. Let the module return the value, or place the modules that set and read it on one rank "
            "(smp.set_partition; the step function is on pp_rank 0)"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise `NotOwnedError`: the attribute cannot be an operand of a PyTorch function."""
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, RemoteAttribute):
                item._refuse()
        raise NotOwnedError("an attribute that is set on another rank was used with a tensor")

    def __getattr__(self, name: str) -> NoReturn:
        """Raise `NotOwnedError`, or AttributeError for special names, so that Python can look up protocols."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        """Return the name of the attribute and the ranks that set it."""
        return f"RemoteAttribute({self.__dict__['_name']!r} on pp_rank {self.__dict__['_ranks']})"

    __hash__ = object.__hash__
    __setattr__ = __delattr__ = __call__ = __bool__ = __len__ = __iter__ = __contains__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __int__ = __float__ = __index__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pos__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
