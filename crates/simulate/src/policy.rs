//! Running a step as the execution server does: a rank that is free asks the schedule which of the
//! ready items has the turn, and runs that one until it waits or ends.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::num::NonZeroU32;
use std::time::Duration;

use shardwright_core::{MicrobatchId, PipelineRank, StageId};
use shardwright_schedule::{ActionKind, Progress, Ready, ReadyKind, Schedule, Turns};

use crate::costs::{Latency, StepCosts};
use crate::error::SimulationError;
use crate::outcome::{SimulatedStep, TaskKind, TaskSpan};
use crate::route::{Ahead, Chain, MicrobatchPath, ROOT, TurnPart, route};

/// Simulates the execution server on a chain of segments under a schedule. The stages of `costs`
/// are the chain's segments. A program is no policy; [`crate::simulate_program`] runs it.
pub fn simulate_schedule(
    schedule: &Schedule,
    chain: &Chain,
    num_microbatches: NonZeroU32,
    costs: &StepCosts,
    latency: &Latency,
) -> Result<SimulatedStep, SimulationError> {
    simulate_splits(schedule, chain, num_microbatches, costs, latency, None)
}

/// As [`simulate_schedule`], where a schedule that splits backwards does so on each rank for that many of the last
/// microbatches only; for all of them without `splits`.
pub fn simulate_splits(
    schedule: &Schedule,
    chain: &Chain,
    num_microbatches: NonZeroU32,
    costs: &StepCosts,
    latency: &Latency,
    splits: Option<&[u32]>,
) -> Result<SimulatedStep, SimulationError> {
    let num_ranks = chain.num_ranks()?;
    costs.check(chain.segments.len(), num_microbatches.get() as usize)?;
    latency.check(num_ranks)?;
    match schedule {
        Schedule::Program(_) => return Err(SimulationError::ProgramAsPolicy),
        Schedule::List(order) if order.entries().len() != 2 * num_microbatches.get() as usize => {
            return Err(SimulationError::ListLength {
                entries: order.entries().len(),
                num_microbatches: num_microbatches.get(),
            });
        }
        _ => {}
    }
    let mut step = Step {
        schedule,
        route: route(chain),
        costs,
        latency,
        splits,
        now: Duration::ZERO,
        ranks: (0..num_ranks).map(|_| RankState::new(schedule)).collect(),
        events: BinaryHeap::new(),
        num_events: 0,
        progress: Progress {
            num_microbatches: num_microbatches.get(),
            ..Progress::default()
        },
        in_flight: BTreeSet::new(),
        one_of_two: BTreeMap::new(),
        tasks: Vec::new(),
    };
    step.run();
    assert!(
        step.progress.returned == num_microbatches.get(),
        "every schedule lets the lowest microbatch go on"
    );
    Ok(SimulatedStep::new(num_ranks, step.tasks))
}

/// What a turn is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    /// A turn of the route, by its index.
    Visit(usize),
    /// The root asks for the backward, beforehand.
    Ahead,
    /// The weight gradients of a segment.
    WeightGradient(StageId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Control, or what a microbatch needs, is at a rank.
    Arrival(MicrobatchId, usize),
    /// A rank's turn is over.
    End(PipelineRank),
}

#[derive(Debug)]
struct RankState {
    ready: Vec<(Ready, Subject)>,
    arrivals: u64,
    turns: Turns,
    turn: Option<(MicrobatchId, Subject)>,
    /// Whether the schedule has been asked, and nothing has changed since.
    refused: bool,
}

impl RankState {
    fn new(schedule: &Schedule) -> Self {
        Self {
            ready: Vec::new(),
            arrivals: 0,
            turns: Turns::of(schedule),
            turn: None,
            refused: false,
        }
    }

    fn push_ready(&mut self, kind: ReadyKind, microbatch: MicrobatchId, subject: Subject) {
        self.arrivals += 1;
        let ready = Ready {
            kind,
            microbatch,
            arrival: self.arrivals,
            visit: self.turns.visit(kind, microbatch),
        };
        self.ready.push((ready, subject));
        self.refused = false;
    }
}

