//! Simulated workers: how they run their scripts.

use std::collections::VecDeque;

use shardwright_core::{CallId, MicrobatchId, Rank, WorkerId};
use shardwright_wire::{Phase, Value, Work};

use super::rig::{body, forward, new_request};
use super::script::{Operation, answer, script};
use super::simulated_vote::raised;
use super::simulation::Simulation;
use crate::{Grant, Task, Waiting};

impl Simulation {
    /// A worker goes on: from its grant, or with the next operation of its task.
    pub(super) fn work(&mut self, rank: usize, index: usize) {
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
                        Task::WeightGradient(_) => {
                            simulated.weight_gradients_run += 1;
                            VecDeque::new()
                        }
                    };
                    worker.task = Some(task);
                }
                Some(Grant::Resume) => {
                    let ids: Vec<_> = worker.waits.iter().map(|(id, _)| *id).collect();
                    let answers = simulated.machine.take_responses(&ids).unwrap();
                    for (answer, (_, expected)) in answers.into_iter().zip(worker.waits.drain(..)) {
                        assert_eq!(
                            answer.body.value, expected,
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
        if worker.task.is_some() && !worker.aborting && self.fails_now(rank) {
            let simulated = &mut self.ranks[rank];
            simulated.machine.fail(None, raised(), now);
            simulated.workers[index].aborting = true;
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
            let defers = matches!(worker.task, Some(Task::Root { .. } | Task::Request(_)));
            if self.splits_backward
                && defers
                && !worker.aborting
                && simulated.machine.defer_weight_gradient(id).is_ok()
            {
                simulated.weight_gradients_left += 1;
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
            Task::WeightGradient(deferred) => deferred.microbatch,
        };
        let depth = match &task {
            Task::Root { .. } => 3,
            Task::Request(request) => request.place.call.0,
            Task::WeightGradient(_) => unreachable!("it makes no calls"),
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
            let mut request = new_request(work, MicrobatchId(microbatch.0), Value::Int(seed));
            request.place.call = CallId(depth - 1);
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
}

fn seed_of(task: &Task) -> i64 {
    match task {
        Task::Request(request) => match request.body.value {
            Value::Int(seed) => seed,
            _ => 0,
        },
        Task::Root { .. } | Task::WeightGradient(_) => 0,
    }
}
