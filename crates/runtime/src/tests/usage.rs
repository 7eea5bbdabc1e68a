//! Where a step's time is charged to.

use std::collections::BTreeMap;
use std::time::Duration;

use shardwright_core::{MicrobatchId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_wire::{Message, Phase, Request, Response, ResponseOutcome, Value};

use super::alone::*;
use super::rig::{backward, body, config, forward, new_request, plan};
use crate::{
    AloneRecorder, Grant, LocalError, Machine, MainEvent, Task, TraceKind, Usage, Waiting,
};

const WORKER: WorkerId = WorkerId(0);

fn waited_for(waits: &[(u32, u64)]) -> BTreeMap<Rank, Duration> {
    let waits = waits.iter();
    waits
        .map(|(rank, seconds)| (Rank(*rank), at(*seconds)))
        .collect()
}

fn answer(id: RequestId) -> Message {
    Message::Response(Box::new(Response {
        id,
        step: StepEpoch(1),
        responder: Rank(1),
        outcome: ResponseOutcome::Value(body(Value::None).into()),
    }))
}

/// A request of rank `from` for a forward here, as its own machine sends it.
fn request(from: u32, pipeline: &[u32], to: u32) -> Message {
    let mut asking = Machine::new(config(from, pipeline, pipeline.len() as u32));
    asking.begin_step(plan(1, "train_step", 1), at(0)).unwrap();
    let new = new_request(forward(1), MicrobatchId(0), Value::None);
    asking.send_request(None, Rank(to), new, at(0)).unwrap();
    request_of(&mut asking)
}

/// Starts the worker that is wanted, which comes up then and gets a task.
fn start(machine: &mut Machine, asked: u64, up: u64) -> Task {
    assert_eq!(
        machine.poll_main(at(asked)),
        Some(MainEvent::StartWorker(WORKER))
    );
    machine.worker_returns(WORKER, at(up)).unwrap();
    match machine.take_grant(WORKER) {
        Some(Grant::Task(task)) => task,
        other => panic!("no task but {other:?}"),
    }
}

/// The same, where the task is a request.
fn start_request(machine: &mut Machine, asked: u64, up: u64) -> Request {
    match start(machine, asked, up) {
        Task::Request(request) => *request,
        other => panic!("no request but {other:?}"),
    }
}

/// A whole step of the root with one microbatch: 17 s, of which it waits 4 for rank 1.
fn run_root(root: &mut Machine) {
    enter(root, 1).unwrap();
    start(root, 1, 2);
    let new = new_request(forward(1), MicrobatchId(0), Value::None);
    let id = root
        .send_request(Some(WORKER), Rank(1), new, at(3))
        .unwrap();
    let waits = root.wait(WORKER, &[id], Phase::Forward, at(5)).unwrap();
    assert_eq!(waits, Waiting::Suspended);
    root.deliver(Rank(1), answer(id), at(9));
    assert_eq!(root.take_grant(WORKER), Some(Grant::Resume));
    root.take_responses(&[id]).unwrap();
    root.await_backward(WORKER, at(10)).unwrap();
    assert_eq!(root.take_grant(WORKER), Some(Grant::Resume));
    root.worker_returns(WORKER, at(14)).unwrap();
    assert_eq!(root.poll_main(at(15)), Some(MainEvent::RootDone));
    root.end_step(body(Value::None)).unwrap();
    root.leave_step(at(17)).unwrap();
}

#[test]
fn a_root_waits_for_the_rank_whose_answer_lets_it_go_on() {
    let mut root = machine(0);
    run_root(&mut root);
    let expected = Usage {
        steps: 1,
        forward: at(3 + 1),
        backward: at(4),
        waiting: waited_for(&[(1, 4)]),
        overhead: at(2 + 1),
        commit: at(2),
        ideal_idle: Some(at(15) / 2),
        ..Usage::default()
    };
    assert_eq!(root.newest_usage(), &expected);
    assert_eq!(root.usage(), &expected);
    assert_eq!(expected.total(), at(17));
    assert!((expected.bubble() - 7.0 / 15.0).abs() < 1e-12);
    assert_eq!(expected.ideal_bubble(), Some(0.5));
    assert_eq!(
        expected.to_string(),
        "1 steps in 17.0 s: busy 47.1% (forward 23.5%, backward 23.5%), waiting 23.5% (for rank 1 23.5%), \
         overhead 17.6%, finishing gradients 11.8%; sending 0.0%, 0 bytes sent, 0 received; bubble 46.7% \
         (the schedule's ideal 50.0%)"
    );
}

#[test]
fn what_a_root_does_after_its_backward_began_elsewhere_is_backward_work() {
    let mut root = machine(0);
    enter(&mut root, 1).unwrap();
    start(&mut root, 0, 0);
    assert_eq!(root.begin_backward_elsewhere(WORKER, at(2)), Ok(true));
    let new = new_request(backward(1, RequestId(1)), MicrobatchId(0), Value::None);
    let id = root
        .send_request(Some(WORKER), Rank(1), new, at(3))
        .unwrap();
    root.wait(WORKER, &[id], Phase::Backward, at(3)).unwrap();
    root.deliver(Rank(1), answer(id), at(7));
    assert_eq!(root.take_grant(WORKER), Some(Grant::Resume));
    root.worker_returns(WORKER, at(12)).unwrap();
    assert_eq!(root.poll_main(at(12)), Some(MainEvent::RootDone));
    root.end_step(body(Value::None)).unwrap();
    root.leave_step(at(12)).unwrap();
    let usage = root.newest_usage();
    assert_eq!((usage.forward, usage.backward), (at(2), at(1 + 5)));
}

#[test]
fn a_peer_waits_for_the_rank_that_asks_it_and_for_the_root_to_end_the_step() {
    let mut peer = machine(1);
    enter(&mut peer, 1).unwrap();
    peer.deliver(Rank(0), begin(1), at(2));
    peer.deliver(Rank(0), request(0, &[0, 1], 1), at(3));
    let request = start_request(&mut peer, 3, 4);
    peer.respond(Rank(0), request.id, body(Value::None), at(6))
        .unwrap();
    peer.worker_returns(WORKER, at(6)).unwrap();
    peer.deliver(Rank(0), end(1), at(9));
    assert!(matches!(
        peer.poll_main(at(10)),
        Some(MainEvent::StepEnd(_))
    ));
    peer.leave_step(at(11)).unwrap();
    let usage = peer.usage();
    assert_eq!(usage.waiting, waited_for(&[(0, 3 + 3)]));
    assert_eq!((usage.forward, usage.overhead), (at(2), at(1 + 1)));
    assert_eq!((usage.commit, usage.total()), (at(1), at(11)));
}

#[test]
fn a_task_that_still_runs_when_the_root_has_ended_the_step_is_charged_its_time() {
    // The answer is out before the worker has come back.
    let mut peer = machine(1);
    enter(&mut peer, 1).unwrap();
    peer.deliver(Rank(0), begin(1), at(0));
    peer.deliver(Rank(0), request(0, &[0, 1], 1), at(0));
    let request = start_request(&mut peer, 0, 0);
    peer.respond(Rank(0), request.id, body(Value::None), at(2))
        .unwrap();
    peer.deliver(Rank(0), end(1), at(5));
    peer.worker_returns(WORKER, at(6)).unwrap();
    assert!(matches!(peer.poll_main(at(6)), Some(MainEvent::StepEnd(_))));
    peer.leave_step(at(6)).unwrap();
    assert_eq!(peer.usage().forward, at(6));
    assert_eq!(peer.usage().waiting, waited_for(&[]));
}

#[test]
fn what_was_kept_for_the_roots_word_was_waited_for_by_that_word() {
    let mut third = Machine::new(config(2, &[0, 1, 2], 3));
    enter(&mut third, 1).unwrap();
    third.deliver(Rank(1), request(1, &[0, 1, 2], 2), at(1));
    third.deliver(Rank(0), begin(1), at(4));
    let request = start_request(&mut third, 4, 4);
    third
        .respond(Rank(1), request.id, body(Value::None), at(5))
        .unwrap();
    third.worker_returns(WORKER, at(5)).unwrap();
    third.deliver(Rank(0), end(1), at(5));
    assert!(matches!(
        third.poll_main(at(5)),
        Some(MainEvent::StepEnd(_))
    ));
    third.leave_step(at(5)).unwrap();
    assert_eq!(third.usage().waiting, waited_for(&[(0, 4)]));
}

#[test]
fn a_failed_step_is_not_counted() {
    let mut root = waiting_root();
    root.fail(None, LocalError::default(), at(3));
    assert_eq!(root.take_grant(WORKER), Some(Grant::Aborted));
    root.worker_returns(WORKER, at(4)).unwrap();
    assert!(matches!(root.poll_main(at(4)), Some(MainEvent::Failed(_))));
    assert_eq!(root.usage(), &Usage::default());
    assert_eq!(root.newest_usage(), &Usage::default());
}

#[test]
fn a_step_that_divides_a_model_is_the_newest_but_not_in_the_total() {
    let mut root = machine(0);
    enter(&mut root, 1).unwrap();
    start(&mut root, 0, 0);
    let control = shardwright_wire::Work::Control {
        name: "partition".to_owned(),
    };
    let new = new_request(control, MicrobatchId(0), Value::None);
    let id = root
        .send_request(Some(WORKER), Rank(1), new, at(1))
        .unwrap();
    root.wait(WORKER, &[id], Phase::Forward, at(1)).unwrap();
    root.deliver(Rank(1), answer(id), at(5));
    assert_eq!(root.take_grant(WORKER), Some(Grant::Resume));
    root.worker_returns(WORKER, at(6)).unwrap();
    assert_eq!(root.poll_main(at(6)), Some(MainEvent::RootDone));
    root.end_step(body(Value::None)).unwrap();
    root.leave_step(at(6)).unwrap();
    assert_eq!(root.newest_usage().total(), at(6));
    assert_eq!(root.newest_usage().waiting, waited_for(&[(1, 4)]));
    assert_eq!(root.usage().steps, 0);
}

#[test]
fn steps_add_up_and_an_unknown_ideal_stays_unknown() {
    let mut step = Usage::default();
    step.ran(TraceKind::Root, Phase::Forward, at(2));
    step.ran(TraceKind::WeightGradient, Phase::Backward, at(1));
    step.ran(TraceKind::Close, Phase::Backward, at(1));
    let mut total = Usage::default();
    total.add(&step, Some(0.25));
    total.add(&step, Some(0.75));
    assert_eq!((total.steps, total.busy()), (2, at(8)));
    assert_eq!((total.weight, total.other), (at(2), at(2)));
    assert_eq!(total.ideal_bubble(), Some(0.5));
    total.add(&step, None);
    total.add(&step, Some(0.5));
    assert_eq!(total.ideal_bubble(), None);
}

#[test]
fn a_rank_alone_adds_up_its_microbatches_and_the_end_of_its_steps() {
    let mut recorder = AloneRecorder::new(0);
    for step in 1..3 {
        recorder.begin(StepEpoch(step), at(0));
        recorder.passed(Phase::Forward, at(2));
        recorder.passed(Phase::Backward, at(5));
        recorder.next_microbatch(at(6));
        recorder.end(at(7));
        recorder.commit(at(9));
        recorder.commit(at(10));
    }
    recorder.begin(StepEpoch(3), at(0));
    recorder.next_microbatch(at(6));
    let (total, newest) = recorder.usage();
    assert_eq!((total.steps, newest.steps), (2, 1));
    assert_eq!(
        (newest.forward, newest.backward, newest.commit),
        (at(3), at(3), at(2))
    );
    assert_eq!(
        (total.total(), total.bubble(), total.ideal_bubble()),
        (at(16), 0.0, Some(0.0))
    );
}
