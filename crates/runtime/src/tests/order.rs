//! A peer under a program, event by event: what it serves next, what it passes over, and how a misfit ends.

use std::sync::Arc;

use shardwright_core::{CallPath, MicrobatchId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_schedule::{Program, Schedule};
use shardwright_wire::{Message, Request, StepBegin, Value, Work};

use super::alone::{at, end, machine};
use super::rig::{backward, body, close, forward, plan};
use crate::{FailureKind, Grant, Machine, MainEvent, StepPlan, Task};

const ONE_STAGE: &str = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n";
const TWO_STAGES: &str = "0F0,2F0,0F1,2F1,2B0,0B0,2B1,0B1\n1F0,3F0,1F1,3F1,3B0,1B0,3B1,1B1\n";

/// Rank 1 in a step of two microbatches, with a worker that is idle.
fn peer(program: &str) -> Machine {
    let program = Program::from_csv(program).unwrap();
    peer_under(Schedule::Program(Arc::new(program)))
}

pub(super) fn peer_under(schedule: Schedule) -> Machine {
    let mut peer = machine(1);
    let plan = StepPlan {
        schedule,
        ..plan(1, "train_step", 2)
    };
    peer.begin_step(plan, at(0)).unwrap();
    peer.enter_main(at(0));
    let begin = StepBegin {
        step: StepEpoch(1),
        function: "train_step".to_owned(),
        num_microbatches: 2,
        one_at_a_time: false,
    };
    peer.deliver(Rank(0), Message::StepBegin(begin), at(0));
    peer
}

pub(super) fn ask(peer: &mut Machine, id: u64, work: Work, microbatch: u32) {
    let request = Request {
        id: RequestId(id),
        step: StepEpoch(1),
        model: shardwright_core::ModelId(0),
        work,
        microbatch: MicrobatchId(microbatch),
        requester: Rank(0),
        place: shardwright_wire::Place {
            parent: None,
            call: shardwright_core::CallId(0),
        },
        path: CallPath(vec![id as u32]),
        hold: false,
        released: Vec::new(),
        body: body(Value::None),
    };
    peer.deliver(Rank(0), Message::Request(Box::new(request)), at(0));
    start_worker(peer);
}

fn start_worker(peer: &mut Machine) {
    if let Some(MainEvent::StartWorker(worker)) = peer.poll_main(at(0)) {
        peer.worker_returns(worker, at(0)).unwrap();
    }
}

/// The id of the request that runs now, which ends; `None` when everything is held back.
pub(super) fn serve(peer: &mut Machine) -> Option<u64> {
    serve_and(peer, |_| {})
}

pub(super) fn serve_and(peer: &mut Machine, meanwhile: impl FnOnce(&mut Machine)) -> Option<u64> {
    let Grant::Task(Task::Request(request)) = peer.take_grant(WorkerId(0))? else {
        panic!("only requests come")
    };
    meanwhile(peer);
    peer.respond(Rank(0), request.id, body(Value::None), at(0))
        .unwrap();
    peer.worker_returns(WorkerId(0), at(0)).unwrap();
    Some(request.id.0)
}

#[test]
fn what_comes_later_in_the_program_waits_for_what_comes_first() {
    let mut peer = peer(ONE_STAGE);
    ask(&mut peer, 2, forward(1), 1);
    assert_eq!(serve(&mut peer), None);
    ask(&mut peer, 1, forward(1), 0);
    assert_eq!(serve(&mut peer), Some(1));
    assert_eq!(serve(&mut peer), Some(2));
    ask(&mut peer, 3, backward(1, RequestId(1)), 0);
    assert_eq!(serve(&mut peer), None);
    ask(&mut peer, 4, backward(1, RequestId(2)), 1);
    assert_eq!(serve(&mut peer), Some(4));
    assert_eq!(serve(&mut peer), Some(3));
}

#[test]
fn further_calls_of_a_microbatch_belong_to_the_last_stage() {
    let mut peer = peer(ONE_STAGE);
    ask(&mut peer, 1, forward(1), 0);
    assert_eq!(serve(&mut peer), Some(1));
    // Nothing of microbatch 1 has come, and yet this is no later action.
    ask(&mut peer, 2, forward(2), 0);
    assert_eq!(serve(&mut peer), Some(2));
    ask(&mut peer, 3, forward(1), 1);
    assert_eq!(serve(&mut peer), Some(3));
    // The backward of a stage is over when that of each of its calls is.
    ask(&mut peer, 4, backward(2, RequestId(2)), 0);
    assert_eq!(serve(&mut peer), None);
    ask(&mut peer, 5, backward(1, RequestId(3)), 1);
    assert_eq!(serve(&mut peer), Some(5));
    assert_eq!(serve(&mut peer), Some(4));
}

#[test]
fn a_close_is_a_backward_and_a_forward_without_either_is_passed_over() {
    let mut peer = peer("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n");
    ask(&mut peer, 1, forward(1), 0);
    ask(&mut peer, 2, forward(1), 1);
    assert_eq!(serve(&mut peer), Some(1));
    assert_eq!(serve(&mut peer), None);
    ask(&mut peer, 3, close(1, RequestId(1)), 0);
    assert_eq!(serve(&mut peer), Some(3));
    assert_eq!(serve(&mut peer), Some(2));

    let mut peer = self::peer("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n");
    ask(&mut peer, 1, forward(1), 0);
    ask(&mut peer, 2, forward(1), 1);
    let first = serve_and(&mut peer, |peer| {
        peer.ends_with_forward(WorkerId(0)).unwrap();
    });
    assert_eq!(first, Some(1));
    assert_eq!(serve(&mut peer), Some(2));
}

#[test]
fn the_roots_word_that_the_step_is_over_lets_everything_go() {
    let mut peer = peer(ONE_STAGE);
    ask(&mut peer, 2, forward(1), 1);
    assert_eq!(serve(&mut peer), None);
    peer.deliver(Rank(0), end(1), at(0));
    start_worker(&mut peer);
    assert_eq!(serve(&mut peer), Some(2));
}

#[test]
fn microbatches_one_at_a_time_go_before_the_program() {
    let mut peer = peer(ONE_STAGE);
    peer.one_at_a_time();
    ask(&mut peer, 1, forward(1), 0);
    assert_eq!(serve(&mut peer), Some(1));
    ask(&mut peer, 2, backward(1, RequestId(1)), 0);
    assert_eq!(serve(&mut peer), Some(2));
}

fn failure_of(peer: &mut Machine, seconds: u64) -> crate::Failure {
    let Some(MainEvent::Failed(failure)) = peer.poll_main(at(seconds)) else {
        panic!("the step has failed")
    };
    failure
}

#[test]
fn a_stage_that_the_model_does_not_have_fails_the_step_at_once() {
    let mut peer = peer(TWO_STAGES);
    ask(&mut peer, 1, forward(1), 0);
    assert_eq!(serve(&mut peer), Some(1));
    ask(&mut peer, 2, backward(1, RequestId(1)), 0);
    let failure = failure_of(&mut peer, 0);
    assert_eq!(failure.kind, FailureKind::Stall);
    assert_eq!(
        failure.report.message,
        "the model does not fit the program in step 1 (train_step): rank 1 stands at action 2 of 8 of the program, \
         3F0; the backward of microbatch 0 is asked for, but only 1 of its forwards were, so that what the program \
         wants can never come; held back meanwhile: backward of module \"module 1 of model 0\" for microbatch 0 \
         (action 6, 1B0)"
    );
    assert_eq!(failure.report.microbatch, Some(MicrobatchId(0)));
}

#[test]
fn a_step_that_stands_still_for_its_program_fails_and_says_what_it_waits_for() {
    let mut peer = peer(ONE_STAGE);
    ask(&mut peer, 2, forward(1), 1);
    peer.block_main(true);
    peer.tick(at(0));
    assert!(
        peer.describe(at(0))
            .contains("stands at action 1 of 4 of the program, 1F0")
    );
    // The rig reports after 1 s and gives up after 3 s.
    peer.tick(at(1));
    let failure = failure_of(&mut peer, 1);
    assert!(
        failure.report.message.contains(
            "rank 1 stands at action 1 of 4 of the program, 1F0; nothing in the job has made progress for 1.0 s"
        ) && failure.report.message.contains("for microbatch 1 (action 2, 1F1)"),
        "{}",
        failure.report.message
    );
}

#[test]
fn the_next_step_follows_the_program_from_its_beginning() {
    let mut peer = peer(ONE_STAGE);
    ask(&mut peer, 1, forward(1), 0);
    assert_eq!(serve(&mut peer), Some(1));
    peer.deliver(Rank(0), end(1), at(0));
    assert!(matches!(peer.poll_main(at(0)), Some(MainEvent::StepEnd(_))));
    peer.leave_step(at(0)).unwrap();
    let again = Schedule::Program(Arc::new(Program::from_csv(ONE_STAGE).unwrap()));
    let plan = StepPlan {
        schedule: again,
        ..plan(2, "train_step", 2)
    };
    peer.begin_step(plan, at(0)).unwrap();
    assert!(peer.describe(at(0)).contains("stands at action 1 of 4"));
}
