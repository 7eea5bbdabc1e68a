//! Two pipelines side by side whose modules hold collectives: both run them in one order.

use std::num::NonZeroU32;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use shardwright_core::{MicrobatchId, ModelId, ModuleId, Rank, StepEpoch, WorkerId};
use shardwright_schedule::Schedule;
use shardwright_wire::{
    AnswerKind, Asked, Message, Phase, TaskEvent, TaskName, TaskOrder, TaskSource, Value, Work,
};

use super::rig::{
    Behaviour, Ended, TestRank, WATCHDOG, backward, config, forward, job_of, microbatch_of,
    new_request, on_every_rank, plan, real_time, shut_down,
};
use crate::machine::{Effect, Grant, Machine};
use crate::{Expected, FailureKind, MainEvent, ServerError, StepPlan, Task};

const MICROBATCHES: u32 = 6;

/// Ranks 0 and 1 are one pipeline, 2 and 3 the other.
fn ranks() -> Vec<Arc<TestRank>> {
    let configs: Vec<_> = (0..4)
        .map(|rank| {
            let first = rank / 2 * 2;
            let mut own = real_time(config(rank, &[first, first + 1], 4));
            own.tensor_group = vec![Rank(rank % 2), Rank(rank % 2 + 2)];
            own
        })
        .collect();
    job_of(&configs)
}

/// What the ranks of each tensor-parallel group have brought to their collectives so far.
#[derive(Default)]
struct Collectives {
    names: Mutex<[Vec<String>; 4]>,
    news: Condvar,
}

impl Collectives {
    /// Waits, with the turn, until the other rank of the group has come to the same number; both must mean the same.
    fn meet(&self, rank: &TestRank, name: &str) -> Result<(), ServerError> {
        let own = rank.id.0 as usize;
        let other = (own + 2) % 4;
        let began = Instant::now();
        let mut names = self.names.lock().unwrap();
        names[own].push(name.to_owned());
        let count = names[own].len();
        self.news.notify_all();
        while names[other].len() < count {
            assert!(
                began.elapsed() < WATCHDOG,
                "rank {own} waits alone in {name}"
            );
            let slice = Duration::from_millis(20);
            names = self.news.wait_timeout(names, slice).unwrap().0;
            let step = StepEpoch(rank.server.stats().steps);
            rank.server.check_abort(step, &[])?;
        }
        assert_eq!(names[other][count - 1], name, "on rank {own}");
        Ok(())
    }
}

/// A delay that looks random, another one for each rank, step and microbatch.
fn dawdle(rank: u32, seed: u64, place: u64) {
    let mixed = (u64::from(rank) * 31 + seed * 17 + place * 7).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    std::thread::sleep(Duration::from_micros(mixed >> 53));
}

/// The root calls the other rank of its pipeline twice, and back; every task holds a collective.
fn model(collectives: &Arc<Collectives>, other_branch: bool) -> Behaviour {
    let collectives = Arc::clone(collectives);
    Arc::new(
        move |rank: &TestRank, worker: WorkerId, task: &Task| -> Result<Value, ServerError> {
            let (id, microbatch) = (rank.id.0, microbatch_of(task));
            let to = id / 2 * 2 + 1;
            let place = u64::from(microbatch.0);
            dawdle(id, rank.server.stats().steps, place);
            match task {
                Task::Root { .. } => {
                    collectives.meet(rank, &format!("root {microbatch}"))?;
                    let branch = u32::from(other_branch && id == 2 && microbatch.0 == 1);
                    let mut calls = Vec::new();
                    for module in [1, 2 + branch] {
                        let work = forward(module);
                        let (call, _) = rank.call(worker, to, work, microbatch, Value::None)?;
                        dawdle(id, 5, place + u64::from(module));
                        collectives.meet(rank, &format!("root {microbatch} after {module}"))?;
                        calls.push((module, call));
                    }
                    rank.await_backward(worker)?;
                    for (module, call) in calls.into_iter().rev() {
                        let work = backward(module, call);
                        rank.call(worker, to, work, microbatch, Value::None)?;
                        collectives.meet(rank, &format!("root {microbatch} behind {module}"))?;
                    }
                    Ok(Value::None)
                }
                Task::Request(request) => {
                    let phase = match request.work {
                        Work::Forward(ref call) => format!("forward of {}", call.module),
                        Work::Backward(ref call) => format!("backward of {}", call.module),
                        _ => unreachable!("nothing is closed here"),
                    };
                    collectives.meet(rank, &format!("{phase} for {microbatch}"))?;
                    Ok(Value::None)
                }
                Task::WeightGradient(_) => unreachable!("the schedules here split no backward"),
            }
        },
    )
}

fn under(schedule: Schedule, step: u64) -> StepPlan {
    StepPlan {
        schedule,
        ..plan(step, "train", MICROBATCHES)
    }
}

