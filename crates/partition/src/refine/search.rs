//! The search: from several starts, moves that make the simulated step faster, within a budget.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use shardwright_core::PipelineRank;
use shardwright_schedule::Schedule;
use shardwright_simulate::{Chain, Control, Latency, StageCosts, StepCosts, simulate_schedule};

use super::line::{LATENCY, Segments, StretchSequence};
use super::together;
use super::units::{Units, in_turns};
use crate::node::NodeId;

/// A move must gain this part of the step.
const LEAST_STEP: f64 = 0.003;
/// How many tasks may be simulated in all: about a second.
const MOST_TASKS: u64 = 3_000_000;
/// More microbatches repeat what these do.
const MOST_MICROBATCHES: u32 = 32;
/// From how many starts the search goes on, besides the division itself.
const STARTS: usize = 3;
/// How many moves are simulated before the best of them is taken.
const MOVES_AT_ONCE: usize = 48;
/// By how many parts of the step one part of memory too much counts.
const MEMORY_PENALTY: f64 = 4.0;

/// By which part tasks take more or less time than measured. Without that, places win which fit
/// into one another by luck, and do not on real ranks.
const VARIATION: f64 = 0.1;
/// Each step is simulated so often, with other variations.
const SAMPLES: u32 = 4;

/// A number from -1 to 1 that depends on the given one only (the mixing of `SplitMix64`).
#[expect(clippy::cast_precision_loss, reason = "53 bits are left")]
fn noise(number: u64) -> f64 {
    let mut mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

/// What the search found.
#[derive(Clone, Debug)]
pub(super) struct RefinementResult {
    /// The simulated step at first.
    pub(super) before: Duration,
    /// The simulated step in the end.
    pub(super) after: Duration,
    /// The rank of each node.
    pub(super) ranks: Vec<PipelineRank>,
}

pub(super) struct Search<'a> {
    line: &'a StretchSequence,
    units: &'a Units,
    schedule: Schedule,
    num_microbatches: NonZeroU32,
    num_devices: u32,
    memory: &'a [f64],
    undivided: &'a [Vec<NodeId>],
    holding: Vec<bool>,
    /// The most bytes of a rank, and the fewest ranks in use.
    most_memory: f64,
    least_ranks: usize,
    tasks: u64,
    steps: u64,
}

/// Places of all nodes, and what they are worth.
#[derive(Clone, Debug)]
struct State {
    ranks: Vec<PipelineRank>,
    step: Duration,
    /// The part by which the fullest rank holds too much.
    excess: f64,
    /// Work of each rank for one microbatch.
    loads: Vec<Duration>,
}

impl State {
    fn score(&self) -> f64 {
        score(self.step, self.excess)
    }
}

fn score(step: Duration, excess: f64) -> f64 {
    step.as_secs_f64() * (1.0 + MEMORY_PENALTY * excess)
}

/// Places that may be worth simulating.
struct Candidate {
    ranks: Vec<PipelineRank>,
    segments: Segments,
    loads: Vec<Duration>,
    excess: f64,
    /// No step is faster than the work of its busiest rank, but for variations.
    bound: f64,
}

impl<'a> Search<'a> {
    #[expect(clippy::too_many_arguments, reason = "all that it looks at, once")]
    pub(super) fn new(
        line: &'a StretchSequence,
        units: &'a Units,
        schedule: Schedule,
        num_microbatches: NonZeroU32,
        num_devices: u32,
        memory: &'a [f64],
        undivided: &'a [Vec<NodeId>],
        holding: Vec<bool>,
    ) -> Self {
        let fewer = num_microbatches.get().min(MOST_MICROBATCHES);
        Self {
            line,
            units,
            schedule,
            num_microbatches: NonZeroU32::new(fewer).expect("both are 1 or more"),
            num_devices,
            memory,
            undivided,
            holding,
            most_memory: 0.0,
            least_ranks: 0,
            tasks: 0,
            steps: 0,
        }
    }

    pub(super) fn simulated_steps(&self) -> u64 {
        self.steps
    }

    /// Searches from `first`, with so much more memory on the fullest rank as is tolerated.
    pub(super) fn run(
        &mut self,
        first: &[PipelineRank],
        memory_tolerance: f64,
    ) -> RefinementResult {
        self.most_memory = self.fullest(first) * memory_tolerance;
        self.least_ranks = self.used_ranks(first);
        let candidate = self
            .candidate(first.to_vec())
            .expect("the division is allowed");
        let begin = self
            .simulate(candidate, f64::INFINITY)
            .expect("there is no limit");
        let mut starts = vec![begin.clone()];
        for ranks in self.starts(first) {
            if let Some(candidate) = self.candidate(ranks) {
                starts.extend(self.simulate(candidate, f64::INFINITY));
            }
            if self.is_exhausted() {
                break;
            }
        }
        // A stable order, so that of equal ones the simplest comes first.
        starts[1..].sort_by(|left, right| left.score().total_cmp(&right.score()));
        starts.truncate(1 + STARTS);
        let mut best = begin.clone();
        for start in starts {
            let end = self.climb(start);
            if end.excess <= 0.0 && end.step < best.step {
                best = end;
            }
        }
        RefinementResult {
            before: begin.step,
            after: best.step,
            ranks: best.ranks,
        }
    }

