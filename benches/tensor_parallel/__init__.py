"""A GPT-2's training step divided by tensor parallelism, beside torch's DTensor and Megatron's split by hand."""
