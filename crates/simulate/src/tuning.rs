//! How many microbatches are in flight, and which backwards are run in two parts, under a limit on memory. Pure.

use std::num::NonZeroU32;
use std::time::Duration;

use shardwright_schedule::Schedule;

use crate::auto::chain_of;
use crate::costs::{Latency, StageCosts, StepCosts};
use crate::error::SimulationError;
use crate::policy::simulate_splits;
use crate::route::{Chain, Control};

/// A plan may be slower by this part than the fastest one if it holds less.
const MARGIN: f64 = 0.01;
/// More microbatches are not simulated: they would repeat these.
const MOST_MICROBATCHES: u32 = 32;
/// How often the interval that has the latency is halved.
const HALVINGS: u32 = 8;

/// What one rank does for one microbatch, and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankLoad {
    /// How long its tasks take. A whole backward is quicker than its parts by the price of a split.
    pub costs: StageCosts,
    /// How many forward requests it serves; nothing on the root.
    pub visits: u32,
    /// What a microbatch in flight keeps on it, in bytes; 0 if that is not known.
    pub microbatch_bytes: u64,
    /// How many bytes all microbatches in flight on it may keep together, if that is limited.
    pub free_bytes: Option<u64>,
}

impl RankLoad {
    fn allows(&self, in_flight: u32) -> bool {
        let held = self.microbatch_bytes.saturating_mul(in_flight.into());
        self.free_bytes.is_none_or(|free| held <= free)
    }
}

/// How a step runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The schedule, with the number of microbatches in flight.
    pub schedule: Schedule,
    /// By rank: of how many of the last microbatches it runs the backward in two parts.
    pub splits: Vec<u32>,
    /// How long the simulated step takes.
    pub makespan: Duration,
    /// By rank: the most microbatches in flight on it.
    pub in_flight: Vec<u32>,
    /// Whether all ranks stay within their limits.
    pub fits: bool,
}

impl Plan {
    /// What is less in a plan that is preferred among those that are fast enough.
    fn price(&self, ranks: &[RankLoad]) -> (u128, u32, u32, Duration) {
        let held = ranks.iter().zip(&self.in_flight);
        let held =
            held.map(|(rank, number)| u128::from(rank.microbatch_bytes) * u128::from(*number));
        let splits = self.splits.iter().sum();
        (
            held.sum(),
            self.in_flight.iter().sum(),
            splits,
            self.makespan,
        )
    }
}

/// What was chosen, beside what it is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuned {
    /// The plan.
    pub chosen: Plan,
    /// The fastest plan within the limits that splits no backward; without limits if none is within them.
    pub whole: Plan,
    /// As many in flight as allowed, and every backward in two parts; none if they are not split.
    pub all_split: Option<Plan>,
}

/// Chooses a plan with at most `active` microbatches in flight, where each message takes `latency`.
///
/// Of the plans within the limits, those count that are within [`MARGIN`] of the fastest and no slower than the fastest
/// that splits nothing; of them, the one that holds the least, then the one that splits the fewest backwards, and of
/// those of that plan only the ones without which the step would take longer. If no plan is within the limits, it is the
/// one with the least in flight.
pub fn tune(
    ranks: &[RankLoad],
    num_microbatches: NonZeroU32,
    active: NonZeroU32,
    may_split: bool,
    control: Control,
    latency: Duration,
) -> Result<Tuned, SimulationError> {
    let trial = Trial::new(ranks, num_microbatches, control, latency);
    let simulated = trial.num_microbatches;
    let most = active.min(simulated).get();
    let mut numbers: Vec<u32> = std::iter::successors(Some(1), |number| Some(number * 2))
        .take_while(|number| *number < simulated.get() && may_split)
        .collect();
    numbers.insert(0, 0);
    if may_split {
        numbers.push(simulated.get());
    }
    let mut plans = Vec::new();
    for active in (1..=most).filter_map(NonZeroU32::new) {
        for number in &numbers {
            plans.push(trial.plan(active, vec![*number; ranks.len()], may_split)?);
        }
    }
    let all_split = plans.last().filter(|_| may_split).cloned();
    let is_whole = |plan: &&Plan| plan.splits.iter().all(|number| *number == 0);
    let any_fits = plans.iter().any(|plan| plan.fits);
    let allowed = || plans.iter().filter(|plan| plan.fits || !any_fits);
    let by_time = |plan: &&Plan| plan.makespan;
    // The first plan has the fewest in flight and splits nothing: if any fits, it does.
    let whole = allowed().filter(is_whole).min_by_key(by_time);
    let whole = whole.expect("one microbatch may be in flight").clone();
    let chosen = if any_fits {
        let fastest = allowed()
            .map(|plan| plan.makespan)
            .min()
            .unwrap_or_default();
        let enough = fastest.mul_f64(1.0 + MARGIN).min(whole.makespan);
        let good = allowed().filter(|plan| plan.makespan <= enough);
        let best = good.min_by_key(|plan| plan.price(ranks)).unwrap_or(&whole);
        trial.without_needless(best.clone(), may_split)?
    } else {
        plans.swap_remove(0)
    };
    let scaled = |plan: Plan| trial.of_all(plan, num_microbatches);
    Ok(Tuned {
        chosen: scaled(chosen),
        whole: scaled(whole),
        all_split: all_split.map(scaled),
    })
}