    fn is_exhausted(&self) -> bool {
        self.tasks >= MOST_TASKS
    }

    /// What is too small to be moved alone with its parent, and then rows of units dealt out in turns, in larger and
    /// larger chunks.
    fn starts(&self, first: &[PipelineRank]) -> Vec<Vec<PipelineRank>> {
        let mut gathered = first.to_vec();
        self.units.gather(&mut gathered);
        let mut found = vec![gathered.clone()];
        for rows in &self.units.rows {
            let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
            for chunk in 1..=longest.div_ceil(self.num_devices as usize) {
                for rank in 0..self.num_devices {
                    let mut ranks = gathered.clone();
                    in_turns(self.units, rows, chunk, rank, self.num_devices, &mut ranks);
                    found.push(ranks);
                }
            }
        }
        found
    }

    /// Takes the best of the most promising moves, until none is good enough.
    fn climb(&mut self, mut state: State) -> State {
        while !self.is_exhausted() {
            let good_enough = state.score() * (1.0 - LEAST_STEP);
            let mut candidates: Vec<Candidate> = self
                .moves(&state)
                .into_iter()
                .filter_map(|ranks| self.candidate(ranks))
                .filter(|candidate| candidate.bound < good_enough)
                .collect();
            candidates.sort_by(|left, right| left.bound.total_cmp(&right.bound));
            let mut best: Option<State> = None;
            for (number, candidate) in candidates.into_iter().enumerate() {
                let limit = best.as_ref().map_or(good_enough, State::score);
                if self.is_exhausted() || (number >= MOVES_AT_ONCE && best.is_some()) {
                    break;
                }
                if candidate.bound < limit {
                    best = self.simulate(candidate, limit).or(best);
                }
            }
            match best {
                Some(better) => state = better,
                None => break,
            }
        }
        state
    }

    /// From the busiest rank, from the fullest if it is too full, to the least busy one; and exchanges.
    fn moves(&self, state: &State) -> Vec<Vec<PipelineRank>> {
        let ranks = || (0..self.num_devices).map(PipelineRank);
        let load = |rank: &PipelineRank| state.loads[rank.0 as usize];
        let busiest = ranks().rev().max_by_key(load).expect("one rank or more");
        let idlest = ranks().min_by_key(load).expect("one rank or more");
        let held = self.held(&state.ranks);
        let fullest = ranks()
            .rev()
            .max_by(|left, right| held[left.0 as usize].total_cmp(&held[right.0 as usize]))
            .filter(|_| state.excess > 0.0);
        let units = &self.units.movable;
        let rank_of = |unit: usize| state.ranks[units[unit].node.index()];
        let put = |found: &mut Vec<PipelineRank>, unit: usize, rank: PipelineRank| {
            for node in &units[unit].nodes {
                found[node.index()] = rank;
            }
        };
        let mut found = BTreeSet::new();
        for unit in 0..units.len() {
            let leaves = rank_of(unit) == busiest || Some(rank_of(unit)) == fullest;
            for rank in ranks().filter(|rank| leaves || *rank == idlest) {
                let mut moved = state.ranks.clone();
                put(&mut moved, unit, rank);
                found.insert(moved);
            }
        }
        for rows in &self.units.rows {
            let row: Vec<usize> = rows.concat();
            for (place, &unit) in row.iter().enumerate() {
                for (distance, &other) in row[place + 1..].iter().enumerate() {
                    let (one, two) = (rank_of(unit), rank_of(other));
                    let balances = [one, two].contains(&busiest) && [one, two].contains(&idlest);
                    if one != two && (balances || distance < 2) {
                        let mut moved = state.ranks.clone();
                        put(&mut moved, unit, two);
                        put(&mut moved, other, one);
                        found.insert(moved);
                    }
                }
            }
        }
        found.remove(&state.ranks);
        found.into_iter().collect()
    }

