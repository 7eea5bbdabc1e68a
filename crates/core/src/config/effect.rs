//! What of a configuration switches nothing on beside its other keys.
//!
//! A configuration is refused where it has such a key, because its author expects something of it. Scripts for the
//! original library always give some of them; the import path of that library takes them out, and says so.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Config, KEYS, as_u32, check_each, data_parallel, names, number, object_of};

/// A key that switches nothing on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idle {
    /// The key.
    pub key: String,
    /// Its value, as JSON.
    pub value: String,
    /// Why it does nothing.
    pub reason: &'static str,
}

const OF_GRAPHS: &str = "it is for graphs of TensorFlow";
const WITHOUT_SHARDING: &str = "\"sharded_data_parallel_degree\" is 1";
const WITHOUT_REPLICAS: &str = "\"ddp\" is false, so there is one replica of the model";
const WITHOUT_STATIC_MODE: &str = "\"static_mode\" is false";
const IN_FLOAT32: &str = "neither \"fp16\" nor \"bf16\" is true, so gradients are float32 anyway";
const WITHOUT_PIPELINE: &str = "\"pipeline_parallel_degree\" is 1";
/// Of keys that need more than one replica, those that ask for nothing where there is one.
const OF_REPLICAS: [&str; 3] = ["ddp_port", "ddp_dist_backend", "shard_optimizer_state"];

impl Config {
    /// The keys of a JSON object that switch nothing on beside the others. What is no configuration has none.
    pub fn without_effect(text: &str) -> Vec<Idle> {
        let mut given = object_of(text);
        let mut found = Vec::new();
        given.retain(|key, value| {
            let reason = names::asks_for_nothing(key, value)
                .or((key == "contiguous" && *value == json!(false)).then_some(OF_GRAPHS));
            found.extend(reason.map(|reason| idle(key, value, reason)));
            reason.is_none()
        });
        let Ok(mut values) = check_each(&given) else {
            return found;
        };
        if names::unite(&mut values).is_ok() {
            let of_keys = idle_keys(&values);
            found.extend(
                of_keys
                    .into_iter()
                    .map(|(key, reason)| idle(key, &values[key], reason)),
            );
        }
        found
    }
}

fn idle(key: &str, value: &Value, reason: &'static str) -> Idle {
    Idle {
        key: key.to_owned(),
        value: value.to_string(),
        reason,
    }
}

fn idle_keys(values: &BTreeMap<&'static str, Value>) -> Vec<(&'static str, &'static str)> {
    let is_on = |name: &str| values.get(name) == Some(&json!(true));
    let is_changed = |name: &&str| {
        let key = KEYS.iter().find(|key| key.name == *name);
        key.is_some_and(|key| {
            values
                .get(*name)
                .is_some_and(|value| *value != key.default_json())
        })
    };
    let mut found = Vec::new();
    if !is_on("ddp") {
        let names = OF_REPLICAS.into_iter().filter(is_changed);
        found.extend(names.map(|name| (name, WITHOUT_REPLICAS)));
    }
    if number(values, "sharded_data_parallel_degree") == 1 {
        let names = data_parallel::OF_SHARDING.into_iter().filter(is_changed);
        found.extend(names.map(|name| (name, WITHOUT_SHARDING)));
    }
    if is_on("fast_mode") && !is_on("static_mode") {
        found.push(("fast_mode", WITHOUT_STATIC_MODE));
    }
    if is_on("_fp32_grad_accumulation") && !is_on("fp16") && !is_on("bf16") {
        found.push(("_fp32_grad_accumulation", IN_FLOAT32));
    }
    if number(values, "pipeline_parallel_degree") == 1 {
        let is_simple = values.get("pipeline") == Some(&json!("simple"));
        let active = values.get("active_microbatches").and_then(as_u32);
        if is_simple && active.is_some_and(|active| active < number(values, "microbatches")) {
            found.push(("active_microbatches", WITHOUT_PIPELINE));
        }
        if is_on("load_partition") && !values.contains_key("partition_file") {
            found.push(("load_partition", WITHOUT_PIPELINE));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(given: &Value) -> Vec<String> {
        let found = Config::without_effect(&given.to_string());
        found.into_iter().map(|each| each.key).collect()
    }

    /// What is refused for no other reason than that it does nothing, with the keys that make it do something.
    fn cases() -> Vec<(Value, Value)> {
        let sharded = json!({"ddp": true, "sharded_data_parallel_degree": 2});
        vec![
            (json!({"ddp_port": 29500}), json!({"ddp": true})),
            (json!({"ddp_dist_backend": "nccl"}), json!({"ddp": true})),
            (json!({"shard_optimizer_state": true}), json!({"ddp": true})),
            (json!({"sdp_reduce_bucket_size": 7}), sharded.clone()),
            (
                json!({"sdp_param_persistence_threshold": 7}),
                sharded.clone(),
            ),
            (json!({"sdp_max_live_parameters": 7}), sharded.clone()),
            (
                json!({"sdp_hierarchical_allgather": false}),
                sharded.clone(),
            ),
            (json!({"sdp_gradient_clipping": 0.5}), sharded.clone()),
            (json!({"sdp_stage": 1}), sharded),
            (json!({"fast_mode": true}), json!({"static_mode": true})),
            (
                json!({"_fp32_grad_accumulation": true}),
                json!({"bf16": true}),
            ),
            (
                json!({"load_partition": true}),
                json!({"partition_file": "f"}),
            ),
        ]
    }

    #[test]
    fn what_is_refused_because_it_does_nothing_is_found_and_only_that() {
        for (alone, others) in cases() {
            let (key, value) = alone.as_object().expect("one").iter().next().expect("one");
            assert!(Config::parse(&alone.to_string()).is_err(), "{key}");
            assert_eq!(keys(&alone), std::slice::from_ref(key));
            let mut together = others;
            together[key] = value.clone();
            assert!(Config::parse(&together.to_string()).is_ok(), "{key}");
            assert!(keys(&together).is_empty(), "{key}");
        }
    }

    #[test]
    fn a_limit_of_microbatches_is_idle_only_without_a_pipeline() {
        let mut given = json!({"pipeline": "simple", "active_microbatches": 2, "microbatches": 8});
        assert_eq!(keys(&given), ["active_microbatches"]);
        given["partitions"] = json!(2);
        assert!(keys(&given).is_empty());
        assert!(Config::parse(&given.to_string()).is_err());
    }

    #[test]
    fn what_asks_for_something_is_never_idle() {
        for given in [
            json!({"tensor_parallel_degree": 2}),
            json!({"sharded_data_parallel_degree": 2}),
            json!({"horovod": true}),
            json!({"context_parallel_degree": 2}),
            json!({"sm_activation_offloading": true}),
            json!({"load_partition": true, "partitions": 2}),
            json!({"sdp_stage": 9}),
            json!({"sdp_stage": null}),
            json!([1]),
            json!({}),
        ] {
            assert!(keys(&given).is_empty(), "{given}");
        }
    }

    #[test]
    fn what_another_interface_has_by_default_is_idle() {
        let given = json!({"contiguous": false, "context_parallel_degree": 1, "allow_empty_shards": true, "bad": 1});
        let mut found = keys(&given);
        found.sort();
        assert_eq!(
            found,
            [
                "allow_empty_shards",
                "context_parallel_degree",
                "contiguous"
            ]
        );
    }
}
