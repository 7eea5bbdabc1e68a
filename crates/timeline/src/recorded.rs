//! The order in which a recorded step ran, as a program that other steps can be run by.

use std::collections::{BTreeMap, BTreeSet};

use shardwright_core::{MicrobatchId, StageId};
use shardwright_schedule::{Action, ActionKind, Program, ProgramError};

use crate::record::{Phase, Record, RecordKind};
use crate::timeline::{Timeline, TraceError};

/// A step whose order is no program.
#[derive(Debug, thiserror::Error)]
pub enum RecordedError {
    /// There is no such step.
    #[error(transparent)]
    Step(#[from] TraceError),
    /// There is no step at all.
    #[error("the trace has no steps")]
    Empty,
    /// Something is missing.
    #[error(
        "{lost} records were overwritten before they were taken: the order is not known in full"
    )]
    Lost {
        /// How many records.
        lost: u64,
    },
    /// It is not one pipeline.
    #[error("step functions ran on ranks {roots:?}; allowed is one rank, the root of one pipeline")]
    Roots {
        /// Where step functions ran.
        roots: Vec<u32>,
    },
    /// The model's calls differ between microbatches.
    #[error(
        "rank {rank} ran {found} forwards for microbatch {microbatch} and {expected} for microbatch {first}; a program \
         needs the same stages for every microbatch"
    )]
    Uneven {
        /// The rank.
        rank: u32,
        /// The microbatch.
        microbatch: u32,
        /// How many forwards it had there.
        found: usize,
        /// The microbatch that it is compared with.
        first: u32,
        /// How many forwards that one had.
        expected: usize,
    },
    /// A backward without a forward.
    #[error("rank {rank} ran a backward of microbatch {microbatch} without a forward before it")]
    NoForward {
        /// The rank.
        rank: u32,
        /// The microbatch.
        microbatch: u32,
    },
    /// The order is no program.
    #[error("the order of the step is no program: {0}")]
    NoProgram(#[from] ProgramError),
}

/// A task when it first had the turn.
struct Task<'a> {
    start_ns: u64,
    kind: ActionKind,
    microbatch: u32,
    module: Option<&'a str>,
}

/// Which of its rank's stages a task is of, counted from 0 in the order of the first microbatch's forwards.
struct Placed {
    start_ns: u64,
    slot: usize,
    kind: ActionKind,
    microbatch: u32,
}

impl Timeline {
    /// The order of a step (the fastest one, if none is given) as a program: the first stage is what the step
    /// function runs before its first call, each forward that another rank serves is a stage of that rank.
    ///
    /// # Errors
    ///
    /// The trace is not whole, has several pipelines, or the step's order is no program: its calls differ between
    /// microbatches, or some have no backward.
    pub fn program(&self, step: Option<u64>) -> Result<Program, RecordedError> {
        if self.lost() > 0 {
            return Err(RecordedError::Lost { lost: self.lost() });
        }
        let fastest = self.intervals().into_iter();
        let fastest = fastest.min_by_key(|(_, interval)| interval.end_ns - interval.start_ns);
        let step = self.step_or_newest(step.or(fastest.map(|(step, _)| step)))?;
        let step = step.ok_or(RecordedError::Empty)?;
        let records: Vec<_> = self
            .records()
            .iter()
            .filter(|record| record.step == step)
            .collect();
        let of_kind = |kind| records.iter().filter(move |record| record.kind == kind);
        let roots: BTreeSet<_> = of_kind(RecordKind::Root)
            .map(|record| record.rank)
            .collect();
        let roots: Vec<_> = roots.into_iter().collect();
        let [root] = roots[..] else {
            return Err(RecordedError::Roots { roots });
        };
        let serving: BTreeSet<_> = of_kind(RecordKind::Forward)
            .map(|record| record.rank)
            .collect();
        let mut ranks = vec![(root, root_tasks(&records, root))];
        for rank in serving.into_iter().filter(|rank| *rank != root) {
            ranks.push((rank, served_tasks(&records, rank)));
        }
        let placed = ranks.iter().map(|(rank, tasks)| place(*rank, tasks));
        let placed: Vec<Vec<Placed>> = placed.collect::<Result<_, _>>()?;
        let (first, stages) = stages(&placed);
        let program = placed.iter().enumerate().map(|(place, tasks)| {
            let actions = tasks.iter().map(|task| {
                let stage = stages.get(&(place, task.slot)).copied();
                // Other ranks began with a microbatch that this one has not run.
                let missing = || RecordedError::Uneven {
                    rank: ranks[place].0,
                    microbatch: first,
                    found: 0,
                    first: task.microbatch,
                    expected: task.slot + 1,
                };
                Ok::<_, RecordedError>(Action {
                    stage: stage.ok_or_else(missing)?,
                    kind: task.kind,
                    microbatch: MicrobatchId(task.microbatch),
                })
            });
            actions.collect()
        });
        let program = Program::new(program.collect::<Result<_, _>>()?);
        program.validate()?;
        Ok(program)
    }
}

