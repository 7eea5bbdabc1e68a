//! Which schedule is the fastest for tasks that have been measured. A pure function of the measurements.

use std::num::NonZeroU32;
use std::time::Duration;

use shardwright_core::PipelineRank;
use shardwright_schedule::Schedule;

use crate::costs::{Latency, StageCosts, StepCosts};
use crate::error::SimulationError;
use crate::policy::simulate_schedule;
use crate::route::{Chain, Control};

/// A schedule has to be faster by more than this part than one that is preferred to it: simulations are no more exact,
/// and to split backwards costs something that they do not know.
pub const MARGIN: f64 = 0.03;

/// What one rank does for one microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankTimes {
    /// Its forward work.
    pub forward: Duration,
    /// Its backward work.
    pub backward: Duration,
    /// How many forward requests it serves; nothing on the root.
    pub visits: u32,
}

/// What one rank did in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTimes {
    /// The step.
    pub step: u64,
    /// Nanoseconds of forward work.
    pub forward: u64,
    /// Nanoseconds of backward work.
    pub backward: u64,
    /// From the beginning of the step's tasks to their end, and the commit.
    pub seconds: f64,
    /// How many forward requests it served.
    pub visits: u64,
}

/// Training steps that run before a choice; those that divide a model, fail, or run nothing backward do not count.
const TRIAL_STEPS: usize = 3;
/// Of them, the first ones that are not measured: threads start in them, and memory is set aside.
const WARM_UP_STEPS: usize = 1;

/// What the steps before a choice took.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// The steps that were measured.
    pub steps: Vec<u64>,
    /// How long they took on average, on the root.
    pub seconds: f64,
    /// The mean of each rank, for a microbatch.
    pub ranks: Vec<RankTimes>,
}

impl Trial {
    /// From what every rank of the pipeline measured, the root's first; `None` while that is not enough. A step counts
    /// if all ranks have it and one ran backward.
    pub fn of(ranks: &[Vec<StepTimes>], num_microbatches: NonZeroU32) -> Option<Self> {
        let root = ranks.first()?;
        let at = |step| -> Option<Vec<&StepTimes>> {
            let of_rank = |times: &'_ Vec<StepTimes>| times.iter().position(|one| one.step == step);
            ranks
                .iter()
                .map(|times| of_rank(times).map(|place| &times[place]))
                .collect()
        };
        let mut shared: Vec<_> = root.iter().filter_map(|times| at(times.step)).collect();
        shared.retain(|times| times.iter().any(|one| one.backward > 0));
        shared.sort_by_key(|times| times[0].step);
        if shared.len() < TRIAL_STEPS {
            return None;
        }
        let measured = &shared[WARM_UP_STEPS..];
        let number = u32::try_from(measured.len()).unwrap_or(u32::MAX);
        let tasks = u64::from(number) * u64::from(num_microbatches.get());
        let sum = |rank: usize, of: fn(&StepTimes) -> u64| -> u64 {
            measured.iter().map(|times| of(times[rank])).sum()
        };
        let ranks = (0..ranks.len()).map(|rank| RankTimes {
            forward: Duration::from_nanos(sum(rank, |times| times.forward) / tasks),
            backward: Duration::from_nanos(sum(rank, |times| times.backward) / tasks),
            visits: u32::try_from((sum(rank, |times| times.visits) + tasks / 2) / tasks)
                .unwrap_or(u32::MAX),
        });
        let seconds: f64 = measured.iter().map(|times| times[0].seconds).sum();
        Some(Self {
            steps: measured.iter().map(|times| times[0].step).collect(),
            seconds: seconds / f64::from(number),
            ranks: ranks.collect(),
        })
    }
}

/// The fastest schedule, and how long the step takes under each one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleChoice {
    /// The fastest.
    pub schedule: Schedule,
    /// Every candidate with its simulated time, in the order of preference.
    pub candidates: Vec<(Schedule, Duration)>,
}

/// Chooses among the built-in schedules with at most `active` microbatches in flight.
///
/// Of those within [`MARGIN`] of the fastest, `interleaved` with the fewest microbatches in flight goes first, then
/// `looped`, which is tried only where some rank is visited more than once, then `simple`, which is tried only where
/// all microbatches may be in flight, then `zero_bubble`. The model counts as a
/// chain that goes round the ranks as often as the one that is visited most; half of a backward counts as gradients
/// of weights, and messages take no time.
pub fn choose_schedule(
    ranks: &[RankTimes],
    num_microbatches: NonZeroU32,
    active: NonZeroU32,
    control: Control,
) -> Result<ScheduleChoice, SimulationError> {
    let half = |times: &RankTimes| {
        let input = times.backward / 2;
        let weight = times.backward.saturating_sub(input);
        (
            StageCosts::split(times.forward, input, weight),
            times.visits,
        )
    };
    let (chain, costs) = chain_of(&ranks.iter().map(half).collect::<Vec<_>>(), control);
    let most = active.min(num_microbatches).get();
    let numbers = || (1..=most).filter_map(NonZeroU32::new);
    let interleaved = numbers().map(|active| Schedule::Interleaved { active });
    let rounds = ranks.iter().any(|rank| rank.visits > 1);
    let looped = numbers().filter(|_| rounds);
    let looped = looped.map(|active| Schedule::Looped { active });
    let simple = (active >= num_microbatches).then_some(Schedule::Simple);
    let zero_bubble = numbers().map(|active| Schedule::ZeroBubble { active });
    let simulate = |schedule: Schedule| {
        simulate_schedule(&schedule, &chain, num_microbatches, &costs, &Latency::NONE)
            .map(|outcome| (schedule, outcome.makespan))
    };
    let candidates = interleaved.chain(looped).chain(simple).chain(zero_bubble);
    let candidates: Vec<_> = candidates.map(simulate).collect::<Result<_, _>>()?;
    let makespans = candidates.iter().map(|(_, makespan)| *makespan);
    let fastest = makespans.min().unwrap_or_default();
    let good_enough = fastest.mul_f64(1.0 + MARGIN);
    let schedule = candidates
        .iter()
        .find(|(_, makespan)| *makespan <= good_enough)
        .map_or(Schedule::Interleaved { active }, |(schedule, _)| {
            schedule.clone()
        });
    Ok(ScheduleChoice {
        schedule,
        candidates,
    })
}

/// A model that goes round the ranks as often as the one that is visited most, from what each rank does for a microbatch
/// and how often it is visited for that.
pub(crate) fn chain_of(ranks: &[(StageCosts, u32)], control: Control) -> (Chain, StepCosts) {
    let peers = ranks.iter().skip(1);
    let rounds = peers.map(|(_, visits)| *visits).max().unwrap_or(1).max(1);
    let mut segments = Vec::new();
    let mut costs = Vec::new();
    for round in 0..rounds {
        for (index, (of_rank, visits)) in ranks.iter().enumerate() {
            let visits = if index == 0 { rounds } else { (*visits).max(1) };
            if round < visits {
                segments.push(PipelineRank(index as u32));
                costs.push(StageCosts {
                    forward: of_rank.forward / visits,
                    full_backward: of_rank.full_backward / visits,
                    input_gradient: of_rank.input_gradient / visits,
                    weight_gradient: of_rank.weight_gradient / visits,
                });
            }
        }
    }
    let chain = Chain {
        segments,
        control,
        root_turn: Duration::ZERO,
        root_backward: Duration::ZERO,
    };
    (chain, StepCosts::Same(costs))
}
