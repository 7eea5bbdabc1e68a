//! Dynamic loss scaling: when the factor of a float16 loss grows, and when it shrinks.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The largest scale: a power of two that float32 holds, in which scaled losses are computed.
const MAX_SCALE: f64 = 170_141_183_460_469_231_731_687_303_715_884_105_728.0; // 2^127

/// A setting that is not allowed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{name} is {value}; allowed: {allowed}")]
pub struct LossScaleError {
    /// The setting.
    name: &'static str,
    /// Its value.
    value: String,
    /// What would be allowed.
    allowed: &'static str,
}

/// The settings of dynamic loss scaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaleSettings {
    /// The scale before the first step.
    pub init_scale: f64,
    /// What the scale is multiplied or divided by.
    pub scale_factor: f64,
    /// How many steps in a row without overflow let the scale grow.
    pub scale_window: u64,
    /// The smallest scale.
    pub min_scale: f64,
    /// The overflow, counted from 1, with which the scale begins to shrink.
    pub delayed_shift: u64,
    /// Whether any step without overflow lets the count of `delayed_shift` begin anew; else only
    /// a growth of the scale does.
    pub consecutive_hysteresis: bool,
}

/// A loss scale that shrinks with overflows and grows without them.
///
/// Ranks that report the same overflows have the same scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicLossScale {
    settings: LossScaleSettings,
    scale: f64,
    /// Steps without overflow since the last one with it.
    good_steps: u64,
    /// Overflows that are left before the scale shrinks, this one included.
    overflows_left: u64,
}

impl DynamicLossScale {
    /// A scale that has seen no step.
    ///
    /// # Errors
    ///
    /// A setting is out of its range.
    pub fn new(settings: LossScaleSettings) -> Result<Self, LossScaleError> {
        settings.check()?;
        Ok(Self {
            settings,
            scale: settings.init_scale,
            good_steps: 0,
            overflows_left: settings.delayed_shift,
        })
    }

    /// The scale that was written by `serde`.
    ///
    /// # Errors
    ///
    /// A setting or the state is out of its range.
    pub fn checked(self) -> Result<Self, LossScaleError> {
        self.settings.check()?;
        let least = self.settings.min_scale;
        if !(least..=MAX_SCALE).contains(&self.scale) {
            return Err(LossScaleError {
                name: "scale",
                value: self.scale.to_string(),
                allowed: "a number from min_scale to 2**127",
            });
        }
        if !(1..=self.settings.delayed_shift).contains(&self.overflows_left) {
            return Err(LossScaleError {
                name: "overflows_left",
                value: self.overflows_left.to_string(),
                allowed: "an integer from 1 to delayed_shift",
            });
        }
        Ok(self)
    }

    /// What the next loss is multiplied by.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Takes note of a step, whose gradients may have overflowed.
    pub fn update(&mut self, overflow: bool) {
        let settings = self.settings;
        if overflow {
            self.good_steps = 0;
            if self.overflows_left > 1 {
                self.overflows_left -= 1;
            } else {
                self.scale = (self.scale / settings.scale_factor).max(settings.min_scale);
            }
            return;
        }
        self.good_steps += 1;
        if settings.consecutive_hysteresis {
            self.overflows_left = settings.delayed_shift;
        }
        if self.good_steps.is_multiple_of(settings.scale_window) {
            self.overflows_left = settings.delayed_shift;
            self.scale = (self.scale * settings.scale_factor).min(MAX_SCALE);
        }
    }
}

