"""The ``smp.step`` decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from shardwright.errors import ConfigError
from shardwright.job.runtime import current_runtime
from shardwright.step.run import run_step
from shardwright.step.split import Splitter

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")


class StepFunction(Generic[P, R]):
    """A step function: called on every rank, its body runs once per microbatch on pp_rank 0 (the paper, 4.3).

    Attributes:
        name: The qualified name by which ranks compare what they call.
        detach_outputs: Whether returned tensors lose their graph.
        microbatches: Into how many parts a batch is split; None for the configuration's.
        calls: How often it was called.
        warned_of_batches: Whether this rank has said that its batch is not that of the first rank of its pipeline.
        warned_of_labels: Whether this rank has said that microbatches have different numbers of labels.
    """

    def __init__(
        self,
        function: Callable[P, R],
        non_split_inputs: Collection[str] = (),
        input_split_axes: Mapping[str, int] | None = None,
        detach_outputs: bool = True,
        microbatches: int | None = None,
    ) -> None:
        """Wrap ``function``; see :func:`step`."""
        if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
            raise ConfigError(f"smp.step: microbatches of {function.__qualname__} is {microbatches!r}; at least 1")
        functools.update_wrapper(self, function)
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.function = function
        self.splitter = Splitter(function, non_split_inputs, input_split_axes or {})
        self.detach_outputs = detach_outputs
        self.microbatches = microbatches
        self.calls = 0
        self.warned_of_batches = False
        self.warned_of_labels = False

    def num_microbatches(self, runtime: Runtime) -> int:
        """Into how many parts a batch is split in this job."""
        return self.microbatches or runtime.place.cfg.microbatches

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run one step; returns the function's result with every tensor replaced by a :class:`StepOutput`.

        Raises:
            RemoteError: Another rank failed; carries its traceback.
            StepMismatchError: Ranks called different step functions.
            ConfigError: The batch cannot be split into microbatches.
        """
        self.calls += 1
        return run_step(current_runtime(), self, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind like a function, so that methods can be step functions."""
        return self if instance is None else functools.partial(self.__call__, instance)  # type: ignore[arg-type]


@overload
def step(function: Callable[P, R], /) -> StepFunction[P, R]: ...


@overload
def step(
    *,
    non_split_inputs: Collection[str] = ...,
    input_split_axes: Mapping[str, int] | None = ...,
    detach_outputs: bool = ...,
    microbatches: int | None = ...,
) -> Callable[[Callable[P, R]], StepFunction[P, R]]: ...


def step(
    function: Callable[P, R] | None = None,
    /,
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    microbatches: int | None = None,
) -> StepFunction[P, R] | Callable[[Callable[P, R]], StepFunction[P, R]]:
    """Decorate a function that runs one forward, and with ``model.backward`` one backward, of a model.

    Its arguments are split into ``microbatches`` parts and the body runs once for each, pipelined over the ranks.
    Clip gradients and step the optimizer outside, once per call. Usable bare or called.

    Args:
        function: The function, when used bare.
        non_split_inputs: Names of arguments that every microbatch gets whole.
        input_split_axes: Axes along which arguments are split, by name; 0 for the others.
        detach_outputs: Detach returned tensors, which frees their graph.
        microbatches: Into how many parts batches are split, in place of the configuration's number: 1 for an
            evaluation or a generation that takes any number of samples.

    Raises:
        ConfigError: ``microbatches`` is not a number from 1, or an option names what is not an argument.

    Returns:
        The step function. Where ``function`` returns a tensor, it returns a :class:`StepOutput`, also inside
        containers, on every rank of the pipeline.
    """

    def decorate(wrapped: Callable[P, R]) -> StepFunction[P, R]:
        return StepFunction(wrapped, non_split_inputs, input_split_axes, detach_outputs, microbatches)

    return decorate if function is None else decorate(function)
