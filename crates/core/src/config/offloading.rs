//! What is offloaded, and where its files are.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::ConfigError;

/// A directory needs something that is written to it.
pub(super) fn check(values: &BTreeMap<&'static str, Value>) -> Result<(), ConfigError> {
    let to_disk = ["offload_activations", "offload_optimizer"]
        .into_iter()
        .any(|key| values.get(key) == Some(&json!("disk")));
    if values.contains_key("offload_directory") && !to_disk {
        return Err(ConfigError::OffloadDirectoryAlone);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, FlagOrWord};

    fn parse(value: &Value) -> Result<Config, ConfigError> {
        Config::parse(&value.to_string())
    }

    fn refused(value: &Value) -> String {
        parse(value).expect_err("to be refused").to_string()
    }

    #[test]
    fn offloading_is_a_flag_or_names_the_disk() {
        for (given, expected) in [
            (json!(true), FlagOrWord::Flag(true)),
            (json!(false), FlagOrWord::Flag(false)),
            (json!("disk"), FlagOrWord::Word("disk".to_owned())),
        ] {
            let config = parse(&json!({"offload_activations": given})).expect("a good value");
            assert_eq!(config.offload_activations, expected);
        }
        let text = refused(&json!({"offload_activations": "nvme"}));
        assert!(
            text.ends_with("allowed: true or false or \"disk\""),
            "{text}"
        );
        assert!(
            refused(&json!({"activation_loading_horizon": 0})).contains("an integer of 1 or more")
        );
        let text = refused(&json!({"offload_directory": "/fast", "offload_activations": true}));
        assert!(
            text.contains("\"offload_directory\"") && text.contains("\"disk\""),
            "{text}"
        );
        for key in ["offload_activations", "offload_optimizer"] {
            assert!(parse(&json!({"offload_directory": "/fast", key: "disk"})).is_ok());
            assert!(refused(&json!({"offload_directory": "/fast", key: true})).contains(key));
        }
    }
}
