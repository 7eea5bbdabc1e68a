"""What LAMB and NovoGrad share: arguments, parameters with gradients, and norms of whole parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.half_precision import model_parameter
from shardwright.job.ranks import MP_GROUP, TP_GROUP
from shardwright.job.runtime import Runtime, find_runtime
from shardwright.model.gather import gather_over
from shardwright.model.models import Models
from shardwright.model.sentinel import is_sentinel
from shardwright.optimizer import DistributedOptimizer
from shardwright.optimizer.clip import counted_here


class LayerwiseOptimizer(Optimizer):
    """The base of optimizers whose updates depend on norms of whole parameters.

    Of a parameter that is divided over tensor-parallel ranks the norm is that of the whole. All ranks must call
    ``step()``, also those without parameters.
    """

    steps_on_all_ranks = True

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        """Check the settings that all have.

        Raises:
            ConfigError: A setting is out of range.
        """
        name = type(self).__name__
        for setting in ("lr", "eps", "weight_decay"):
            if not defaults[setting] >= 0:
                raise ConfigError(f"{name}: {setting} is {defaults[setting]!r}; allowed: 0 and positive numbers")
        if len(defaults["betas"]) != 2 or not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ConfigError(f"{name}: betas is {defaults['betas']!r}; allowed: two numbers from 0 to below 1")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: Computes the loss again, and its gradients.

        Returns:
            The result of the closure, if there is one.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError

    def _trained(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]]:
        """Yield each group with its parameters that have a gradient, of one dtype and device, and the gradients."""
        for group in self.param_groups:
            kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            for parameters in kinds.values():
                yield group, parameters, [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _moment(self, name: str, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a moment of each parameter, zeros at first."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]

    def _next_steps(self, parameters: list[torch.Tensor]) -> list[int]:
        """Count a step of each parameter, and return their numbers, from 1."""
        for parameter in parameters:
            self.state[parameter]["step"] = int(self.state[parameter].get("step", 0)) + 1
        return [self.state[parameter]["step"] for parameter in parameters]

    def _norms(self, parameters: list[torch.Tensor], *lists: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return L2 norms of tensors that are divided over tensor-parallel ranks as their parameters are.

        Args:
            parameters: The parameters.
            *lists: Of each parameter a tensor.
        """
        norms = [_norms_here(tensors) for tensors in lists]
        divided = self._divided()
        if divided is None:
            return norms
        own = {
            divided[id(parameter)]: torch.stack([of_list[index].square().cpu() for of_list in norms])
            for index, parameter in enumerate(parameters)
            if id(parameter) in divided
        }
        sums: dict[int, torch.Tensor] = {}
        for theirs in gather_over(TP_GROUP, own, f"{type(self).__name__}.step"):
            for number, squares in theirs.items():
                sums[number] = sums[number] + squares if number in sums else squares
        for index, parameter in enumerate(parameters):
            if id(parameter) in divided:
                for of_list, square in zip(norms, sums[divided[id(parameter)]], strict=True):
                    of_list[index] = square.sqrt().to(of_list[index].device)
        return norms

    def _divided(self) -> dict[int, int] | None:
        """Return a number for each parameter that is sliced over tensor-parallel ranks; None without any rank else."""
        runtime = find_runtime()
        if runtime is None or len(runtime.place.tp_ranks) == 1 or not self._trains_model(runtime):
            return None
        sharded = [placement.sharded for placement in runtime[Models].placements if placement.is_sharded]
        sliced = {key for one in sharded for key, sharding in one.by_id().items() if sharding.dim is not None}
        all_of_them = (parameter for group in self.param_groups for parameter in group["params"])
        found = [id(parameter) for parameter in all_of_them if id(model_parameter(parameter)) in sliced]
        return {key: number for number, key in enumerate(found)}

    def _trains_model(self, runtime: Runtime) -> bool:
        """Return whether it trains a ``smp.DistributedModel``; the result is the same on all ranks of MP_GROUP."""
        models = runtime[Models].alive
        if isinstance(self, DistributedOptimizer) and any(self.trains(model) for model in models):
            return True
        own = {id(parameter) for model in models for parameter in model.parameters()}
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return any(is_sentinel(parameter) or id(model_parameter(parameter)) in own for parameter in parameters)

    def _global_norm(self) -> float:
        """Return the norm of all gradients of the model."""
        parameters = [parameter for _, of_kind, _ in self._trained() for parameter in of_kind]
        runtime = find_runtime()
        if runtime is None or not self._trains_model(runtime):
            return math.sqrt(_sum_of_squares(parameters))
        operation = f"{type(self).__name__}.step"
        here = {id(one) for one in counted_here(list(map(model_parameter, parameters)), 2.0, operation)}
        counted = [parameter for parameter in parameters if id(model_parameter(parameter)) in here]
        every: list[float] = gather_over(MP_GROUP, _sum_of_squares(counted), operation)
        return math.sqrt(math.fsum(every))


def _sum_of_squares(parameters: list[torch.Tensor]) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return math.fsum(float(norm) ** 2 for norm in _norms_here(gradients))


def _norms_here(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch._foreach_norm(tensors)) if tensors else []
