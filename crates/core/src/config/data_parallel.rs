//! Which keys need data parallelism, and which go together with sharded data parallelism.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{ConfigError, KEYS, number};

const NEED_REPLICAS: [&str; 5] = [
    "ddp_port",
    "ddp_dist_backend",
    "tensor_parallel_degree",
    "shard_optimizer_state",
    "sharded_data_parallel_degree",
];
const REFUSED: [(&str, &str); 5] = [
    (
        "tensor_parallel_degree",
        "the ranks of a TP_GROUP hold different slices of parameters, which are reduced over other ranks than whole ones",
    ),
    (
        "shard_optimizer_state",
        "sharded data parallelism shards the state of optimizers itself",
    ),
    (
        "fp16",
        "the loss scale needs to know of infinities in all shards before one rank updates",
    ),
    (
        "_fp32_grad_accumulation",
        "gradients of shards have the dtype of parameters",
    ),
    (
        "fp16_params",
        "it is for distributed modules, which need tensor parallelism",
    ),
];
pub(super) const OF_SHARDING: [&str; 6] = [
    "sdp_reduce_bucket_size",
    "sdp_param_persistence_threshold",
    "sdp_max_live_parameters",
    "sdp_hierarchical_allgather",
    "sdp_gradient_clipping",
    "sdp_stage",
];

/// Refuses keys of data parallelism without it, features that cannot be combined with sharded data
/// parallelism, and the keys of that without it.
pub(super) fn check(values: &BTreeMap<&'static str, Value>) -> Result<(), ConfigError> {
    let degree = number(values, "sharded_data_parallel_degree");
    let changed = |name: &str| {
        let key = KEYS.iter().find(|key| key.name == name)?;
        let value = values.get(name)?;
        (*value != key.default_json()).then(|| (key, value.to_string()))
    };
    if values.get("ddp") != Some(&json!(true))
        && let Some((key, value)) = NEED_REPLICAS.into_iter().find_map(changed)
    {
        return Err(ConfigError::NeedsDataParallelism {
            key: key.name,
            value,
        });
    }
    if degree == 1 {
        return match OF_SHARDING.into_iter().find_map(changed) {
            Some((key, value)) => Err(ConfigError::NeedsSharding {
                key: key.name,
                value,
            }),
            None => Ok(()),
        };
    }
    for (name, reason) in REFUSED {
        if let Some((key, value)) = changed(name) {
            return Err(ConfigError::NotWithSharding {
                degree,
                key: key.name,
                value,
                reason,
                default: key.default_json().to_string(),
            });
        }
    }
    Ok(())
}

/// Refuses a degree that does not divide the number of replicas.
pub(super) fn check_world(degree: u32, replicas: u32) -> Result<(), ConfigError> {
    if replicas.is_multiple_of(degree) {
        return Ok(());
    }
    let allowed = (1..=replicas)
        .filter(|divisor| replicas.is_multiple_of(*divisor))
        .collect();
    Err(ConfigError::ShardingDegree {
        degree,
        replicas,
        allowed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn parse(value: &Value) -> Result<Config, ConfigError> {
        Config::parse(&value.to_string())
    }

    fn refused(value: &Value) -> String {
        parse(value).expect_err("to be refused").to_string()
    }

    #[test]
    fn a_degree_divides_the_replicas() {
        let config = |degree: u32| {
            parse(&json!({"ddp": true, "sharded_data_parallel_degree": degree})).expect("good")
        };
        for (degree, world) in [(2, 2), (2, 4), (4, 4), (1, 3), (3, 6)] {
            assert!(config(degree).check_world(world).is_ok());
        }
        for (degree, world) in [(2, 3), (4, 2), (2, 1)] {
            let text = config(degree)
                .check_world(world)
                .expect_err("odd")
                .to_string();
            assert!(text.contains("sharded_data_parallel_degree"), "{text}");
        }
        let text = config(4).check_world(6).expect_err("odd").to_string();
        assert!(text.ends_with("allowed: 1, 2, 3, 6"), "{text}");
        let alone = refused(&json!({"sharded_data_parallel_degree": 2}));
        assert!(alone.contains("needs \"ddp\""), "{alone}");
    }

    #[test]
    fn what_cannot_be_combined_is_refused_with_the_reason() {
        for (name, reason) in REFUSED {
            let value = if name.ends_with("degree") {
                json!(2)
            } else {
                json!(true)
            };
            let bf16 = name.starts_with("_fp32");
            let keys =
                json!({"ddp": true, "sharded_data_parallel_degree": 2, "bf16": bf16, name: value});
            let text = refused(&keys);
            assert!(text.contains(name) && text.contains(reason), "{text}");
        }
        let pipeline =
            json!({"ddp": true, "sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 2});
        assert!(parse(&pipeline).is_ok());
    }

    #[test]
    fn a_key_of_sharding_alone_is_refused() {
        for name in OF_SHARDING {
            let value = match name {
                "sdp_hierarchical_allgather" => json!(false),
                "sdp_gradient_clipping" => json!(0.5),
                _ => json!(2),
            };
            let text = refused(&json!({ name: value }));
            assert!(
                text.contains(name) && text.contains("does nothing"),
                "{text}"
            );
            let together = json!({"ddp": true, "sharded_data_parallel_degree": 2, name: value});
            assert!(parse(&together).is_ok());
        }
        for clipping in [0.0, -1.0, 1e10] {
            refused(
                &json!({"ddp": true, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": clipping}),
            );
        }
        for stage in [0, 4] {
            refused(&json!({"ddp": true, "sharded_data_parallel_degree": 2, "sdp_stage": stage}));
        }
    }
}
