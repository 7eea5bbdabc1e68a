"""A step is a transaction: what it changes is kept apart until it has succeeded on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.data_parallel import Listener

if TYPE_CHECKING:
    from shardwright.model.placement import Placement


class StepTransaction:
    """Keeps a step's gradients apart from earlier ones, and remembers what a failed step must put back.

    Parameters' own hooks are taken off during the step and run once, on the step's whole gradient: microbatches
    are an implementation detail that a hook must not see.
    """

    def __init__(self, placements: Iterable[Placement]) -> None:
        """Begin: take gradients and hooks off the models' local parameters, copy buffers and the RNG state."""
        self._averaged: list[nn.Parameter] = []
        self._parameters: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._hooks: list[tuple[nn.Parameter, dict[int, Any], dict[int, Any]]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        for placement in placements:
            parameters, buffers = placement.owned_tensors()
            if placement.replicas.averages_microbatches:
                self._averaged += parameters
            for parameter in parameters:
                gradient = parameter.grad
                self._parameters.append((parameter, gradient))
                if gradient is not None:
                    parameter.grad = None
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    self._take_hooks(parameter)
            for module, name in buffers:
                buffer = module._buffers[name]
                if buffer is not None:
                    self._buffers.append((module, name, buffer, buffer.clone()))
        self._rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @property
    def is_plain(self) -> bool:
        """Whether the step's gradients become the parameters' gradients as they are: none before, and no hooks."""
        return not self._hooks and all(earlier is None for _, earlier in self._parameters)

    def _take_hooks(self, parameter: nn.Parameter) -> None:
        held: list[dict[int, Any]] = []
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            users = {key: hook for key, hook in (hooks or {}).items() if not isinstance(hook, Listener)}
            held.append(users)
            if hooks is not None:
                for key in users:
                    del hooks[key]
        if held[0] or held[1]:
            self._hooks.append((parameter, held[0], held[1]))

    def commit(self, num_microbatches: int, *, final: bool) -> None:
        """Average the step's gradients over microbatches, run hooks once, and add what was there before.

        Args:
            num_microbatches: How many microbatches the gradients are the sum of.
            final: Whether nothing can fail from here on; else earlier gradients stay for :meth:`rollback`.
        """
        if num_microbatches > 1:
            gradients = [parameter.grad for parameter in self._averaged if parameter.grad is not None]
            dense = [gradient for gradient in gradients if not gradient.is_sparse]
            if dense:
                torch._foreach_div_(dense, num_microbatches)
            for gradient in gradients:
                if gradient.is_sparse:
                    gradient.div_(num_microbatches)
        late = self._restore_hooks()
        for parameter, earlier in self._parameters:
            if earlier is not None:
                parameter.grad = _sum(earlier, parameter.grad, final)
        for parameter, hooks in late:
            for hook in hooks.values():
                hook(parameter)

    def _restore_hooks(self) -> list[tuple[nn.Parameter, dict[int, Any]]]:
        late = []
        for parameter, tensor_hooks, post_hooks in self._hooks:
            gradient = parameter.grad
            if gradient is not None:
                for hook in tensor_hooks.values():
                    replaced = hook(gradient)
                    gradient = gradient if replaced is None else replaced
                parameter.grad = gradient
                late.append((parameter, post_hooks))
            self._put_hooks_back(parameter, tensor_hooks, post_hooks)
        self._hooks.clear()
        return late

    @staticmethod
    def _put_hooks_back(parameter: nn.Parameter, tensor_hooks: dict[int, Any], post_hooks: dict[int, Any]) -> None:
        if tensor_hooks and parameter._backward_hooks is not None:
            parameter._backward_hooks.update(tensor_hooks)
        if post_hooks and parameter._post_accumulate_grad_hooks is not None:
            parameter._post_accumulate_grad_hooks.update(post_hooks)

    def rollback(self) -> None:
        """Fail: leave gradients, hooks, buffers and the RNG as they were before the step."""
        for parameter, tensor_hooks, post_hooks in self._hooks:
            self._put_hooks_back(parameter, tensor_hooks, post_hooks)
        for parameter, earlier in self._parameters:
            parameter.grad = earlier
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                if buffer.numel() == copy.numel():  # else given up to its owner by a partition made in this step
                    buffer.copy_(copy)
                    module._buffers[name] = buffer
        torch.set_rng_state(self._rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state(self._cuda_rng)
        self.close()

    def close(self) -> None:
        """Forget what a rollback would need."""
        self._parameters.clear()
        self._averaged.clear()
        self._hooks.clear()
        self._buffers.clear()


def _sum(earlier: torch.Tensor, new: torch.Tensor | None, in_place: bool) -> torch.Tensor:
    if new is None:
        return earlier
    return earlier.add_(new) if in_place and not new.is_sparse else earlier + new
