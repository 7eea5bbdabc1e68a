//! `simulate`: how long a step takes under a schedule, from costs in nanoseconds.

use std::num::NonZeroU32;
use std::time::Duration;

use pyo3::prelude::*;
use shardwright_core::PipelineRank;
use shardwright_schedule::{Program, Reference, Shape};
use shardwright_simulate::{
    Chain, Control, Latency, SimulatedStep, StageCosts, StepCosts, simulate_program,
    simulate_schedule,
};

use crate::error::argument_error;

/// A simulated step; `dict`s in Python.
#[derive(IntoPyObject)]
pub(crate) struct Step {
    makespan_ns: u64,
    ranks: Vec<RankUse>,
    tasks: Vec<Task>,
}

#[derive(IntoPyObject)]
struct RankUse {
    busy_ns: u64,
    idle_ns: u64,
}

#[derive(IntoPyObject)]
struct Task {
    rank: u32,
    stage: u32,
    kind: &'static str,
    microbatch: u32,
    start_ns: u64,
    end_ns: u64,
}

/// Simulate a step of a pipeline, from costs of each stage in nanoseconds.
///
/// Either `program` is given, a text of ours or the compute-only CSV of `torch.distributed.pipelining`;
/// or `schedule`, such as `interleaved(active=4)` or `looped(active=4)`, which is then followed as the execution
/// server does, with the model as a chain of `segments`: the ranks of its parts in the order of the forward. Stages of
/// the costs are then those segments. `weight_gradient_ns` is the part of `backward_ns` that waits where
/// a backward is split; half of it if not given. `control` says how it goes from one rank to another:
/// `star`, by way of the root, `direct`, or `predicted`, where the root also asks for the backward before
/// the forward is over (static mode with the loss on another rank); `root_turn_ns` is how long the root has
/// the turn when it only hands control on, `root_backward_ns` how long between the last forward and the first backward.
///
/// Returns `makespan_ns`, for each of the `ranks` its `busy_ns` and `idle_ns`, and the `tasks`, each with
/// `rank`, `stage`, `kind`, `microbatch`, `start_ns` and `end_ns`.
///
/// Raises `ConfigError` for a bad argument, and for a program that is incomplete or in which ranks wait
/// for each other.
#[pyfunction]
#[pyo3(signature = (*, forward_ns: "list[int]", backward_ns: "list[int]",
    weight_gradient_ns: "list[int] | None" = None, program=None, schedule=None, segments: "list[int] | None" = None,
    microbatches=None, latency_ns=0, control="star", root_turn_ns=0, root_backward_ns=0) -> "dict[str, Any]")]
#[expect(
    clippy::too_many_arguments,
    reason = "keyword arguments of one function in Python"
)]
pub(crate) fn simulate(
    py: Python<'_>,
    forward_ns: Vec<u64>,
    backward_ns: Vec<u64>,
    weight_gradient_ns: Option<Vec<u64>>,
    program: Option<&str>,
    schedule: Option<&str>,
    segments: Option<Vec<u32>>,
    microbatches: Option<u32>,
    latency_ns: u64,
    control: &str,
    root_turn_ns: u64,
    root_backward_ns: u64,
) -> PyResult<Step> {
    let costs = costs(forward_ns, backward_ns, weight_gradient_ns)?;
    let latency = Latency::Uniform(Duration::from_nanos(latency_ns));
    let outcome = match (program, schedule, segments, microbatches) {
        (Some(program), None, None, None) => py.detach(|| {
            let program = Program::read(program).map_err(argument_error)?;
            simulate_program(&program, &costs, &latency).map_err(argument_error)
        }),
        (None, Some(schedule), Some(segments), Some(microbatches)) => {
            let schedule = schedule.parse().map_err(argument_error)?;
            let chain = Chain {
                segments: segments.into_iter().map(PipelineRank).collect(),
                control: parse_control(control)?,
                root_turn: Duration::from_nanos(root_turn_ns),
                root_backward: Duration::from_nanos(root_backward_ns),
            };
            let microbatches = positive("microbatches", microbatches)?;
            py.detach(|| {
                simulate_schedule(&schedule, &chain, microbatches, &costs, &latency)
                    .map_err(argument_error)
            })
        }
        _ => Err(argument_error(
            "allowed are program alone, or schedule with segments and microbatches",
        )),
    }?;
    Ok(step(&outcome))
}

/// The textbook form of the schedule `simple`, `interleaved` or `zero_bubble`, as the text of a program.
#[pyfunction]
#[pyo3(signature = (schedule, *, ranks, microbatches, stages_per_rank=1))]
pub(crate) fn reference_program(
    schedule: &str,
    ranks: u32,
    microbatches: u32,
    stages_per_rank: u32,
) -> PyResult<String> {
    let reference: Reference = schedule.parse().map_err(argument_error)?;
    let shape = Shape {
        num_ranks: positive("ranks", ranks)?,
        num_microbatches: positive("microbatches", microbatches)?,
        stages_per_rank: positive("stages_per_rank", stages_per_rank)?,
    };
    let program = reference.program(shape).map_err(argument_error)?;
    Ok(program.to_string())
}

fn costs(forward: Vec<u64>, backward: Vec<u64>, weight: Option<Vec<u64>>) -> PyResult<StepCosts> {
    let weight = weight.unwrap_or_else(|| backward.iter().map(|backward| backward / 2).collect());
    let numbers = [forward.len(), backward.len(), weight.len()];
    if numbers != [numbers[0]; 3] {
        return Err(argument_error(format!(
            "forward_ns, backward_ns and weight_gradient_ns have {numbers:?} values; allowed is one for each stage"
        )));
    }
    let stages = forward.into_iter().zip(backward).zip(weight);
    let stages = stages.map(|((forward, backward), weight)| {
        let input = backward.checked_sub(weight).ok_or_else(|| {
            argument_error(format!(
                "weight_gradient_ns has {weight} where backward_ns, of which it is a part, has {backward}"
            ))
        })?;
        let [forward, input, weight] = [forward, input, weight].map(Duration::from_nanos);
        Ok(StageCosts::split(forward, input, weight))
    });
    stages.collect::<PyResult<_>>().map(StepCosts::Same)
}

pub(crate) fn parse_control(text: &str) -> PyResult<Control> {
    match text {
        "star" => Ok(Control::Star),
        "direct" => Ok(Control::Direct),
        "predicted" => Ok(Control::Predicted),
        other => Err(argument_error(format!(
            "control is {other:?}; allowed are \"star\", \"direct\" and \"predicted\""
        ))),
    }
}

fn positive(name: &str, number: u32) -> PyResult<NonZeroU32> {
    NonZeroU32::new(number)
        .ok_or_else(|| argument_error(format!("{name} is 0; allowed is 1 or more")))
}

fn step(outcome: &SimulatedStep) -> Step {
    let ranks = outcome.ranks.iter().map(|rank| RankUse {
        busy_ns: nanoseconds(rank.busy),
        idle_ns: nanoseconds(rank.idle),
    });
    let tasks = outcome.tasks.iter().map(|task| Task {
        rank: task.rank.0,
        stage: task.stage.0,
        kind: task.kind.name(),
        microbatch: task.microbatch.0,
        start_ns: nanoseconds(task.start),
        end_ns: nanoseconds(task.end),
    });
    Step {
        makespan_ns: nanoseconds(outcome.makespan),
        ranks: ranks.collect(),
        tasks: tasks.collect(),
    }
}

/// Times of more than 584 years are those.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
