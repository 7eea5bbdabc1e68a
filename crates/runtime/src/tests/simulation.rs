//! Several machines over a network that delivers in random order, without threads.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shardwright_comm::Loss;
use shardwright_core::{Rank, RequestId, StepEpoch};
use shardwright_schedule::Schedule;
use shardwright_wire::{Message, Value};

use super::rig::{body, config};
use super::script::{Dice, Operation};
use crate::{Effect, FailureKind, Machine, MainEvent, StepPlan, Task};

#[derive(Default)]
pub(super) struct Worker {
    /// Whether it waits in `next_task` or has not come up.
    pub(super) idle: bool,
    pub(super) running: bool,
    pub(super) task: Option<Task>,
    pub(super) operations: VecDeque<Operation>,
    pub(super) waits: Vec<(RequestId, Value)>,
    pub(super) aborting: bool,
}

/// What a rank's main thread is at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Main {
    /// Its own code, outside the step.
    Away,
    /// The step's tasks.
    Supervises,
    /// What may still fail when the tasks are over here: reductions, and hooks.
    Prepares,
    /// The votes of all ranks, without which it does not succeed.
    AwaitsVotes,
}

pub(super) struct RankSimulation {
    pub(super) machine: Machine,
    pub(super) workers: Vec<Worker>,
    pub(super) main: Main,
    pub(super) entered: Duration,
    pub(super) ended: Option<Result<(), FailureKind>>,
    /// Who has voted for which step, as far as this rank knows.
    pub(super) votes: BTreeSet<(usize, StepEpoch)>,
    pub(super) tasks_run: u32,
    pub(super) weight_gradients_left: u32,
    pub(super) weight_gradients_run: u32,
}

pub(super) struct Simulation {
    pub(super) ranks: Vec<RankSimulation>,
    /// First in, first out for each pair of ranks, and no order between pairs.
    pub(super) network: BTreeMap<(u32, u32), VecDeque<Message>>,
    /// Votes under way: from whom, to whom, for which step. They go beside the machines, in no order with their messages.
    pub(super) ballots: Vec<(usize, usize, StepEpoch)>,
    dice: Dice,
    pub(super) now: Duration,
    pub(super) fail_after: Option<u32>,
    pub(super) failed_by: Option<usize>,
    /// After how many events, and how, the victim is lost.
    pub(super) dies_after: Option<(u32, Loss)>,
    pub(super) victim: usize,
    /// Whether tasks leave weight gradients for later.
    pub(super) splits_backward: bool,
    pub(super) dead: Option<usize>,
    pub(super) untold: Vec<usize>,
}

impl Simulation {
    pub(super) fn new(world: u32, seed: u64) -> Self {
        let pipeline: Vec<u32> = (0..world).collect();
        let ranks = pipeline.iter().map(|rank| RankSimulation {
            machine: Machine::new(config(*rank, &pipeline, world)),
            workers: Vec::new(),
            main: Main::Away,
            entered: Duration::ZERO,
            ended: None,
            votes: BTreeSet::new(),
            tasks_run: 0,
            weight_gradients_left: 0,
            weight_gradients_run: 0,
        });
        Self {
            ranks: ranks.collect(),
            network: BTreeMap::new(),
            ballots: Vec::new(),
            dice: Dice(seed),
            now: Duration::ZERO,
            fail_after: None,
            failed_by: None,
            dies_after: None,
            victim: 0,
            splits_backward: false,
            dead: None,
            untold: Vec::new(),
        }
    }

