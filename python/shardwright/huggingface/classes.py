"""Trainers of any library, and their arguments, over ranks."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import transformers

from shardwright.errors import ConfigError
from shardwright.huggingface.arguments import OfRank, kind_of_rank
from shardwright.huggingface.seq2seq import Seq2SeqTrainer
from shardwright.huggingface.trainer import Trainer

Kind = TypeVar("Kind", bound=type)
#: What was made of each class, so that it is one class however often it is asked for.
_MADE: dict[type, type] = {}


def over_ranks(kind: Kind) -> Kind:
    """Return the class of trainers that trains over the ranks of a job as a class does in one process.

    It stands below the class, in the place of ``transformers.Trainer``: what the class overrides runs as it does alone,
    and calls of ``super()`` reach :class:`Trainer`. Of a class of arguments, the one that counts ranks with different
    samples is returned, which is needed only where arguments compute with the number of processes.

    Args:
        kind: A subclass of ``transformers.Trainer`` or ``transformers.TrainingArguments``, of any library.

    Raises:
        ConfigError: It is neither; or it leaves out what a divided model needs.
    """
    if not isinstance(kind, type) or not issubclass(kind, (transformers.Trainer, transformers.TrainingArguments)):
        raise ConfigError(
            f"over_ranks was given {kind!r}; allowed: a subclass of transformers.Trainer or of "
            "transformers.TrainingArguments"
        )
    made: Any = kind
    if not issubclass(kind, (Trainer, OfRank)):
        made = kind_of_rank(kind) if issubclass(kind, transformers.TrainingArguments) else _trainer_of(kind)
    return cast("Kind", made)


def _trainer_of(kind: type) -> type:
    if kind not in _MADE:
        base = Seq2SeqTrainer if issubclass(kind, transformers.Seq2SeqTrainer) else Trainer
        names: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        own = kind in (transformers.Trainer, transformers.Seq2SeqTrainer)
        _MADE[kind] = base if own else type(kind.__name__, (kind, base), names)
    return _MADE[kind]
