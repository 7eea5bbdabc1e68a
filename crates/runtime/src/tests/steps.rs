//! Steps that succeed, over several ranks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use shardwright_comm::Transport;
use shardwright_core::WorkerId;
use shardwright_wire::{Value, Work};

use super::rig::{
    Behaviour, Ended, TestRank, backward, close, forward, job, microbatch_of, on_every_rank, plan,
    shut_down,
};
use crate::{ServerError, Task};

/// The root calls rank 1, that calls the next one, and so on; the last calls back to rank 0.
/// Then backward the same way, and a close.
pub(super) fn chain(world: u32) -> Behaviour {
    // The forward requests that a rank has made, by step and microbatch.
    let made = Mutex::new(BTreeMap::new());
    Arc::new(
        move |rank: &TestRank, worker: WorkerId, task: &Task| -> Result<Value, ServerError> {
            let microbatch = microbatch_of(task);
            let next = (rank.id.0 + 1) % world;
            match task {
                Task::Root { .. } => {
                    let (id, value) =
                        rank.call(worker, next, forward(1), microbatch, Value::Int(0))?;
                    assert_eq!(value, Value::Int(i64::from(world)));
                    rank.await_backward(worker)?;
                    rank.call(worker, next, backward(1, id), microbatch, Value::Int(0))?;
                    rank.call(worker, next, close(1, id), microbatch, Value::None)?;
                    Ok(Value::None)
                }
                Task::Request(request) => {
                    let Value::Int(depth) = request.body.value else {
                        return Ok(Value::None);
                    };
                    // Rank 0 is the last of the chain.
                    if rank.id.0 == 0 {
                        return Ok(Value::Int(depth + 1));
                    }
                    let place = (rank.id, request.step, microbatch);
                    let made_here = || made.lock().unwrap()[&place];
                    let work = match &request.work {
                        Work::Backward(_) => backward(1, made_here()),
                        Work::Close(_) => close(1, made_here()),
                        other => other.clone(),
                    };
                    let value = Value::Int(depth + 1);
                    let (id, value) = rank.call(worker, next, work.clone(), microbatch, value)?;
                    if matches!(work, Work::Forward(_)) {
                        made.lock().unwrap().insert(place, id);
                    }
                    Ok(value)
                }
                Task::WeightGradient(_) => unreachable!("the schedules here split no backward"),
            }
        },
    )
}

#[test]
fn a_step_runs_on_every_number_of_ranks() {
    for world in 1..4 {
        let ranks = job(world);
        let behaviour = chain(world);
        let ends = on_every_rank(&ranks, move |rank| {
            let ends: Vec<Ended> = (1..=3)
                .map(|step| rank.step(plan(step, "train_step", 6), &behaviour))
                .collect();
            ends
        });
        for (rank, end) in ranks.iter().zip(ends) {
            assert_eq!(
                end,
                (1..=3)
                    .map(|step| Ended::Done(Value::Int(step)))
                    .collect::<Vec<_>>()
            );
            let stats = rank.server.stats();
            assert_eq!(stats.live_requests, 0, "EX-7 on rank {}", rank.id);
            assert_eq!(
                stats.unexpected_messages + stats.stale_messages + stats.kept_messages,
                0
            );
            assert!(stats.workers_started <= 12, "{stats:?}");
            assert_eq!(
                stats.step.sent.forward,
                if world == 1 && rank.id.0 == 0 {
                    6
                } else {
                    stats.step.sent.backward
                }
            );
            rank.shut_down();
        }
    }
}

#[test]
fn a_rank_before_its_first_step_counts_as_computing() {
    // EX-8: it may load data for minutes while its peers wait in the step.
    let ranks = job(2);
    for rank in &ranks {
        let transport = rank.transport.as_ref().expect("two ranks are connected");
        assert!(transport.heartbeat_state().heartbeat(false).executing);
        rank.server.begin_step(plan(1, "train_step", 1)).unwrap();
        assert!(transport.heartbeat_state().heartbeat(false).executing);
    }
    assert_eq!(
        ranks[1]
            .server
            .supervise(std::time::Duration::from_millis(1)),
        None
    );
    let heartbeat = ranks[1]
        .transport
        .as_ref()
        .expect("connected")
        .heartbeat_state()
        .heartbeat(false);
    assert_eq!((heartbeat.step, heartbeat.executing), (1, false));
    shut_down(&ranks);
}

#[test]
fn requests_may_run_at_once() {
    let ranks = job(3);
    let behaviour: Behaviour = Arc::new(|rank, worker, task| {
        let Task::Root { microbatch } = task else {
            return Ok(Value::Int(i64::from(rank.id.0)));
        };
        let ids = [1, 2, 1]
            .map(|to| rank.request(Some(worker), to, forward(to), *microbatch, Value::None));
        let ids: Vec<_> = ids.into_iter().collect::<Result<_, _>>()?;
        let answers = rank
            .server
            .wait(worker, &ids, shardwright_wire::Phase::Forward);
        let answers = answers?.into_iter();
        let values: Vec<Value> = answers.map(|answer| answer.body.value).collect();
        assert_eq!(values, [Value::Int(1), Value::Int(2), Value::Int(1)]);
        Ok(Value::None)
    });
    let ends = on_every_rank(&ranks, move |rank| {
        rank.step(plan(1, "eval_step", 1), &behaviour)
    });
    assert_eq!(ends, vec![Ended::Done(Value::Int(1)); 3]);
    shut_down(&ranks);
}

#[test]
fn control_requests_reach_the_main_threads() {
    let ranks = job(2);
    let rounds = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&rounds);
    let behaviour: Behaviour = Arc::new(move |rank, worker, task| {
        for to in [1, 0] {
            let work = Work::Control {
                name: "partition".to_owned(),
            };
            let (_, value) = rank.call(worker, to, work, microbatch_of(task), Value::Int(5))?;
            assert_eq!(value, Value::Int(5));
            seen.fetch_add(1, Ordering::SeqCst);
        }
        Ok(Value::None)
    });
    let ends = on_every_rank(&ranks, move |rank| {
        rank.step(plan(1, "train_step", 2), &behaviour)
    });
    assert_eq!(ends, vec![Ended::Done(Value::Int(1)); 2]);
    assert_eq!(rounds.load(Ordering::SeqCst), 4);
    shut_down(&ranks);
}
