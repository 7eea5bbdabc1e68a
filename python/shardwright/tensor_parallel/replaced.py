"""The parameters of modules that tensor parallelism has replaced, which a model does not use any more."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import ConfigError


class ReplacedParameters:
    """The parameters that a rank's models had before their modules were replaced; it does not keep them alive."""

    def __init__(self) -> None:
        """Start without any."""
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, name: str, module: nn.Module) -> None:
        """Record that a module, of this name in its model, was replaced."""
        for own, parameter in module.named_parameters():
            self._names[parameter] = f"{name}.{own}" if name else own

    def refuse(self, optimizer: Optimizer, used: Iterable[Tensor]) -> None:
        """Check that an optimizer trains none of these parameters, apart from those that models use again.

        Raises:
            ConfigError: It does: it was created before the model was wrapped, and its updates would be lost.
        """
        if not self._names:
            return
        trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
        unused = {id(parameter): self._names[parameter] for parameter in trained if parameter in self._names}
        for parameter in used if unused else ():
            unused.pop(id(parameter), None)
        if unused:
            names = ", ".join(repr(name) for name in list(unused.values())[:3]) + (", ..." if len(unused) > 3 else "")
            raise ConfigError(
                f"{type(optimizer).__name__} was created before smp.DistributedModel, which has replaced modules for "
                f"tensor parallelism: {len(unused)} of its parameters ({names}) are "
                "not those of the model any more, and training them changes nothing. Create the optimizer from "
                "model.parameters() after smp.DistributedModel"
            )