impl LossScaleSettings {
    fn check(&self) -> Result<(), LossScaleError> {
        let refuse = |name, value: String, allowed| {
            Err(LossScaleError {
                name,
                value,
                allowed,
            })
        };
        if !(self.min_scale > 0.0 && self.min_scale <= MAX_SCALE) {
            let value = self.min_scale.to_string();
            return refuse("min_scale", value, "a number above 0, to 2**127");
        }
        if !(self.min_scale..=MAX_SCALE).contains(&self.init_scale) {
            let value = self.init_scale.to_string();
            return refuse("init_scale", value, "a number from min_scale to 2**127");
        }
        if !(self.scale_factor > 1.0 && self.scale_factor <= MAX_SCALE) {
            let value = self.scale_factor.to_string();
            return refuse("scale_factor", value, "a number above 1, to 2**127");
        }
        for (name, value) in [
            ("scale_window", self.scale_window),
            ("delayed_shift", self.delayed_shift),
        ] {
            if value == 0 {
                return refuse(name, value.to_string(), "an integer of 1 or more");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{DynamicLossScale, LossScaleSettings, MAX_SCALE};

    fn settings() -> LossScaleSettings {
        LossScaleSettings {
            init_scale: 16.0,
            scale_factor: 2.0,
            scale_window: 3,
            min_scale: 1.0,
            delayed_shift: 1,
            consecutive_hysteresis: false,
        }
    }

    fn scales(settings: LossScaleSettings, steps: &str) -> Vec<f64> {
        let mut scale = DynamicLossScale::new(settings).expect("good settings");
        let after = |step| {
            scale.update(step == 'x');
            scale.scale()
        };
        steps.chars().map(after).collect()
    }

    #[test]
    fn an_overflow_halves_the_scale_and_a_window_without_doubles_it() {
        let expected = [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 16.0];
        assert_eq!(scales(settings(), "x......x"), expected);
    }

    #[test]
    fn the_scale_stays_at_its_least_and_at_its_most() {
        assert_eq!(scales(settings(), "xxxxxx")[3..], [1.0, 1.0, 1.0]);
        let high = LossScaleSettings {
            init_scale: MAX_SCALE,
            scale_window: 1,
            ..settings()
        };
        assert_eq!(scales(high, "."), [MAX_SCALE]);
    }

    #[test]
    fn a_delayed_shift_forgives_overflows_until_the_scale_grows() {
        let delayed = LossScaleSettings {
            delayed_shift: 2,
            ..settings()
        };
        assert_eq!(scales(delayed, "x.x.x"), [16.0, 16.0, 8.0, 8.0, 4.0]);
        assert_eq!(
            scales(delayed, "x...xx"),
            [16.0, 16.0, 16.0, 32.0, 32.0, 16.0]
        );
    }

    #[test]
    fn with_consecutive_hysteresis_any_good_step_lets_it_forgive_again() {
        let consecutive = LossScaleSettings {
            delayed_shift: 2,
            consecutive_hysteresis: true,
            ..settings()
        };
        assert_eq!(
            scales(consecutive, "x.x.xx"),
            [16.0, 16.0, 16.0, 16.0, 16.0, 8.0]
        );
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let good = settings();
        for (name, bad) in [
            (
                "init_scale",
                LossScaleSettings {
                    init_scale: f64::INFINITY,
                    ..good
                },
            ),
            (
                "init_scale",
                LossScaleSettings {
                    init_scale: 0.5,
                    ..good
                },
            ),
            (
                "scale_factor",
                LossScaleSettings {
                    scale_factor: 1.0,
                    ..good
                },
            ),
            (
                "scale_factor",
                LossScaleSettings {
                    scale_factor: f64::NAN,
                    ..good
                },
            ),
            (
                "scale_window",
                LossScaleSettings {
                    scale_window: 0,
                    ..good
                },
            ),
            (
                "min_scale",
                LossScaleSettings {
                    min_scale: 0.0,
                    ..good
                },
            ),
            (
                "delayed_shift",
                LossScaleSettings {
                    delayed_shift: 0,
                    ..good
                },
            ),
        ] {
            let error = DynamicLossScale::new(bad).expect_err(name);
            assert!(error.to_string().starts_with(name), "{error}");
        }
    }

    fn any_settings() -> impl Strategy<Value = LossScaleSettings> {
        let numbers = (
            1.0e-3..1.0e9,
            1.001..16.0,
            1u64..6,
            0.0..1.0,
            1u64..4,
            any::<bool>(),
        );
        numbers.prop_map(
            |(init_scale, scale_factor, scale_window, share, delayed_shift, consecutive)| {
                LossScaleSettings {
                    init_scale,
                    scale_factor,
                    scale_window,
                    min_scale: f64::max(init_scale * share, 1.0e-6),
                    delayed_shift,
                    consecutive_hysteresis: consecutive,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn laws(settings in any_settings(), steps in prop::collection::vec(any::<bool>(), 0..200)) {
            let mut scale = DynamicLossScale::new(settings).expect("in range");
            let mut good = 0;
            for overflow in steps {
                let before = scale.scale();
                scale.update(overflow);
                let after = scale.scale();
                good = if overflow { 0 } else { good + 1 };
                // It stays in its range, shrinks only with an overflow, and grows only after a window without.
                prop_assert!((settings.min_scale..=MAX_SCALE).contains(&after));
                prop_assert!(after >= before || overflow);
                let may_grow = !overflow && good % settings.scale_window == 0;
                prop_assert!(after <= before || may_grow);
                if overflow && settings.delayed_shift == 1 {
                    let lower = (before / settings.scale_factor).max(settings.min_scale);
                    prop_assert_eq!(after.to_bits(), lower.to_bits());
                }
                // What is written is read back as the same.
                let text = serde_json::to_string(&scale).expect("numbers are finite");
                let read: DynamicLossScale = serde_json::from_str(&text).expect("it was written");
                prop_assert_eq!(read.checked(), Ok(scale));
            }
        }
    }
}