/// Of each microbatch's step function the first turn and the last one of its backward, with the weight gradients that this
/// one has left: what it does between its calls is no stage.
fn root_tasks<'a>(records: &[&'a Record], root: u32) -> Vec<Task<'a>> {
    let mut found: BTreeMap<(u32, ActionKind), Task<'a>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.rank == root) {
        let kind = match (record.kind, record.phase) {
            (RecordKind::Root, Some(Phase::Backward)) => ActionKind::FullBackward,
            (RecordKind::Root, _) => ActionKind::Forward,
            (RecordKind::Weight, _) if record.module.is_none() => ActionKind::WeightGradient,
            _ => continue,
        };
        let Some(task) = task(record, kind) else {
            continue;
        };
        let key = (task.microbatch, kind);
        if kind != ActionKind::Forward || !found.contains_key(&key) {
            found.insert(key, task);
        }
    }
    sorted(found.into_values())
}

/// The first turns of what a rank served, and weight gradients left behind.
fn served_tasks<'a>(records: &[&'a Record], rank: u32) -> Vec<Task<'a>> {
    let mut seen = BTreeSet::new();
    let tasks = records.iter().filter(|record| record.rank == rank);
    sorted(tasks.filter_map(|record| {
        let kind = match record.kind {
            RecordKind::Forward => ActionKind::Forward,
            RecordKind::Backward => ActionKind::FullBackward,
            RecordKind::Weight => return task(record, ActionKind::WeightGradient),
            _ => return None,
        };
        let is_first = seen.insert((record.kind, record.peer, record.request));
        is_first.then(|| task(record, kind)).flatten()
    }))
}

fn task(record: &Record, kind: ActionKind) -> Option<Task<'_>> {
    Some(Task {
        start_ns: record.start_ns,
        kind,
        microbatch: record.microbatch?,
        module: record.module.as_deref(),
    })
}

fn sorted<'a>(tasks: impl Iterator<Item = Task<'a>>) -> Vec<Task<'a>> {
    let mut tasks: Vec<_> = tasks.collect();
    tasks.sort_by_key(|task| task.start_ns);
    tasks
}

/// Which stage of its rank each task is of. A backward is of the module's newest forward whose backward has not been;
/// weight gradients are of its oldest backward that has left some.
fn place(rank: u32, tasks: &[Task<'_>]) -> Result<Vec<Placed>, RecordedError> {
    #[derive(Default)]
    struct Microbatch<'a> {
        num_forwards: usize,
        open: Vec<(usize, Option<&'a str>)>,
        /// Backwards by their place in the result.
        ran: Vec<(usize, Option<&'a str>)>,
    }
    let mut microbatches: BTreeMap<u32, Microbatch<'_>> = BTreeMap::new();
    let mut placed: Vec<Placed> = Vec::new();
    for task in tasks {
        let state = microbatches.entry(task.microbatch).or_default();
        let missing = RecordedError::NoForward {
            rank,
            microbatch: task.microbatch,
        };
        let slot = match task.kind {
            ActionKind::Forward => {
                state.open.push((state.num_forwards, task.module));
                state.num_forwards += 1;
                state.num_forwards - 1
            }
            ActionKind::WeightGradient => {
                let found = state
                    .ran
                    .iter()
                    .position(|(_, module)| *module == task.module);
                let (backward, _) = state.ran.remove(found.ok_or(missing)?);
                placed[backward].kind = ActionKind::InputGradient;
                placed[backward].slot
            }
            ActionKind::FullBackward | ActionKind::InputGradient => {
                let found = state
                    .open
                    .iter()
                    .rposition(|(_, module)| *module == task.module);
                let (slot, module) = state.open.remove(found.ok_or(missing)?);
                state.ran.push((placed.len(), module));
                slot
            }
        };
        placed.push(Placed {
            start_ns: task.start_ns,
            slot,
            kind: task.kind,
            microbatch: task.microbatch,
        });
    }
    let mut counts = microbatches
        .iter()
        .map(|(number, state)| (*number, state.num_forwards));
    if let Some((first, expected)) = counts.next()
        && let Some((microbatch, found)) = counts.find(|(_, found)| *found != expected)
    {
        return Err(RecordedError::Uneven {
            rank,
            microbatch,
            found,
            first,
            expected,
        });
    }
    Ok(placed)
}

/// The first microbatch; and by rank and its own count of stages the stages of the pipeline: in the order of that
/// microbatch's forwards.
fn stages(placed: &[Vec<Placed>]) -> (u32, BTreeMap<(usize, usize), StageId>) {
    let all = placed.iter().flatten().map(|task| task.microbatch);
    let first = all.min().unwrap_or_default();
    let mut order: Vec<_> = Vec::new();
    for (rank, tasks) in placed.iter().enumerate() {
        let tasks = tasks.iter().filter(|task| task.microbatch == first);
        let forwards = tasks.filter(|task| task.kind == ActionKind::Forward);
        // The root's stage is the first one, whatever a clock of another host says.
        order.extend(forwards.map(|task| (rank != 0, task.start_ns, rank, task.slot)));
    }
    order.sort_unstable();
    let order = order.into_iter().enumerate();
    let stages = order
        .map(|(stage, (_, _, rank, slot))| ((rank, slot), StageId(stage as u32)))
        .collect();
    (first, stages)
}
