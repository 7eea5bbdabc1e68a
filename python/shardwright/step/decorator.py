"""The ``smp.step`` decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

from shardwright.errors import ConfigError
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.step.run import run_step
from shardwright.step.split import Splitter

P = ParamSpec("P")
R = TypeVar("R")


class StepFunction(Generic[P, R]):
    """A step function. It is called on every rank, and its body runs once per microbatch on pp_rank 0 (the paper, 4.3).

    Attributes:
        name: The qualified name, by which ranks check that they call the same function.
        detach_outputs: Whether returned tensors are detached from the graph.
        microbatches: The number of parts of a batch; None for the number in the configuration.
        calls: The number of calls.
        warned_of_batches: Whether this rank has warned that its batch is another than the first rank's of its pipeline.
        warned_of_labels: Whether this rank has warned that microbatches have different numbers of labels.
    """

    def __init__(
        self,
        function: Callable[P, R],
        non_split_inputs: Collection[str] = (),
        input_split_axes: Mapping[str, int] | None = None,
        detach_outputs: bool = True,
        microbatches: int | None = None,
    ) -> None:
        """Wrap ``function``. See :func:`step`."""
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
        """Return the number of parts that a batch is split into in this job."""
        return self.microbatches or runtime.place.cfg.microbatches

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run one step, and return the function's result with every tensor replaced by a :class:`StepOutput`.

        Raises:
            RemoteError: Another rank failed. The error carries its traceback.
            StepMismatchError: Ranks called different step functions.
            ConfigError: The batch cannot be split into microbatches.
        """
        self.calls += 1
        return run_step(current_runtime(), self, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind to an instance like a function, so that methods can be step functions."""
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
    """Decorate a function that runs one forward and, with ``model.backward``, one backward of a model.

    Its arguments are split into ``microbatches`` parts, and the body runs once for each part, pipelined over the ranks.
    Clip gradients and run the optimizer's step outside, once per call. The decorator can be used with or without
    arguments.

    Args:
        function: The function, if the decorator is used without arguments.
        non_split_inputs: Names of arguments that every microbatch receives whole.
        input_split_axes: Axes along which arguments are split, by name. The default is axis 0.
        detach_outputs: Detach returned tensors, which frees their graph.
        microbatches: The number of parts, instead of the number in the configuration. Use 1 for an evaluation or a
            generation with any number of samples.

    Raises:
        ConfigError: ``microbatches`` is not an integer of at least 1, or an option names a parameter that does not
            exist.

    Returns:
        The step function. For each tensor that ``function`` returns, also inside containers, it returns a
        :class:`StepOutput` on every rank of the pipeline.
    """

    def decorate(wrapped: Callable[P, R]) -> StepFunction[P, R]:
        return StepFunction(wrapped, non_split_inputs, input_split_axes, detach_outputs, microbatches)

    return decorate if function is None else decorate(function)
