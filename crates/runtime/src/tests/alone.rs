//! One machine with a clock that the test owns, and messages for it.

use std::time::Duration;

use shardwright_core::{MicrobatchId, Rank, StepEpoch};
use shardwright_wire::{Abort, ErrorReport, Message, Phase, StepBegin, StepEnd, Value};

use super::rig::{body, config, forward, new_request, plan};
use crate::{Effect, Failure, Grant, Machine, MainEvent, ServerError, Task};

pub(super) fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A rank of a pipeline of two, between steps. Reports stalls after 1 s, fails after 3 s.
pub(super) fn machine(rank: u32) -> Machine {
    Machine::new(config(rank, &[0, 1], 2))
}

pub(super) fn report(rank: u32, message: &str) -> ErrorReport {
    ErrorReport {
        rank: Rank(rank),
        host: format!("host{rank}"),
        module: None,
        microbatch: None,
        phase: None,
        kind: "ValueError".to_owned(),
        message: message.to_owned(),
        traceback: String::new(),
    }
}

pub(super) fn abort(step: u64, message: &str) -> Message {
    Message::Abort(Box::new(Abort {
        step: StepEpoch(step),
        error: report(0, message),
    }))
}

pub(super) fn begin(step: u64) -> Message {
    Message::StepBegin(StepBegin {
        step: StepEpoch(step),
        function: "train_step".to_owned(),
        num_microbatches: 1,
        one_at_a_time: false,
    })
}

pub(super) fn end(step: u64) -> Message {
    Message::StepEnd(Box::new(StepEnd {
        step: StepEpoch(step),
        body: body(Value::None),
    }))
}

pub(super) fn enter(machine: &mut Machine, step: u64) -> Result<(), ServerError> {
    let entered = machine.begin_step(plan(step, "train_step", 1), at(0));
    machine.enter_main(at(0));
    entered
}

/// Runs a whole step of rank 1, in which nothing is asked of it, up to its commit.
pub(super) fn commit(machine: &mut Machine, step: u64) {
    enter(machine, step).unwrap();
    machine.deliver(Rank(0), begin(step), at(0));
    machine.deliver(Rank(0), end(step), at(0));
    assert!(matches!(
        machine.poll_main(at(0)),
        Some(MainEvent::StepEnd(_))
    ));
}

pub(super) fn failure(result: Result<(), ServerError>) -> Failure {
    match result {
        Err(ServerError::Failed(failure)) => *failure,
        other => panic!("expected a failed step, got {other:?}"),
    }
}

pub(super) fn aborts_sent(machine: &mut Machine) -> usize {
    let effects = machine.take_effects();
    effects
        .iter()
        .filter(|effect| {
            matches!(
                effect,
                Effect::Send {
                    message: Message::Abort(_),
                    ..
                }
            )
        })
        .count()
}

/// A root whose only worker waits for request 1 to rank 1.
pub(super) fn waiting_root() -> Machine {
    root_that_waits(1)
}

/// A root with so many workers, each with a microbatch, that wait for requests to rank 1.
pub(super) fn root_that_waits(num_microbatches: u32) -> Machine {
    let mut root = machine(0);
    root.begin_step(plan(1, "train_step", num_microbatches), at(0))
        .unwrap();
    root.enter_main(at(0));
    for number in 0..num_microbatches {
        let microbatch = MicrobatchId(number);
        let Some(MainEvent::StartWorker(worker)) = root.poll_main(at(0)) else {
            panic!("a worker is needed")
        };
        root.worker_returns(worker, at(0)).unwrap();
        let task = root.take_grant(worker);
        assert_eq!(task, Some(Grant::Task(Task::Root { microbatch })));
        let request = new_request(forward(1), microbatch, Value::None);
        let id = root
            .send_request(Some(worker), Rank(1), request, at(0))
            .unwrap();
        root.wait(worker, &[id], Phase::Forward, at(0)).unwrap();
    }
    root
}

/// The request that a machine has just sent.
pub(super) fn request_of(machine: &mut Machine) -> Message {
    let effects = machine.take_effects();
    let sent = effects.into_iter().find_map(|effect| match effect {
        Effect::Send {
            message: message @ Message::Request(_),
            ..
        } => Some(message),
        _ => None,
    });
    sent.expect("a request was sent")
}
