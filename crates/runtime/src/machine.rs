//! The pure state machine of a rank's execution server: no clock, no threads, no I/O.
//!
//! Every method that is an event takes the time as `now`, counted from any fixed start. What the
//! shell has to do afterwards (send, wake) collects as [`Effect`]s. Invariants, cited where they
//! are upheld and explained in `docs/design/execution.md`:
//!
//! - EX-1: at most one holder of the turn: a worker that is EXECUTING, or the main thread in a control request.
//! - EX-2: a worker is started only when none is IDLE, and one at a time.
//! - EX-3: a worker that asks for its next task keeps the turn when the choice is a fresh task; one that waits for
//!   responses that are all there keeps it when the schedule would choose it.
//! - EX-4: a message of an older step is dropped and counted; of a newer step, kept until it is entered.
//! - EX-5: an abort reaches every rank of the job; the first failure of a step wins.
//! - EX-6: a failed step's suspended workers unwind one at a time, and its end is reported when all are IDLE.
//! - EX-7: a step ends only when no request is live.
//! - EX-8: only a lack of progress anywhere in the job is a stall.
//! - EX-9: after a failed step the next one starts from nothing.
//! - EX-10: a peer's departure is an error only once a step needs that peer.
//! - EX-11: a tensor that is held is what the answer said, or the step fails; none is held after its step.
//! - EX-12: the ranks of a tensor-parallel group give the turn in the order of its first rank.
//! - EX-14: of a microbatch's forwards that a rank knows of, the first in the sequential program begins.
//! - EX-15: microbatches come in their order to what modules keep, and never two at once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shardwright_core::{MicrobatchId, ModelId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_schedule::{Progress, Schedule, Turns};
use shardwright_wire::{Body, Message, Place, Request, Work};

use crate::counters::{Stats, TaskCounters};
use crate::failure::{Failure, ServerError};
use crate::trace::{TraceRecord, TraceRing};

mod account;
mod arrivals;
mod backward;
mod dispatch;
mod failing;
mod following;
mod held;
mod life;
mod main_thread;
mod order;
mod peer_order;
mod peers;
mod requests;
mod serving;
mod stall;
mod stays;
mod tasks;
mod workers;

pub use dispatch::Deferred;
pub use held::Expected;
pub use main_thread::MainEvent;
pub use requests::About;
pub use stays::StateKey;
pub use tasks::Task;
pub use workers::{Grant, Waiting};

use account::Account;
use arrivals::EarlyMessages;
use dispatch::{ReadyItem, Start, Turn};
use failing::FailedSteps;
use held::HeldResults;
use order::Order;
use peer_order::PeerOrder;
use peers::Peers;
use requests::Outstanding;
use serving::{Parked, RequestKey, Served};
use stall::StallWatch;
use stays::Stays;
use workers::WorkerSlot;

/// What a machine knows about its place in the job.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// This rank.
    pub rank: Rank,
    /// The ranks of its pipeline in pipeline order; the first is the root.
    pub pipeline: Vec<Rank>,
    /// The ranks of its tensor-parallel group; the first one decides the order of tasks.
    pub tensor_group: Vec<Rank>,
    /// The host of every rank of the job, by rank.
    pub hosts: Vec<String>,
    /// After how long without progress on this rank a wait is reported.
    pub stall_report: Duration,
    /// After how long without progress anywhere a step fails.
    pub stall_timeout: Duration,
    /// How many trace records are kept.
    pub trace_capacity: usize,
}

/// What a rank is about to do in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// The step's number; every rank counts alike.
    pub step: StepEpoch,
    /// The step function's qualified name.
    pub function: String,
    /// How many microbatches.
    pub num_microbatches: u32,
    /// Whether they run one after another, whatever the schedule. The root's holds for its peers too.
    pub one_at_a_time: bool,
    /// The schedule.
    pub schedule: Schedule,
}

/// What the caller of `send_request` decides.
#[derive(Clone, Debug, PartialEq)]
pub struct NewRequest {
    /// The model.
    pub model: ModelId,
    /// What is asked for.
    pub work: Work,
    /// The microbatch.
    pub microbatch: MicrobatchId,
    /// Where in the graph.
    pub place: Place,
    /// Whether the results' tensors stay where they are made until somebody asks for them.
    pub hold: bool,
    /// What the response is taken to be until it is there; another one fails the step.
    pub expected: Option<Expected>,
    /// Arguments, or gradients.
    pub body: Body,
}

/// What the shell has to do after an event.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Hand a message to the transport.
    Send {
        /// The receiver.
        to: Rank,
        /// The message.
        message: Message,
    },
    /// A worker has a grant.
    WakeWorker(WorkerId),
    /// The main thread has something to do.
    WakeMain,
}

/// Where a step stands on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// Between steps.
    Outside,
    /// Tasks run.
    Running,
    /// The root's functions have returned; the step's result is being made.
    Ending,
    /// The step's tasks are over everywhere; gradients are being averaged.
    Committing,
    /// Stacks unwind.
    Aborting(Failure),
    /// The step has failed, and all stacks are gone.
    Failed(Failure),
}

