//! Laws of the shell under thousands of orders of its threads (`make check-concurrency`): no wait outlasts what it waits
//! for, and what the machine promises event by event holds for threads too.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use shardwright_comm::sync::{explore, thread};
use shardwright_comm::{Loss, Receiver};
use shardwright_core::{MicrobatchId, Rank};
use shardwright_wire::{Message, Value, Work};

use super::network::Job;
use super::rig::{Behaviour, Ended, TestRank, microbatch_of, plan};
use super::steps::chain;
use crate::{LocalError, Task};

/// No check waits so long.
const EVER: Duration = Duration::from_hours(1);

/// Runs a function on each rank's main thread.
fn on_mains<T: Send + 'static>(
    job: &Job,
    main: impl Fn(&Arc<TestRank>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let main = Arc::new(main);
    let each = job.ranks.iter().map(|rank| {
        let (rank, main) = (Arc::clone(rank), Arc::clone(&main));
        thread::spawn(move || main(&rank))
    });
    let threads: Vec<_> = each.collect();
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect()
}

/// Messages of a rank to another one come as they were decided: requests by their numbers, nothing of a step before its
/// beginning, nothing after its end (EX-13).
fn assert_order(job: &Job) {
    for (to, inbox) in job.inboxes.iter().enumerate() {
        for from in &job.ranks {
            let messages = inbox.from(from.id);
            let requests = messages.iter().filter_map(|message| match message {
                Message::Request(request) => Some(request.id),
                _ => None,
            });
            let requests: Vec<_> = requests.collect();
            let place = format!("rank {} to rank {to}", from.id);
            assert!(requests.is_sorted(), "EX-13: {place}: {requests:?}");
            let mut entered = BTreeSet::new();
            for message in &messages {
                match message {
                    Message::StepBegin(begin) => assert!(entered.insert(begin.step)),
                    Message::Request(request) if from.id.0 == 0 => {
                        assert!(entered.contains(&request.step), "EX-13: {place}");
                    }
                    Message::StepEnd(end) => assert!(entered.contains(&end.step), "EX-13: {place}"),
                    _ => {}
                }
            }
        }
    }
}

/// Two steps over ranks that call each other.
fn steps(pulls: bool) {
    let job = Job::new(2, pulls);
    let behaviour = chain(2);
    let ends = on_mains(&job, move |rank| {
        [1, 2].map(|step| rank.step(plan(step, "train", 2), &behaviour))
    });
    for ended in ends {
        assert_eq!(ended, [1, 2].map(|step| Ended::Done(Value::Int(step))));
    }
    for rank in &job.ranks {
        assert_eq!(rank.server.stats().live_requests, 0, "EX-7");
    }
    assert_order(&job);
    job.end();
}

#[test]
fn every_wait_ends_and_one_thread_has_the_turn() {
    explore(6_000, || steps(false));
}

#[test]
fn every_wait_ends_where_workers_receive_by_themselves() {
    explore(6_000, || steps(true));
}

/// A chain in which rank 1 fails in the second microbatch of the first step.
fn failing() -> Behaviour {
    let sound = chain(2);
    Arc::new(move |rank, worker, task| {
        if let Task::Request(request) = task
            && (rank.id.0, request.step.0, microbatch_of(task).0) == (1, 1, 1)
        {
            return Err(rank.raise(task, "bad value"));
        }
        sound(rank, worker, task)
    })
}

fn failed_step(pulls: bool) {
    let job = Job::new(2, pulls);
    let behaviour = failing();
    let ends = on_mains(&job, move |rank| {
        [1, 2].map(|step| rank.step(plan(step, "train", 2), &behaviour))
    });
    for [first, second] in ends {
        let failure = first.failure();
        assert_eq!(failure.report.rank, Rank(1), "EX-5");
        assert_eq!(failure.report.message, "bad value", "EX-5");
        assert_eq!(second, Ended::Done(Value::Int(2)), "EX-9");
    }
    assert_order(&job);
    job.end();
}

#[test]
fn one_failure_reaches_every_waiter_and_the_next_step_runs() {
    explore(6_000, || failed_step(false));
}

#[test]
fn one_failure_reaches_every_waiter_that_receives_by_itself() {
    explore(6_000, || failed_step(true));
}

#[test]
fn a_lost_peer_ends_the_steps_of_all_whenever_it_is_lost() {
    explore(6_000, || {
        let job = Job::new(2, true);
        let behaviour = chain(2);
        let servers = [0, 1].map(|rank| Arc::clone(&job.ranks[rank].server));
        let losing = thread::spawn(move || {
            servers[0].peer_lost(Rank(1), Loss::Died);
            servers[1].peer_lost(Rank(0), Loss::Died);
        });
        on_mains(&job, move |rank| {
            let mut step = 1;
            while let Ended::Done(_) = rank.step(plan(step, "train", 1), &behaviour) {
                step += 1;
            }
        });
        losing.join().unwrap();
        job.end();
    });
}

fn control() -> Work {
    Work::Control {
        name: "partition".to_owned(),
    }
}

#[test]
fn a_waiting_main_thread_hears_its_answer_and_control_requests_go_first() {
    explore(6_000, || {
        let job = Job::new(2, false);
        let behaviour = chain(2);
        let ends = on_mains(&job, move |rank| {
            rank.server.begin_step(plan(1, "train", 1)).unwrap();
            if rank.id.0 == 0 {
                let asked = rank.request(None, 1, control(), MicrobatchId(0), Value::Int(9));
                let asked = [asked.unwrap()];
                rank.server.begin_main_wait(&asked).unwrap();
                let answer = loop {
                    if let Some(answers) = rank.server.main_wait(&asked, EVER).unwrap() {
                        break answers;
                    }
                };
                assert_eq!(answer[0].body.value, Value::Int(9));
            }
            rank.supervise(&behaviour)
        });
        for ended in ends {
            assert_eq!(ended, Ended::Done(Value::Int(1)));
        }
        job.end();
    });
}

fn error() -> LocalError {
    LocalError {
        origin: None,
        module: None,
        microbatch: None,
        phase: None,
        kind: "ValueError".to_owned(),
        message: "no".to_owned(),
        traceback: String::new(),
    }
}

#[test]
fn threads_that_send_to_one_rank_do_not_overtake_each_other() {
    explore(20_000, || {
        let job = Job::new(2, false);
        let ask = |value: i64| {
            let rank = Arc::clone(&job.ranks[0]);
            thread::spawn(move || {
                let asked = rank.request(None, 1, control(), MicrobatchId(0), Value::Int(value));
                asked.unwrap();
            })
        };
        job.ranks[0].server.begin_step(plan(1, "train", 1)).unwrap();
        for thread in [ask(1), ask(2), ask(3)] {
            thread.join().unwrap();
        }
        assert_order(&job);
        job.end();
    });
}

#[test]
fn a_server_that_closes_has_sent_all_that_was_decided() {
    explore(20_000, || {
        let job = Job::new(2, false);
        let failing = Arc::clone(&job.ranks[0].server);
        failing.begin_step(plan(1, "train", 1)).unwrap();
        let thread = thread::spawn(move || failing.fail(None, error()));
        let server = &job.ranks[0].server;
        let failed = server.describe().contains("which has failed");
        server.close(EVER);
        let told = job.inboxes[1].from(Rank(0));
        let told = told
            .iter()
            .any(|message| matches!(message, Message::Abort(_)));
        assert!(
            told || !failed,
            "decided, and not sent when the server had closed"
        );
        thread.join().unwrap();
        job.end();
    });
}
