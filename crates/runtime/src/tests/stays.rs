//! Microbatches where modules keep something (EX-15), event by event: who enters, who waits, and for whom.

use std::num::NonZeroU32;

use shardwright_core::{MicrobatchId, ModelId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_schedule::Schedule;
use shardwright_wire::{ForwardOver, Message, Phase, Value};

use super::alone::{at, machine};
use super::order::{ask, peer_under};
use super::rig::{body, forward, new_request, plan};
use crate::{
    Effect, FailureKind, Grant, Machine, MainEvent, ServerError, StateKey, StepPlan, Task, Waiting,
};

const KEY: StateKey = (ModelId(0), 0);

fn schedule(text: &str) -> Schedule {
    text.parse().expect("to be a schedule")
}

/// Rank 1 in a step of two microbatches, where microbatches have so many stays in what is kept.
fn peer(stays: Option<u32>) -> Machine {
    let mut peer = peer_under(schedule("interleaved(active=4)"));
    peer.keep_in_order(KEY, "'norm.mean'".to_owned(), stays);
    peer
}

/// The worker that has the turn for a new task, and that task's microbatch.
fn begun(machine: &mut Machine) -> (WorkerId, u32) {
    loop {
        for worker in (0..8).map(WorkerId) {
            match machine.take_grant(worker) {
                Some(Grant::Task(Task::Request(request))) => return (worker, request.microbatch.0),
                Some(Grant::Task(Task::Root { microbatch })) => return (worker, microbatch.0),
                Some(other) => panic!("worker {worker} was granted {other:?}"),
                None => {}
            }
        }
        match machine.poll_main(at(0)) {
            Some(MainEvent::StartWorker(worker)) => machine.worker_returns(worker, at(0)).unwrap(),
            other => panic!("nothing runs, and the main thread has {other:?}"),
        }
    }
}

fn enter(machine: &mut Machine, worker: WorkerId) -> Waiting {
    if machine.try_enter_state(worker, KEY, at(0)).unwrap() {
        return Waiting::Over;
    }
    machine.enter_state(worker, KEY, at(0)).unwrap()
}

fn answer(machine: &mut Machine, worker: WorkerId, id: u64) {
    machine
        .respond(Rank(0), RequestId(id), body(Value::None), at(0))
        .unwrap();
    machine.worker_returns(worker, at(0)).unwrap();
}

fn over(microbatch: u32) -> Message {
    Message::ForwardOver(ForwardOver {
        step: StepEpoch(1),
        microbatch: MicrobatchId(microbatch),
    })
}

#[test]
fn a_later_microbatch_waits_until_an_earlier_one_has_been_there_as_often_as_known() {
    let mut peer = peer(Some(2));
    ask(&mut peer, 1, forward(1), 1);
    let (later, _) = begun(&mut peer);
    assert_eq!(enter(&mut peer, later), Waiting::Suspended);
    ask(&mut peer, 2, forward(1), 0);
    let (first, microbatch) = begun(&mut peer);
    assert_eq!(microbatch, 0);
    for _ in 0..2 {
        assert!(peer.take_grant(later).is_none());
        assert_eq!(enter(&mut peer, first), Waiting::Over);
        peer.leave_state(first, KEY).unwrap();
    }
    answer(&mut peer, first, 2);
    assert_eq!(peer.take_grant(later), Some(Grant::Resume));
    peer.leave_state(later, KEY).unwrap();
    assert_eq!(
        peer.stays(),
        [(KEY, None)],
        "one had two stays, and one had one"
    );
}

#[test]
fn a_stay_within_a_stay_of_the_same_microbatch_does_not_wait() {
    let mut peer = peer(Some(2));
    ask(&mut peer, 1, forward(1), 0);
    let (worker, _) = begun(&mut peer);
    assert_eq!(enter(&mut peer, worker), Waiting::Over);
    assert_eq!(enter(&mut peer, worker), Waiting::Over);
}

#[test]
fn where_nobody_knows_how_often_the_forwards_have_to_be_over() {
    let mut peer = peer(None);
    ask(&mut peer, 1, forward(1), 0);
    let (first, _) = begun(&mut peer);
    assert_eq!(enter(&mut peer, first), Waiting::Over);
    peer.leave_state(first, KEY).unwrap();
    answer(&mut peer, first, 1);
    ask(&mut peer, 2, forward(1), 1);
    let (later, _) = begun(&mut peer);
    assert_eq!(enter(&mut peer, later), Waiting::Suspended);
    assert!(
        peer.describe(at(1_000))
            .contains("microbatch 0 to be through with 'norm.mean'")
    );
    peer.deliver(Rank(0), over(0), at(1));
    assert_eq!(peer.take_grant(later), Some(Grant::Resume));
}

#[test]
fn a_microbatch_that_never_comes_holds_nobody_up() {
    let mut peer = peer(Some(1));
    peer.deliver(Rank(0), over(0), at(0));
    ask(&mut peer, 1, forward(1), 1);
    let (later, _) = begun(&mut peer);
    assert_eq!(enter(&mut peer, later), Waiting::Over);
}

#[test]
fn one_that_comes_back_after_a_later_one_fails_the_step() {
    let mut peer = peer(Some(1));
    for (id, microbatch) in [(1, 0), (2, 1)] {
        ask(&mut peer, id, forward(1), microbatch);
        let (worker, _) = begun(&mut peer);
        assert_eq!(enter(&mut peer, worker), Waiting::Over);
        peer.leave_state(worker, KEY).unwrap();
        answer(&mut peer, worker, id);
    }
    ask(&mut peer, 3, forward(1), 0);
    let (worker, _) = begun(&mut peer);
    peer.take_effects();
    let refused = peer.try_enter_state(worker, KEY, at(0));
    assert_eq!(refused, Err(ServerError::Aborted));
    let told = peer.take_effects().into_iter().any(|effect| {
        matches!(effect, Effect::Send { to: Rank(0), message: Message::Abort(abort) }
            if abort.error.kind == "StateOrderError"
                && abort.error.message.contains("microbatch 0 came to 'norm.mean' after microbatch 1"))
    });
    assert!(told);
    peer.worker_returns(worker, at(0)).unwrap();
    let Some(MainEvent::Failed(failure)) = peer.poll_main(at(0)) else {
        panic!("the step has failed");
    };
    assert_eq!(failure.kind, FailureKind::StateOrder);
}

#[test]
fn a_list_says_which_microbatch_goes_first() {
    let mut peer = peer_under(schedule("list(1F 1B 0F 0B)"));
    peer.keep_in_order(KEY, "'norm.mean'".to_owned(), Some(1));
    ask(&mut peer, 1, forward(1), 1);
    let (worker, _) = begun(&mut peer);
    assert_eq!(enter(&mut peer, worker), Waiting::Over);
}

/// The root in a step of two microbatches, whose peers are told of forwards that are over.
fn root(schedule: Schedule) -> Machine {
    let mut root = machine(0);
    root.tell_forwards();
    let plan = StepPlan {
        schedule,
        ..plan(1, "train_step", 2)
    };
    root.begin_step(plan, at(0)).unwrap();
    root.enter_main(at(0));
    root.take_effects();
    root
}

fn told_over(machine: &mut Machine) -> Vec<u32> {
    let effects = machine.take_effects().into_iter();
    effects
        .filter_map(|effect| match effect {
            Effect::Send {
                message: Message::ForwardOver(over),
                ..
            } => Some(over.microbatch.0),
            _ => None,
        })
        .collect()
}

#[test]
fn forwards_are_over_when_all_answers_are_there_and_the_step_function_is_past_them() {
    let mut root = root(schedule("simple"));
    let (worker, microbatch) = begun(&mut root);
    assert_eq!(microbatch, 0);
    let request = new_request(forward(1), MicrobatchId(0), Value::None);
    let id = root
        .send_request(Some(worker), Rank(1), request, at(0))
        .unwrap();
    // It has gone on without the answer, as static mode does.
    assert!(!root.begin_backward_elsewhere(worker, at(0)).unwrap());
    assert!(told_over(&mut root).is_empty());
    let response = shardwright_wire::Response {
        id,
        step: StepEpoch(1),
        responder: Rank(1),
        outcome: shardwright_wire::ResponseOutcome::Value(body(Value::None).into()),
    };
    root.deliver(Rank(1), Message::Response(Box::new(response)), at(0));
    assert_eq!(told_over(&mut root), [0]);
    root.wait(worker, &[id], Phase::Forward, at(0)).unwrap();
}

#[test]
fn under_simple_a_backward_that_waits_for_all_forwards_holds_no_microbatch_up() {
    let mut root = root(schedule("simple"));
    root.keep_in_order(KEY, "'calls'".to_owned(), None);
    let (first, _) = begun(&mut root);
    assert_eq!(enter(&mut root, first), Waiting::Over);
    root.leave_state(first, KEY).unwrap();
    root.await_backward(first, at(0)).unwrap();
    let (second, microbatch) = begun(&mut root);
    assert_eq!(microbatch, 1);
    assert_eq!(enter(&mut root, second), Waiting::Over);
    root.leave_state(second, KEY).unwrap();
    assert_eq!(root.stays(), [(KEY, Some(1))]);
    root.await_backward(second, at(0)).unwrap();
    assert_eq!(root.take_grant(first), Some(Grant::Resume));
}

#[test]
fn peers_learn_that_microbatches_run_one_after_another() {
    let mut peer = machine(1);
    let active = NonZeroU32::new(4).unwrap();
    peer.begin_step(
        StepPlan {
            schedule: Schedule::Interleaved { active },
            ..plan(1, "train_step", 2)
        },
        at(0),
    )
    .unwrap();
    assert!(!peer.runs_one_at_a_time());
    let begin = shardwright_wire::StepBegin {
        step: StepEpoch(1),
        function: "train_step".to_owned(),
        num_microbatches: 2,
        one_at_a_time: true,
    };
    peer.deliver(Rank(0), Message::StepBegin(begin), at(0));
    assert!(peer.runs_one_at_a_time());
    assert!(peer.keeps_one_at_a_time());
}

#[test]
fn a_peer_takes_the_order_of_microbatches_from_its_root_alone() {
    for ours in [false, true] {
        let mut peer = machine(1);
        let active = NonZeroU32::new(4).unwrap();
        let wanted = StepPlan {
            schedule: Schedule::Interleaved { active },
            one_at_a_time: ours,
            ..plan(1, "train_step", 2)
        };
        peer.begin_step(wanted, at(0)).unwrap();
        let begin = shardwright_wire::StepBegin {
            step: StepEpoch(1),
            function: "train_step".to_owned(),
            num_microbatches: 2,
            one_at_a_time: false,
        };
        peer.deliver(Rank(0), Message::StepBegin(begin), at(0));
        assert!(!peer.runs_one_at_a_time());
        assert!(!peer.keeps_one_at_a_time());
    }
}
