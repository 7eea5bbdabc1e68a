//! What trace records cost: calls of a module on another rank as one machine sees them, without threads and transport,
//! in turns with records and without.
//!
//! `cargo run --release -p shardwright-runtime --example trace_cost`

use std::io::Write;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use shardwright_core::{CallId, MicrobatchId, ModelId, ModuleId, Rank, StepEpoch, WorkerId};
use shardwright_runtime::{Machine, MachineConfig, MainEvent, NewRequest, StepPlan};
use shardwright_schedule::Schedule;
use shardwright_wire::{
    Body, ForwardCall, Message, Phase, Place, Response, ResponseOutcome, Value,
};

const CALLS: u32 = 1_000;
const ROUNDS: usize = 401;
/// That the worker ran until it waited, that it waited, and that a request left and its answer came.
const RECORDS_PER_CALL: f64 = 4.0;
const WORKER: WorkerId = WorkerId(0);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut machine = started()?;
    let clock = Instant::now();
    let mut added = Vec::new();
    for round in 0..ROUNDS {
        // The order of on and off alternates, so that drift falls on both.
        let mut nanoseconds = [0.0; 2];
        for turn in 0..2 {
            let on = (round + turn) % 2 == 1;
            machine.keep_trace(on);
            let began = Instant::now();
            for _ in 0..CALLS {
                call(&mut machine, &clock)?;
            }
            nanoseconds[usize::from(on)] = began.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS);
        }
        added.push((nanoseconds[1] - nanoseconds[0], nanoseconds[0]));
    }
    let median = |mut figures: Vec<f64>| {
        figures.sort_by(f64::total_cmp);
        figures[figures.len() / 2]
    };
    let off = median(added.iter().map(|(_, off)| *off).collect());
    let more = median(added.iter().map(|(more, _)| *more).collect());
    writeln!(
        std::io::stdout(),
        "{{\"call_ns\": {off:.0}, \"added_ns\": {more:.0}, \"added_ns_per_record\": {:.1}}}",
        more / RECORDS_PER_CALL
    )?;
    Ok(())
}

/// A root whose worker has the turn in the step function.
fn started() -> Result<Machine, Box<dyn std::error::Error>> {
    let mut machine = Machine::new(MachineConfig {
        rank: Rank(0),
        pipeline: vec![Rank(0), Rank(1)],
        tensor_group: Vec::new(),
        hosts: vec!["localhost".to_owned(); 2],
        stall_report: Duration::from_hours(1),
        stall_timeout: Duration::from_hours(1),
        trace_capacity: 1 << 16,
    });
    let active = NonZeroU32::MIN;
    let plan = StepPlan {
        step: StepEpoch(1),
        function: "trace_cost".to_owned(),
        num_microbatches: 1,
        one_at_a_time: false,
        schedule: Schedule::Interleaved { active },
    };
    machine.begin_step(plan, Duration::ZERO)?;
    machine.enter_main(Duration::ZERO);
    let started = machine.poll_main(Duration::ZERO);
    if started != Some(MainEvent::StartWorker(WORKER)) {
        return Err(format!("{started:?} instead of a worker").into());
    }
    machine.worker_returns(WORKER, Duration::ZERO)?;
    machine.take_grant(WORKER).ok_or("no task was given")?;
    Ok(machine)
}

fn call(machine: &mut Machine, clock: &Instant) -> Result<(), Box<dyn std::error::Error>> {
    let empty = || Body {
        value: Value::None,
        tensors: Vec::new(),
    };
    let request = NewRequest {
        model: ModelId(0),
        work: ForwardCall::new(ModuleId(1)).into(),
        microbatch: MicrobatchId(0),
        place: Place {
            parent: None,
            call: CallId(0),
        },
        hold: false,
        expected: None,
        body: empty(),
    };
    let id = machine.send_request(Some(WORKER), Rank(1), request, clock.elapsed())?;
    machine.wait(WORKER, &[id], Phase::Forward, clock.elapsed())?;
    let answer = Message::Response(Box::new(Response {
        id,
        step: StepEpoch(1),
        responder: Rank(1),
        outcome: ResponseOutcome::Value(empty().into()),
    }));
    machine.deliver(Rank(1), answer, clock.elapsed());
    machine
        .take_grant(WORKER)
        .ok_or("the answer was not noticed")?;
    machine.take_responses(&[id])?;
    machine.take_effects();
    Ok(())
}
