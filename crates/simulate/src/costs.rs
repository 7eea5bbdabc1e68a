//! How long tasks and transfers take.

use std::time::Duration;

use shardwright_core::{MicrobatchId, PipelineRank, StageId};
use shardwright_schedule::ActionKind;

use crate::error::SimulationError;

/// How long the tasks of one stage take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageCosts {
    /// A forward.
    pub forward: Duration,
    /// A whole backward; it may be quicker than its parts.
    pub full_backward: Duration,
    /// The part of a backward that makes gradients of inputs.
    pub input_gradient: Duration,
    /// The part of a backward that makes gradients of parameters.
    pub weight_gradient: Duration,
}

impl StageCosts {
    /// Costs where a whole backward takes as long as its parts.
    pub fn split(forward: Duration, input_gradient: Duration, weight_gradient: Duration) -> Self {
        Self {
            forward,
            full_backward: input_gradient + weight_gradient,
            input_gradient,
            weight_gradient,
        }
    }

    /// How long this kind takes.
    pub fn of(&self, kind: ActionKind) -> Duration {
        match kind {
            ActionKind::Forward => self.forward,
            ActionKind::FullBackward => self.full_backward,
            ActionKind::InputGradient => self.input_gradient,
            ActionKind::WeightGradient => self.weight_gradient,
        }
    }
}

/// How long the tasks of a step take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepCosts {
    /// The same for every microbatch, by stage.
    Same(Vec<StageCosts>),
    /// By microbatch, then by stage.
    ByMicrobatch(Vec<Vec<StageCosts>>),
}

impl StepCosts {
    /// The costs of a stage for a microbatch; both have been checked.
    pub(crate) fn get(&self, stage: StageId, microbatch: MicrobatchId) -> &StageCosts {
        let stages = match self {
            Self::Same(stages) => stages,
            Self::ByMicrobatch(microbatches) => &microbatches[microbatch.0 as usize],
        };
        &stages[stage.0 as usize]
    }

    pub(crate) fn check(
        &self,
        num_stages: usize,
        num_microbatches: usize,
    ) -> Result<(), SimulationError> {
        let rows = match self {
            Self::Same(stages) => std::slice::from_ref(stages),
            Self::ByMicrobatch(rows) if rows.len() == num_microbatches => rows,
            Self::ByMicrobatch(rows) => {
                return Err(SimulationError::MicrobatchCosts {
                    given: rows.len(),
                    needed: num_microbatches,
                });
            }
        };
        match rows.iter().find(|stages| stages.len() != num_stages) {
            None => Ok(()),
            Some(stages) => Err(SimulationError::StageCosts {
                given: stages.len(),
                needed: num_stages,
            }),
        }
    }
}

/// How long it takes until what one rank has made is on another. Nothing waits for a link: any
/// number of transfers run at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Latency {
    /// As long between any two ranks.
    Uniform(Duration),
    /// By sender, then by receiver.
    ByPair(Vec<Vec<Duration>>),
}

impl Latency {
    /// Transfers that take no time.
    pub const NONE: Self = Self::Uniform(Duration::ZERO);

    /// From one rank to another; both have been checked. Nothing within a rank.
    pub(crate) fn between(&self, from: PipelineRank, to: PipelineRank) -> Duration {
        match self {
            _ if from == to => Duration::ZERO,
            Self::Uniform(latency) => *latency,
            Self::ByPair(rows) => rows[from.0 as usize][to.0 as usize],
        }
    }

    pub(crate) fn check(&self, num_ranks: usize) -> Result<(), SimulationError> {
        let Self::ByPair(rows) = self else {
            return Ok(());
        };
        let lengths = std::iter::once(rows.len()).chain(rows.iter().map(Vec::len));
        match lengths.into_iter().find(|length| *length != num_ranks) {
            None => Ok(()),
            Some(given) => Err(SimulationError::Latencies {
                given,
                needed: num_ranks,
            }),
        }
    }
}