    /// Places, unless they break a rule.
    fn candidate(&self, ranks: Vec<PipelineRank>) -> Option<Candidate> {
        let undivided = |nodes: &Vec<NodeId>| together(&ranks, nodes);
        if !self.undivided.iter().all(undivided) || self.used_ranks(&ranks) < self.least_ranks {
            return None;
        }
        let segments = self.line.segments(&ranks);
        let mut loads = vec![Duration::ZERO; self.num_devices as usize];
        for (rank, cost) in segments.ranks.iter().zip(&segments.costs) {
            loads[rank.0 as usize] += cost.forward + cost.full_backward;
        }
        let excess = (self.fullest(&ranks) / self.most_memory - 1.0).max(0.0);
        let busiest = loads.iter().max().copied().unwrap_or_default();
        let bound = (busiest * self.num_microbatches.get()).as_secs_f64();
        Some(Candidate {
            bound: bound * (1.0 + MEMORY_PENALTY * excess),
            ranks,
            segments,
            loads,
            excess,
        })
    }

    /// The places with their step; None, as soon as that is certain, where they score no less than `limit`.
    fn simulate(&mut self, candidate: Candidate, limit: f64) -> Option<State> {
        let Segments { ranks, costs } = candidate.segments;
        self.steps += 1;
        self.tasks +=
            3 * u64::from(SAMPLES) * ranks.len() as u64 * u64::from(self.num_microbatches.get());
        // A rank without a segment has no part in the step.
        let used: BTreeSet<PipelineRank> = ranks.iter().copied().collect();
        let number: Vec<PipelineRank> = used.into_iter().collect();
        let dense = |rank: &PipelineRank| {
            let place = number
                .binary_search(rank)
                .expect("it is one of those in use");
            PipelineRank(u32::try_from(place).expect("ranks are 32-bit numbers"))
        };
        let chain = Chain {
            segments: ranks.iter().map(dense).collect(),
            // Whoever calls is a segment of its own wherever control passes through it.
            control: Control::Direct,
            root_turn: Duration::ZERO,
            root_backward: Duration::ZERO,
        };
        let busiest = candidate.loads.iter().max().copied().unwrap_or_default();
        let least = (busiest * self.num_microbatches.get()).mul_f64(1.0 - VARIATION);
        let mut steps = Duration::ZERO;
        for sample in 0..SAMPLES {
            let costs = StepCosts::ByMicrobatch(self.varied(&chain, &costs, sample));
            let simulated = simulate_schedule(
                &self.schedule,
                &chain,
                self.num_microbatches,
                &costs,
                &Latency::Uniform(LATENCY),
            );
            steps += simulated
                .expect("the chain begins at the root, and its ranks are numbered one by one")
                .makespan;
            let at_least = steps + least * (SAMPLES - 1 - sample);
            if score(at_least / SAMPLES, candidate.excess) >= limit {
                return None;
            }
        }
        Some(State {
            ranks: candidate.ranks,
            step: steps / SAMPLES,
            excess: candidate.excess,
            loads: candidate.loads,
        })
    }

    /// Costs of each microbatch: each rank is a little slower or faster for it.
    fn varied(&self, chain: &Chain, costs: &[StageCosts], sample: u32) -> Vec<Vec<StageCosts>> {
        let of_microbatch = |microbatch: u32| {
            let varied = chain.segments.iter().zip(costs).map(|(rank, cost)| {
                let factor = |kind: u64| {
                    let which = u64::from(sample) << 60 | kind << 56 | u64::from(microbatch) << 32;
                    1.0 + VARIATION * noise(which | u64::from(rank.0))
                };
                StageCosts {
                    forward: cost.forward.mul_f64(factor(0)),
                    full_backward: cost.full_backward.mul_f64(factor(1)),
                    input_gradient: cost.input_gradient.mul_f64(factor(2)),
                    weight_gradient: cost.weight_gradient.mul_f64(factor(3)),
                }
            });
            varied.collect()
        };
        (0..self.num_microbatches.get())
            .map(of_microbatch)
            .collect()
    }

    fn held(&self, ranks: &[PipelineRank]) -> Vec<f64> {
        let mut held = vec![0.0; self.num_devices as usize];
        for (rank, memory) in ranks.iter().zip(self.memory) {
            held[rank.0 as usize] += memory;
        }
        held
    }

    fn fullest(&self, ranks: &[PipelineRank]) -> f64 {
        // At least a byte, to divide by.
        self.held(ranks).into_iter().fold(1.0, f64::max)
    }

    /// How many ranks hold parameters.
    fn used_ranks(&self, ranks: &[PipelineRank]) -> usize {
        let holders = ranks.iter().zip(&self.holding).filter(|(_, holds)| **holds);
        let used: BTreeSet<PipelineRank> = holders.map(|(rank, _)| *rank).collect();
        used.len()
    }
}