#[test]
fn collectives_meet_whatever_the_delays() {
    let active = NonZeroU32::new(3).expect("three is not zero");
    for schedule in [Schedule::Simple, Schedule::Interleaved { active }] {
        let ranks = ranks();
        let collectives = Arc::new(Collectives::default());
        let behaviour = model(&collectives, false);
        let ends = on_every_rank(&ranks, move |rank| {
            (1..=4)
                .map(|step| rank.step(under(schedule.clone(), step), &behaviour))
                .collect::<Vec<_>>()
        });
        for (rank, ends) in ranks.iter().zip(ends) {
            let done: Vec<_> = (1..=4).map(|step| Ended::Done(Value::Int(step))).collect();
            assert_eq!(ends, done, "rank {}", rank.id);
            assert_eq!(rank.server.stats().unexpected_messages, 0);
        }
        let names = collectives.names.lock().unwrap();
        assert_eq!(names[0].len(), 4 * MICROBATCHES as usize * 5);
        assert_eq!(names[1].len(), 4 * MICROBATCHES as usize * 4);
        drop(names);
        shut_down(&ranks);
    }
}

#[test]
fn ranks_that_take_other_branches_end_with_the_first_task_in_which_they_differ() {
    let ranks = ranks();
    for rank in &ranks {
        let names = ["", "first", "second", "other"].map(str::to_owned);
        rank.server.name_modules(ModelId(0), names.to_vec());
    }
    let collectives = Arc::new(Collectives::default());
    let behaviour = model(&collectives, true);
    let ends = on_every_rank(&ranks, move |rank| {
        rank.step(under(Schedule::Simple, 1), &behaviour).failure()
    });
    for failure in ends {
        let text = &failure.report.message;
        // Who calls it sees it, or who is called, whichever is first.
        let called = "tp_rank 0 (rank 0) calls forward of second for microbatch 1, where tp_rank 1 (rank 2) calls \
                      forward of other for microbatch 1";
        let run = "tp_rank 0 (rank 1) runs forward of second for microbatch 1, where tp_rank 1 (rank 3) has forward \
                   of other for microbatch 1 in its place";
        assert!(text.contains(called) || text.contains(run), "{text}");
        assert_eq!(failure.report.kind, "StepMismatchError");
        assert_eq!(failure.kind, FailureKind::StepMismatch);
    }
    shut_down(&ranks);
}

#[test]
fn a_turn_that_another_message_has_overtaken_is_given_in_its_place() {
    let mut own = config(2, &[2], 3);
    own.tensor_group = vec![Rank(0), Rank(2)];
    let mut machine = Machine::new(own);
    let now = Duration::ZERO;
    machine.begin_step(plan(1, "train", 2), now).unwrap();
    let event = MainEvent::StartWorker(WorkerId(0));
    assert_eq!(
        machine.poll_main(now),
        None,
        "it runs nothing before it is told to"
    );
    let turn = |microbatch| {
        TaskEvent::Turn(TaskName {
            source: TaskSource::Root,
            phase: Phase::Forward,
            microbatch: MicrobatchId(microbatch),
            module: None,
        })
    };
    let told = |number, microbatch| {
        Message::TaskOrder(Box::new(TaskOrder {
            step: StepEpoch(1),
            number,
            events: vec![turn(microbatch)],
        }))
    };
    machine.deliver(Rank(0), told(1, 0), now);
    assert_eq!(machine.poll_main(now), None, "the first turn is not known");
    machine.deliver(Rank(0), told(0, 1), now);
    assert_eq!(machine.poll_main(now), Some(event));
    machine.worker_returns(WorkerId(0), now).unwrap();
    let task = Task::Root {
        microbatch: MicrobatchId(1),
    };
    assert_eq!(machine.take_grant(WorkerId(0)), Some(Grant::Task(task)));
}

#[test]
fn a_step_in_which_one_rank_predicts_what_another_waits_for_is_run_again() {
    for theirs in [false, true] {
        let mut own = config(2, &[2, 3], 4);
        own.tensor_group = vec![Rank(0), Rank(2)];
        let mut machine = Machine::new(own);
        machine.name_modules(ModelId(0), ["", "first"].map(str::to_owned).to_vec());
        let (now, microbatch) = (Duration::ZERO, MicrobatchId(1));
        machine.begin_step(plan(1, "train", 2), now).unwrap();
        machine.poll_main(now);
        let turn = TaskEvent::Turn(TaskName {
            source: TaskSource::Root,
            phase: Phase::Forward,
            microbatch,
            module: None,
        });
        let asked = TaskEvent::Asks(Asked {
            place: 1,
            phase: Some(Phase::Forward),
            microbatch,
            module: (ModelId(0), Some(ModuleId(1))),
            is_predicted: theirs,
        });
        let told = TaskOrder {
            step: StepEpoch(1),
            number: 0,
            events: vec![turn, asked],
        };
        machine.deliver(Rank(0), Message::TaskOrder(Box::new(told)), now);
        machine.poll_main(now);
        machine.worker_returns(WorkerId(0), now).unwrap();
        assert!(matches!(
            machine.take_grant(WorkerId(0)),
            Some(Grant::Task(_))
        ));
        let mut call = new_request(forward(1), microbatch, Value::None);
        call.expected = (!theirs).then(|| Expected {
            kind: AnswerKind::Value,
            value: Value::None,
            tensors: Vec::new(),
        });
        machine
            .send_request(Some(WorkerId(0)), Rank(3), call, now)
            .unwrap();
        machine.worker_returns(WorkerId(0), now).unwrap();
        let Some(MainEvent::Failed(failure)) = machine.poll_main(now) else {
            panic!("it goes on");
        };
        assert_eq!(failure.kind, FailureKind::Departure);
        let report = &failure.report;
        let (predicts, waits) = if theirs { (0, 2) } else { (2, 0) };
        let named = format!("for rank {predicts} the results are as in");
        assert!(report.message.contains(&named), "{}", report.message);
        let named = format!("rank {waits} has not called it");
        assert!(report.message.contains(&named), "{}", report.message);
        assert_eq!(report.module.as_deref(), Some("first"));
        assert_eq!(report.microbatch, Some(microbatch));
    }
}

