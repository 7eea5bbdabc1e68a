"""A step as a transaction: its changes are kept separate until it has succeeded on every rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwright import _core
from shardwright.data_parallel.reducer import GradientListener
from shardwright.errors import ShardwrightError
from shardwright.execution import process
from shardwright.execution.turn import Turn
from shardwright.model.placement import Placement
from shardwright.model.sentinel import is_sentinel
from shardwright.partition.preserve import ModuleState
from shardwright.sharded_data_parallel.parameters import shard_of
from shardwright.step.ordered import OrderedGradients

#: Attributes of modules that belong to PyTorch. Gradients and buffers are restored separately.
_OF_TORCH = frozenset(vars(nn.Module()))


class StepTransaction:
    """Separates a step's gradients from earlier ones, and saves what must be restored after a failed step.

    Hooks of parameters are removed during the step and run once, on the gradient of the whole step, because they must
    not see microbatches.
    """

    def __init__(
        self, placements: Sequence[Placement], ordered_by: Turn | None = None, *, attributes: bool = False
    ) -> None:
        """Create a transaction that has changed nothing yet.

        Gradients of the tasks of the turn ``ordered_by`` are summed in a fixed order. With ``attributes``, the step may
        run again, and needs the original attributes of modules.
        """
        self._placements = placements
        self._ordered_by = ordered_by
        self._has_attributes = attributes
        self._averaged: list[nn.Parameter] = []
        self._over_tensor_group: list[nn.Parameter] = []
        #: Parameters whose gradients belong to the step.
        self.parameters: list[nn.Parameter] = []
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []
        #: By ``id``, parameters with earlier gradients that are reduced to owners, and whether this rank is one.
        self._sharded: dict[int, bool] = {}
        #: Gradients to be added to earlier ones.
        self._unsummed: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._hooks: list[tuple[nn.Parameter, dict[int, Any], dict[int, Any]]] = []
        self._attributes: list[ModuleState] = []
        self._ordered: OrderedGradients | None = None
        self._begun = False

    def begin(self) -> None:
        """Remove gradients and hooks from the models' local parameters, and copy buffers and the RNG state.

        Everything that may fail is done before anything is changed.
        """
        hooked = []
        for placement in self._placements:
            parameters, buffers = placement.owned_tensors()
            if placement.replicas.averages_microbatches:
                self._averaged += parameters
            self.parameters += parameters
            self._over_tensor_group += placement.replicas.over_rdp(parameters)
            for parameter in _core.parameters_in_use(parameters):
                gradient = parameter.grad
                if gradient is not None:
                    self._earlier.append((parameter, gradient))
                    is_owner = placement.replicas.sharded_earlier(parameter, gradient)
                    if is_owner is not None:
                        self._sharded[id(parameter)] = is_owner
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    hooked.append(parameter)
            placement.buffers.save(buffers)
            placement.deferred_loads.begin_step(placement.module)
        self._random = process.random_state()
        # Dividing a model changes its attributes permanently.
        divided = [one for one in self._placements if self._has_attributes and one.partitioned]
        self._attributes = [ModuleState(module, _OF_TORCH) for one in divided for module in one.module.modules()]
        self._begun = True
        for parameter, _ in self._earlier:
            parameter.grad = None
        for parameter in hooked:
            self._take_hooks(parameter)

    def begin_tasks(self) -> None:
        """Prepare for the tasks, once parameters are those with which modules compute."""
        if self._ordered_by is not None:
            trained = [
                parameter
                for placement in self._placements
                if placement.sharding is not None
                for parameter in placement.sharding.trained()
            ]
            self._ordered = OrderedGradients([*self.parameters, *trained], self._ordered_by)

    def end_tasks(self) -> None:
        """Complete the gradients that the tasks have made, and see what else they have changed."""
        if self._ordered is not None:
            self._ordered.finish()
            self._ordered = None
        for placement in self._placements:
            if placement.untraced is not None:
                placement.untraced.end_tasks()

    @property
    def is_plain(self) -> bool:
        """Whether the parameters' gradients are those of the step alone: no earlier gradients, hooks or fixed order."""
        return not self._hooks and not self._earlier and self._ordered_by is None

    def _take_hooks(self, parameter: nn.Parameter) -> None:
        held: list[dict[int, Any]] = []
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            users = {key: hook for key, hook in (hooks or {}).items() if not isinstance(hook, GradientListener)}
            held.append(users)
            if hooks is not None:
                for key in users:
                    del hooks[key]
        if held[0] or held[1]:
            self._hooks.append((parameter, held[0], held[1]))

    @property
    def is_hooked(self) -> bool:
        """Whether parameters have hooks."""
        return bool(self._hooks)

    def average(self, divisor: float, tensor_divisor: int) -> None:
        """Average the step's gradients over microbatches, which can be undone.

        Args:
            divisor: The divisor of the sum over microbatches: their number, or the sum of their weights.
            tensor_divisor: The number of tp ranks whose samples are summed in the gradients of distributed parameters.
        """
        if divisor != 1:
            _divide_gradients(self._averaged, divisor)
        if tensor_divisor > 1:
            _divide_gradients(self._over_tensor_group, tensor_divisor)

    def prepare(self, *, in_place: bool) -> None:
        """Run hooks once on the averaged gradients, and add the earlier ones.

        All of this can be undone. What cannot be undone is left to :meth:`finish`.

        Args:
            in_place: Whether the sums with earlier gradients are not needed before the step has succeeded.
        """
        late = self._restore_hooks() if self._hooks else []
        if in_place and not late:
            self._unsummed = self._earlier
        else:
            self._refuse_late([parameter for parameter, _ in late])
            self._unsummed = [one for one in self._earlier if self._sharded.get(id(one[0]), False)]
            for parameter, earlier in self._earlier:
                if id(parameter) in self._sharded:
                    continue
                if not is_sentinel(parameter):  # a partition made in this step may have released it
                    new = parameter.grad
                    parameter.grad = earlier.clone() if new is None else earlier + new
        for parameter, hooks in late:
            for hook in hooks.values():
                hook(parameter)

    def _refuse_late(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise if a hook would see gradients of earlier steps, of which other ranks do not have their part."""
        seen = {id(parameter) for parameter in parameters} & self._sharded.keys()
        for parameter, earlier in self._earlier:
            if id(parameter) in seen and bool((earlier.detach() != 0).any()):
                names = (
                    name for one in self._placements for name, its in one.module.named_parameters() if its is parameter
                )
                raise ShardwrightError(
                    f"parameter {next(names, '')!r} has a post-accumulate-grad hook, which sees gradients of earlier "
                    "steps in p.grad too, and with shard_optimizer_state only the owner of a parameter has them: "
                    "clear them before each step, by model.zero_grad() with either set_to_none, or use "
                    "parameter.register_hook, which sees the gradient of the step"
                )

    def finish(self) -> None:
        """Complete the step, after it has succeeded on every rank."""
        for placement in self._placements:
            placement.buffers.forget()
        for parameter, earlier in self._unsummed:
            if not is_sentinel(parameter):
                parameter.grad = _sum(earlier, parameter.grad)

    def _restore_hooks(self) -> list[tuple[nn.Parameter, dict[int, Any]]]:
        late = []
        for parameter, tensor_hooks, post_hooks in self._hooks:
            gradient = parameter.grad
            if gradient is not None:
                for hook in tensor_hooks.values():
                    replaced = hook(gradient)
                    gradient = gradient if replaced is None else replaced
                parameter.grad = gradient
                if post_hooks:
                    late.append((parameter, post_hooks))
            self._put_hooks_back(parameter, tensor_hooks, post_hooks)
        self._hooks.clear()
        return late

    @staticmethod
    def _put_hooks_back(parameter: nn.Parameter, tensor_hooks: dict[int, Any], post_hooks: dict[int, Any]) -> None:
        if is_sentinel(parameter):
            return  # released by a partition made in this step: its hooks run on the rank that owns it
        if tensor_hooks and parameter._backward_hooks is not None:
            parameter._backward_hooks.update(tensor_hooks)
        if post_hooks and parameter._post_accumulate_grad_hooks is not None:
            parameter._post_accumulate_grad_hooks.update(post_hooks)

    def rollback(self) -> None:
        """Restore gradients, hooks, buffers and the RNG state from before the step."""
        if not self._begun:
            return
        if self._ordered is not None:
            self._ordered.stop()
        for parameter, tensor_hooks, post_hooks in self._hooks:
            self._put_hooks_back(parameter, tensor_hooks, post_hooks)
        for attributes in self._attributes:
            attributes.restore()
        for parameter in self.parameters:
            parameter.grad = None
        for parameter, earlier in self._earlier:
            if not is_sentinel(parameter):
                parameter.grad = earlier
        for placement in self._placements:
            placement.buffers.put_back()
            placement.deferred_loads.undo_step(placement.module)
        self.restore_random_numbers()

    def restore_random_numbers(self) -> None:
        """Restore the RNG state from before the step."""
        process.restore_random_state(self._random)


def _divide_gradients(parameters: list[nn.Parameter], divisor: float) -> None:
    dense = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient.div_(divisor)
        else:
            dense.append(shard_of(gradient))
    if not dense:
        return
    if math.frexp(divisor)[0] == 0.5:
        # A power of two: multiplying by the reciprocal, exact in float32, equals division and takes half the time.
        single = dense[0].dtype == torch.float32
        torch._foreach_mul_(dense, _number(1 / divisor, torch.float32 if single else torch.float64))
    else:
        torch._foreach_div_(dense, _number(divisor, torch.float64))


@functools.lru_cache(maxsize=16)
def _number(value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a cached tensor, so that PyTorch does not wrap it again for every gradient.

    An operation with a number of the gradients' own dtype takes half the time.
    """
    return torch.tensor(value, dtype=dtype, device="cpu")


class Trained:
    """The parameters that a step may give gradients, those among them that are whole only while it runs too."""

    def __init__(self, transaction: StepTransaction, placements: Sequence[Placement]) -> None:
        """Take those of a transaction, and of sharded models."""
        self._transaction = transaction
        self._placements = placements

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that there are now."""
        yield from self._transaction.parameters
        for placement in self._placements:
            if placement.sharding is not None:
                yield from placement.sharding.trained()


def _sum(earlier: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
    if new is None:
        return earlier
    return earlier + new if new.is_sparse else earlier.add_(new)
