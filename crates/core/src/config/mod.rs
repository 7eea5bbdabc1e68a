//! The configuration of a job: every key typed, checked, and never ignored.
//!
//! A key at its default is always accepted, so the effective configuration is itself a valid one.

mod data_parallel;
mod dtypes;
mod effect;
mod elastic;
mod error;
mod key;
mod keys;
mod names;
mod offloading;
mod pipeline;
#[cfg(test)]
mod tests;

pub use effect::Idle;
pub use error::ConfigError;
pub use key::{ConfigKey, DefaultValue, FlagOrWord, Origin, ValueKind};
pub use keys::KEYS;
pub use pipeline::{PROGRAM_HEADER, Pipeline, PipelineName, check_list, is_schedule};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::topology::{Placement, Topology};

/// What a partition balances by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimize {
    /// Mostly memory.
    Memory,
    /// Mostly computation.
    Speed,
}

/// The effective configuration; [`KEYS`] says what each key means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the table of keys documents every field")]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the keys are given by the interface"
)]
pub struct Config {
    pub pipeline_parallel_degree: u32,
    pub partitions: u32,
    pub microbatches: u32,
    pub pipeline: Pipeline,
    pub optimize: Optimize,
    pub placement_strategy: String,
    pub auto_partition: bool,
    pub default_partition: u32,
    pub contiguous: bool,
    pub horovod: bool,
    pub memory_weight: f64,
    pub ddp: bool,
    pub ddp_port: Option<u16>,
    pub ddp_dist_backend: String,
    pub active_microbatches: u32,
    pub deterministic_server: bool,
    pub tensor_parallel_degree: u32,
    pub fp16: bool,
    pub bf16: bool,
    pub fp16_params: bool,
    pub shard_optimizer_state: bool,
    pub offload_activations: FlagOrWord,
    pub activation_loading_horizon: u32,
    pub prescaled_batch: bool,
    #[serde(rename = "_prescaled_batch")]
    pub prescaled_batch_alias: bool,
    pub skip_tracing: bool,
    pub sharded_data_parallel_degree: u32,
    pub sdp_reduce_bucket_size: u64,
    pub sdp_param_persistence_threshold: u64,
    pub sdp_max_live_parameters: u64,
    pub sdp_hierarchical_allgather: bool,
    pub sdp_gradient_clipping: f64,
    pub delayed_parameter_initialization: bool,
    pub static_mode: bool,
    pub fast_mode: bool,
    pub checkpoint_attentions: bool,
    pub load_partition: bool,
    pub partition_file: Option<String>,
    pub overlapping_allreduce: Option<bool>,
    #[serde(rename = "_match_weights")]
    pub match_weights: bool,
    #[serde(rename = "_fp32_grad_accumulation")]
    pub fp32_grad_accumulation: bool,
    pub seed: u64,
    pub reproducible_rng: bool,
    pub tensor_handles: bool,
    pub static_steps: u32,
    pub on_departure: String,
    pub refine_partition: bool,
    pub sdp_stage: u32,
    pub stall_report_seconds: f64,
    pub stall_timeout_seconds: f64,
    pub liveness_timeout_seconds: f64,
    pub connect_timeout_seconds: f64,
    pub secret_file: Option<String>,
    pub allow_insecure_hosts: bool,
    pub bind_interface_address: Option<String>,
    pub transport: String,
    pub encrypt: bool,
    pub comm_spin_microseconds: Option<u32>,
    pub ucx_library: Option<String>,
    pub comm_buffer_bytes: u64,
    pub memory_limit_bytes: Option<u64>,
    pub offload_optimizer: FlagOrWord,
    pub offload_directory: Option<String>,
    pub elastic_degrees: Option<String>,
}

