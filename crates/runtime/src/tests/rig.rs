//! Ranks as threads in one process: main threads, and worker threads that run scripted tasks, as Python would.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use shardwright_comm::sync::thread::{self, JoinHandle};
use shardwright_comm::{InProcess, Receiver, Router, Transport, in_process};
use shardwright_core::{
    CallId, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch, WorkerId,
};
use shardwright_schedule::Schedule;
use shardwright_wire::{BackwardCall, Body, CloseCall, ForwardCall, Phase, Place, Value, Work};

use crate::{
    Failure, LocalError, MachineConfig, MainEvent, NewRequest, Server, ServerError, StepPlan, Task,
};

/// No test waits longer than this for anything.
pub(super) const WATCHDOG: Duration = Duration::from_mins(5);

/// What the modules of a test do: every task calls this.
pub(super) type Behaviour =
    Arc<dyn Fn(&TestRank, WorkerId, &Task) -> Result<Value, ServerError> + Send + Sync>;

/// One rank of the rig.
pub(super) struct TestRank {
    pub(super) id: Rank,
    pub(super) server: Arc<Server>,
    pub(super) transport: Option<Arc<InProcess>>,
    /// How many workers execute at this moment (EX-1).
    executing: AtomicU32,
    threads: std::sync::Mutex<Vec<JoinHandle<()>>>,
}

/// How a rank's step ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Ended {
    Done(Value),
    Failed(Failure),
}

impl Ended {
    pub(super) fn failure(self) -> Failure {
        match self {
            Self::Failed(failure) => failure,
            Self::Done(value) => panic!("the step succeeded with {value:?}"),
        }
    }
}

pub(super) fn body(value: Value) -> Body {
    Body {
        value,
        tensors: Vec::new(),
    }
}

/// A first call in a microbatch.
pub(super) fn new_request(work: Work, microbatch: MicrobatchId, value: Value) -> NewRequest {
    NewRequest {
        model: ModelId(0),
        work,
        microbatch,
        place: Place {
            parent: None,
            call: CallId(0),
        },
        hold: false,
        expected: None,
        body: body(value),
    }
}

pub(super) fn forward(module: u32) -> Work {
    ForwardCall::new(ModuleId(module)).into()
}

pub(super) fn backward(module: u32, forward: RequestId) -> Work {
    BackwardCall::new(ModuleId(module), forward).into()
}

pub(super) fn close(module: u32, forward: RequestId) -> Work {
    CloseCall::new(ModuleId(module), forward).into()
}

pub(super) fn microbatch_of(task: &Task) -> MicrobatchId {
    match task {
        Task::Root { microbatch } => *microbatch,
        Task::Request(request) => request.microbatch,
        Task::WeightGradient(deferred) => deferred.microbatch,
    }
}

/// Stalls are reported after 1 s and fail after 3 s.
pub(super) fn config(rank: u32, pipeline: &[u32], world: u32) -> MachineConfig {
    MachineConfig {
        rank: Rank(rank),
        pipeline: pipeline.iter().map(|rank| Rank(*rank)).collect(),
        tensor_group: Vec::new(),
        hosts: (0..world).map(|rank| format!("host{rank}")).collect(),
        stall_report: Duration::from_secs(1),
        stall_timeout: Duration::from_secs(3),
        trace_capacity: 10_000,
    }
}

/// The same on the machine's clock, by which threads may wait for a processor: nothing is a stall.
pub(super) fn real_time(config: MachineConfig) -> MachineConfig {
    MachineConfig {
        stall_report: Duration::from_hours(1),
        stall_timeout: Duration::from_hours(1),
        ..config
    }
}

pub(super) fn plan(step: u64, function: &str, num_microbatches: u32) -> StepPlan {
    StepPlan {
        step: StepEpoch(step),
        function: function.to_owned(),
        num_microbatches,
        one_at_a_time: false,
        schedule: Schedule::Interleaved {
            active: NonZeroU32::new(4).expect("four is not zero"),
        },
    }
}

/// A job of ranks in one pipeline.
pub(super) fn job(world: u32) -> Vec<Arc<TestRank>> {
    let pipeline: Vec<u32> = (0..world).collect();
    job_of(
        &(0..world)
            .map(|rank| real_time(config(rank, &pipeline, world)))
            .collect::<Vec<_>>(),
    )
}

