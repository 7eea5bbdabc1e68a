//! Keys with two names, and keys of the interface's second version.

use std::collections::BTreeMap;

use serde_json::Value;

use super::ConfigError;

/// The older name of a key, and its name.
const OLDER_NAMES: [(&str, &str); 2] = [
    ("partitions", "pipeline_parallel_degree"),
    ("_prescaled_batch", "prescaled_batch"),
];

/// Keys of `torch.sagemaker`, the second version of the interface, and what there is here in place of each.
const OF_VERSION_2: [(&str, &str); 7] = [
    (
        "hybrid_shard_degree",
        "\"sharded_data_parallel_degree\" says among how many replicas parameters are sharded",
    ),
    (
        "context_parallel_degree",
        "nothing divides sequences over ranks; \"tensor_parallel_degree\" divides what is computed of each position",
    ),
    (
        "expert_parallel_degree",
        "\"tensor_parallel_degree\" divides experts, and smp.set_partition places them on ranks of a pipeline",
    ),
    (
        "sm_activation_offloading",
        "\"offload_activations\" moves what checkpointed modules keep out of memory",
    ),
    (
        "fsdp_cache_flush_warnings",
        "no allocator is watched; smp.memory_report() says what fills the memory of each rank",
    ),
    (
        "allow_empty_shards",
        "shards may always be empty, also in checkpoints",
    ),
    (
        "random_seed",
        "\"seed\" is the seed of random numbers in steps, with \"reproducible_rng\"",
    ),
];

/// Of those keys, values that ask for nothing, and why.
const OF_VERSION_2_IDLE: [(&str, &[&str], &str); 7] = [
    (
        "hybrid_shard_degree",
        &["0", "1"],
        "it asks for no other sharding than the script's own",
    ),
    ("context_parallel_degree", &["1"], "sequences stay whole"),
    ("expert_parallel_degree", &["1"], "experts stay together"),
    (
        "sm_activation_offloading",
        &["false"],
        "nothing is offloaded",
    ),
    (
        "fsdp_cache_flush_warnings",
        &["false"],
        "no allocator is watched",
    ),
    (
        "allow_empty_shards",
        &["false", "true"],
        "shards may always be empty",
    ),
    (
        "random_seed",
        &["12345"],
        "it is the default of the second version of the interface",
    ),
];

/// Why a key of the second version asks for nothing at a value; `None` where it asks for something, and of other keys.
pub(super) fn asks_for_nothing(name: &str, value: &Value) -> Option<&'static str> {
    let (_, values, reason) = OF_VERSION_2_IDLE.iter().find(|(key, _, _)| *key == name)?;
    let shown = value.to_string();
    values.contains(&shown.as_str()).then_some(*reason)
}

/// What there is in place of a key of the second version, if it is one.
pub(super) fn in_place_of(name: &str) -> Option<&'static str> {
    let found = OF_VERSION_2.iter().find(|(other, _)| *other == name);
    found.map(|(_, instead)| *instead)
}

/// Gives the value of a key with two names to both of them.
pub(super) fn unite(values: &mut BTreeMap<&'static str, Value>) -> Result<(), ConfigError> {
    for (older, name) in OLDER_NAMES {
        match (values.get(older).cloned(), values.get(name).cloned()) {
            (Some(first), Some(second)) if first != second => {
                return Err(ConfigError::NamesDiffer {
                    older,
                    first: first.to_string(),
                    name,
                    second: second.to_string(),
                });
            }
            (Some(value), _) | (None, Some(value)) => {
                values.insert(older, value.clone());
                values.insert(name, value);
            }
            (None, None) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{OF_VERSION_2, OF_VERSION_2_IDLE, in_place_of};
    use crate::Config;
    use crate::config::KEYS;

    fn parse(given: &Value) -> Result<Config, crate::ConfigError> {
        Config::parse(&given.to_string())
    }

    #[test]
    fn a_batch_is_prescaled_under_either_name() {
        for given in [
            json!({"_prescaled_batch": true}),
            json!({"prescaled_batch": true}),
            json!({"prescaled_batch": true, "_prescaled_batch": true}),
        ] {
            let config = parse(&given).expect("a good configuration");
            assert!(config.prescaled_batch && config.prescaled_batch_alias);
        }
        let text = parse(&json!({"_prescaled_batch": true, "prescaled_batch": false}))
            .expect_err("two values")
            .to_string();
        assert_eq!(
            text,
            "\"_prescaled_batch\" is true and \"prescaled_batch\" is false; they are two names of one key: give one of them, or equal values"
        );
    }

    #[test]
    fn keys_of_the_second_version_are_refused_with_what_is_here_instead() {
        for (name, instead) in OF_VERSION_2 {
            assert!(KEYS.iter().all(|key| key.name != name), "{name} is a key");
            let text = parse(&json!({ name: 1 })).expect_err("refused").to_string();
            assert!(text.contains(name) && text.ends_with(instead), "{text}");
        }
        assert_eq!(in_place_of("microbatches"), None);
        let idle: Vec<&str> = OF_VERSION_2_IDLE.iter().map(|(name, _, _)| *name).collect();
        let all: Vec<&str> = OF_VERSION_2.iter().map(|(name, _)| *name).collect();
        assert_eq!(idle, all);
    }
}
