"""Half precision: models in float16 or bfloat16, float32 master weights, loss scaling."""

from shardwright.half_precision.cast import cast_model, half_dtype, keep_float32, to_float32, to_half
from shardwright.half_precision.gradients import accumulate_in_float32, gradient_dtype
from shardwright.half_precision.loss_scaler import LossScaler, LossScaling
from shardwright.half_precision.masters import Masters, model_parameter

__all__ = [
    "LossScaler",
    "LossScaling",
    "Masters",
    "accumulate_in_float32",
    "cast_model",
    "gradient_dtype",
    "half_dtype",
    "keep_float32",
    "model_parameter",
    "to_float32",
    "to_half",
]
