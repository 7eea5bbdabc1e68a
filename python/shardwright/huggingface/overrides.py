"""What subclasses of a trainer override, and what has to be around that for a model that is divided.

A method of these is entered by way of the class of the trainer itself, whichever classes between it and ``Trainer``
override it, and whether or not they call those below them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
import transformers
from accelerate.data_loader import DataLoaderStateMixin
from torch.utils.data import DataLoader

from shardwright.accelerate.accelerator import distributed, foreign
from shardwright.accelerate.seat import started
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.huggingface.arguments import as_of_rank
from shardwright.huggingface.carried import carried
from shardwright.huggingface.collected import collect_over_ranks
from shardwright.huggingface.evaluation import over_replicas
from shardwright.huggingface.last_batch import of_own_rows, of_own_samples
from shardwright.huggingface.order import has_own_share, order_in, ordered
from shardwright.job.ranks import rank, size
from shardwright.job.runtime import current_runtime
from shardwright.logs import logger
from shardwright.model import DistributedModel
from shardwright.optimizer import DistributedOptimizer

_OWN = __package__ or ""


def enter(kind: type) -> None:
    """Let methods that a class of trainers overrides, or inherits from one that does, be entered as they have to be."""
    for one in kind.__mro__:
        if not one.__module__.startswith((f"{_OWN}.", "transformers.", "builtins")):
            collect_over_ranks(one.__module__)
    for name, around in _AROUND.items():
        if any(True for _ in overrides(kind, name)) and not getattr(vars(kind).get(name), "_is_entered", False):
            setattr(kind, name, _entered(name, getattr(kind, name), around))


def _entered(name: str, method: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def entered(self: Any, *args: Any, **keywords: Any) -> Any:
        inside: set[str] = self.__dict__.setdefault("_inside", set())
        if name in inside:  # by a class above this one
            return method(self, *args, **keywords)
        inside.add(name)
        try:
            return around(self, functools.partial(method, self), *args, **keywords)
        finally:
            inside.discard(name)

    entered._is_entered = True  # type: ignore[attr-defined]
    return entered


def overrides(kind: type, name: str) -> Iterator[Callable[..., Any]]:
    """Yield what classes that are not of this library or transformers have in place of a method, the last first."""
    for one in kind.__mro__:
        method = inspect.unwrap(vars(one)[name]) if name in vars(one) else None
        if callable(method) and not _is_known(method):
            yield method


def _is_known(method: Callable[..., Any]) -> bool:
    module = getattr(method, "__module__", None) or ""
    return module.startswith((f"{_OWN}.", "transformers."))


def is_overridden(kind: type, name: str) -> bool:
    """Return whether a class of neither this library nor transformers has its own method of this name."""
    return any(True for _ in overrides(kind, name))


def calls_below(kind: type, name: str) -> bool:
    """Return whether every override of a method names the method, as those do that call that of the class below."""
    return all(name in _names(method.__code__) for method in overrides(kind, name) if hasattr(method, "__code__"))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


#: What has to run for a divided model, with what to write instead of an override that leaves it out.
_NEEDED = {
    "training_step": (
        "a divided model runs in steps: override compute_loss, which runs once for each microbatch, and call "
        "super().training_step(model, inputs, num_items_in_batch) where training_step does something besides"
    ),
    "create_accelerator_and_postprocess": "call that of the class below, and change self.accelerator after it",
    "_save_optimizer_and_scheduler": "call that of the class below, which saves a checkpoint of all ranks",
    "_load_optimizer_and_scheduler": "call that of the class below, which loads a checkpoint of all ranks",
    "_clip_grad_norm": "call that of the class below, which clips by the norm over the whole model",
}


def refuse(kind: type) -> None:
    """Raise :class:`ConfigError` if a class leaves out what a divided model needs."""
    for name, instead in _NEEDED.items():
        if not calls_below(kind, name):
            raise ConfigError(f"{kind.__name__}.{name} does not call super().{name}, and {instead}")


def _init(self: Any, call: Callable[..., Any], *args: Any, **keywords: Any) -> None:
    """Give a class what it reads of its arguments as a rank of the job, wherever they stand among the others."""
    started(f"shardwright.huggingface.{type(self).__name__}")
    refuse(type(self))
    call(*map(_of_rank, args), **{name: _of_rank(value) for name, value in keywords.items()})


def _of_rank(value: Any) -> Any:
    if isinstance(value, DistributedModel):
        raise ConfigError("Trainer was given a smp.DistributedModel: give it the model itself, of which it makes one")
    return as_of_rank(value) if isinstance(value, transformers.TrainingArguments) else value


def _training_step(self: Any, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Say what to write instead where an own ``training_step`` runs the model outside of steps."""
    self._in_own_step = True
    try:
        return call(*args, **keywords)
    except ShardwrightError as error:
        if not self._in_own_step:
            raise
        raise ConfigError(
            f"{type(self).__name__}.training_step runs the model, or its backward, itself, and "
            f"{_NEEDED['training_step']}"
        ) from error
    finally:
        self._in_own_step = False