impl Config {
    /// Reads a JSON object of keys and values, and checks all of them.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let given = match serde_json::from_str(text) {
            Ok(Value::Object(given)) => given,
            Ok(other) => return Err(ConfigError::NotAnObject(kind_of(&other))),
            Err(error) => return Err(ConfigError::Json(error.to_string())),
        };
        let mut values = check_each(&given)?;
        names::unite(&mut values)?;
        let degree = number(&values, "pipeline_parallel_degree");
        let microbatches = number(&values, "microbatches");
        let default_partition_given = values.contains_key("default_partition");
        if values.get("auto_partition") == Some(&json!(false)) && !default_partition_given {
            return Err(ConfigError::DefaultPartitionMissing);
        }
        let default_partition = number(&values, "default_partition");
        if default_partition != 0 && default_partition >= degree {
            return Err(ConfigError::NotAllowed {
                key: "default_partition",
                value: default_partition.to_string(),
                allowed: format!("0 to {} (below pipeline_parallel_degree)", degree - 1),
            });
        }

        let is_looped = values.get("pipeline") == Some(&json!("looped"));
        let active_default = pipeline::default_active_microbatches(is_looped, degree);
        let active = values.get("active_microbatches").and_then(as_u32);
        let simple = values.get("pipeline") == Some(&json!("simple"));
        match active {
            Some(active) if simple && active < microbatches && active != active_default => {
                return Err(ConfigError::ActiveMicrobatchesIgnored {
                    active,
                    microbatches,
                });
            }
            _ => {}
        }
        if let Some(list @ Value::Array(_)) = values.get("pipeline") {
            pipeline::read_list(list, microbatches)?;
            let needed = pipeline::most_in_flight(list);
            if let Some(active) = active
                && active < needed
                && active != active_default
            {
                return Err(ConfigError::ActiveMicrobatchesExceeded { active, needed });
            }
        }
        pipeline::check_memory_limit(&values)?;
        let is_on = |key: &str| values.get(key) == Some(&json!(true));
        if is_on("fast_mode") && !is_on("static_mode") {
            return Err(ConfigError::FastModeAlone);
        }
        if is_on("load_partition") && values.get("partition_file").is_none_or(Value::is_null) {
            return Err(ConfigError::PartitionFileMissing);
        }
        if is_on("encrypt") && values.get("transport") == Some(&json!("ucx")) {
            return Err(ConfigError::EncryptedUcx);
        }
        offloading::check(&values)?;
        dtypes::check(is_on)?;
        data_parallel::check(&values)?;

        let speed = values.get("optimize") == Some(&json!("speed"));
        let derived = [
            (
                "active_microbatches",
                json!(active.unwrap_or(active_default)),
            ),
            (
                "refine_partition",
                values
                    .get("refine_partition")
                    .cloned()
                    .unwrap_or_else(|| json!(!is_on("deterministic_server"))),
            ),
            (
                "memory_weight",
                json!(
                    values
                        .get("memory_weight")
                        .and_then(Value::as_f64)
                        .unwrap_or(if speed { 0.2 } else { 0.8 })
                ),
            ),
        ];
        values.extend(derived);
        let effective: Map<String, Value> = KEYS
            .iter()
            .map(|key| {
                let value = values.remove(key.name);
                (
                    key.name.to_owned(),
                    value.unwrap_or_else(|| key.default_json()),
                )
            })
            .collect();
        Ok(serde_json::from_value(Value::Object(effective))
            .expect("checked values have the fields' types"))
    }

    /// The effective configuration as a JSON object with every key, in the table's order.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers are finite and keys are text")
    }

    /// Refuses a world size that this configuration does not fit; the topology if it fits.
    pub fn check_world(&self, world: u32) -> Result<Topology, ConfigError> {
        let topology = Topology::new(
            world,
            self.pipeline_parallel_degree,
            self.tensor_parallel_degree,
            &self.placement(),
        )?;
        let replica = self.pipeline_parallel_degree * self.tensor_parallel_degree;
        if world > replica && !self.ddp {
            return Err(ConfigError::WorldNeedsDataParallelism { world, replica });
        }
        data_parallel::check_world(self.sharded_data_parallel_degree, world / replica)?;
        Ok(topology)
    }

    /// The placement strategy.
    pub fn placement(&self) -> Placement {
        self.placement_strategy
            .parse()
            .expect("checked when the configuration was read")
    }

    /// What all ranks of a job must agree on: the effective configuration without the keys that
    /// each rank may set for itself, as JSON with sorted keys, so that a mismatch can be explained
    /// by [`difference`](Self::difference).
    pub fn fingerprint(&self) -> String {
        let agreed = object_of(&self.to_json());
        let agreed: BTreeMap<String, Value> = agreed
            .into_iter()
            .filter(|(name, _)| KEYS.iter().all(|key| key.name != name || !key.per_rank))
            .collect();
        serde_json::to_string(&agreed).expect("it was JSON before")
    }

    /// The keys in which two fingerprints differ, with both values: `seed: 0 and 1`.
    ///
    /// A key that only one side has (another version of the library) counts as null.
    pub fn difference(own: &str, other: &str) -> Vec<String> {
        let (own, other) = (object_of(own), object_of(other));
        let names: std::collections::BTreeSet<&String> = own.keys().chain(other.keys()).collect();
        names
            .into_iter()
            .filter(|name| own.get(*name) != other.get(*name))
            .map(|name| {
                let shown = |side: &Map<String, Value>| {
                    side.get(name).map_or("null".to_owned(), Value::to_string)
                };
                format!("{name}: {} and {}", shown(&own), shown(&other))
            })
            .collect()
    }
}

