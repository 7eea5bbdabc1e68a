//! A simulated step as one JSON object.

use std::time::Duration;

use serde::Serialize;
use shardwright_schedule::{ProgramError, Wait};
use shardwright_simulate::{RankUse, SimulatedStep, TaskSpan};

#[derive(Serialize)]
struct Step {
    makespan_ns: u64,
    bubble: f64,
    ranks: Vec<Rank>,
    tasks: Vec<Task>,
}

#[derive(Serialize)]
struct Rank {
    busy_ns: u64,
    idle_ns: u64,
    bubble: f64,
}

#[derive(Serialize)]
struct Task {
    rank: u32,
    stage: u32,
    kind: &'static str,
    microbatch: u32,
    start_ns: u64,
    end_ns: u64,
}

#[derive(Serialize)]
struct Problem {
    problem: String,
    /// Empty where the problem is another one.
    deadlock: Vec<Waiting>,
}

#[derive(Serialize)]
struct Waiting {
    rank: u32,
    action: String,
    needs: String,
    of_rank: u32,
}

/// A step that was simulated.
pub(crate) fn outcome(outcome: &SimulatedStep) -> String {
    to_text(&Step {
        makespan_ns: nanoseconds(outcome.makespan),
        bubble: outcome.bubble(),
        ranks: outcome.ranks.iter().map(rank).collect(),
        tasks: outcome.tasks.iter().map(task).collect(),
    })
}

/// A program that cannot be run.
pub(crate) fn problem(error: &ProgramError) -> String {
    let cycle = match error {
        ProgramError::Deadlock(deadlock) => deadlock.cycle.as_slice(),
        _ => &[],
    };
    to_text(&Problem {
        problem: error.to_string(),
        deadlock: cycle.iter().map(waiting).collect(),
    })
}

fn rank(rank: &RankUse) -> Rank {
    Rank {
        busy_ns: nanoseconds(rank.busy),
        idle_ns: nanoseconds(rank.idle),
        bubble: rank.bubble(),
    }
}

fn task(task: &TaskSpan) -> Task {
    Task {
        rank: task.rank.0,
        stage: task.stage.0,
        kind: task.kind.name(),
        microbatch: task.microbatch.0,
        start_ns: nanoseconds(task.start),
        end_ns: nanoseconds(task.end),
    }
}

fn waiting(wait: &Wait) -> Waiting {
    Waiting {
        rank: wait.rank.0,
        action: wait.action.to_string(),
        needs: wait.needs.to_string(),
        of_rank: wait.of.0,
    }
}

/// Times of more than 584 years are those.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn to_text(object: &impl Serialize) -> String {
    let text = serde_json::to_string(object).expect("numbers and text are JSON");
    text + "\n"
}
