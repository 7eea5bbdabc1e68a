//! Several machines over a network that delivers in random order, without threads.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shardwright_core::{CallId, MicrobatchId, ModelId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_schedule::Schedule;
use shardwright_wire::{Message, Phase, Place, Value, Work};

use super::rig::{body, config, context, forward};
use super::script::{Dice, Operation, answer, script};
use crate::{
    Action, FailureKind, Grant, LocalError, Machine, MainEvent, NewRequest, StepPlan, Task, Waiting,
};

#[derive(Default)]
pub(super) struct Worker {
    /// Whether it waits in `next_task` or has not come up.
    idle: bool,
    running: bool,
    task: Option<Task>,
    operations: VecDeque<Operation>,
    waits: Vec<(RequestId, Value)>,
    aborting: bool,
}

pub(super) struct RankSimulation {
    pub(super) machine: Machine,
    pub(super) workers: Vec<Worker>,
    supervising: bool,
    ended: Option<Result<(), FailureKind>>,
    pub(super) tasks_run: u32,
}

pub(super) struct Simulation {
    pub(super) ranks: Vec<RankSimulation>,
    /// First in, first out for each pair of ranks, and no order between pairs.
    pub(super) network: BTreeMap<(u32, u32), VecDeque<Message>>,
    dice: Dice,
    now: Duration,
    pub(super) fail_after: Option<u32>,
    pub(super) failed_by: Option<usize>,
}

impl Simulation {
    pub(super) fn new(world: u32, seed: u64) -> Self {
        let pipeline: Vec<u32> = (0..world).collect();
        let ranks = pipeline.iter().map(|rank| RankSimulation {
            machine: Machine::new(config(*rank, &pipeline, world)),
            workers: Vec::new(),
            supervising: false,
            ended: None,
            tasks_run: 0,
        });
        Self {
            ranks: ranks.collect(),
            network: BTreeMap::new(),
            dice: Dice(seed),
            now: Duration::ZERO,
            fail_after: None,
            failed_by: None,
        }
    }

    fn world(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Runs one step until every rank has ended it.
    pub(super) fn step(
        &mut self,
        step: u64,
        num_microbatches: u32,
        schedule: Schedule,
    ) -> Vec<Result<(), FailureKind>> {
        let mut to_enter: Vec<usize> = (0..self.ranks.len()).collect();
        for rank in &mut self.ranks {
            rank.ended = None;
        }
        for _ in 0..200_000 {
            self.now += Duration::from_micros(1);
            let mut choices = Vec::new();
            choices.extend(to_enter.iter().map(|rank| Choice::Enter(*rank)));
            choices.extend(
                self.network
                    .iter()
                    .filter(|(_, queue)| !queue.is_empty())
                    .map(|(pair, _)| Choice::Deliver(*pair)),
            );
            for (index, rank) in self.ranks.iter().enumerate() {
                if rank.supervising {
                    choices.push(Choice::Main(index));
                }
                choices.extend((0..rank.workers.len()).map(|worker| Choice::Worker(index, worker)));
            }
            let chosen = choices.swap_remove(self.dice.roll(choices.len().max(1)));
            match chosen {
                Choice::Enter(rank) => {
                    to_enter.retain(|other| *other != rank);
                    self.enter(rank, step, num_microbatches, schedule);
                }
                Choice::Deliver((from, to)) => {
                    let queue = self.network.get_mut(&(from, to)).unwrap();
                    let message = queue.pop_front().unwrap();
                    self.ranks[to as usize]
                        .machine
                        .deliver(Rank(from), message, self.now);
                    self.settle(to as usize);
                }
                Choice::Main(rank) => self.supervise(rank),
                Choice::Worker(rank, worker) => self.work(rank, worker),
            }
            self.check();
            if to_enter.is_empty() && self.ranks.iter().all(|rank| rank.ended.is_some()) {
                return self.ranks.iter().map(|rank| rank.ended.unwrap()).collect();
            }
        }
        panic!("the step hangs");
    }

    fn enter(&mut self, rank: usize, step: u64, num_microbatches: u32, schedule: Schedule) {
        let function = "train_step".to_owned();
        let plan = StepPlan {
            step: StepEpoch(step),
            function,
            num_microbatches,
            schedule,
        };
        let now = self.now;
        let simulated = &mut self.ranks[rank];
        match simulated.machine.begin_step(plan, now) {
            Ok(()) => simulated.supervising = true,
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
                simulated.machine.leave_step().unwrap();
                simulated.ended = Some(Ok(()));
                simulated.supervising = false;
            }
            Some(MainEvent::StepEnd(result)) => {
                assert_eq!(result.value, Value::Bool(true));
                simulated.machine.leave_step().unwrap();
                simulated.ended = Some(Ok(()));
                simulated.supervising = false;
            }
            Some(MainEvent::Failed(failure)) => {
                // EX-6: no stack is left.
                assert!(simulated.workers.iter().all(|worker| worker.task.is_none()));
                simulated.ended = Some(Err(failure.kind));
                simulated.supervising = false;
            }
        }
        if self.ranks[rank].ended == Some(Ok(())) {
            assert_eq!(self.ranks[rank].machine.stats().live_requests, 0, "EX-7");
        }
        self.settle(rank);
    }

