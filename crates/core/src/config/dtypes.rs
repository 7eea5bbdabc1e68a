//! Which keys of half precision go together.

use super::ConfigError;

/// Refuses keys that ask for two dtypes, or for float32 gradients where they are float32 anyway.
pub(super) fn check(is_on: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
    for first in ["fp16", "fp16_params"] {
        if is_on(first) && is_on("bf16") {
            let second = "bf16";
            return Err(ConfigError::TwoDtypes { first, second });
        }
    }
    if is_on("_fp32_grad_accumulation") && !is_on("fp16") && !is_on("bf16") {
        return Err(ConfigError::NeedsHalfPrecision);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::Config;

    fn refused(value: &Value) -> String {
        let error = Config::parse(&value.to_string()).expect_err("to be refused");
        error.to_string()
    }

    #[test]
    fn a_model_has_one_dtype() {
        for good in [
            json!({"fp16": true, "fp16_params": true, "_fp32_grad_accumulation": true}),
            json!({"bf16": true, "_fp32_grad_accumulation": true}),
            json!({"fp16_params": true}),
        ] {
            assert!(Config::parse(&good.to_string()).is_ok(), "{good}");
        }
        let both = refused(&json!({"fp16": true, "bf16": true}));
        assert!(
            both.contains("\"fp16\" and \"bf16\" are both true"),
            "{both}"
        );
        let both = refused(&json!({"fp16_params": true, "bf16": true}));
        assert!(both.contains("\"fp16_params\" and \"bf16\""), "{both}");
        let alone = refused(&json!({"_fp32_grad_accumulation": true}));
        assert!(alone.contains("needs \"fp16\" or \"bf16\""), "{alone}");
    }

    #[test]
    fn master_weights_may_be_sharded() {
        for dtype in ["fp16", "bf16", "fp16_params"] {
            let keys = json!({"ddp": true, "shard_optimizer_state": true, dtype: true});
            assert!(Config::parse(&keys.to_string()).is_ok());
        }
    }
}
