//! The cost of a remote call: a request and its answer between two servers of one process.
//!
//! `cargo run --release -p shardwright-runtime --example ping_pong`

use std::error::Error;
use std::io::Write;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwright_comm::{Receiver, Router, Transport, in_process};
use shardwright_core::{CallId, ModelId, ModuleId, Rank, StepEpoch, WorkerId};
use shardwright_runtime::{MachineConfig, MainEvent, NewRequest, Server, StepPlan, Task};
use shardwright_schedule::Schedule;
use shardwright_wire::{Body, ForwardCall, Phase, Place, Value};

const CALLS: u32 = 20_000;

fn main() -> Result<(), Box<dyn Error>> {
    let routers = [Arc::new(Router::default()), Arc::new(Router::default())];
    let receivers = routers
        .iter()
        .map(|router| Arc::clone(router) as Arc<dyn Receiver>)
        .collect();
    let transports = in_process(receivers)?;
    let mut mains = Vec::new();
    for (router, transport) in routers.iter().zip(&transports) {
        let config = MachineConfig {
            rank: transport.rank(),
            pipeline: vec![Rank(0), Rank(1)],
            tensor_group: Vec::new(),
            hosts: vec!["localhost".to_owned(); 2],
            stall_report: Duration::from_secs(10),
            stall_timeout: Duration::from_mins(1),
            trace_capacity: 1024,
        };
        let server = Server::attach(Some(Arc::clone(transport) as Arc<dyn Transport>), config);
        router.set_handler(Arc::clone(&server) as Arc<dyn Receiver>);
        let name = format!("main-{}", transport.rank());
        mains.push(
            std::thread::Builder::new()
                .name(name)
                .spawn(move || run_step(&server))?,
        );
    }
    for main in mains {
        main.join().map_err(|_| "a main thread panicked")?;
    }
    for transport in transports {
        transport.close(None);
    }
    Ok(())
}

fn run_step(server: &Arc<Server>) {
    let schedule = Schedule::Interleaved {
        active: NonZeroU32::MIN,
    };
    let plan = StepPlan {
        step: StepEpoch(1),
        function: "ping_pong".to_owned(),
        num_microbatches: 1,
        one_at_a_time: false,
        schedule,
    };
    server.begin_step(plan).expect("the first step begins");
    loop {
        match server.supervise(Duration::from_millis(100)) {
            Some(MainEvent::StartWorker(worker)) => {
                let server = Arc::clone(server);
                let work = move || run_tasks(&server, worker);
                std::thread::Builder::new()
                    .name(format!("worker-{worker}"))
                    .spawn(work)
                    .expect("a thread starts");
            }
            Some(MainEvent::RootDone) => {
                server
                    .end_step(empty())
                    .expect("all step functions have returned");
                break;
            }
            Some(MainEvent::StepEnd(_)) => break,
            Some(MainEvent::Failed(failure)) => panic!("{failure:?}"),
            Some(MainEvent::Control(_) | MainEvent::StallReport(_)) | None => {}
        }
    }
    server.leave_step().expect("the step was committing");
    server.close(Duration::from_secs(1));
}

fn run_tasks(server: &Server, worker: WorkerId) {
    while let Some(task) = server.next_task(worker).expect("the worker exists") {
        match task {
            Task::Root { microbatch } => {
                let start = Instant::now();
                for call in 0..CALLS {
                    let request = NewRequest {
                        model: ModelId(0),
                        work: ForwardCall::new(ModuleId(1)).into(),
                        microbatch,
                        place: Place {
                            parent: None,
                            call: CallId(call),
                        },
                        hold: false,
                        expected: None,
                        body: empty(),
                    };
                    let id = server
                        .send_request(Some(worker), Rank(1), request)
                        .expect("the step runs");
                    server
                        .wait(worker, &[id], Phase::Forward)
                        .expect("rank 1 answers");
                }
                let microseconds = start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS);
                let line = format!(
                    "{{\"calls\": {CALLS}, \"microseconds_per_call\": {microseconds:.1}}}\n"
                );
                std::io::stdout()
                    .write_all(line.as_bytes())
                    .expect("stdout is open");
            }
            Task::Request(request) => {
                server
                    .respond(request.requester, request.id, empty())
                    .expect("it is being served");
            }
            Task::WeightGradient(_) => unreachable!("nothing is left for later here"),
        }
    }
}

fn empty() -> Body {
    Body {
        value: Value::None,
        tensors: Vec::new(),
    }
}
