//! Single rules of the machine about waits and departures (EX-8, EX-10).

use shardwright_comm::Loss;
use shardwright_core::{MicrobatchId, ModelId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_wire::{ErrorReport, Heartbeat, Message, Phase, Response, ResponseOutcome, Value};

use super::alone::*;
use super::rig::{backward, body, config, forward, new_request, plan};
use crate::{FailureKind, Grant, Machine, MainEvent, StepPlan, Waiting};

#[test]
fn a_peer_that_computes_is_progress_and_one_that_waits_is_not() {
    // EX-8
    let mut root = waiting_root();
    let heartbeat = |executing| Heartbeat {
        step: 1,
        executing,
        sending: false,
        progress: 3,
    };
    for second in 1..60 {
        root.heartbeat(Rank(1), heartbeat(true), at(second));
        root.tick(at(second));
        assert!(!matches!(
            root.poll_main(at(second)),
            Some(MainEvent::Failed(_))
        ));
    }
    for second in 60..62 {
        root.heartbeat(Rank(1), heartbeat(false), at(second));
        root.tick(at(second));
    }
    root.tick(at(63));
    // EX-6: reported only when the waiting worker has gone.
    assert!(!matches!(
        root.poll_main(at(63)),
        Some(MainEvent::Failed(_))
    ));
    assert_eq!(root.take_grant(WorkerId(0)), Some(Grant::Aborted));
    root.worker_returns(WorkerId(0), at(63)).unwrap();
    let Some(MainEvent::Failed(failed)) = root.poll_main(at(63)) else {
        panic!("a stall is a failure")
    };
    assert_eq!(failed.kind, FailureKind::Stall);
    assert_eq!(aborts_sent(&mut root), 1);
}

#[test]
fn a_main_thread_that_waits_outside_the_server_is_no_progress_for_others() {
    // EX-8
    let mut rank = machine(1);
    assert!(rank.is_executing());
    assert_eq!(rank.wait_outside(true, at(10)), at(0));
    assert!(!rank.is_executing());
    assert_eq!(rank.wait_outside(true, at(14)), at(4));
    let computing = Heartbeat {
        step: 0,
        executing: true,
        sending: false,
        progress: 0,
    };
    rank.heartbeat(Rank(0), computing, at(15));
    assert_eq!(rank.wait_outside(true, at(17)), at(2));
    rank.wait_outside(false, at(18));
    assert!(rank.is_executing());
}

const INTERLEAVED: &str = "interleaved(active=4)";

/// A root of two microbatches: worker 0 waits for request 1 of microbatch 0, and worker 1 has sent request 2 of
/// microbatch 1 but does not wait yet.
pub(super) fn root_of_two(schedule: &str) -> Machine {
    let mut root = machine(0);
    let plan = StepPlan {
        schedule: schedule.parse().expect("to be a schedule"),
        ..plan(1, "train_step", 2)
    };
    root.begin_step(plan, at(0)).unwrap();
    root.enter_main(at(0));
    for microbatch in 0..2 {
        let Some(MainEvent::StartWorker(worker)) = root.poll_main(at(0)) else {
            panic!("a worker is needed")
        };
        root.worker_returns(worker, at(0)).unwrap();
        assert!(matches!(root.take_grant(worker), Some(Grant::Task(_))));
        let request = new_request(forward(1), MicrobatchId(microbatch), Value::None);
        let id = root
            .send_request(Some(worker), Rank(1), request, at(0))
            .unwrap();
        if microbatch == 0 {
            let waiting = root.wait(worker, &[id], Phase::Forward, at(0)).unwrap();
            assert_eq!(waiting, Waiting::Suspended);
        }
    }
    root
}

pub(super) fn answer_of(id: u64) -> Message {
    Message::Response(Box::new(Response {
        id: RequestId(id),
        step: StepEpoch(1),
        responder: Rank(1),
        outcome: ResponseOutcome::Value(body(Value::None).into()),
    }))
}

#[test]
fn a_wait_that_is_over_already_keeps_the_turn() {
    // EX-3
    let mut root = root_of_two(INTERLEAVED);
    root.deliver(Rank(1), answer_of(2), at(0));
    assert_eq!(
        root.wait(WorkerId(1), &[RequestId(2)], Phase::Forward, at(0)),
        Ok(Waiting::Over)
    );
}

#[test]
fn a_wait_that_is_over_already_lets_an_earlier_microbatch_go_first() {
    // EX-3
    let mut root = root_of_two(INTERLEAVED);
    root.deliver(Rank(1), answer_of(1), at(0));
    root.deliver(Rank(1), answer_of(2), at(0));
    assert_eq!(root.take_grant(WorkerId(0)), None);
    assert_eq!(
        root.wait(WorkerId(1), &[RequestId(2)], Phase::Forward, at(0)),
        Ok(Waiting::Suspended)
    );
    assert_eq!(root.take_grant(WorkerId(0)), Some(Grant::Resume));
    root.await_backward(WorkerId(0), at(0)).unwrap();
    // Its backward goes before the other's forward, which has waited longer.
    assert_eq!(root.take_grant(WorkerId(0)), Some(Grant::Resume));
    root.worker_returns(WorkerId(0), at(0)).unwrap();
    assert_eq!(root.take_grant(WorkerId(1)), Some(Grant::Resume));
}

#[test]
fn a_backward_that_begins_elsewhere_is_asked_for_at_once_though_an_earlier_microbatch_is_ready() {
    let mut root = root_of_two(INTERLEAVED);
    root.deliver(Rank(1), answer_of(1), at(0));
    assert_eq!(root.begin_backward_elsewhere(WorkerId(1), at(0)), Ok(true));
    assert_eq!(root.take_grant(WorkerId(0)), None);
}

#[test]
fn a_backward_that_begins_elsewhere_waits_where_the_schedule_has_another_order() {
    let mut root = root_of_two("simple");
    assert_eq!(root.begin_backward_elsewhere(WorkerId(1), at(0)), Ok(false));
    let mut root = root_of_two("list(0F 1F 0B 1B)");
    assert_eq!(root.begin_backward_elsewhere(WorkerId(1), at(0)), Ok(false));
}

#[test]
fn a_backward_that_begins_elsewhere_is_asked_for_at_once_where_each_rank_has_its_part_of_a_program()
{
    let program = "shardwright program 1\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n";
    let mut root = root_of_two(program);
    assert_eq!(root.begin_backward_elsewhere(WorkerId(1), at(0)), Ok(true));
}

#[test]
fn a_long_task_here_is_no_stall() {
    // EX-8
    let mut root = machine(0);
    enter(&mut root, 1).unwrap();
    let Some(MainEvent::StartWorker(worker)) = root.poll_main(at(0)) else {
        panic!("a worker is needed")
    };
    root.worker_returns(worker, at(0)).unwrap();
    assert!(root.take_grant(worker).is_some());
    for second in 1..100 {
        root.tick(at(second));
        assert_eq!(root.poll_main(at(second)), None);
    }
}

#[test]
fn a_wait_is_reported_ever_more_rarely_and_says_who_waits_for_whom() {
    let mut root = waiting_root();
    root.name_modules(
        ModelId(0),
        vec!["model".to_owned(), "model.tail".to_owned()],
    );
    let mut reports = Vec::new();
    for second in 1..=9 {
        root.heartbeat(
            Rank(1),
            Heartbeat {
                step: 1,
                executing: true,
                sending: false,
                progress: 7,
            },
            at(second),
        );
        root.tick(at(second));
        if let Some(MainEvent::StallReport(text)) = root.poll_main(at(second)) {
            reports.push((second, text));
        }
    }
    assert_eq!(
        reports
            .iter()
            .map(|(second, _)| *second)
            .collect::<Vec<_>>(),
        [1, 2, 4, 8]
    );
    assert_eq!(
        reports[0].1,
        "step 1 (train_step): rank 0 on host \"host0\": microbatch 0 (worker 0) has waited 1.0 s for rank 1 to \
         answer request 1 (forward of model.tail) [last heard: executing in step 1, 7 tasks done]"
    );
}

#[test]
fn of_many_microbatches_that_wait_a_few_are_described_and_the_others_counted() {
    let shown = |num_microbatches| {
        let text = root_that_waits(num_microbatches).describe(at(1));
        let tail = text.split("; more microbatches that wait: ").nth(1);
        (
            text.matches(" has waited 1.0 s for rank 1").count(),
            tail.map(str::to_owned),
        )
    };
    assert_eq!(shown(1), (1, None));
    assert_eq!(shown(3), (3, None));
    assert_eq!(shown(4), (3, Some("1".to_owned())));
}

#[test]
fn a_peer_that_leaves_after_the_roots_word_is_not_missed() {
    // EX-10
    let mut third = Machine::new(config(2, &[0, 1, 2], 3));
    enter(&mut third, 1).unwrap();
    third.deliver(Rank(0), begin(1), at(0));
    third.peer_lost(Rank(1), Loss::Left(None), at(0));
    third.deliver(Rank(0), end(1), at(0));
    third.peer_lost(Rank(0), Loss::Left(None), at(0));
    assert!(matches!(
        third.poll_main(at(0)),
        Some(MainEvent::StepEnd(_))
    ));
    assert_eq!(third.check_abort(StepEpoch(1), &[], at(0)), Ok(()));
    third.leave_step(at(0)).unwrap();
    let failed = failure(enter(&mut third, 2));
    assert_eq!(failed.kind, FailureKind::PeerLost);
}

#[test]
fn a_partner_of_a_collective_that_has_left_is_missed_after_a_while() {
    // EX-10
    let mut peer = machine(1);
    commit(&mut peer, 1);
    peer.peer_lost(Rank(0), Loss::Left(None), at(10));
    assert_eq!(peer.check_abort(StepEpoch(1), &[Rank(0)], at(11)), Ok(()));
    assert_eq!(peer.check_abort(StepEpoch(1), &[Rank(1)], at(20)), Ok(()));
    let failed = failure(peer.check_abort(StepEpoch(1), &[Rank(0)], at(12)));
    assert_eq!(
        (failed.kind, failed.report.rank),
        (FailureKind::PeerLost, Rank(0))
    );
}

#[test]
fn of_ranks_gone_between_steps_the_first_fails_the_next_one() {
    // EX-10: the others may have left for its sake.
    let mut third = Machine::new(config(2, &[0, 1, 2], 3));
    commit(&mut third, 1);
    third.leave_step(at(0)).unwrap();
    third.peer_lost(Rank(1), Loss::Died, at(1));
    third.peer_lost(Rank(0), Loss::Left(None), at(2));
    let failed = failure(enter(&mut third, 2));
    assert_eq!(failed.report.rank, Rank(1));
}

#[test]
fn a_rank_that_dies_between_steps_fails_the_next_one() {
    // EX-10
    let mut peer = machine(1);
    peer.peer_lost(Rank(0), Loss::Silent { seconds: 9 }, at(0));
    let failed = failure(enter(&mut peer, 1));
    assert_eq!(failed.kind, FailureKind::PeerLost);
    assert!(
        failed.report.message.contains("has been silent for 9 s"),
        "{}",
        failed.report.message
    );
}

/// A root that has asked rank 1 for several things, and then loses it.
fn root_that_loses_a_rank(heartbeat_of_step: u64) -> ErrorReport {
    let mut root = machine(0);
    root.begin_step(plan(1, "train_step", 2), at(0)).unwrap();
    root.enter_main(at(0));
    root.poll_main(at(0));
    root.worker_returns(WorkerId(0), at(0)).unwrap();
    for (work, microbatch) in [
        (forward(2), 1),
        (forward(1), 0),
        (backward(1, RequestId(9)), 0),
    ] {
        let request = new_request(work, MicrobatchId(microbatch), Value::None);
        root.send_request(Some(WorkerId(0)), Rank(1), request, at(0))
            .unwrap();
    }
    let heartbeat = Heartbeat {
        step: heartbeat_of_step,
        executing: false,
        sending: false,
        progress: 0,
    };
    root.heartbeat(Rank(1), heartbeat, at(0));
    root.peer_lost(Rank(1), Loss::Died, at(1));
    root.worker_returns(WorkerId(0), at(1)).unwrap();
    let Some(MainEvent::Failed(failed)) = root.poll_main(at(1)) else {
        panic!("a lost rank is a failure")
    };
    failed.report
}

#[test]
fn a_lost_rank_is_reported_with_the_request_that_it_serves_first() {
    // EX-10
    let report = root_that_loses_a_rank(1);
    assert_eq!(
        (report.phase, report.microbatch),
        (Some(Phase::Backward), Some(MicrobatchId(0)))
    );
}

#[test]
fn a_rank_that_was_lost_before_it_entered_the_step_did_not_die_in_what_it_was_asked() {
    // EX-10
    let report = root_that_loses_a_rank(0);
    assert_eq!((report.phase, report.microbatch), (None, None));
    assert!(
        report.message.ends_with(
            "nothing has been heard from it in this step, and backward of \"module 1 of model 0\" in microbatch 0 \
             was asked of it"
        ),
        "{}",
        report.message
    );
}

#[test]
fn the_end_of_a_workers_thread_fails_the_step() {
    // EX-5, EX-6
    let mut root = machine(0);
    root.begin_step(plan(1, "train_step", 2), at(0)).unwrap();
    root.enter_main(at(0));
    root.poll_main(at(0));
    root.worker_returns(WorkerId(0), at(0)).unwrap();
    root.worker_gone(WorkerId(0), at(1));
    root.worker_gone(WorkerId(0), at(1));
    let Some(MainEvent::Failed(failed)) = root.poll_main(at(1)) else {
        panic!("nobody will end the task")
    };
    assert_eq!(failed.report.kind, "WorkerGone");
    assert_eq!(failed.report.microbatch, Some(MicrobatchId(0)));
    assert_eq!(aborts_sent(&mut root), 1);
    root.begin_step(plan(2, "train_step", 1), at(2)).unwrap();
    assert_eq!(
        root.poll_main(at(2)),
        Some(MainEvent::StartWorker(WorkerId(1)))
    );
}
