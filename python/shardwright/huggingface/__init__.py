"""The Trainer of Hugging Face's transformers with models that are divided over ranks.

``from shardwright.huggingface import Trainer, TrainingArguments`` in place of the same names of ``transformers``; and
``over_ranks(SFTTrainer)``, of any subclass of ``transformers.Trainer``.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shardwright.huggingface needs transformers and accelerate: pip install 'shardwright[hf]'"
    ) from error

from shardwright.huggingface.arguments import Seq2SeqTrainingArguments, TrainingArguments
from shardwright.huggingface.classes import over_ranks
from shardwright.huggingface.seq2seq import Seq2SeqTrainer
from shardwright.huggingface.trainer import Trainer

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments", "over_ranks"]