def _prediction_step(self: Any, call: Callable[..., Any], model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
    """Run a ``prediction_step`` that runs the model itself in a step, on the whole batch in one microbatch."""
    if calls_below(type(self), "prediction_step"):
        return call(model, inputs, *args, **keywords)

    def evaluated(own: Any, rows: int) -> tuple[Any, ...]:
        with carried(self):
            loss, *outputs = self.in_one_microbatch(call, own, *args, **keywords)
        if loss is not None and self.accelerator.num_processes > 1:
            loss = over_replicas(loss, self._weighing.in_evaluation(own, rows), is_sum=False)
        return (loss, *outputs)

    return of_own_rows(self.accelerator, evaluated, inputs)


def _prepare_inputs(self: Any, call: Callable[..., Any], inputs: Any) -> Any:
    """Let code that makes a batch of another one run the model, which GRPO generates with, in a step."""
    if current_runtime().step.running:
        return call(inputs)
    with carried(self), torch.no_grad():
        return self.in_one_microbatch(lambda model, given: call(given), inputs)


def _create_optimizer(self: Any, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Let an optimizer be created of the divided model, and update it."""
    _ = self.distributed_model
    made = call(*args, **keywords)
    self.optimizer = made if self.optimizer is None else self.optimizer
    distribute_optimizer(self)
    return self.optimizer


def distribute_optimizer(trainer: Any) -> None:
    """Make a ``smp.DistributedOptimizer`` of the optimizer of a trainer, unless it is one.

    Raises:
        ConfigError: It has parameters that the divided model does not have, whose gradients ranks would not share.
    """
    if isinstance(trainer.distributed_optimizer, DistributedOptimizer):
        return
    others = [tuple(one.shape) for one in foreign(trainer.optimizer, [trainer.distributed_model])]
    if others and size() > 1:
        raise ConfigError(
            f"the optimizer of {type(trainer).__name__} has {len(others)} parameters that its model does not have, the "
            f"first of shape {others[0]}: ranks would not share their gradients. Make their module a part of the model "
            "before the trainer is made: model.head = head"
        )
    trainer.optimizer = distributed(trainer.optimizer)


def _loader(name: str) -> Callable[..., Any]:
    """Let a loader that is not prepared for several processes give each replica its samples."""

    def around(self: Any, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        loader = call(*args, **keywords)
        if isinstance(loader, DataLoaderStateMixin):
            return loader
        where, replicas = f"{type(self).__name__}.{name}", self.accelerator.num_processes
        if not isinstance(loader, DataLoader):
            if replicas > 1 and rank() == 0:
                logger.warning(
                    "%s returned a %s, which is no DataLoader: each of the %d ranks with different samples trains on "
                    "what it gives there. Let it give the share of self.args.process_index of self.args.world_size",
                    where,
                    type(loader).__name__,
                    replicas,
                )
            return loader
        if has_own_share(loader, where, replicas, self.accelerator.process_index):
            prepared = self.accelerator.prepare_data_loader(loader)
            prepared.batch_sampler.num_processes, prepared.batch_sampler.process_index = 1, 0
            return prepared
        if name != "get_train_dataloader":
            return of_evaluation(self, self.accelerator.prepare_data_loader(loader))
        self._order_of_samples = order_in(loader)
        return self.accelerator.prepare_data_loader(loader)

    return around


def of_evaluation(trainer: Any, loader: Any) -> Any:
    """Let a prepared loader give each replica its own samples only, also in the last batch, in place.

    What makes batches of those that it is given, as GRPO does, may count on their size, and gets them filled up.
    """
    return loader if is_overridden(type(trainer), "_prepare_inputs") else of_own_samples(loader)


def _sampler(self: Any, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    self._order_of_samples = ordered(call(*args, **keywords))
    return self._order_of_samples


_AROUND: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "training_step": _training_step,
    "prediction_step": _prediction_step,
    "_prepare_inputs": _prepare_inputs,
    "create_optimizer": _create_optimizer,
    "_get_train_sampler": _sampler,
    "get_train_dataloader": _loader("get_train_dataloader"),
    "get_eval_dataloader": _loader("get_eval_dataloader"),
    "get_test_dataloader": _loader("get_test_dataloader"),
}