    /// A worker goes on: from its grant, or with the next operation of its task.
    fn work(&mut self, rank: usize, index: usize) {
        let now = self.now;
        let world = self.world();
        let simulated = &mut self.ranks[rank];
        let worker = &mut simulated.workers[index];
        let id = WorkerId(index as u32);
        if !worker.running {
            match simulated.machine.take_grant(id) {
                None => return,
                Some(Grant::Task(task)) => {
                    simulated.tasks_run += 1;
                    worker.idle = false;
                    worker.operations = match &task {
                        Task::Root { microbatch } => {
                            script(i64::from(microbatch.0) + 11, 3, world, true)
                        }
                        Task::Request(request) => {
                            script(seed_of(&task), request.place.call.0, world, false)
                        }
                    };
                    worker.task = Some(task);
                }
                Some(Grant::Resume) => {
                    let ids: Vec<_> = worker.waits.iter().map(|(id, _)| *id).collect();
                    let bodies = simulated.machine.take_responses(&ids).unwrap();
                    for (body, (_, expected)) in bodies.into_iter().zip(worker.waits.drain(..)) {
                        assert_eq!(
                            body.value, expected,
                            "a response is lost or belongs to another"
                        );
                    }
                }
                Some(Grant::Aborted) => worker.aborting = true,
                Some(Grant::Closed) => unreachable!("nobody closes"),
            }
            worker.running = true;
            self.settle(rank);
            return;
        }
        if self.fail_after == Some(0) && worker.task.is_some() && !worker.aborting {
            self.fail_after = None;
            self.failed_by = Some(rank);
            simulated.machine.fail(
                None,
                LocalError {
                    kind: "ValueError".to_owned(),
                    ..LocalError::default()
                },
                now,
            );
            worker.aborting = true;
        } else if let Some(left) = self.fail_after.as_mut() {
            *left = left.saturating_sub(1);
        }
        self.proceed(rank, index);
        self.settle(rank);
    }

    fn proceed(&mut self, rank: usize, index: usize) {
        let now = self.now;
        let simulated = &mut self.ranks[rank];
        let worker = &mut simulated.workers[index];
        let id = WorkerId(index as u32);
        let operation = if worker.aborting {
            None
        } else {
            worker.operations.pop_front()
        };
        let Some(task) = worker.task.clone().filter(|_| operation.is_some()) else {
            if let Some(Task::Request(request)) = &worker.task
                && !worker.aborting
            {
                let value = answer(seed_of(worker.task.as_ref().unwrap()));
                simulated
                    .machine
                    .respond(request.requester, request.id, body(value), now)
                    .unwrap();
            }
            worker.task = None;
            worker.operations.clear();
            worker.waits.clear();
            worker.aborting = false;
            worker.running = false;
            worker.idle = true;
            simulated.machine.worker_returns(id, now).unwrap();
            return;
        };
        let microbatch = match &task {
            Task::Root { microbatch } => *microbatch,
            Task::Request(request) => request.microbatch,
        };
        let depth = match &task {
            Task::Root { .. } => 3,
            Task::Request(request) => request.place.call.0,
        };
        let calls: Vec<(u32, Work, i64, Value)> = match operation.expect("checked above") {
            Operation::AwaitBackward => {
                worker.running = false;
                if simulated.machine.await_backward(id, now).is_err() {
                    worker.running = true;
                    worker.aborting = true;
                }
                return;
            }
            Operation::Call(calls) => calls
                .into_iter()
                .map(|(to, seed)| (to, forward(1), i64::from(seed), answer(i64::from(seed))))
                .collect(),
            Operation::Control(to) => vec![(
                to,
                Work::Control {
                    name: "partition".to_owned(),
                },
                5,
                Value::Int(5),
            )],
        };
        for (to, work, seed, expected) in calls {
            let request = NewRequest {
                model: ModelId(0),
                work,
                microbatch: MicrobatchId(microbatch.0),
                place: Place {
                    parent: None,
                    call: CallId(depth - 1),
                },
                context: context(),
                body: body(Value::Int(seed)),
            };
            let sent = simulated
                .machine
                .send_request(Some(id), Rank(to), request, now);
            let Ok(id) = sent else {
                worker.aborting = true;
                return;
            };
            worker.waits.push((id, expected));
        }
        let ids: Vec<_> = worker.waits.iter().map(|(id, _)| *id).collect();
        worker.running = false;
        match simulated.machine.wait(id, &ids, Phase::Forward, now) {
            Ok(Waiting::Suspended) => {}
            Ok(Waiting::Over) => unreachable!("nothing was delivered in between"),
            Err(_) => {
                worker.running = true;
                worker.aborting = true;
            }
        }
    }

    fn settle(&mut self, rank: usize) {
        for action in self.ranks[rank].machine.take_actions() {
            if let Action::Send { to, message } = action {
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
    Main(usize),
    Worker(usize, usize),
}

fn seed_of(task: &Task) -> i64 {
    match task {
        Task::Request(request) => match request.body.value {
            Value::Int(seed) => seed,
            _ => 0,
        },
        Task::Root { .. } => 0,
    }
}
