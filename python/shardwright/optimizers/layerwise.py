"""What LAMB and NovoGrad share: arguments, parameters with gradients, and norms of whole parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

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
from shardwright.optimizer.reach.divided import divided_parameters


class _Made(NamedTuple):
    """How this rank's part of a parameter is made.

    Attributes:
        number: Its number among those that are sliced over tensor-parallel ranks; None if it is not.
        weights: Of how many weights it was made; 0 for one.
        runs: Which of its rows are of which of these: the first, the one after the last, and the weight's number.
    """

    number: int | None
    weights: int
    runs: tuple[tuple[int, int, int], ...]

    def norms(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the norm over the rows of each weight, as a 1-D tensor."""
        squares: list[list[torch.Tensor]] = [[] for _ in range(self.weights)]
        of_runs = _norms_here([tensor[first:last] for first, last, _ in self.runs])
        for norm, (_, _, weight) in zip(of_runs, self.runs, strict=True):
            squares[weight].append(norm.square())
        return torch.stack([sum(each, tensor.new_zeros(())) for each in squares]).sqrt()

    def spread(self, values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return the value of each weight for its rows of a parameter, as a tensor of as many dims."""
        rows = values.new_ones(parameter.shape[0])
        for first, last, weight in self.runs:
            rows[first:last] = values[weight]
        return rows.view(-1, *[1] * (parameter.dim() - 1))


class LayerwiseOptimizer(Optimizer):
    """The base of optimizers whose updates depend on norms of whole parameters.

    Of a parameter that is divided over tensor-parallel ranks the norm is that of the whole. One that was made of
    several weights, such as query, key and value of a layer of ``transformers``, has the norm of each of these for its
    rows. All ranks must call ``step()``, also those without parameters.
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

        Returns:
            Of each list the norms, as 0-D tensors. Of a parameter that was made of several weights it is a 1-D tensor
            with that of each, which `_spread` spreads over the rows.
        """
        norms = [_norms_here(tensors) for tensors in lists]
        divided = self._divided()
        if divided is None:
            return norms
        for index, parameter in enumerate(parameters):
            if (made := divided.get(id(parameter))) is not None and made.runs:
                for of_list, tensors in zip(norms, lists, strict=True):
                    of_list[index] = made.norms(tensors[index])
        own = {
            made.number: torch.stack([of_list[index].square().cpu() for of_list in norms])
            for index, parameter in enumerate(parameters)
            if (made := divided.get(id(parameter))) is not None and made.number is not None
        }
        sums: dict[int, torch.Tensor] = {}
        for theirs in gather_over(TP_GROUP, own, f"{type(self).__name__}.step"):
            for number, squares in theirs.items():
                sums[number] = sums[number] + squares if number in sums else squares
        for index, parameter in enumerate(parameters):
            if (made := divided.get(id(parameter))) is not None and made.number is not None:
                for of_list, square in zip(norms, sums[made.number], strict=True):
                    of_list[index] = square.sqrt().to(of_list[index].device)
        return norms

    def _spread(self, parameters: list[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return values for the elements of parameters, given one for each weight that a parameter was made of."""
        if all(value.dim() == 0 for value in values):
            return values
        divided = self._divided() or {}
        return [
            value if value.dim() == 0 else divided[id(parameter)].spread(value, parameter)
            for parameter, value in zip(parameters, values, strict=True)
        ]

    def _divided(self) -> dict[int, _Made] | None:
        """Return how parameters are made, by ``id``, where it is not of one whole weight; None without other ranks."""
        runtime = find_runtime()
        if runtime is None or len(runtime.place.tp_ranks) == 1 or not self._trains_model(runtime):
            return None
        known, found = divided_parameters(runtime, self.param_groups), dict[int, _Made]()
        place = runtime.place.tp_ranks.index(runtime.place.rank), len(runtime.place.tp_ranks)
        parameters = {id(one): one for group in self.param_groups for one in group["params"]}
        for number, (key, how) in enumerate((key, known[key]) for key in parameters if key in known):
            sharding, runs = how.sharding, list[tuple[int, int, int]]()
            size = sum(rows for origin in how.origins for *_, rows in origin.rows)
            slices = sharding.slices(size, *place) if sharding.dim == 0 else [(0, 0, size)]
            for origin, (first, _, rows) in ((n, run) for n, one in enumerate(how.origins) for run in one.rows):
                for begin, of_whole, length in slices:
                    start, stop = max(first, of_whole), min(first + rows, of_whole + length)
                    if start < stop:
                        runs.append((begin + start - of_whole, begin + stop - of_whole, origin))
            found[key] = _Made(number if sharding.dim is not None else None, len(how.origins), tuple(runs))
        return found

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