/// How long a message takes, if a step with `active` microbatches in flight and no backward split took `measured`.
///
/// It is the least with which the simulated step takes as long, and at most the mean of the ranks' forward tasks: what a
/// measured step lost otherwise is no message's. So it stands for all that comes between two tasks.
pub fn latency_of(
    ranks: &[RankLoad],
    num_microbatches: NonZeroU32,
    active: NonZeroU32,
    control: Control,
    measured: Duration,
) -> Result<Duration, SimulationError> {
    let forwards: Duration = ranks.iter().map(|rank| rank.costs.forward).sum();
    let tasks: u32 = ranks.iter().map(|rank| rank.visits.max(1)).sum();
    let (mut least, mut most) = (Duration::ZERO, forwards / tasks.max(1));
    let mut trial = Trial::new(ranks, num_microbatches, control, least);
    let active = active.min(trial.num_microbatches);
    let measured = measured * trial.num_microbatches.get() / num_microbatches.get();
    let mut is_as_long = |latency| -> Result<bool, SimulationError> {
        trial.latency = Latency::Uniform(latency);
        let plan = trial.plan(active, vec![0; ranks.len()], false)?;
        Ok(plan.makespan >= measured)
    };
    if is_as_long(least)? {
        return Ok(least);
    }
    for _ in 0..HALVINGS {
        let middle = (least + most) / 2;
        if is_as_long(middle)? {
            most = middle;
        } else {
            least = middle;
        }
    }
    Ok(most)
}

struct Trial<'a> {
    ranks: &'a [RankLoad],
    chain: Chain,
    costs: StepCosts,
    num_microbatches: NonZeroU32,
    latency: Latency,
}

impl<'a> Trial<'a> {
    fn new(
        ranks: &'a [RankLoad],
        num_microbatches: NonZeroU32,
        control: Control,
        latency: Duration,
    ) -> Self {
        let costs: Vec<_> = ranks.iter().map(|rank| (rank.costs, rank.visits)).collect();
        let (chain, costs) = chain_of(&costs, control);
        let most = NonZeroU32::new(MOST_MICROBATCHES).unwrap_or(NonZeroU32::MIN);
        Self {
            ranks,
            chain,
            costs,
            num_microbatches: num_microbatches.min(most),
            latency: Latency::Uniform(latency),
        }
    }

    fn plan(
        &self,
        active: NonZeroU32,
        splits: Vec<u32>,
        may_split: bool,
    ) -> Result<Plan, SimulationError> {
        let schedule = if may_split {
            Schedule::ZeroBubble { active }
        } else {
            Schedule::Interleaved { active }
        };
        let step = simulate_splits(
            &schedule,
            &self.chain,
            self.num_microbatches,
            &self.costs,
            &self.latency,
            Some(&splits),
        )?;
        let in_flight = step.most_in_flight();
        let mut held = self.ranks.iter().zip(&in_flight);
        let fits = held.all(|(rank, number)| rank.allows(*number));
        Ok(Plan {
            schedule,
            splits,
            makespan: step.makespan,
            in_flight,
            fits,
        })
    }