fn object_of(text: &str) -> Map<String, Value> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => object,
        _ => Map::new(),
    }
}

/// Every given key, checked by itself; keys given as null are left to their default.
fn check_each(given: &Map<String, Value>) -> Result<BTreeMap<&'static str, Value>, ConfigError> {
    let mut values = BTreeMap::new();
    for (name, value) in given {
        let key = KEYS
            .iter()
            .find(|key| key.name == name)
            .ok_or_else(|| unknown(name, value))?;
        let value = key.check(value)?;
        if !value.is_null() {
            values.insert(key.name, value);
        }
    }
    Ok(values)
}

/// Below this similarity, a suggestion would only confuse.
const SIMILAR: f64 = 0.7;

/// What other libraries, and people in a hurry, call a key; similarity finds others for these.
const OTHER_NAMES: [(&str, &str); 21] = [
    ("pp", "pipeline_parallel_degree"),
    ("pp_degree", "pipeline_parallel_degree"),
    ("pp_size", "pipeline_parallel_degree"),
    ("pipeline_degree", "pipeline_parallel_degree"),
    ("pipeline_parallel", "pipeline_parallel_degree"),
    ("pipeline_parallel_size", "pipeline_parallel_degree"),
    ("num_stages", "pipeline_parallel_degree"),
    ("tp", "tensor_parallel_degree"),
    ("tp_degree", "tensor_parallel_degree"),
    ("tp_size", "tensor_parallel_degree"),
    ("tensor_parallel", "tensor_parallel_degree"),
    ("tensor_parallel_size", "tensor_parallel_degree"),
    ("dp", "ddp"),
    ("data_parallel", "ddp"),
    ("num_microbatches", "microbatches"),
    ("n_microbatches", "microbatches"),
    ("num_micro_batches", "microbatches"),
    ("micro_batches", "microbatches"),
    ("gradient_accumulation_steps", "microbatches"),
    ("schedule", "pipeline"),
    ("pipeline_schedule", "pipeline"),
];

fn unknown(name: &str, value: &Value) -> ConfigError {
    if let Some(instead) = names::in_place_of(name) {
        let key = name.to_owned();
        return ConfigError::OfVersion2 { key, instead };
    }
    let known = OTHER_NAMES.iter().find(|(other, _)| *other == name);
    let similar = KEYS
        .iter()
        .map(|key| (strsim::jaro_winkler(name, key.name), key.name))
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .map(|(_, name)| name);
    let nearest = known.map(|(_, name)| *name).or(similar);
    ConfigError::UnknownKey {
        key: key::shortened(name),
        value: key::shortened(&value.to_string()),
        nearest,
    }
}

fn as_u32(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}

/// The value of a 32-bit key, or its default.
fn number(values: &BTreeMap<&'static str, Value>, name: &str) -> u32 {
    let default = || {
        let key = KEYS.iter().find(|key| key.name == name);
        key.and_then(|key| as_u32(&key.default_json()))
    };
    values
        .get(name)
        .and_then(as_u32)
        .or_else(default)
        .expect("the table gives this key a 32-bit kind and default")
}

const fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