/// The first rank of a tensor-parallel group with one microbatch, whose backward it runs.
fn in_backward(machine: &mut Machine, step: u64) {
    let (now, worker) = (Duration::ZERO, WorkerId(0));
    machine.begin_step(plan(step, "train", 1), now).unwrap();
    if let Some(MainEvent::StartWorker(worker)) = machine.poll_main(now) {
        machine.worker_returns(worker, now).unwrap();
    }
    assert!(matches!(machine.take_grant(worker), Some(Grant::Task(_))));
}

/// What a machine tells the other ranks of its group that it has left, and its turns for that.
fn told_of_weight_gradients(machine: &mut Machine) -> Vec<TaskEvent> {
    let sent = machine.take_effects().into_iter();
    let orders = sent.filter_map(|effect| match effect {
        Effect::Send {
            message: Message::TaskOrder(order),
            ..
        } => Some(order.events),
        _ => None,
    });
    let is_of_weight_gradients = |event: &TaskEvent| match event {
        TaskEvent::Defers(task) | TaskEvent::Turn(task) => {
            matches!(task.source, TaskSource::WeightGradient { .. })
        }
        _ => false,
    };
    orders.flatten().filter(is_of_weight_gradients).collect()
}

#[test]
fn weight_gradients_have_the_same_names_on_all_ranks_whatever_a_failed_step_had_left() {
    let leader_of = |failing: bool| {
        let mut own = config(0, &[0], 2);
        own.tensor_group = vec![Rank(0), Rank(1)];
        let mut machine = Machine::new(own);
        let (now, worker) = (Duration::ZERO, WorkerId(0));
        in_backward(&mut machine, 1);
        if failing {
            machine.defer_weight_gradient(worker).unwrap();
        }
        machine.fail_internally("it was told to".to_owned(), now);
        machine.worker_returns(worker, now).unwrap();
        assert!(matches!(machine.poll_main(now), Some(MainEvent::Failed(_))));
        in_backward(&mut machine, 2);
        machine.take_effects();
        machine.defer_weight_gradient(worker).unwrap();
        machine.worker_returns(worker, now).unwrap();
        told_of_weight_gradients(&mut machine)
    };
    let told = leader_of(true);
    assert_eq!(
        told.len(),
        2,
        "it is left, and then it has the turn: {told:?}"
    );
    assert_eq!(told, leader_of(false));
}

#[test]
fn ranks_of_which_one_leaves_weight_gradients_and_another_does_not_end_with_an_error() {
    let mut own = config(2, &[2], 3);
    own.tensor_group = vec![Rank(0), Rank(2)];
    let mut machine = Machine::new(own);
    let (now, worker) = (Duration::ZERO, WorkerId(0));
    let task = |source, phase| TaskName {
        source,
        phase,
        microbatch: MicrobatchId(0),
        module: None,
    };
    let left = TaskSource::WeightGradient { token: 0 };
    let told = TaskOrder {
        step: StepEpoch(1),
        number: 0,
        events: vec![
            TaskEvent::Turn(task(TaskSource::Root, Phase::Forward)),
            TaskEvent::Defers(task(left, Phase::Backward)),
        ],
    };
    machine.begin_step(plan(1, "train", 1), now).unwrap();
    machine.deliver(Rank(0), Message::TaskOrder(Box::new(told)), now);
    machine.poll_main(now);
    machine.worker_returns(worker, now).unwrap();
    assert!(matches!(machine.take_grant(worker), Some(Grant::Task(_))));
    machine.worker_returns(worker, now).unwrap();
    let Some(MainEvent::Failed(failure)) = machine.poll_main(now) else {
        panic!("it waits for ever for a turn that is not here");
    };
    let text = &failure.report.message;
    let parted = "tp_rank 0 (rank 0) leaves weight gradients for later in the step function for microbatch 0, where tp_rank \
                  1 (rank 2) has ended the step function for microbatch 0";
    assert!(text.contains(parted), "{text}");
}
