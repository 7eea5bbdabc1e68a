//! Steps that fail: on every rank, with the reason, in bounded time, and the next one is exact.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use shardwright_comm::{Loss, Receiver, Transport};
use shardwright_core::{MicrobatchId, Rank, StepEpoch};
use shardwright_wire::{ErrorReport, Heartbeat, Message, Value};

use super::rig::{
    Behaviour, Ended, config, job, job_hearing, job_of, microbatch_of, on_every_rank, plan,
    real_time, shut_down,
};
use super::steps::chain;
use crate::{Failure, FailureKind, LocalError, Server, ServerError, Task};

/// A chain in which rank 1 raises in microbatch 2 of the first step.
fn raising(world: u32) -> Behaviour {
    let usual = chain(world);
    Arc::new(move |rank, worker, task| {
        let first = matches!(task, Task::Request(request) if request.step == StepEpoch(1));
        if first && rank.id == Rank(1) && microbatch_of(task) == MicrobatchId(2) {
            return Err(rank.raise(task, "bad value"));
        }
        usual(rank, worker, task)
    })
}

#[test]
fn an_error_in_a_task_ends_the_step_everywhere_and_the_next_is_exact() {
    let ranks = job(3);
    let behaviour = raising(3);
    let ends = on_every_rank(&ranks, move |rank| {
        let failed = rank.step(plan(1, "train_step", 6), &behaviour).failure();
        (failed, rank.step(plan(2, "train_step", 6), &behaviour))
    });
    for (rank, (failure, next)) in ranks.iter().zip(ends) {
        let kind = if rank.id == Rank(1) {
            FailureKind::Local
        } else {
            FailureKind::Remote
        };
        assert_eq!(failure.kind, kind);
        let report = failure.report;
        assert_eq!((report.rank, report.host.as_str()), (Rank(1), "host1"));
        assert_eq!(report.microbatch, Some(MicrobatchId(2)));
        assert_eq!(
            (report.kind.as_str(), report.message.as_str()),
            ("ValueError", "bad value")
        );
        assert_eq!(report.traceback, "Traceback: line 1");
        assert_eq!(next, Ended::Done(Value::Int(2)));
        assert_eq!(rank.server.stats().live_requests, 0);
        rank.shut_down();
    }
}

#[test]
fn a_main_thread_that_raises_itself_may_enter_the_next_step_later() {
    let ranks = job(2);
    let behaviour = chain(2);
    let ends = on_every_rank(&ranks, move |rank| {
        if rank.id == Rank(1) {
            let failure = rank.step(plan(1, "train_step", 4), &behaviour).failure();
            let next = rank.step(plan(2, "train_step", 4), &behaviour).failure();
            assert_eq!(
                (failure.kind, next.kind),
                (FailureKind::Remote, FailureKind::Remote)
            );
            assert_eq!(
                (
                    failure.report.message.as_str(),
                    next.report.message.as_str()
                ),
                ("interrupted", "early")
            );
            return rank.step(plan(3, "train_step", 4), &behaviour);
        }
        rank.server.begin_step(plan(1, "train_step", 4)).unwrap();
        while !rank.supervise_once(&behaviour) {}
        rank.server.fail(None, error("interrupted"));
        assert!(rank.server.await_unwound(super::rig::WATCHDOG));
        // Fails the second step before entering it: its peer waits there, or will.
        rank.server.fail(Some(StepEpoch(2)), error("early"));
        assert!(rank.server.await_unwound(super::rig::WATCHDOG));
        rank.step(plan(3, "train_step", 4), &behaviour)
    });
    assert_eq!(ends[0], ends[1]);
    assert!(matches!(ends[0], Ended::Done(_)));
    shut_down(&ranks);
}

fn error(message: &str) -> LocalError {
    LocalError {
        kind: "KeyboardInterrupt".to_owned(),
        message: message.to_owned(),
        ..LocalError::default()
    }
}

#[test]
fn a_failure_that_is_passed_on_stays_that_of_the_rank_that_failed() {
    // A rank may learn of a loss from a message of its own, before the server does.
    let ranks = job(3);
    let error = LocalError {
        origin: Some((Rank(2), "node-2".to_owned())),
        kind: "PeerLostError".to_owned(),
        message: "rank 2 died".to_owned(),
        ..LocalError::default()
    };
    ranks[0].server.fail(Some(StepEpoch(1)), error);
    let failure = await_abort(&ranks[1].server, StepEpoch(1));
    assert_eq!(failure.kind, FailureKind::PeerLost);
    assert_eq!(
        (failure.report.rank, failure.report.host.as_str()),
        (Rank(2), "node-2")
    );
    shut_down(&ranks);
}

