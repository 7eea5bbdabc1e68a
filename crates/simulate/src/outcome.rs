//! What a simulation finds.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shardwright_core::{MicrobatchId, PipelineRank, StageId};
use shardwright_schedule::ActionKind;

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaskKind {
    /// Work of a stage.
    Action(ActionKind),
    /// The root's own code, which hands control on to a stage.
    Turn,
}

impl TaskKind {
    /// Its name in data.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Action(ActionKind::Forward) => "forward",
            Self::Action(ActionKind::FullBackward) => "backward",
            Self::Action(ActionKind::InputGradient) => "input_gradient",
            Self::Action(ActionKind::WeightGradient) => "weight_gradient",
            Self::Turn => "turn",
        }
    }
}

/// When a rank did something. Times count from the start of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskSpan {
    /// The rank.
    pub rank: PipelineRank,
    /// Of which stage (or segment); for a turn, the one that control goes to.
    pub stage: StageId,
    /// What.
    pub kind: TaskKind,
    /// For which microbatch.
    pub microbatch: MicrobatchId,
    /// Its start.
    pub start: Duration,
    /// Its end.
    pub end: Duration,
}

impl TaskSpan {
    /// How long it takes.
    pub fn duration(&self) -> Duration {
        self.end
            .checked_sub(self.start)
            .expect("a task ends after its start")
    }
}

/// How much of a step a rank uses. Both together are the makespan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankUse {
    /// For how long it has a task.
    pub busy: Duration,
    /// For how long it has none.
    pub idle: Duration,
}

/// A simulated step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedStep {
    /// From the start of the first task to the end of the last.
    pub makespan: Duration,
    /// By rank.
    pub ranks: Vec<RankUse>,
    /// In the order of their starts; of those that start together, the lower rank's first.
    pub tasks: Vec<TaskSpan>,
}

impl SimulatedStep {
    /// Of tasks that are in order on each rank.
    pub(crate) fn new(num_ranks: usize, mut tasks: Vec<TaskSpan>) -> Self {
        tasks.sort_by_key(|task| (task.start, task.rank));
        let ends = tasks.iter().map(|task| task.end);
        let makespan = ends.max().unwrap_or_default();
        let mut ranks = vec![RankUse::default(); num_ranks];
        for task in &tasks {
            ranks[task.rank.0 as usize].busy += task.duration();
        }
        for rank in &mut ranks {
            rank.idle = makespan
                .checked_sub(rank.busy)
                .expect("a rank's tasks follow one another");
        }
        Self {
            makespan,
            ranks,
            tasks,
        }
    }

    /// How many microbatches each rank has in flight at most: begun on it, with work on it still to do.
    pub fn most_in_flight(&self) -> Vec<u32> {
        let actions = self.tasks.iter().filter(|task| task.kind != TaskKind::Turn);
        let mut last = BTreeMap::new();
        for (place, task) in actions.clone().enumerate() {
            last.insert((task.rank, task.microbatch), place);
        }
        let mut most = vec![0_u32; self.ranks.len()];
        let mut open = vec![BTreeSet::new(); self.ranks.len()];
        for (place, task) in actions.enumerate() {
            let rank = task.rank.0 as usize;
            open[rank].insert(task.microbatch);
            most[rank] = most[rank].max(open[rank].len() as u32);
            if last[&(task.rank, task.microbatch)] == place {
                open[rank].remove(&task.microbatch);
            }
        }
        most
    }

    /// Which part of all ranks' time nobody uses, from 0 to 1.
    pub fn bubble(&self) -> f64 {
        let idle = self.ranks.iter().map(|rank| rank.idle.as_nanos()).sum();
        fraction(idle, self.makespan.as_nanos() * self.ranks.len() as u128)
    }
}

impl RankUse {
    /// Which part of the rank's time is idle, from 0 to 1.
    pub fn bubble(&self) -> f64 {
        fraction(
            self.idle.as_nanos(),
            self.busy.as_nanos() + self.idle.as_nanos(),
        )
    }
}

/// Of nanoseconds: those of all ranks together may be more than a duration holds.
#[expect(
    clippy::cast_precision_loss,
    reason = "a share needs no more than 53 bits"
)]
fn fraction(part: u128, whole: u128) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}