    pub(super) fn world(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Runs one step until every rank has ended it.
    pub(super) fn step(
        &mut self,
        step: u64,
        num_microbatches: u32,
        schedule: &Schedule,
    ) -> Vec<Result<(), FailureKind>> {
        self.splits_backward = schedule.splits_backward();
        let mut to_enter: Vec<usize> = (0..self.ranks.len()).collect();
        for rank in &mut self.ranks {
            rank.ended = None;
        }
        self.bury(&mut to_enter);
        for _ in 0..200_000 {
            self.now += Duration::from_micros(1);
            if let Some((left, _)) = self.dies_after.as_mut() {
                *left = left.saturating_sub(1);
                self.bury(&mut to_enter);
            }
            let mut choices = Vec::new();
            choices.extend(to_enter.iter().map(|rank| Choice::Enter(*rank)));
            choices.extend(
                self.network
                    .iter()
                    .filter(|((_, to), queue)| !queue.is_empty() && self.dead != Some(*to as usize))
                    .map(|(pair, _)| Choice::Deliver(*pair)),
            );
            choices.extend(
                (0..self.ballots.len())
                    .filter(|index| self.dead != Some(self.ballots[*index].1))
                    .map(Choice::Count),
            );
            choices.extend(self.untold.iter().map(|rank| Choice::Tell(*rank)));
            for (index, rank) in self.living() {
                if rank.main != Main::Away {
                    choices.push(Choice::Main(index));
                }
                choices.extend((0..rank.workers.len()).map(|worker| Choice::Worker(index, worker)));
            }
            let chosen = choices.swap_remove(self.dice.roll(choices.len().max(1)));
            match chosen {
                Choice::Enter(rank) => {
                    to_enter.retain(|other| *other != rank);
                    self.enter(rank, step, num_microbatches, schedule.clone());
                }
                Choice::Deliver((from, to)) => {
                    let queue = self.network.get_mut(&(from, to)).unwrap();
                    let message = queue.pop_front().unwrap();
                    self.ranks[to as usize]
                        .machine
                        .deliver(Rank(from), message, self.now);
                    self.settle(to as usize);
                }
                Choice::Count(ballot) => {
                    let (from, to, step) = self.ballots.swap_remove(ballot);
                    self.ranks[to].votes.insert((from, step));
                }
                Choice::Tell(rank) => self.tell(rank),
                Choice::Main(rank) => match self.ranks[rank].main {
                    Main::Away => unreachable!("it is in the step"),
                    Main::Supervises => self.supervise(rank),
                    Main::Prepares => self.vote(rank),
                    Main::AwaitsVotes => self.await_votes(rank),
                },
                Choice::Worker(rank, worker) => self.work(rank, worker),
            }
            self.check();
            if to_enter.is_empty() && self.living().all(|(_, rank)| rank.ended.is_some()) {
                return self.living().map(|(_, rank)| rank.ended.unwrap()).collect();
            }
        }
        panic!("the step hangs");
    }

    fn living(&self) -> impl Iterator<Item = (usize, &RankSimulation)> {
        self.ranks
            .iter()
            .enumerate()
            .filter(|(index, _)| self.dead != Some(*index))
    }

    /// The victim is gone when its time has come; the others learn so later.
    fn bury(&mut self, to_enter: &mut Vec<usize>) {
        if self.dead.is_none() && self.dies_after.as_ref().is_some_and(|(left, _)| *left == 0) {
            self.dead = Some(self.victim);
            self.untold = (0..self.ranks.len())
                .filter(|rank| *rank != self.victim)
                .collect();
        }
        to_enter.retain(|rank| self.dead != Some(*rank));
    }

    /// A rank learns of the death, once all that the dead rank had sent has arrived.
    fn tell(&mut self, rank: usize) {
        let victim = self.victim as u32;
        let in_flight = self
            .network
            .get(&(victim, rank as u32))
            .is_some_and(|queue| !queue.is_empty())
            || self
                .ballots
                .iter()
                .any(|(from, to, _)| (*from, *to) == (self.victim, rank));
        if !in_flight {
            self.untold.retain(|other| *other != rank);
            let (_, loss) = self.dies_after.clone().expect("a rank has died");
            self.ranks[rank]
                .machine
                .peer_lost(Rank(victim), loss, self.now);
            self.settle(rank);
        }
    }

    fn enter(&mut self, rank: usize, step: u64, num_microbatches: u32, schedule: Schedule) {
        let function = "train_step".to_owned();
        let plan = StepPlan {
            step: StepEpoch(step),
            function,
            num_microbatches,
            one_at_a_time: false,
            schedule,
        };
        let now = self.now;
        let simulated = &mut self.ranks[rank];
        match simulated.machine.begin_step(plan, now) {
            Ok(()) => {
                simulated.main = Main::Supervises;
                simulated.entered = now;
            }
            Err(crate::ServerError::Failed(failure)) => simulated.ended = Some(Err(failure.kind)),
            Err(other) => panic!("{other}"),
        }
        self.settle(rank);
    }

    fn supervise(&mut self, rank: usize) {
        let now = self.now;
        let simulated = &mut self.ranks[rank];
        simulated.machine.enter_main(now);
        let event = simulated.machine.poll_main(now);
        match event {
            None | Some(MainEvent::StallReport(_)) => {}
            Some(MainEvent::StartWorker(worker)) => {
                assert!(
                    simulated.workers.iter().all(|worker| !worker.idle),
                    "EX-2: a worker is started while one is idle"
                );
                assert_eq!(worker.0 as usize, simulated.workers.len());
                simulated.workers.push(Worker {
                    running: true,
                    ..Worker::default()
                });
            }
            Some(MainEvent::Control(request)) => {
                assert!(
                    simulated
                        .workers
                        .iter()
                        .all(|worker| !worker.running || worker.task.is_none()),
                    "EX-1"
                );
                simulated
                    .machine
                    .respond(request.requester, request.id, request.body, now)
                    .unwrap();
            }
            Some(MainEvent::RootDone) => {
                simulated.machine.end_step(body(Value::Bool(true))).unwrap();
                simulated.main = Main::Prepares;
            }
            Some(MainEvent::StepEnd(result)) => {
                assert_eq!(result.value, Value::Bool(true));
                simulated.main = Main::Prepares;
            }
            Some(MainEvent::Failed(failure)) => {
                // EX-6: no stack is left.
                assert!(simulated.workers.iter().all(|worker| worker.task.is_none()));
                simulated.end(Err(failure.kind));
            }
        }
        self.settle(rank);
    }

    pub(super) fn settle(&mut self, rank: usize) {
        for effect in self.ranks[rank].machine.take_effects() {
            if let Effect::Send { to, message } = effect {
                self.network
                    .entry((rank as u32, to.0))
                    .or_default()
                    .push_back(message);
            }
        }
    }

    fn check(&self) {
        for rank in &self.ranks {
            let executing = rank
                .workers
                .iter()
                .filter(|worker| worker.running && worker.task.is_some())
                .count();
            assert!(executing <= 1, "EX-1: {executing} workers execute");
        }
    }
}

enum Choice {
    Enter(usize),
    Deliver((u32, u32)),
    Count(usize),
    Tell(usize),
    Main(usize),
    Worker(usize, usize),
}
