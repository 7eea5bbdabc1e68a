//! A front without Python: a model of plain arithmetic on `Vec<f64>`, divided over two processes, on the same execution
//! server, schedules and transports as PyTorch's.
//!
//! `rust_front SECRET 0 SCHEDULE...` starts the second process with its port, and both run a step under each schedule.
//! They compare the gradients of their modules, bit for bit, with those that one process computes.
#![expect(clippy::print_stdout, reason = "it is a program")]

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, thread};

use shardwright_comm::{JobOptions, Joining, Rendezvous, Secret};
use shardwright_core::{
    CallId, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch, WorkerId,
};
use shardwright_runtime::{
    MachineConfig, MainEvent, NewRequest, Server, ServerError, StepPlan, Task,
};
use shardwright_wire::{
    Answer, AnswerKind, BackwardCall, Body, Buffer, ForwardCall, Place, Request, TensorMeta,
    TensorPart, Value, Work,
};

const MICROBATCHES: u32 = 6;
const SIZE: u32 = 5;
type Vector = Vec<f64>;

/// The modules: owner, scale of the weights, and the modules that each calls. They call each other's ranks in turn.
const MODEL: [(Rank, f64, &[u32]); 5] = [
    (Rank(0), 0.7, &[1, 2]),
    (Rank(1), -0.9, &[3]),
    (Rank(1), 0.3, &[]),
    (Rank(0), 1.1, &[4]),
    (Rank(1), 0.5, &[]),
];

/// What an execution remembers for its backward: its argument and its calls, or the request that ran it elsewhere.
enum Trail {
    Here(u32, Vector, Vec<Trail>),
    Elsewhere(u32, RequestId),
}

/// A process of the job, or the only one.
#[derive(Default)]
struct Front {
    /// This rank and its execution server; `None` computes everything here.
    job: Option<(Rank, Arc<Server>)>,
    /// Of weights, by module and microbatch: so they do not depend on the order in which a schedule runs these.
    gradients: Mutex<BTreeMap<(u32, u32), Vector>>,
    trails: Mutex<HashMap<(Rank, RequestId), Trail>>,
}

/// A task, and how many calls of other ranks it has made.
struct Execution<'a> {
    front: &'a Front,
    worker: WorkerId,
    microbatch: MicrobatchId,
    parent: Option<RequestId>,
    calls: u32,
}

impl<'a> Execution<'a> {
    fn new(front: &'a Front, worker: WorkerId, microbatch: MicrobatchId) -> Self {
        let (parent, calls) = (None, 0);
        #[rustfmt::skip]
        return Self { front, worker, microbatch, parent, calls };
    }

    /// A module gives `w[i] * x[i] * x[i]`, and what the modules add that it calls.
    fn forward(&mut self, module: u32, x: Vector) -> Result<(Vector, Trail), ServerError> {
        let (owner, _, calls) = MODEL[module as usize];
        let job = self.front.job.as_ref();
        if job.is_some_and(|(rank, _)| *rank != owner) {
            let call = ForwardCall::new(ModuleId(module));
            let (id, y) = self.ask(owner, call.into(), &x)?;
            return Ok((y, Trail::Elsewhere(module, id)));
        }
        let mut y: Vector = weights(module).zip(&x).map(|(w, x)| w * x * x).collect();
        let mut inner = Vec::new();
        for called in calls {
            let (result, trail) = self.forward(*called, x.clone())?;
            y = sum(&y, &result);
            inner.push(trail);
        }
        Ok((y, Trail::Here(module, x, inner)))
    }

    fn backward(&mut self, trail: Trail, dy: &[f64]) -> Result<Vector, ServerError> {
        let (module, x, inner) = match trail {
            Trail::Here(module, x, inner) => (module, x, inner),
            Trail::Elsewhere(module, id) => {
                let mut call = BackwardCall::new(ModuleId(module), id);
                call.gradients = vec![(0, 0)];
                return Ok(self.ask(MODEL[module as usize].0, call.into(), dy)?.1);
            }
        };
        let dw = x.iter().zip(dy).map(|(x, dy)| x * x * dy).collect();
        let terms = weights(module).zip(&x).zip(dy);
        let mut dx: Vector = terms.map(|((w, x), dy)| 2.0 * w * x * dy).collect();
        for trail in inner.into_iter().rev() {
            dx = sum(&dx, &self.backward(trail, dy)?);
        }
        let mut gradients = self.front.gradients.lock().expect("nobody panics");
        gradients.insert((module, self.microbatch.0), dw);
        Ok(dx)
    }