pub(super) fn job_of(configs: &[MachineConfig]) -> Vec<Arc<TestRank>> {
    job_hearing(configs, |server| server)
}

/// A job whose servers hear through what `ear` puts around them.
pub(super) fn job_hearing(
    configs: &[MachineConfig],
    ear: impl Fn(Arc<Server>) -> Arc<dyn Receiver>,
) -> Vec<Arc<TestRank>> {
    if let [config] = configs {
        return vec![rank_of(config, None, None)];
    }
    let routers: Vec<Arc<Router>> = configs
        .iter()
        .map(|_| Arc::new(Router::default()))
        .collect();
    let receivers = routers
        .iter()
        .map(|router| Arc::clone(router) as Arc<dyn Receiver>)
        .collect();
    let transports = in_process(receivers).unwrap();
    let ranks: Vec<_> = configs
        .iter()
        .zip(transports)
        .map(|(config, transport)| rank_of(config, Some(Arc::clone(&transport)), Some(transport)))
        .collect();
    for (router, rank) in routers.iter().zip(&ranks) {
        router.set_handler(ear(Arc::clone(&rank.server)));
    }
    ranks
}

/// A rank whose server sends through `own`, over `transport` in the end.
pub(super) fn rank_of(
    config: &MachineConfig,
    transport: Option<Arc<InProcess>>,
    own: Option<Arc<dyn Transport>>,
) -> Arc<TestRank> {
    Arc::new(TestRank {
        id: config.rank,
        server: Server::attach(own, config.clone()),
        transport,
        executing: AtomicU32::new(0),
        threads: std::sync::Mutex::default(),
    })
}

impl TestRank {
    /// Calls a module of another rank and waits for the result.
    pub(super) fn call(
        &self,
        worker: WorkerId,
        to: u32,
        work: Work,
        microbatch: MicrobatchId,
        value: Value,
    ) -> Result<(RequestId, Value), ServerError> {
        let phase = if matches!(work, Work::Forward(_)) {
            Phase::Forward
        } else {
            Phase::Backward
        };
        let id = self.request(Some(worker), to, work, microbatch, value)?;
        let answers = self.off_turn(|| self.server.wait(worker, &[id], phase))?;
        Ok((
            id,
            answers
                .into_iter()
                .next()
                .expect("one request has one answer")
                .body
                .value,
        ))
    }

    pub(super) fn request(
        &self,
        worker: Option<WorkerId>,
        to: u32,
        work: Work,
        microbatch: MicrobatchId,
        value: Value,
    ) -> Result<RequestId, ServerError> {
        let request = new_request(work, microbatch, value);
        self.server.send_request(worker, Rank(to), request)
    }

    pub(super) fn await_backward(&self, worker: WorkerId) -> Result<(), ServerError> {
        self.off_turn(|| self.server.await_backward(worker))
    }

