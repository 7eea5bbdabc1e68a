"""Loss scaling: gradients of a float16 loss are computed as those of a multiple of it, and divided again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright import _core
from shardwright.errors import ConfigError
from shardwright.safe_repr import safe_repr

_NAME = "smp.DistributedOptimizer"
_DEFAULTS: dict[str, Any] = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}
_INTEGERS = ("scale_window", "delayed_shift")


class LossScaler:
    """The factor of the loss, static or dynamic. Ranks that report the same overflows have the same factor."""

    def __init__(self, static: float = 1.0, dynamic: _core.DynamicLossScale | None = None) -> None:
        """Create a static scaler, or a dynamic one."""
        self._static = static
        self._dynamic = dynamic

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale changes."""
        return self._dynamic is not None

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self._static if self._dynamic is None else self._dynamic.scale

    def update(self, overflow: bool) -> None:
        """Take note of a step, whose gradients may have overflowed."""
        if self._dynamic is not None:
            self._dynamic.update(overflow)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and, of a dynamic scaler, its settings and state as JSON."""
        return {"loss_scale": self.loss_scale, "dynamic": None if self._dynamic is None else self._dynamic.to_json()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the settings and state of a dynamic scaler; a static one keeps the scale that the script gave it.

        Raises:
            ConfigError: The state is not that of a scaler.
        """
        self._dynamic = self.read(state_dict)

    def read(self, state_dict: Mapping[str, Any]) -> _core.DynamicLossScale | None:
        """Return the dynamic scale that :meth:`load_state_dict` would set, without setting it.

        Raises:
            ConfigError: The state is not that of a scaler.
        """
        saved = state_dict.get("dynamic")
        if self._dynamic is None or saved is None:
            return self._dynamic
        try:
            return _core.DynamicLossScale.from_json(saved)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"the loss scaler of an optimizer's state dict cannot be read: {error}") from None


class LossScaling:
    """What ``model.backward`` multiplies losses by, in a job with ``fp16``.

    Attributes:
        scaler: The scaler of the newest ``smp.DistributedOptimizer``; None if there is none, or without ``fp16``.
        backwards: How often ``model.backward`` was called on this rank.
    """

    def __init__(self) -> None:
        """Scale nothing."""
        self.scaler: LossScaler | None = None
        self.backwards = 0

    @property
    def is_on(self) -> bool:
        """Whether gradients are those of a multiple of the loss."""
        return self.scaler is not None and (self.scaler.is_dynamic or self.scaler.loss_scale != 1)

    def scaled(self, weight: float | None) -> float | None:
        """Return the factor of a loss, given its weight in the step; None for 1."""
        self.backwards += 1
        scale = 1.0 if self.scaler is None else self.scaler.loss_scale
        return weight if scale == 1.0 else scale if weight is None else weight * scale


def scaler_of(
    static_loss_scale: object, dynamic_loss_scale: object, dynamic_loss_args: object, *, is_float16: bool
) -> LossScaler:
    """Return the scaler that the arguments of ``smp.DistributedOptimizer`` ask for.

    Args:
        static_loss_scale: The scale, or None for 1.
        dynamic_loss_scale: Whether the scale changes.
        dynamic_loss_args: The settings of a dynamic scale, or None.
        is_float16: Whether the job has ``fp16``; otherwise only the defaults are allowed.

    Raises:
        ConfigError: An argument is not allowed, or two do not go together.
    """
    if not isinstance(dynamic_loss_scale, bool):
        raise ConfigError(f"{_NAME}: dynamic_loss_scale is {dynamic_loss_scale!r}; allowed: True and False")
    given = {
        "static_loss_scale": static_loss_scale not in (None, 1.0),
        "dynamic_loss_scale": dynamic_loss_scale,
        "dynamic_loss_args": bool(dynamic_loss_args),
    }
    for name, differs in given.items():
        if differs and not is_float16:
            raise ConfigError(
                f"{_NAME} was given {name}; losses are scaled in a job with fp16 only, so without it only the defaults "
                "are allowed: set fp16=True in smp.init, or leave it out"
            )
    if given["static_loss_scale"] and dynamic_loss_scale:
        raise ConfigError(
            f"{_NAME} was given static_loss_scale and dynamic_loss_scale; give one of them, and the first scale of "
            'dynamic loss scaling as dynamic_loss_args={"init_scale": ...}'
        )
    if not dynamic_loss_scale:
        if dynamic_loss_args:
            raise ConfigError(f"{_NAME} was given dynamic_loss_args without dynamic_loss_scale=True")
        return LossScaler(1.0 if static_loss_scale is None else _static(static_loss_scale))
    return LossScaler(dynamic=_dynamic(dynamic_loss_args))


def _static(scale: object) -> float:
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not 0 < scale <= 2.0**127:  # type: ignore[operator]
        raise ConfigError(
            f"{_NAME}: static_loss_scale is {safe_repr(scale)}; allowed: None, or a number above 0, to 2**127"
        )
    return float(scale)  # type: ignore[arg-type]


def _dynamic(given: object) -> _core.DynamicLossScale:
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_NAME}: dynamic_loss_args is a {type(given).__name__}; allowed: a dict")
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise ConfigError(f"{_NAME}: dynamic_loss_args has no {name!r}; allowed: {', '.join(map(repr, _DEFAULTS))}")
        wanted: tuple[type, ...] = (int,) if name in _INTEGERS else (int, float)
        is_flag = name == "consecutive_hysteresis"
        if isinstance(value, bool) != is_flag or not (is_flag or isinstance(value, wanted)):
            kind = "True or False" if is_flag else "an integer" if name in _INTEGERS else "a number"
            raise ConfigError(f"{_NAME}: dynamic_loss_args has {name!r} {safe_repr(value)}; allowed: {kind}")
        if name in _INTEGERS and not 1 <= value < 2**64:
            raise ConfigError(
                f"{_NAME}: dynamic_loss_args has {name!r} {safe_repr(value)}; allowed: an integer of 1 or more, "
                "below 2**64"
            )
        if isinstance(value, int) and abs(value) >= 2**1023:
            raise ConfigError(f"{_NAME}: dynamic_loss_args has {name!r} {safe_repr(value)}; allowed: a finite number")
    try:
        return _core.DynamicLossScale(**{**_DEFAULTS, **given})
    except ConfigError as error:
        raise ConfigError(f"{_NAME}: dynamic_loss_args: {error}") from None