    /// A plan without the splits that gain nothing: each rank splits as few backwards as make no step longer.
    fn without_needless(&self, mut plan: Plan, may_split: bool) -> Result<Plan, SimulationError> {
        let active = plan.schedule.active().unwrap_or(NonZeroU32::MIN);
        for rank in 0..plan.splits.len() {
            for fewer in 0..plan.splits[rank] {
                let mut splits = plan.splits.clone();
                splits[rank] = fewer;
                let other = self.plan(active, splits, may_split)?;
                let holds_no_more = other.price(self.ranks).0 <= plan.price(self.ranks).0;
                if other.makespan <= plan.makespan && other.fits && holds_no_more {
                    plan = other;
                    break;
                }
            }
        }
        Ok(plan)
    }

    /// A plan for a step of more microbatches than were simulated: where all were split, all are.
    fn of_all(&self, mut plan: Plan, num_microbatches: NonZeroU32) -> Plan {
        for number in &mut plan.splits {
            if *number == self.num_microbatches.get() {
                *number = num_microbatches.get();
            }
        }
        plan
    }
}

/// What one rank did in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepLoad {
    /// The step.
    pub step: u64,
    /// Nanoseconds of the step.
    pub duration: u64,
    /// Nanoseconds of forward work.
    pub forward: u64,
    /// Nanoseconds of backward work, without what was run apart.
    pub backward: u64,
    /// Nanoseconds of weight gradients that were run apart.
    pub weight: u64,
    /// How many forward requests it served.
    pub visits: u64,
}

/// The costs of every rank, from steps that split all backwards and steps that split none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// The steps that were measured.
    pub steps: Vec<u64>,
    /// How long the step took that split none, on the root.
    pub whole: Duration,
    /// By rank, without what it holds.
    pub ranks: Vec<RankLoad>,
}

impl Measured {
    /// From what every rank of the pipeline measured, the root's first: of the steps that all ranks have and in which one
    /// ran backward, the first is not measured, the second counts for the parts, and the third for whole backwards.
    /// `None` while these are not enough.
    pub fn of(ranks: &[Vec<StepLoad>], num_microbatches: NonZeroU32) -> Option<Self> {
        let shared = shared_steps(ranks);
        let [_, parts, whole, ..] = shared.as_slice() else {
            return None;
        };
        let per_microbatch =
            |nanoseconds| Duration::from_nanos(nanoseconds) / num_microbatches.get();
        let half = u64::from(num_microbatches.get() / 2);
        let of_rank = |(parts, whole): (&StepLoad, &StepLoad)| RankLoad {
            costs: StageCosts {
                forward: per_microbatch(parts.forward.midpoint(whole.forward)),
                full_backward: per_microbatch(whole.backward + whole.weight),
                input_gradient: per_microbatch(parts.backward),
                weight_gradient: per_microbatch(parts.weight),
            },
            visits: ((parts.visits + half) / u64::from(num_microbatches.get())) as u32,
            ..RankLoad::default()
        };
        Some(Self {
            steps: vec![parts[0].step, whole[0].step],
            whole: Duration::from_nanos(whole[0].duration),
            ranks: parts.iter().zip(whole).map(of_rank).collect(),
        })
    }

    /// How many steps of a trial all ranks have.
    pub fn num_steps(ranks: &[Vec<StepLoad>]) -> usize {
        shared_steps(ranks).len()
    }
}

/// By step what each rank did.
fn shared_steps(ranks: &[Vec<StepLoad>]) -> Vec<Vec<StepLoad>> {
    let root = ranks.first().map_or(&[][..], Vec::as_slice);
    let at = |step| -> Option<Vec<StepLoad>> {
        let of_rank = |loads: &Vec<StepLoad>| loads.iter().find(|one| one.step == step).copied();
        ranks.iter().map(of_rank).collect()
    };
    let mut shared: Vec<_> = root.iter().filter_map(|load| at(load.step)).collect();
    shared.retain(|loads| loads.iter().any(|one| one.backward > 0));
    shared.sort_by_key(|loads| loads[0].step);
    shared
}