#[test]
fn a_rank_that_dies_in_a_step_ends_it_for_the_others() {
    let ranks = job(3);
    let usual = chain(3);
    let behaviour: Behaviour = Arc::new(move |rank, worker, task| {
        if rank.id == Rank(2) && microbatch_of(task) == MicrobatchId(1) {
            rank.transport
                .as_ref()
                .expect("three ranks are connected")
                .vanish();
            // What a dead rank's own server does no longer matters.
            return Err(rank.raise(task, "died"));
        }
        usual(rank, worker, task)
    });
    let ends = on_every_rank(&ranks, move |rank| {
        rank.step(plan(1, "train_step", 4), &behaviour)
    });
    for end in &ends[..2] {
        let failure = end.clone().failure();
        assert_eq!(failure.kind, FailureKind::PeerLost);
        assert_eq!(
            (failure.report.rank, failure.report.host.as_str()),
            (Rank(2), "host2")
        );
        assert!(
            failure.report.message.contains("rank 2 died"),
            "{}",
            failure.report.message
        );
        assert!(
            failure
                .report
                .message
                .contains("step 1 (train_step) needs it"),
            "{}",
            failure.report.message
        );
    }
    shut_down(&ranks);
}

#[test]
fn different_step_functions_are_named_on_every_rank() {
    let ranks = job(2);
    let behaviour = chain(2);
    let ends = on_every_rank(&ranks, move |rank| {
        let function = if rank.id == Rank(0) {
            "train_step"
        } else {
            "eval_step"
        };
        let failure = rank.step(plan(1, function, 2), &behaviour).failure();
        (failure, rank.step(plan(2, "train_step", 2), &behaviour))
    });
    for (failure, next) in ends {
        assert_eq!(failure.kind, FailureKind::StepMismatch);
        for part in ["train_step", "eval_step", "rank 0", "rank 1"] {
            assert!(
                failure.report.message.contains(part),
                "{}",
                failure.report.message
            );
        }
        assert_eq!(next, Ended::Done(Value::Int(2)));
    }
    shut_down(&ranks);
}

#[test]
fn a_rank_that_leaves_early_is_missed_by_the_step_that_needs_it() {
    for leaver in 0..2 {
        let ranks = job(2);
        let behaviour = chain(2);
        let ends = on_every_rank(&ranks, move |rank| {
            let first = rank.step(plan(1, "train_step", 2), &behaviour);
            assert_eq!(first, Ended::Done(Value::Int(1)));
            if rank.id == Rank(leaver) {
                rank.transport
                    .as_ref()
                    .expect("two ranks are connected")
                    .close(None);
                return None;
            }
            Some(rank.step(plan(2, "train_step", 2), &behaviour).failure())
        });
        let failure = ends[1 - leaver as usize]
            .clone()
            .expect("the other rank's step fails");
        assert_eq!(failure.kind, FailureKind::PeerLost);
        let message = failure.report.message;
        let said = format!("rank {leaver} has left the job; step 2 (train_step) needs it");
        let asked = format!("{said}: nothing has been heard from it in this step, and ");
        assert!(message == said || message.starts_with(&asked), "{message}");
        shut_down(&ranks);
    }
}

#[test]
fn a_report_with_an_error_is_passed_on() {
    let ranks = job(2);
    let behaviour = chain(2);
    let ends = on_every_rank(&ranks, move |rank| {
        if rank.id == Rank(1) {
            let report = ErrorReport {
                rank: Rank(1),
                host: "host1".to_owned(),
                module: None,
                microbatch: None,
                phase: None,
                kind: "KeyError".to_owned(),
                message: "'text'".to_owned(),
                traceback: "Traceback of the loader".to_owned(),
            };
            rank.transport
                .as_ref()
                .expect("two ranks are connected")
                .close(Some(report));
            return None;
        }
        Some(rank.step(plan(1, "train_step", 2), &behaviour).failure())
    });
    let report = ends[0].clone().expect("rank 0's step fails").report;
    assert!(
        report.message.contains("KeyError: 'text'"),
        "{}",
        report.message
    );
    assert_eq!(report.traceback, "Traceback of the loader");
    shut_down(&ranks);
}

