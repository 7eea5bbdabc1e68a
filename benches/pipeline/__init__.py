"""Pipelines of stages that sleep, beside ``torch.distributed.pipelining``, and the ideals of their schedules."""
