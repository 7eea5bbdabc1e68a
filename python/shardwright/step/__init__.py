"""``smp.step``: a forward and backward function that runs once per microbatch."""

from shardwright.step.decorator import StepFunction, step
from shardwright.step.output import StepOutput

__all__ = ["StepFunction", "StepOutput", "step"]