#[test]
fn a_failure_during_the_commit_is_seen_there_and_by_other_replicas() {
    // Two replicas of one rank each: no message but aborts goes between them.
    let ranks = job_of(&[config(0, &[0], 2), config(1, &[1], 2)].map(real_time));
    let committing = Arc::new(Barrier::new(2));
    let raise_when = Arc::clone(&committing);
    let behaviour: Behaviour = Arc::new(move |rank, _, task| {
        if rank.id == Rank(1) && rank.server.stats().steps == 1 {
            raise_when.wait();
            return Err(rank.raise(task, "other replica"));
        }
        Ok(Value::None)
    });
    let again = Arc::clone(&behaviour);
    let ends = on_every_rank(&ranks, move |rank| {
        rank.server.begin_step(plan(1, "train_step", 1)).unwrap();
        let ended = rank.supervise(&behaviour);
        if rank.id == Rank(1) {
            assert_eq!(ended.failure().kind, FailureKind::Local);
            return None;
        }
        assert!(matches!(ended, Ended::Done(_)));
        committing.wait();
        let deadline = Instant::now() + super::rig::WATCHDOG;
        loop {
            assert!(Instant::now() < deadline, "the abort never came");
            match rank.server.check_abort(StepEpoch(1), &[Rank(1)]) {
                Ok(()) => std::thread::yield_now(),
                Err(ServerError::Failed(failure)) => return Some(*failure),
                Err(other) => panic!("{other}"),
            }
        }
    });
    let failure = ends[0].clone().expect("rank 0 sees the failure");
    assert_eq!(
        (failure.kind, failure.report.rank),
        (FailureKind::Remote, Rank(1))
    );
    let next = on_every_rank(&ranks, move |rank| {
        rank.step(plan(2, "train_step", 1), &again)
    });
    assert_eq!(next, vec![Ended::Done(Value::Int(2)); 2]);
    shut_down(&ranks);
}

/// The failure of a step that this rank has not entered, once it has come from rank 0.
fn await_abort(server: &Server, step: StepEpoch) -> Failure {
    let deadline = Instant::now() + super::rig::WATCHDOG;
    loop {
        assert!(Instant::now() < deadline, "the abort never came");
        match server.check_abort(step, &[Rank(0)]) {
            Ok(()) => std::thread::yield_now(),
            Err(ServerError::Failed(failure)) => return *failure,
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn a_step_failed_elsewhere_is_seen_before_it_is_entered() {
    // A rank may wait for others at the beginning of a step, outside the server.
    let ranks = job(2);
    let error = LocalError {
        kind: "ValueError".to_owned(),
        message: "no batch".to_owned(),
        ..LocalError::default()
    };
    ranks[0].server.fail(Some(StepEpoch(1)), error);
    let failure = await_abort(&ranks[1].server, StepEpoch(1));
    assert_eq!(
        (failure.kind, failure.report.message.as_str()),
        (FailureKind::Remote, "no batch")
    );
    let behaviour = chain(2);
    let next = on_every_rank(&ranks, move |rank| {
        rank.step(plan(2, "train_step", 1), &behaviour)
    });
    assert!(matches!(next[..], [Ended::Done(_), Ended::Done(_)]));
    shut_down(&ranks);
}

/// Loses every response.
struct DeafToResponses(Arc<Server>);

impl Receiver for DeafToResponses {
    fn deliver(&self, from: Rank, message: Message) {
        if !matches!(message, Message::Response(_)) {
            self.0.deliver(from, message);
        }
    }

    fn peer_lost(&self, from: Rank, loss: Loss) {
        self.0.peer_lost(from, loss);
    }

    fn heartbeat(&self, from: Rank, heartbeat: Heartbeat) {
        self.0.heartbeat(from, heartbeat);
    }
}

#[test]
fn a_job_that_stands_still_is_reported_and_ends() {
    let mut configs = [config(0, &[0, 1], 2), config(1, &[0, 1], 2)];
    for config in &mut configs {
        config.stall_report = Duration::from_millis(300);
        config.stall_timeout = Duration::from_millis(1500);
    }
    let ranks = job_hearing(&configs, |server| Arc::new(DeafToResponses(server)));
    ranks[0].server.name_modules(
        shardwright_core::ModelId(0),
        vec!["model".to_owned(), "model.tail".to_owned()],
    );
    let behaviour = chain(2);
    let ends = on_every_rank(&ranks, move |rank| {
        rank.step(plan(1, "train_step", 1), &behaviour).failure()
    });
    for failure in &ends {
        assert_eq!(failure.kind, FailureKind::Stall);
        assert!(
            failure
                .report
                .message
                .contains("nothing in the job has made progress"),
            "{}",
            failure.report.message
        );
    }
    shut_down(&ranks);
}
