//! Single rules of the machine about steps, failures and tasks, event by event.

use shardwright_core::{MicrobatchId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_wire::{Message, Phase, Response, ResponseOutcome, Value};

use super::alone::*;
use super::rig::{body, forward, new_request};
use crate::{FailureKind, Grant, LocalError, MainEvent, ServerError, Task};

#[test]
fn a_message_of_an_older_step_is_dropped_and_counted() {
    // EX-4
    let mut peer = machine(1);
    commit(&mut peer, 5);
    peer.deliver(Rank(0), begin(4), at(0));
    assert_eq!(peer.stats().stale_messages, 1);
}

#[test]
fn a_message_of_a_newer_step_is_kept_until_it_is_entered() {
    // EX-4
    let mut peer = machine(1);
    peer.deliver(Rank(0), begin(1), at(0));
    peer.deliver(Rank(0), end(1), at(0));
    assert_eq!(peer.stats().kept_messages, 2);
    assert_eq!(peer.poll_main(at(0)), None);
    enter(&mut peer, 1).unwrap();
    assert!(matches!(peer.poll_main(at(0)), Some(MainEvent::StepEnd(_))));
    assert_eq!(peer.stats().kept_messages, 0);
}

#[test]
fn an_abort_of_a_step_not_entered_fails_it_at_its_entry_only() {
    // EX-5
    let mut peer = machine(1);
    peer.deliver(Rank(0), abort(1, "first"), at(0));
    peer.deliver(Rank(0), abort(1, "second"), at(0));
    let failed = failure(enter(&mut peer, 1));
    assert_eq!(
        (failed.kind, failed.report.message.as_str()),
        (FailureKind::Remote, "first")
    );
    assert_eq!(aborts_sent(&mut peer), 0);
    enter(&mut peer, 2).unwrap();
}

#[test]
fn a_rank_that_raises_because_of_an_abort_before_it_enters_does_not_report_it_as_its_own() {
    // EX-5
    let mut peer = machine(1);
    peer.deliver(Rank(0), abort(1, "first"), at(0));
    assert_eq!(
        failure(peer.check_abort(StepEpoch(1), &[], at(0)))
            .report
            .message,
        "first"
    );
    peer.fail(Some(StepEpoch(1)), LocalError::default(), at(0));
    assert_eq!(aborts_sent(&mut peer), 0);
    enter(&mut peer, 2).unwrap();
}

#[test]
fn the_first_failure_of_a_step_wins() {
    // EX-5
    let mut peer = machine(1);
    enter(&mut peer, 1).unwrap();
    peer.fail(
        None,
        LocalError {
            message: "own".to_owned(),
            ..LocalError::default()
        },
        at(0),
    );
    peer.deliver(Rank(0), abort(1, "other"), at(0));
    let Some(MainEvent::Failed(failed)) = peer.poll_main(at(0)) else {
        panic!("the step has failed")
    };
    assert_eq!(
        (failed.kind, failed.report.message.as_str()),
        (FailureKind::Local, "own")
    );
    assert_eq!(aborts_sent(&mut peer), 1);
    // A late report of the same step's failure does not touch the next step.
    enter(&mut peer, 2).unwrap();
    peer.deliver(Rank(0), abort(1, "other"), at(0));
    assert_eq!(peer.poll_main(at(0)), None);
}

#[test]
fn an_abort_during_the_commit_is_raised_there() {
    // EX-5
    let mut peer = machine(1);
    commit(&mut peer, 1);
    assert_eq!(peer.check_abort(StepEpoch(1), &[], at(0)), Ok(()));
    peer.deliver(Rank(0), abort(1, "all-reduce"), at(0));
    assert_eq!(
        failure(peer.check_abort(StepEpoch(1), &[], at(0)))
            .report
            .message,
        "all-reduce"
    );
    peer.leave_step(at(0)).unwrap();
    enter(&mut peer, 2).unwrap();
}

#[test]
fn a_failure_of_a_step_that_succeeded_here_fails_the_next_one_everywhere() {
    // EX-5
    let mut peer = machine(1);
    commit(&mut peer, 1);
    peer.leave_step(at(0)).unwrap();
    peer.deliver(Rank(0), abort(1, "hook"), at(0));
    assert_eq!(failure(enter(&mut peer, 2)).report.message, "hook");
    assert_eq!(aborts_sent(&mut peer), 1);
    enter(&mut peer, 3).unwrap();
}

#[test]
fn an_error_in_the_commit_is_told_and_the_next_step_starts() {
    let mut peer = machine(1);
    commit(&mut peer, 1);
    peer.fail(Some(StepEpoch(1)), LocalError::default(), at(0));
    assert_eq!(aborts_sent(&mut peer), 1);
    enter(&mut peer, 2).unwrap();
}

#[test]
fn a_response_from_the_wrong_rank_or_twice_is_dropped_and_counted() {
    let mut root = waiting_root();
    let response = |responder: u32| {
        Message::Response(Box::new(Response {
            id: RequestId(1),
            step: StepEpoch(1),
            responder: Rank(responder),
            outcome: ResponseOutcome::Value(body(Value::None).into()),
        }))
    };
    root.deliver(Rank(0), response(0), at(0));
    assert_eq!(root.stats().unexpected_messages, 1);
    root.deliver(Rank(1), response(1), at(0));
    root.deliver(Rank(1), response(1), at(0));
    assert_eq!(root.stats().unexpected_messages, 2);
    assert_eq!(root.take_grant(WorkerId(0)), Some(Grant::Resume));
}

#[test]
fn a_message_that_only_the_root_may_send_is_dropped_from_others() {
    let mut root = waiting_root();
    root.deliver(Rank(1), begin(1), at(0));
    root.deliver(Rank(1), end(1), at(0));
    assert_eq!(root.stats().unexpected_messages, 2);
}

#[test]
fn a_suspended_worker_may_not_ask_for_a_task() {
    let mut root = waiting_root();
    let misuse = root.worker_returns(WorkerId(0), at(0));
    let expected = ServerError::NotExecuting {
        worker: WorkerId(0),
        call: "next_task",
    };
    assert_eq!(misuse, Err(expected));
}

#[test]
fn a_task_that_ends_without_its_answer_fails_the_step() {
    let mut sender = waiting_root();
    let mut peer = machine(1);
    enter(&mut peer, 1).unwrap();
    peer.deliver(Rank(0), begin(1), at(0));
    peer.deliver(Rank(0), request_of(&mut sender), at(0));
    let Some(MainEvent::StartWorker(worker)) = peer.poll_main(at(0)) else {
        panic!("a worker is needed")
    };
    peer.worker_returns(worker, at(0)).unwrap();
    assert!(matches!(
        peer.take_grant(worker),
        Some(Grant::Task(Task::Request(_)))
    ));
    peer.worker_returns(worker, at(0)).unwrap();
    let Some(MainEvent::Failed(failed)) = peer.poll_main(at(0)) else {
        panic!("the step has failed")
    };
    assert!(
        failed.report.message.contains("without an answer"),
        "{}",
        failed.report.message
    );
}

#[test]
fn a_rank_whose_worker_comes_up_is_not_idle() {
    // EX-2: on a loaded machine the thread may take long, and other ranks wait for what it will do.
    let mut root = machine(0);
    enter(&mut root, 1).unwrap();
    root.block_main(true);
    assert_eq!(root.idle_in_step(at(5)), None, "a worker is wanted");
    let Some(MainEvent::StartWorker(worker)) = root.poll_main(at(5)) else {
        panic!("a worker is needed")
    };
    assert_eq!(root.idle_in_step(at(9)), None, "its thread comes up");
    root.worker_returns(worker, at(9)).unwrap();
    let _task = root.take_grant(worker);
    let request = new_request(forward(1), MicrobatchId(0), Value::None);
    let id = root
        .send_request(Some(worker), Rank(1), request, at(9))
        .unwrap();
    root.wait(worker, &[id], Phase::Forward, at(9)).unwrap();
    assert_eq!(root.idle_in_step(at(12)), Some((at(9), at(3))));
}
