"""``smp.step``: one forward and backward function, run once per microbatch."""

from shardwright.step.decorator import StepFunction, step
from shardwright.step.output import StepOutput

__all__ = ["StepFunction", "StepOutput", "step"]
