"""A GPT-2's training step on two ranks, beside one process, DDP and the pipelines of torch."""
