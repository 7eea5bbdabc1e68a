//! `shardwright simulate`: how long a step takes under a schedule, and which rank idles when.

mod duration;
mod json;
mod picture;

#[cfg(test)]
mod tests;

use std::io;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use shardwright_core::PipelineRank;
use shardwright_schedule::{
    Complete, ParseProgramError, Program, Reference, ReferenceError, Schedule, Shape,
};
use shardwright_simulate::{
    Chain, Control, Latency, SimulatedStep, SimulationError, StageCosts, StepCosts,
    simulate_program, simulate_schedule,
};

use crate::Finished;
use crate::misuse::line;

/// What `simulate` runs, and how long its parts take.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(group = ArgGroup::new("what").required(true).args(["program", "schedule", "policy"]))]
pub struct SimulateArguments {
    /// Run this program: our text form, or the compute-only CSV of `torch.distributed.pipelining`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ranks", "stages_per_rank", "microbatches", "segments", "control"])]
    program: Option<PathBuf>,
    /// Run the textbook form of a schedule: `simple`, `interleaved` or `zero_bubble`.
    #[arg(long, value_name = "NAME", requires = "ranks", requires = "microbatches", conflicts_with_all = ["segments", "control"])]
    schedule: Option<Reference>,
    /// Do what the execution server does under a schedule, such as `interleaved(active=4)` or `looped(active=8)`.
    #[arg(long, value_name = "SCHEDULE", requires = "segments", requires = "microbatches", conflicts_with_all = ["ranks", "stages_per_rank"])]
    policy: Option<Schedule>,
    /// How many ranks the pipeline has.
    #[arg(long, value_name = "NUMBER")]
    ranks: Option<NonZeroU32>,
    /// How many stages each rank has.
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    stages_per_rank: NonZeroU32,
    /// How many microbatches a step has.
    #[arg(long, value_name = "NUMBER")]
    microbatches: Option<NonZeroU32>,
    /// The ranks of the model's parts in the order of the forward, such as 0,1,0.
    #[arg(long, value_name = "RANKS", value_delimiter = ',')]
    segments: Vec<u32>,
    /// How control goes between ranks other than the root.
    #[arg(long, value_enum, default_value_t = ControlArgument::Star)]
    control: ControlArgument,
    /// How long a forward takes: one time, or one for each stage with commas between. Times are
    /// nanoseconds, or have a unit: 40ms, 5us.
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = duration::parse, default_value = "1ms")]
    forward: Vec<Duration>,
    /// How long a whole backward takes.
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = duration::parse, default_value = "2ms")]
    backward: Vec<Duration>,
    /// How much of the backward goes to weight gradients, where it is split; half of it otherwise.
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = duration::parse)]
    weight: Vec<Duration>,
    /// How long it takes until what one rank has made is on another.
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "0")]
    latency: Duration,
    /// Write one JSON object.
    #[arg(long)]
    json: bool,
}

/// See [`Control`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ControlArgument {
    /// By way of the root, which needs its turn for it.
    Star,
    /// From one to the next.
    Direct,
    /// From one to the next, and the last one begins the backward by itself.
    Predicted,
}

/// Why nothing was simulated.
#[derive(Debug, thiserror::Error)]
enum Misuse {
    #[error("cannot read {path:?}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path:?}: {source}")]
    NoProgram {
        path: PathBuf,
        source: ParseProgramError,
    },
    #[error(transparent)]
    NoReference(#[from] ReferenceError),
    #[error("--{name} has {given} times; allowed are one, or one for each of the {needed} stages")]
    NumTimes {
        name: &'static str,
        given: usize,
        needed: usize,
    },
    #[error("--weight {weight:?} is more than --backward {backward:?}, of which it is a part")]
    WeightTooLong {
        weight: Duration,
        backward: Duration,
    },
    #[error(
        "{ranks} ranks or segments with {microbatches} microbatches are too many to be simulated here; allowed are {MOST_TASKS} \
         forwards in all"
    )]
    TooLarge { ranks: u64, microbatches: u32 },
    #[error(transparent)]
    Simulation(SimulationError),
}

/// The most forwards of a step that is simulated: some seconds of work.
const MOST_TASKS: u64 = 1 << 16;

/// Refuses what would take minutes, or all memory.
fn check_size(ranks: u64, microbatches: NonZeroU32) -> Result<(), Misuse> {
    let microbatches = microbatches.get();
    if ranks.saturating_mul(microbatches.into()) > MOST_TASKS {
        return Err(Misuse::TooLarge {
            ranks,
            microbatches,
        });
    }
    Ok(())
}