/// The state machine. See the module's documentation.
#[derive(Debug)]
pub struct Machine {
    config: MachineConfig,
    stage: Stage,
    plan: StepPlan,
    begun: bool,
    progress: Progress,
    /// What this rank has begun in the step.
    turns: Turns,
    /// Microbatches whose step function has returned.
    returned: BTreeSet<MicrobatchId>,
    /// How far this rank is in the step's program, if it has one.
    order: Option<Order>,
    /// How far it is in the order of its tensor-parallel group.
    peer_order: PeerOrder,
    /// Which microbatches have been where modules keep something.
    stays: Stays,
    workers: Vec<WorkerSlot>,
    busy_workers: u32,
    turn: Turn,
    last_worker: Option<WorkerId>,
    start: Start,
    ready: Vec<ReadyItem>,
    arrivals: u64,
    /// How many backwards of the step have left weight gradients.
    num_deferred: u64,
    next_request: u64,
    /// Over a tensor-parallel group.
    next_fetch: u64,
    outstanding: BTreeMap<RequestId, Outstanding>,
    serving: BTreeMap<RequestKey, Served>,
    parked: Parked,
    held: HeldResults,
    controls: VecDeque<Box<Request>>,
    main_missing: Option<u32>,
    end_body: Option<Body>,
    kept: EarlyMessages,
    failed_steps: FailedSteps,
    beside: Option<Failure>,
    late: Option<Failure>,
    peers: Peers,
    stall: StallWatch,
    names: BTreeMap<ModelId, Vec<String>>,
    total: TaskCounters,
    step: TaskCounters,
    stats: Stats,
    trace: TraceRing,
    account: Account,
    /// Whose message is being taken in.
    receiving_from: Option<Rank>,
    effects: Vec<Effect>,
    main_blocked: bool,
    closed: bool,
}

impl Machine {
    /// A machine between steps, with no workers.
    pub fn new(config: MachineConfig) -> Self {
        let trace = TraceRing::new(config.trace_capacity);
        Self {
            config,
            stage: Stage::Outside,
            plan: StepPlan {
                step: StepEpoch(0),
                function: String::new(),
                num_microbatches: 0,
                one_at_a_time: false,
                schedule: Schedule::Simple,
            },
            begun: false,
            progress: Progress::default(),
            turns: Turns::default(),
            returned: BTreeSet::new(),
            order: None,
            peer_order: PeerOrder::default(),
            stays: Stays::default(),
            workers: Vec::new(),
            busy_workers: 0,
            turn: Turn::Free,
            last_worker: None,
            start: Start::NotWanted,
            ready: Vec::new(),
            arrivals: 0,
            next_request: 0,
            num_deferred: 0,
            next_fetch: 0,
            outstanding: BTreeMap::new(),
            serving: BTreeMap::new(),
            parked: Parked::default(),
            held: HeldResults::default(),
            controls: VecDeque::new(),
            main_missing: None,
            end_body: None,
            kept: EarlyMessages::default(),
            failed_steps: FailedSteps::default(),
            beside: None,
            late: None,
            peers: Peers::default(),
            stall: StallWatch::default(),
            names: BTreeMap::new(),
            total: TaskCounters::default(),
            step: TaskCounters::default(),
            stats: Stats::default(),
            trace,
            account: Account::default(),
            receiving_from: None,
            effects: Vec::new(),
            main_blocked: false,
            closed: false,
        }
    }

    /// What the shell has to do, in order, since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Gives a model's modules their names, for reports.
    pub fn name_modules(&mut self, model: ModelId, names: Vec<String>) {
        self.names.insert(model, names);
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        Stats {
            total: self.total,
            step: self.step,
            live_requests: (self.outstanding.len() + self.serving.len() + self.ready.len()) as u64,
            held_responses: self.held.len() as u64,
            kept_messages: self.kept.len() as u64,
            ..self.stats
        }
    }

    /// Keeps trace records from now on, or keeps none.
    pub fn keep_trace(&mut self, on: bool) {
        self.trace.switch(on);
    }

    /// The trace's records, oldest first, and how many more were overwritten; there are none afterwards.
    pub fn take_trace(&mut self) -> (Vec<TraceRecord>, u64) {
        self.trace.take()
    }

    /// Whether a thread of this rank computes, as far as the server can tell (EX-8).
    ///
    /// The main thread computes whenever it does not wait in the server: it then runs the
    /// user's own code between steps, or averages gradients.
    pub fn is_executing(&self) -> bool {
        matches!(self.turn, Turn::Worker(_)) || !self.main_blocked
    }

    /// A number that grows with everything that this rank does.
    pub fn progress_count(&self) -> u64 {
        self.total.tasks + self.total.suspensions + self.stats.steps
    }

    /// The newest step entered.
    pub fn newest_step(&self) -> StepEpoch {
        self.plan.step
    }

    fn is_root(&self) -> bool {
        self.config.pipeline.first() == Some(&self.config.rank)
    }

    fn root_rank(&self) -> Rank {
        *self
            .config
            .pipeline
            .first()
            .expect("a pipeline has at least its root")
    }

    fn pipeline_peers(&self) -> Vec<Rank> {
        self.config
            .pipeline
            .iter()
            .copied()
            .filter(|rank| *rank != self.config.rank)
            .collect()
    }

    fn host(&self, rank: Rank) -> String {
        self.config
            .hosts
            .get(rank.0 as usize)
            .cloned()
            .unwrap_or_else(|| "unknown".to_owned())
    }

    fn in_step(&self) -> bool {
        !matches!(self.stage, Stage::Outside | Stage::Failed(_))
    }

    /// Refuses a call outside a step, and unwinds its caller in a failing one.
    fn require_running(&self, call: &'static str) -> Result<(), ServerError> {
        match &self.stage {
            _ if self.closed => Err(ServerError::Aborted),
            Stage::Running | Stage::Ending => Ok(()),
            Stage::Aborting(_) => Err(ServerError::Aborted),
            Stage::Failed(failure) => Err(ServerError::Failed(Box::new(failure.clone()))),
            Stage::Outside | Stage::Committing => Err(ServerError::NotInStep { call }),
        }
    }
}