    /// Runs a blocking call, in which other workers may execute.
    fn off_turn<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.executing.fetch_sub(1, Ordering::SeqCst);
        let result = wait();
        assert_eq!(
            self.executing.fetch_add(1, Ordering::SeqCst),
            0,
            "EX-1: two workers execute"
        );
        result
    }

    fn work(self: &Arc<Self>, worker: WorkerId, behaviour: &Behaviour) {
        while let Some(task) = self.server.next_task(worker).expect("the worker exists") {
            assert_eq!(
                self.executing.fetch_add(1, Ordering::SeqCst),
                0,
                "EX-1: two workers execute"
            );
            let result = behaviour(self, worker, &task);
            match (result, &task) {
                (Ok(value), Task::Request(request)) => {
                    self.server
                        .respond(request.requester, request.id, body(value))
                        .expect("it is being served");
                }
                (Ok(_), Task::Root { .. } | Task::WeightGradient(_))
                | (Err(ServerError::Aborted | ServerError::Failed(_)), _) => {}
                (Err(other), _) => panic!("a task misused the server: {other}"),
            }
            self.executing.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// What the step decorator does on the main thread.
    pub(super) fn step(self: &Arc<Self>, plan: StepPlan, behaviour: &Behaviour) -> Ended {
        match self.server.begin_step(plan) {
            Ok(()) => {}
            Err(ServerError::Failed(failure)) => return Ended::Failed(*failure),
            Err(other) => panic!("the step was not entered: {other}"),
        }
        let ended = self.supervise(behaviour);
        if matches!(ended, Ended::Done(_)) {
            self.server.leave_step().expect("the step was committing");
        }
        ended
    }

    /// Supervises a step until its tasks are over.
    pub(super) fn supervise(self: &Arc<Self>, behaviour: &Behaviour) -> Ended {
        let watchdog = Instant::now() + WATCHDOG;
        loop {
            assert!(Instant::now() < watchdog, "rank {} hangs", self.id);
            match self.server.supervise(Duration::from_millis(50)) {
                None | Some(MainEvent::StallReport(_)) => {}
                Some(MainEvent::StartWorker(worker)) => self.start(worker, behaviour),
                Some(MainEvent::Control(request)) => {
                    self.server
                        .respond(request.requester, request.id, request.body)
                        .expect("the control request is being served");
                }
                Some(MainEvent::StepEnd(body)) => return Ended::Done(body.value),
                Some(MainEvent::RootDone) => {
                    let value = Value::Int(self.server.stats().steps.cast_signed());
                    match self.server.end_step(body(value.clone())) {
                        Ok(()) => return Ended::Done(value),
                        Err(ServerError::Aborted) => {}
                        Err(other) => panic!("the step did not end: {other}"),
                    }
                }
                Some(MainEvent::Failed(failure)) => return Ended::Failed(failure),
            }
        }
    }

    /// Serves until the first worker has been started.
    pub(super) fn supervise_once(self: &Arc<Self>, behaviour: &Behaviour) -> bool {
        match self.server.supervise(Duration::from_millis(50)) {
            Some(MainEvent::StartWorker(worker)) => {
                self.start(worker, behaviour);
                true
            }
            None => false,
            Some(other) => panic!("the first event is {other:?}"),
        }
    }

    fn start(self: &Arc<Self>, worker: WorkerId, behaviour: &Behaviour) {
        let rank = Arc::clone(self);
        let behaviour = Arc::clone(behaviour);
        let thread = thread::Builder::new()
            .name(format!("worker-{}-{worker}", self.id))
            .spawn(move || rank.work(worker, &behaviour))
            .expect("a thread starts");
        self.threads.lock().unwrap().push(thread);
    }

    /// Fails the step as Python does for an exception in a task.
    pub(super) fn raise(&self, task: &Task, message: &str) -> ServerError {
        let error = LocalError {
            origin: None,
            module: Some("model.layer".to_owned()),
            microbatch: Some(microbatch_of(task)),
            phase: Some(Phase::Forward),
            kind: "ValueError".to_owned(),
            message: message.to_owned(),
            traceback: "Traceback: line 1".to_owned(),
        };
        self.server.fail(None, error);
        ServerError::Aborted
    }

    /// Ends the rank in good order.
    pub(super) fn shut_down(&self) {
        self.server.close(WATCHDOG);
        for thread in self.threads.lock().unwrap().drain(..) {
            thread.join().expect("no worker panicked");
        }
        if let Some(transport) = &self.transport {
            transport.close(None);
        }
    }
}

/// Ends all ranks in good order.
pub(super) fn shut_down(ranks: &[Arc<TestRank>]) {
    for rank in ranks {
        rank.shut_down();
    }
}

/// Runs a function per rank, each on a main thread of its own, and gives their results.
pub(super) fn on_every_rank<T: Send + 'static>(
    ranks: &[Arc<TestRank>],
    main: impl Fn(Arc<TestRank>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let main = Arc::new(main);
    let results: Vec<_> = ranks
        .iter()
        .map(|rank| {
            let (tx, rx) = mpsc::sync_channel(1);
            let rank = Arc::clone(rank);
            let main = Arc::clone(&main);
            thread::Builder::new()
                .name(format!("main-{}", rank.id))
                // Nobody receives it when the test has given up on this rank.
                .spawn(move || drop(tx.send(main(rank))))
                .expect("a thread starts");
            rx
        })
        .collect();
    results
        .iter()
        .map(|rx| {
            rx.recv_timeout(WATCHDOG * 2)
                .expect("a rank hangs or panicked")
        })
        .collect()
}
