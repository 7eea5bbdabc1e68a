//! The values of the key `pipeline`: a word, a list of starts, or a program.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Config, ConfigError};
use crate::Phase;

/// A name and its word in the configuration, which but for the last two is that of the policy.
macro_rules! names {
    ($($(#[$of_name:meta])* $variant:ident = $word:literal;)*) => {
        /// The schedules that have a name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum PipelineName {
            $(
                $(#[$of_name])*
                #[serde(rename = $word)]
                $variant,
            )*
        }

        impl PipelineName {
            /// All names.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its word in the configuration.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }
    };
}

names! {
    /// A ready backward first, else the next forward.
    Interleaved = "interleaved";
    /// All forwards, then all backwards.
    Simple = "simple";
    /// Forward and backward by turns, for several parts of the model on one rank.
    Looped = "looped";
    /// As interleaved, with weight gradients computed when nothing else is ready.
    ZeroBubble = "zero_bubble";
    /// Interleaved at first, then what the first steps show to be the fastest.
    Auto = "auto";
    /// Interleaved, for jobs that only evaluate: without any backward.
    OnlyForward = "_only_forward";
}

/// The order of forwards and backwards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Pipeline {
    /// A schedule with a name.
    Named(PipelineName),
    /// The order in which the root starts forwards and backwards.
    List(Vec<(u32, Phase)>),
    /// What each rank does, in order: the text of a program.
    Program(String),
}

/// What the text of a program begins with, by which it is told from the name of a schedule.
pub const PROGRAM_HEADER: &str = "shardwright program ";

/// The default of `active_microbatches`: as many as fill the pipeline, and two that come and go. With looped stages one
/// set that fills it goes forward while another goes backward.
pub(super) fn default_active_microbatches(is_looped: bool, degree: u32) -> u32 {
    if is_looped {
        degree.saturating_mul(2)
    } else {
        degree.saturating_add(2)
    }
}

/// The words of all names.
pub(super) fn words() -> Vec<&'static str> {
    PipelineName::ALL.iter().map(|name| name.name()).collect()
}

/// Whether a text is the name of a schedule, or a program itself.
pub fn is_schedule(text: &str) -> bool {
    words().contains(&text) || text.starts_with(PROGRAM_HEADER)
}

/// Whether a value has the form of one of the three; what a list or a program says is checked later.
pub(super) fn has_form(value: &Value) -> bool {
    match value {
        Value::String(text) => is_schedule(text),
        Value::Array(entries) => !entries.is_empty(),
        _ => false,
    }
}

/// Refuses a limit on memory with a schedule that does not choose how many microbatches are in flight. Without a value
/// it is `interleaved`.
pub(super) fn check_memory_limit(values: &BTreeMap<&str, Value>) -> Result<(), ConfigError> {
    let value = values.get("pipeline").unwrap_or(&Value::Null);
    let limit = values.get("memory_limit_bytes");
    let named = |name: PipelineName| value == name.name();
    let chooses = named(PipelineName::Interleaved) || named(PipelineName::ZeroBubble);
    if limit.is_none_or(Value::is_null) || value.is_null() || chooses {
        return Ok(());
    }
    let pipeline = match value {
        Value::String(text) if text.starts_with(PROGRAM_HEADER) => "a program".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        other => other.to_string(),
    };
    Err(ConfigError::MemoryLimitIgnored { pipeline })
}

/// The entries of a list, which starts every microbatch once in either phase, the forward first.
pub(super) fn read_list(value: &Value, microbatches: u32) -> Result<(), ConfigError> {
    let Value::Array(entries) = value else {
        return Ok(());
    };
    let read = |(index, entry): (usize, &Value)| {
        serde_json::from_value(entry.clone()).map_err(|_| ConfigError::ListEntry {
            index,
            value: entry.to_string(),
            allowed: format!(
                "a microbatch from 0 to {} and \"forward\" or \"backward\", such as [0, \"forward\"]",
                microbatches - 1
            ),
        })
    };
    let entries = entries.iter().enumerate().map(read);
    check_list(&entries.collect::<Result<Vec<_>, _>>()?, microbatches)
}

/// Whether a list starts every one of so many microbatches exactly once in either phase, its forward before
/// its backward.
pub fn check_list(entries: &[(u32, Phase)], microbatches: u32) -> Result<(), ConfigError> {
    let mut seen = BTreeMap::new();
    for (index, entry @ (microbatch, phase)) in entries.iter().enumerate() {
        let refused = |allowed| {
            Err(ConfigError::ListEntry {
                index,
                value: shown(*entry),
                allowed,
            })
        };
        if *microbatch >= microbatches {
            return refused(format!(
                "microbatches from 0 to {}, since \"microbatches\" is {microbatches}",
                microbatches - 1
            ));
        }
        if let Some(first) = seen.insert(*entry, index) {
            return refused(format!("each entry once; it stands at index {first} too"));
        }
        let forward = (*microbatch, Phase::Forward);
        if *phase == Phase::Backward && !seen.contains_key(&forward) {
            return refused(format!("a backward only behind {}", shown(forward)));
        }
    }
    let mut wanted = (0..microbatches)
        .flat_map(|microbatch| [Phase::Forward, Phase::Backward].map(|phase| (microbatch, phase)));
    match wanted.find(|entry| !seen.contains_key(entry)) {
        None => Ok(()),
        Some(entry) => Err(ConfigError::ListIncomplete {
            length: entries.len(),
            missing: shown(entry),
            microbatches,
        }),
    }
}

/// How many microbatches a checked list has in flight at most.
pub(super) fn most_in_flight(value: &Value) -> u32 {
    let entries = value.as_array().map_or(&[][..], Vec::as_slice);
    let (mut in_flight, mut most) = (0_u32, 0);
    for entry in entries {
        if entry.get(1).and_then(Value::as_str) == Some(Phase::Forward.name()) {
            in_flight += 1;
        } else {
            in_flight = in_flight.saturating_sub(1);
        }
        most = most.max(in_flight);
    }
    most
}

fn shown((microbatch, phase): (u32, Phase)) -> String {
    format!("[{microbatch}, {:?}]", phase.name())
}

impl Config {
    /// Whether `active_microbatches` has another value than the one that it has if it is not given.
    pub fn active_microbatches_given(&self) -> bool {
        let is_looped = self.pipeline == Pipeline::Named(PipelineName::Looped);
        let degree = self.pipeline_parallel_degree;
        self.active_microbatches != default_active_microbatches(is_looped, degree)
    }

    /// Whether the number of microbatches in flight is chosen after the first steps: by measured times, which differ from
    /// run to run.
    pub fn chooses_active_microbatches(&self) -> bool {
        let is_zero_bubble = self.pipeline == Pipeline::Named(PipelineName::ZeroBubble);
        (is_zero_bubble || self.memory_limit_bytes.is_some()) && !self.deterministic_server
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::Config;

    fn parse(given: &Value) -> Result<Config, crate::ConfigError> {
        Config::parse(&given.to_string())
    }

    fn refused(given: &Value) -> String {
        parse(given).expect_err("refused").to_string()
    }

    #[test]
    fn a_memory_limit_is_for_schedules_that_choose_how_many_microbatches_are_in_flight() {
        for pipeline in ["interleaved", "zero_bubble"] {
            let config = parse(&json!({"pipeline": pipeline, "memory_limit_bytes": 5e9}));
            assert_eq!(
                config.expect("good").memory_limit_bytes,
                Some(5_000_000_000)
            );
        }
        assert!(parse(&json!({"memory_limit_bytes": 1})).is_ok());
        assert!(parse(&json!({"pipeline": "simple", "memory_limit_bytes": null})).is_ok());
        let list = json!([[0, "forward"], [0, "backward"]]);
        for (pipeline, named) in [
            (json!("simple"), "\"simple\""),
            (json!("auto"), "\"auto\""),
            (list, "a list"),
        ] {
            let text = refused(&json!({"pipeline": pipeline, "memory_limit_bytes": 100}));
            assert!(
                text.contains(&format!("with \"pipeline\" {named}, which does not choose")),
                "{text}"
            );
        }
        assert!(refused(&json!({"memory_limit_bytes": 0})).contains("an integer of 1 or more"));
    }
}
