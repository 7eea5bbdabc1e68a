"""State dicts of models of ``transformers``, with their own layers and with distributed ones."""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta"]