/// Runs the verb. `read` gets the text of a file.
pub fn simulate(
    arguments: &SimulateArguments,
    read: impl FnOnce(&Path) -> io::Result<String>,
) -> Finished {
    match run(arguments, read) {
        Ok(outcome) => Finished {
            output: if arguments.json {
                json::outcome(&outcome)
            } else {
                picture::outcome(&outcome)
            },
            ..Finished::default()
        },
        // The program was understood, and this is what is wrong with it.
        Err(Misuse::Simulation(SimulationError::Program(error))) => Finished {
            status: 1,
            output: if arguments.json {
                json::problem(&error)
            } else {
                format!("{error}\n")
            },
            ..Finished::default()
        },
        Err(misuse) => Finished {
            status: 2,
            complaint: line(&format!("error: {misuse}")),
            ..Finished::default()
        },
    }
}

fn run(
    arguments: &SimulateArguments,
    read: impl FnOnce(&Path) -> io::Result<String>,
) -> Result<SimulatedStep, Misuse> {
    let latency = Latency::Uniform(arguments.latency);
    if let Some(schedule) = &arguments.policy {
        let chain = Chain {
            segments: arguments
                .segments
                .iter()
                .copied()
                .map(PipelineRank)
                .collect(),
            control: match arguments.control {
                ControlArgument::Star => Control::Star,
                ControlArgument::Direct => Control::Direct,
                ControlArgument::Predicted => Control::Predicted,
            },
            root_turn: Duration::ZERO,
            root_backward: Duration::ZERO,
        };
        let costs = costs(arguments, chain.segments.len())?;
        let microbatches = arguments
            .microbatches
            .expect("a policy requires microbatches");
        check_size(chain.segments.len() as u64, microbatches)?;
        return simulate_schedule(schedule, &chain, microbatches, &costs, &latency)
            .map_err(Misuse::Simulation);
    }
    let program = program(arguments, read)?;
    let num_stages = Complete::new(&program)
        .map_err(|error| Misuse::Simulation(error.into()))?
        .num_stages();
    let costs = costs(arguments, num_stages)?;
    simulate_program(&program, &costs, &latency).map_err(Misuse::Simulation)
}

fn program(
    arguments: &SimulateArguments,
    read: impl FnOnce(&Path) -> io::Result<String>,
) -> Result<Program, Misuse> {
    if let Some(path) = &arguments.program {
        let path = path.clone();
        let text = match read(&path) {
            Ok(text) => text,
            Err(source) => return Err(Misuse::Unreadable { path, source }),
        };
        return Program::read(&text).map_err(|source| Misuse::NoProgram { path, source });
    }
    let reference = arguments.schedule.expect("one of the group is given");
    let shape = Shape {
        num_ranks: arguments.ranks.expect("a schedule requires ranks"),
        num_microbatches: arguments
            .microbatches
            .expect("a schedule requires microbatches"),
        stages_per_rank: arguments.stages_per_rank,
    };
    let stages =
        u64::from(shape.num_ranks.get()).saturating_mul(shape.stages_per_rank.get().into());
    check_size(stages, shape.num_microbatches)?;
    Ok(reference.program(shape)?)
}

fn costs(arguments: &SimulateArguments, num_stages: usize) -> Result<StepCosts, Misuse> {
    let forward = for_stages("forward", &arguments.forward, num_stages)?;
    let backward = for_stages("backward", &arguments.backward, num_stages)?;
    let weight = if arguments.weight.is_empty() {
        backward.iter().map(|backward| *backward / 2).collect()
    } else {
        for_stages("weight", &arguments.weight, num_stages)?
    };
    let stages = forward.into_iter().zip(backward).zip(weight);
    let stages = stages.map(|((forward, backward), weight)| {
        let input = backward
            .checked_sub(weight)
            .ok_or(Misuse::WeightTooLong { weight, backward })?;
        Ok(StageCosts::split(forward, input, weight))
    });
    stages.collect::<Result<_, _>>().map(StepCosts::Same)
}

fn for_stages(
    name: &'static str,
    given: &[Duration],
    num_stages: usize,
) -> Result<Vec<Duration>, Misuse> {
    match given {
        [same] => Ok(vec![*same; num_stages]),
        each if each.len() == num_stages => Ok(each.to_vec()),
        _ => Err(Misuse::NumTimes {
            name,
            given: given.len(),
            needed: num_stages,
        }),
    }
}