    /// Asks another rank, and waits for its answer.
    fn ask(&mut self, to: Rank, work: Work, x: &[f64]) -> Result<(RequestId, Vector), ServerError> {
        let phase = work.kind().phase().expect("it is a task");
        let (_, server) = self.front.job.as_ref().expect("there is another rank");
        let (parent, call) = (self.parent, CallId(self.calls));
        self.calls += 1;
        let request = NewRequest {
            model: ModelId(0),
            work,
            microbatch: self.microbatch,
            place: Place { parent, call },
            hold: false,
            expected: None,
            body: body(x),
        };
        let id = server.send_request(Some(self.worker), to, request)?;
        let answer = server.wait(self.worker, &[id], phase)?.remove(0);
        Ok((id, vector(&answer.body)))
    }

    /// The step function: the model, and the sum of squares as its loss.
    fn step(&mut self) -> Result<(), ServerError> {
        let x = (0..SIZE).map(|index| f64::from(self.microbatch.0 + 1) / f64::from(index + 2));
        let (y, trail) = self.forward(0, x.collect())?;
        if let Some((_, server)) = &self.front.job {
            server.await_backward(self.worker)?;
        }
        let dy: Vector = y.iter().map(|y| 2.0 * y).collect();
        self.backward(trail, &dy).map(drop)
    }

    /// Runs what another rank asks for, and answers.
    fn serve(&mut self, server: &Server, request: &Request) -> Result<(), ServerError> {
        self.parent = Some(request.id);
        let given = vector(&request.body);
        let (kind, result) = match &request.work {
            Work::Forward(call) => {
                let (y, trail) = self.forward(call.module.0, given)?;
                let mut trails = self.front.trails.lock().expect("nobody panics");
                trails.insert((request.requester, request.id), trail);
                (AnswerKind::Result(Arc::default()), y)
            }
            Work::Backward(call) => {
                let mut trails = self.front.trails.lock().expect("nobody panics");
                let trail = trails.remove(&(request.requester, call.forward));
                drop(trails);
                let dx = self.backward(trail.expect("it went forward"), &given)?;
                (AnswerKind::Gradients(vec![(0, 0)]), dx)
            }
            Work::Close(_) | Work::Control { .. } => unreachable!("nobody asks for that here"),
        };
        let body = body(&result);
        server.respond(request.requester, request.id, Answer { kind, body })
    }
}

impl Front {
    /// A worker: runs tasks until the server ends.
    fn work(&self, server: &Server, worker: WorkerId) {
        while let Ok(Some(task)) = server.next_task(worker) {
            let done = match &task {
                Task::Root { microbatch } => Execution::new(self, worker, *microbatch).step(),
                Task::Request(request) => {
                    Execution::new(self, worker, request.microbatch).serve(server, request)
                }
                Task::WeightGradient(_) => unreachable!("nothing is left for later"),
            };
            // A step that fails elsewhere is told to the main thread.
            let is_fine = matches!(done, Ok(()) | Err(ServerError::Aborted));
            assert!(is_fine, "{done:?}");
        }
    }

