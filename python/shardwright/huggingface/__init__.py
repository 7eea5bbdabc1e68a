"""The Trainer of Hugging Face's transformers with models that are divided over ranks.

``from shardwright.huggingface import Trainer, TrainingArguments`` in place of the same names of ``transformers``.
"""

from shardwright.huggingface.arguments import Seq2SeqTrainingArguments, TrainingArguments
from shardwright.huggingface.seq2seq import Seq2SeqTrainer
from shardwright.huggingface.trainer import Trainer

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]
