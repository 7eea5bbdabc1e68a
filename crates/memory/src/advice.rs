//! Which settings would need less memory, and how much less.

use shardwright_core::Config;
use shardwright_core::config::{FlagOrWord, KEYS, Pipeline, PipelineName};

use crate::account::Categories;

/// What advice is based on.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The job's configuration.
    pub config: &'a Config,
    /// What fills the rank.
    pub categories: Categories,
    /// How many microbatches are in flight on it at most.
    pub in_flight: u32,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Ranks that hold the same parameters.
    pub replicas: u32,
    /// What checkpointed calls keep in memory at the most full moment: bytes, and how many calls.
    pub checkpointed: (u64, u32),
    /// Bytes of optimizer state that would leave the memory that the rank computes in.
    pub offloadable: u64,
    /// Whether that is a device's, so that host memory takes them.
    pub on_device: bool,
}

/// A setting, and what it is expected to save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The setting and its value, as users write it.
    pub setting: String,
    /// Bytes of this rank.
    pub saves: u64,
    /// What it costs.
    pub price: &'static str,
}

/// The settings that would save something, the largest saving first.
pub fn advise(situation: &Situation<'_>) -> Vec<Advice> {
    let mut advice = [
        recompute(situation),
        offload(situation),
        fewer_in_flight(situation),
        smaller_microbatches(situation),
        shard_optimizer(situation),
        offload_optimizer(situation),
        more_stages(situation),
    ]
    .into_iter()
    .flatten()
    .filter(|one| one.saves > 0)
    .collect::<Vec<_>>();
    advice.sort_by_key(|one| std::cmp::Reverse(one.saves));
    advice
}

pub(crate) fn is_built(key: &str) -> bool {
    KEYS.iter()
        .any(|row| row.name == key && row.not_built.is_none())
}

/// `bytes` times `numerator` / `denominator`.
fn part(bytes: u64, numerator: u32, denominator: u32) -> u64 {
    (u128::from(bytes) * u128::from(numerator) / u128::from(denominator.max(1))) as u64
}

/// A rank then keeps the activations of the microbatch that it computes, and of the others what its modules are given.
fn recompute(situation: &Situation<'_>) -> Option<Advice> {
    let others = situation.in_flight.saturating_sub(1);
    Some(Advice {
        setting: "smp.set_activation_checkpointing(module) for the layers".to_owned(),
        saves: part(
            situation.categories.activations?,
            others,
            situation.in_flight,
        ),
        price: "every forward runs twice, up to a third more time",
    })
}

/// Of the calls whose arguments are kept, those within the horizon stay in memory.
fn offload(situation: &Situation<'_>) -> Option<Advice> {
    let (bytes, calls) = situation.checkpointed;
    if situation.config.offload_activations != FlagOrWord::Flag(false) {
        return None;
    }
    let outside = calls.saturating_sub(situation.config.activation_loading_horizon);
    Some(Advice {
        setting: "\"offload_activations\": \"disk\"".to_owned(),
        saves: part(bytes.min(situation.categories.activations?), outside, calls),
        price: "what checkpointed modules keep is written to a disk and read back",
    })
}

fn fewer_in_flight(situation: &Situation<'_>) -> Option<Advice> {
    let (config, in_flight) = (situation.config, situation.in_flight);
    let degree = config.pipeline_parallel_degree;
    let (setting, left) = match &config.pipeline {
        Pipeline::Named(PipelineName::Simple) => (
            "\"pipeline\": \"interleaved\"".to_owned(),
            in_flight.min(degree.saturating_add(2)),
        ),
        Pipeline::Named(_) if in_flight > degree => {
            (format!("\"active_microbatches\": {degree}"), degree)
        }
        _ => return None,
    };
    Some(Advice {
        setting,
        saves: part(
            situation.categories.activations?,
            in_flight.saturating_sub(left),
            in_flight,
        ),
        price: "ranks may wait for one another more",
    })
}

/// Only where the number in flight is limited: else there are twice as many of half the size.
fn smaller_microbatches(situation: &Situation<'_>) -> Option<Advice> {
    let twice = situation.microbatches.checked_mul(2)?;
    let limited = match &situation.config.pipeline {
        Pipeline::Named(PipelineName::Simple) | Pipeline::List(_) | Pipeline::Program(_) => {
            return None;
        }
        Pipeline::Named(_) => situation.config.active_microbatches,
    };
    let then = if situation.config.pipeline_parallel_degree == 1 {
        1
    } else {
        limited.min(twice)
    };
    let now = situation.in_flight.max(1);
    Some(Advice {
        setting: format!("\"microbatches\": {twice}"),
        saves: part(
            situation.categories.activations?,
            now.saturating_mul(2).saturating_sub(then),
            now.saturating_mul(2),
        ),
        price: "smaller operations, and more messages",
    })
}

fn shard_optimizer(situation: &Situation<'_>) -> Option<Advice> {
    let config = situation.config;
    if config.shard_optimizer_state
        || config.sharded_data_parallel_degree > 1
        || !is_built("shard_optimizer_state")
    {
        return None;
    }
    Some(Advice {
        setting: "\"shard_optimizer_state\": true".to_owned(),
        saves: part(
            situation.categories.optimizer_state?,
            situation.replicas.saturating_sub(1),
            situation.replicas,
        ),
        price: "updated parameters are gathered after each update",
    })
}

fn offload_optimizer(situation: &Situation<'_>) -> Option<Advice> {
    let (value, price) = if situation.on_device {
        (
            "true",
            "optimizer.step() brings its state from host memory and back",
        )
    } else {
        (
            "\"disk\"",
            "optimizer.step() reads its state from a disk and writes it back",
        )
    };
    let key = &situation.config.offload_optimizer;
    let is_on = match key {
        FlagOrWord::Flag(is_on) => *is_on && situation.on_device,
        FlagOrWord::Word(_) => true,
    };
    if is_on {
        return None;
    }
    Some(Advice {
        setting: format!("\"offload_optimizer\": {value}"),
        saves: situation
            .offloadable
            .min(situation.categories.optimizer_state?),
        price,
    })
}

fn more_stages(situation: &Situation<'_>) -> Option<Advice> {
    let categories = &situation.categories;
    let held = [
        categories.parameters,
        categories.gradients,
        categories.optimizer_state,
    ];
    Some(Advice {
        setting: format!(
            "\"pipeline_parallel_degree\": {}",
            situation.config.pipeline_parallel_degree.checked_mul(2)?
        ),
        saves: held.into_iter().flatten().sum::<u64>() / 2,
        price: "twice the ranks for each replica of the model",
    })
}