struct Step<'a> {
    schedule: &'a Schedule,
    route: MicrobatchPath,
    costs: &'a StepCosts,
    latency: &'a Latency,
    splits: Option<&'a [u32]>,
    now: Duration,
    ranks: Vec<RankState>,
    /// By time, and then in the order in which they were foreseen.
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    num_events: u64,
    /// Of the root.
    progress: Progress,
    /// Microbatches whose step function has started and not returned.
    in_flight: BTreeSet<MicrobatchId>,
    /// When the first of two things is at the rank that begins a microbatch's backward: the root's word
    /// and the end of the forward.
    one_of_two: BTreeMap<MicrobatchId, Duration>,
    tasks: Vec<TaskSpan>,
}

impl Step<'_> {
    fn run(&mut self) {
        for microbatch in 0..self.progress.num_microbatches {
            self.arrive(MicrobatchId(microbatch), 0);
        }
        loop {
            // What happens at an instant has happened before a turn is given, and one turn is given
            // at a time, the root's first: a turn that takes no time may make more items ready.
            if let Some(event) = self.next_event_now() {
                match event {
                    Event::Arrival(microbatch, visit) => self.arrive(microbatch, visit),
                    Event::End(rank) => self.end_turn(rank),
                }
            } else if !(0..self.ranks.len()).any(|rank| self.give_turn(rank)) {
                match self.events.peek() {
                    None => return,
                    Some(Reverse((time, _, _))) => self.now = *time,
                }
            }
        }
    }

    fn next_event_now(&mut self) -> Option<Event> {
        let Reverse((time, _, event)) = *self.events.peek()?;
        if time > self.now {
            return None;
        }
        self.events.pop();
        Some(event)
    }

    fn foresee(&mut self, time: Duration, event: Event) {
        self.num_events += 1;
        self.events.push(Reverse((time, self.num_events, event)));
    }

    fn arrive(&mut self, microbatch: MicrobatchId, index: usize) {
        let visit = &self.route.visits[index];
        let rank = &mut self.ranks[visit.rank.0 as usize];
        rank.push_ready(visit.kind, microbatch, Subject::Visit(index));
    }

    /// Gives a rank's turn away, if it is free and the schedule allows something.
    fn give_turn(&mut self, index: usize) -> bool {
        if self.ranks[index].turn.is_some() || self.ranks[index].refused {
            return false;
        }
        let progress = self.progress_of(index);
        let rank = &mut self.ranks[index];
        let items = rank.ready.iter().map(|(ready, _)| ready);
        let Some(chosen) = self.schedule.choose(items, &progress) else {
            rank.refused = true;
            return false;
        };
        let (ready, subject) = rank.ready.swap_remove(chosen);
        let Ready { microbatch, .. } = ready;
        rank.turns.begin(ready.kind, microbatch);
        if let Schedule::List(order) = self.schedule {
            // Every microbatch of a chain has its backward, so none is passed over.
            self.progress.listed = order.after(&ready, self.progress.listed);
        }
        rank.turn = Some((microbatch, subject));
        let rank = PipelineRank(index as u32);
        let mut end = self.now;
        match subject {
            Subject::Visit(visit) => {
                if self.route.visits[visit].kind == ReadyKind::RootForward {
                    self.progress.started += 1;
                    self.in_flight.insert(microbatch);
                }
                for piece in self.route.visits[visit].pieces.clone() {
                    end = self.run_piece(rank, microbatch, piece, end);
                }
            }
            Subject::Ahead => {}
            Subject::WeightGradient(stage) => {
                let kind = ActionKind::WeightGradient;
                end = self.run_action(rank, stage, kind, microbatch, end);
            }
        }
        self.foresee(end, Event::End(rank));
        true
    }

    /// As the server sees them: only the root knows of step functions.
    fn progress_of(&self, index: usize) -> Progress {
        let is_root = PipelineRank(index as u32) == ROOT;
        let deferred: BTreeSet<MicrobatchId> = self.ranks[index]
            .ready
            .iter()
            .filter(|(ready, _)| ready.kind == ReadyKind::WeightGradient)
            .map(|(ready, _)| ready.microbatch)
            .filter(|microbatch| !(is_root && self.in_flight.contains(microbatch)))
            .collect();
        let known = if is_root {
            self.progress
        } else {
            Progress::default()
        };
        Progress {
            deferred: deferred.len() as u32,
            after_backward: self.ranks[index].turns.last_was_backward(),
            ..known
        }
    }

    /// Records a part of a turn; when it ends.
    fn run_piece(
        &mut self,
        rank: PipelineRank,
        microbatch: MicrobatchId,
        piece: TurnPart,
        start: Duration,
    ) -> Duration {
        match piece {
            TurnPart::Forward(stage) => {
                self.run_action(rank, stage, ActionKind::Forward, microbatch, start)
            }
            TurnPart::Backward(stage) => {
                let kind = if self.splits(rank, microbatch) {
                    ActionKind::InputGradient
                } else {
                    ActionKind::FullBackward
                };
                self.run_action(rank, stage, kind, microbatch, start)
            }
            TurnPart::Turn(_, cost) if cost.is_zero() => start,
            TurnPart::Turn(stage, cost) => {
                self.record(rank, stage, TaskKind::Turn, microbatch, start, cost)
            }
        }
    }

    /// Whether a rank runs a microbatch's backward in two parts.
    fn splits(&self, rank: PipelineRank, microbatch: MicrobatchId) -> bool {
        let last = self.splits.map_or(u32::MAX, |splits| {
            splits.get(rank.0 as usize).copied().unwrap_or(0)
        });
        let is_last = microbatch.0.saturating_add(last) >= self.progress.num_microbatches;
        self.schedule.splits_backward() && is_last
    }

    fn run_action(
        &mut self,
        rank: PipelineRank,
        stage: StageId,
        kind: ActionKind,
        microbatch: MicrobatchId,
        start: Duration,
    ) -> Duration {
        let cost = self.costs.get(stage, microbatch).of(kind);
        self.record(rank, stage, TaskKind::Action(kind), microbatch, start, cost)
    }

    fn record(
        &mut self,
        rank: PipelineRank,
        stage: StageId,
        kind: TaskKind,
        microbatch: MicrobatchId,
        start: Duration,
        cost: Duration,
    ) -> Duration {
        let end = start + cost;
        self.tasks.push(TaskSpan {
            rank,
            stage,
            kind,
            microbatch,
            start,
            end,
        });
        end
    }

    fn end_turn(&mut self, rank: PipelineRank) {
        let state = &mut self.ranks[rank.0 as usize];
        state.refused = false;
        let (microbatch, subject) = state.turn.take().expect("the turn that ends has begun");
        let splits = self.splits(rank, microbatch);
        let state = &mut self.ranks[rank.0 as usize];
        let index = match subject {
            Subject::Visit(index) => index,
            Subject::Ahead => return self.may_begin_backward(rank, microbatch),
            Subject::WeightGradient(_) => return,
        };
        if splits {
            for piece in &self.route.visits[index].pieces {
                if let TurnPart::Backward(stage) = *piece {
                    let subject = Subject::WeightGradient(stage);
                    state.push_ready(ReadyKind::WeightGradient, microbatch, subject);
                }
            }
        }
        let ahead = self.route.ahead;
        if ahead.is_some_and(|ahead| ahead.after == index) {
            self.progress.forwards_done += 1;
            if self
                .schedule
                .may_begin_elsewhere(microbatch, &self.progress)
            {
                self.may_begin_backward(rank, microbatch);
            } else {
                let state = &mut self.ranks[rank.0 as usize];
                state.push_ready(ReadyKind::RootBackward, microbatch, Subject::Ahead);
            }
        }
        if ahead.is_some_and(|ahead| ahead.backward == index + 1) {
            return self.may_begin_backward(rank, microbatch);
        }
        let Some(next) = self.route.visits.get(index + 1) else {
            self.progress.returned += 1;
            self.in_flight.remove(&microbatch);
            return;
        };
        if next.kind == ReadyKind::RootBackward {
            self.progress.forwards_done += 1;
        }
        let delay = self.latency.between(rank, next.rank);
        self.foresee(self.now + delay, Event::Arrival(microbatch, index + 1));
    }

    /// One of the two things that a backward asked for beforehand needs is on its way; with the second it begins.
    fn may_begin_backward(&mut self, from: PipelineRank, microbatch: MicrobatchId) {
        let Some(Ahead { backward, .. }) = self.route.ahead else {
            unreachable!("only where the root asks beforehand");
        };
        let rank = self.route.visits[backward].rank;
        let time = self.now + self.latency.between(from, rank);
        match self.one_of_two.remove(&microbatch) {
            None => {
                self.one_of_two.insert(microbatch, time);
            }
            Some(other) => {
                self.foresee(time.max(other), Event::Arrival(microbatch, backward));
            }
        }
    }
}