    /// Runs a step, and compares the gradients of this rank's modules; how many there were.
    fn step(self: &Arc<Self>, step: u64, schedule: &str) -> Result<usize, Box<dyn Error>> {
        let (rank, server) = self.job.as_ref().ok_or("there is no server")?;
        self.gradients.lock().expect("nobody panics").clear();
        server.begin_step(StepPlan {
            step: StepEpoch(step),
            function: "step".to_owned(),
            num_microbatches: MICROBATCHES,
            one_at_a_time: false,
            schedule: schedule.parse()?,
        })?;
        loop {
            match server.supervise(Duration::from_millis(100)) {
                Some(MainEvent::StartWorker(worker)) => {
                    let (front, server) = (Arc::clone(self), Arc::clone(server));
                    let thread = thread::Builder::new().name(format!("worker-{worker}"));
                    thread.spawn(move || front.work(&server, worker))?;
                }
                Some(MainEvent::RootDone) => {
                    server.end_step(body(&[]))?;
                    break;
                }
                Some(MainEvent::StepEnd(_)) => break,
                Some(MainEvent::Failed(failure)) => return Err(format!("{failure:?}").into()),
                Some(MainEvent::Control(_) | MainEvent::StallReport(_)) | None => {}
            }
        }
        server.leave_step()?;
        let alone = Self::default();
        for microbatch in (0..MICROBATCHES).map(MicrobatchId) {
            Execution::new(&alone, WorkerId(0), microbatch).step()?;
        }
        let mut expected = alone.gradients.lock().expect("nobody panics").clone();
        expected.retain(|(module, _), _| MODEL[*module as usize].0 == *rank);
        let found = self.gradients.lock().expect("nobody panics");
        assert_eq!(*found, expected, "gradients of rank {rank}");
        Ok(found.len())
    }
}

fn weights(module: u32) -> impl Iterator<Item = f64> {
    (3..).map(move |index| MODEL[module as usize].1 / f64::from(index))
}

fn sum(one: &[f64], other: &[f64]) -> Vector {
    one.iter().zip(other).map(|(a, b)| a + b).collect()
}

fn body(vector: &[f64]) -> Body {
    let meta = TensorMeta {
        dtype: "float64".to_owned(),
        shape: vec![vector.len() as u64],
        strides: vec![1],
        device: "cpu".to_owned(),
        requires_grad: true,
    };
    let data = Buffer::copy_of(bytemuck::cast_slice(vector));
    let (value, tensors) = (Value::Tensor(0), vec![TensorPart::new(meta, data)]);
    Body { value, tensors }
}

fn vector(body: &Body) -> Vector {
    bytemuck::cast_slice(body.tensors[0].data.as_bytes()).to_vec()
}

/// Joins the job as a rank, and runs a step under each schedule.
fn run(rank: Rank, place: Rendezvous, schedules: &[String]) -> Result<(), Box<dyn Error>> {
    let options = JobOptions::on_this_host(rank, 2, place);
    let node = Joining::prepare(options)?.join(&mut || true)?;
    let config = MachineConfig {
        rank,
        pipeline: vec![Rank(0), Rank(1)],
        tensor_group: Vec::new(),
        hosts: vec!["localhost".to_owned(); 2],
        stall_report: Duration::from_secs(10),
        stall_timeout: Duration::from_mins(1),
        trace_capacity: 0,
    };
    let server = Server::attach(Some(Arc::clone(node.transport())), config);
    node.router().set_handler(Arc::<Server>::clone(&server));
    let front = Arc::new(Front {
        job: Some((rank, Arc::clone(&server))),
        ..Front::default()
    });
    for (step, schedule) in (1..).zip(schedules) {
        let exact = front.step(step, schedule)?;
        println!("rank {rank}: {exact} gradients are exact under {schedule}");
    }
    server.close(Duration::from_secs(5));
    node.close(None);
    Ok(())
}

/// Rank 0 starts rank 1, which is told the port.
fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = env::args().collect();
    let [_, secret, port, schedules @ ..] = arguments.as_slice() else {
        return Err("usage: rust_front SECRET 0 SCHEDULE...".into());
    };
    let (host, secret) = (
        "127.0.0.1".to_owned(),
        Secret::new(secret.as_bytes().to_vec())?,
    );
    let port = port.parse()?;
    if port != 0 {
        return run(Rank(1), Rendezvous::at(host, port, secret), schedules);
    }
    let place = Rendezvous::listen(host, secret)?;
    let schedules = schedules.to_vec();
    arguments[2] = place.port().to_string();
    let mut other = Command::new(env::current_exe()?);
    let mut other = other.args(&arguments[1..]).spawn()?;
    run(Rank(0), place, &schedules)?;
    let ended = other.wait()?;
    ended.success().then_some(()).ok_or("rank 1 failed".into())
}
