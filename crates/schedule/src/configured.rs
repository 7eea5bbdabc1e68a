//! The schedule that a configuration asks for.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;

use shardwright_core::config::{Pipeline, PipelineName};
use shardwright_core::{Config, ConfigError, MicrobatchId, PipelineRank, StageId};

use crate::list::{RootOrder, RootStart};
use crate::policy::Schedule;
use crate::program::{ActionKind, Complete, Program};

/// The schedule that a checked configuration asks for. With `auto` it is the one that the first steps run with.
///
/// # Errors
///
/// Refuses a program that does not fit the job, or cannot be run.
pub fn configured(config: &Config) -> Result<Schedule, ConfigError> {
    let mut active = config.active_microbatches;
    if config.chooses_active_microbatches() {
        // Until then, the fewest that may keep all ranks busy.
        active = active.min(config.pipeline_parallel_degree);
    }
    let active = NonZeroU32::new(active).unwrap_or(NonZeroU32::MIN);
    Ok(match &config.pipeline {
        Pipeline::Named(PipelineName::Auto | PipelineName::OnlyForward) => {
            Schedule::Interleaved { active }
        }
        Pipeline::Named(name) => Schedule::of_name(name.name(), active)
            .ok_or_else(|| refused(&format!("{:?} is no policy", name.name())))?,
        Pipeline::List(entries) => {
            let entries = entries.iter().map(|(microbatch, phase)| RootStart {
                microbatch: MicrobatchId(*microbatch),
                phase: *phase,
            });
            let order = RootOrder::new(entries.collect()).map_err(|error| refused(&error))?;
            Schedule::List(Arc::new(order))
        }
        Pipeline::Program(text) => {
            let program: Program = text.parse().map_err(|error| refused(&error))?;
            check_program(&program, config)?;
            Schedule::Program(Arc::new(program))
        }
    })
}

fn refused(why: &impl ToString) -> ConfigError {
    ConfigError::Program {
        why: why.to_string(),
    }
}

fn check_program(program: &Program, config: &Config) -> Result<(), ConfigError> {
    let ranks = program.ranks().len();
    let degree = config.pipeline_parallel_degree;
    if ranks != degree as usize {
        return Err(refused(&format!(
            "it has {ranks} ranks; allowed: {degree}, as many as \"pipeline_parallel_degree\""
        )));
    }
    if let Some(rank) = program.ranks().iter().position(Vec::is_empty) {
        return Err(refused(&format!(
            "rank {rank} has no actions; allowed: every rank has at least one stage"
        )));
    }
    let complete = Complete::new(program).map_err(|error| refused(&error))?;
    let microbatches = complete.num_microbatches();
    if microbatches != config.microbatches as usize {
        return Err(refused(&format!(
            "it has {microbatches} microbatches; allowed: {}, the value of \"microbatches\"",
            config.microbatches
        )));
    }
    let first = complete.rank(StageId(0));
    if first != PipelineRank(0) {
        return Err(refused(&format!(
            "stage 0 is on rank {first}; allowed: rank 0, the root, which runs the step function"
        )));
    }
    complete
        .walk(|_, _| {})
        .map_err(|circle| refused(&circle))?;
    let most = most_in_flight(program);
    let active = config.active_microbatches;
    if config.active_microbatches_given() && active < most {
        return Err(ConfigError::ActiveMicrobatchesExceeded {
            active,
            needed: most,
        });
    }
    Ok(())
}

/// How many microbatches the root has in flight at most: begun, and not done with.
fn most_in_flight(program: &Program) -> u32 {
    let root = program.ranks().first().map_or(&[][..], Vec::as_slice);
    let is_first = |stage| stage == StageId(0);
    let mut in_flight = BTreeSet::new();
    let mut most = 0;
    for action in root.iter().filter(|action| is_first(action.stage)) {
        match action.kind {
            ActionKind::Forward => in_flight.insert(action.microbatch),
            ActionKind::InputGradient => false,
            ActionKind::FullBackward | ActionKind::WeightGradient => {
                in_flight.remove(&action.microbatch)
            }
        };
        most = most.max(in_flight.len());
    }
    most as u32
}
