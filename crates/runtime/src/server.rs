//! The shell around the machine: one short lock, a condition variable per worker, a clock, and the transport.
//!
//! A monitor rather than a thread with an inbox: whoever brings an event (a Python thread, a
//! thread of the transport) enters the lock, lets the machine decide, and wakes the chosen
//! worker itself. Sends and wake-ups happen after the lock is released; what one thread sends to a rank, no other overtakes
//! (the [`Outbox`]).

mod calls;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use shardwright_comm::sync::{Condvar, Mutex, MutexGuard, thread};
use shardwright_comm::{CommError, Loss, Receiver, Transport};
use shardwright_core::{ModelId, ModuleId, Rank, StepEpoch, WorkerId};
use shardwright_wire::{Body, Heartbeat, Message};

use crate::counters::Stats;
use crate::failure::{LocalError, ServerError, attribute};
use crate::machine::{Effect, Grant, Machine, MachineConfig, MainEvent, StepPlan, Task};
use crate::outbox::Outbox;
use crate::state::{State, wait_on};
use crate::trace::TraceRecord;
use crate::usage::Usage;

/// A rank's execution server.
pub struct Server {
    state: Mutex<State>,
    main_condvar: Condvar,
    /// Rings for those who close once nothing is left to send.
    all_sent: Condvar,
    pub(crate) transport: Option<Arc<dyn Transport>>,
    started: Instant,
    started_at: SystemTime,
}

impl Server {
    /// A server between steps. Without a transport it is the only rank.
    pub fn attach(transport: Option<Arc<dyn Transport>>, config: MachineConfig) -> Arc<Self> {
        let server = Arc::new(Self {
            state: Mutex::new(State {
                machine: Machine::new(config),
                condvars: Vec::new(),
                reader: None,
                outbox: Outbox::default(),
                reported_progress: 0,
                closing: false,
            }),
            main_condvar: Condvar::new(),
            all_sent: Condvar::new(),
            transport,
            started: Instant::now(),
            started_at: SystemTime::now(),
        });
        // Heartbeats say from the start that this rank runs its script (EX-8).
        drop(server.settle(server.lock()));
        server
    }

    /// Enters a step; see [`Machine::begin_step`].
    pub fn begin_step(&self, plan: StepPlan) -> Result<(), ServerError> {
        if let Some(transport) = &self.transport {
            transport.heartbeat_state().enter_step(plan.step.0);
        }
        self.enter(|machine, now| machine.begin_step(plan, now))
    }

    /// Lets the step's microbatches run one after another; see [`Machine::one_at_a_time`].
    pub fn one_at_a_time(&self) {
        self.enter(|machine, _| machine.one_at_a_time());
    }

    /// Whether they do so whatever the schedule; see [`Machine::keeps_one_at_a_time`].
    pub fn keeps_one_at_a_time(&self) -> bool {
        self.lock().machine.keeps_one_at_a_time()
    }

    /// Whether the step's microbatches run one after another; see [`Machine::runs_one_at_a_time`].
    pub fn runs_one_at_a_time(&self) -> bool {
        self.lock().machine.runs_one_at_a_time()
    }

    /// Waits for at most `timeout` until nothing is left of a failed step; see [`Machine::unwound`].
    pub fn await_unwound(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            let unwound = state.machine.unwound(self.now());
            state = self.settle(state);
            let left = deadline.saturating_duration_since(Instant::now());
            if unwound || left.is_zero() {
                return unwound;
            }
            state = wait_on(&self.main_condvar, state, left);
        }
    }

    /// The main thread's next event, or `None` when there was none for `timeout`.
    pub fn supervise(&self, timeout: Duration) -> Option<MainEvent> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        state.machine.enter_main(self.now());
        loop {
            state.machine.tick(self.now());
            // Nothing may come between looking and sleeping: what settling lets in is seen by the look.
            state = self.settle(state);
            let event = state.machine.poll_main(self.now());
            let left = deadline.saturating_duration_since(Instant::now());
            if event.is_some() {
                state.machine.block_main(false);
                drop(self.settle(state));
                return event;
            }
            if left.is_zero() {
                // The caller looks for signals and comes back: it still waits (EX-8).
                return None;
            }
            state = wait_on(&self.main_condvar, state, left);
        }
    }

    /// A worker's next task; `None` when its thread may end.
    pub fn next_task(&self, worker: WorkerId) -> Result<Option<Task>, ServerError> {
        let mut state = self.lock();
        state.machine.worker_returns(worker, self.now())?;
        match self.await_grant(state, worker).0 {
            Grant::Task(task) => Ok(Some(task)),
            Grant::Closed => Ok(None),
            Grant::Resume | Grant::Aborted => unreachable!("an idle worker has nothing to resume"),
        }
    }

    /// Parks a root task until the schedule grants its backward.
    pub fn await_backward(&self, worker: WorkerId) -> Result<(), ServerError> {
        let mut state = self.lock();
        state.machine.await_backward(worker, self.now())?;
        self.resumed(state, worker).map(|_| ())
    }

    /// Whether a root task may ask another rank for its backward; see [`Machine::begin_backward_elsewhere`].
    pub fn begin_backward_elsewhere(&self, worker: WorkerId) -> Result<bool, ServerError> {
        let mut state = self.lock();
        state.machine.begin_backward_elsewhere(worker, self.now())
    }

    /// The thread of a worker is gone; see [`Machine::worker_gone`].
    pub fn worker_gone(&self, worker: WorkerId) {
        self.enter(|machine, now| machine.worker_gone(worker, now));
    }

    /// Fails the step on every rank; see [`Machine::fail`].
    pub fn fail(&self, step: Option<StepEpoch>, error: LocalError) {
        self.enter(|machine, now| machine.fail(step, error, now));
    }

    /// Enters a step without tasks; see [`Machine::begin_alone`].
    pub fn begin_alone(&self, step: StepEpoch, function: String) -> Result<(), ServerError> {
        if let Some(transport) = &self.transport {
            transport.heartbeat_state().enter_step(step.0);
        }
        self.enter(|machine, now| machine.begin_alone(step, function, now))
    }

    /// Ends the step on the peers (root only).
    pub fn end_step(&self, body: Body) -> Result<(), ServerError> {
        self.enter(|machine, _| machine.end_step(body))
    }

    /// The commit is done.
    pub fn leave_step(&self) -> Result<(), ServerError> {
        self.enter(Machine::leave_step)
    }

    /// Raises a failure that arrived after the tasks were over; see [`Machine::check_abort`].
    pub fn check_abort(&self, step: StepEpoch, needed: &[Rank]) -> Result<(), ServerError> {
        self.enter(|machine, now| machine.check_abort(step, needed, now))
    }

    /// See [`Machine::would_run_again`].
    pub fn would_run_again(&self, step: StepEpoch, departures: bool) -> bool {
        self.lock().machine.would_run_again(step, departures)
    }

    /// See [`Machine::check_run_again`].
    pub fn check_run_again(&self, step: StepEpoch, departures: bool) -> Result<(), ServerError> {
        self.lock().machine.check_run_again(step, departures)
    }

    /// Gives a model's modules their names, for reports.
    pub fn name_modules(&self, model: ModelId, names: Vec<String>) {
        self.lock().machine.name_modules(model, names);
    }

    /// A module's name, or its number where it has none.
    pub fn module_name(&self, model: ModelId, module: ModuleId) -> String {
        self.lock().machine.module_name(model, module)
    }

    /// What this rank does at the moment.
    pub fn describe(&self) -> String {
        self.lock().machine.describe(self.now())
    }

    /// What a rank was last outcome to do; empty before its first heartbeat.
    pub fn last_heartbeat(&self, rank: Rank) -> String {
        self.lock().machine.last_heartbeat(rank)
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        self.lock().machine.stats()
    }

    /// Where the time of all steps went, and that of the newest one; see [`Machine::usage`].
    pub fn usage(&self) -> (Usage, Usage) {
        let machine = &self.lock().machine;
        (machine.usage().clone(), machine.newest_usage().clone())
    }

    /// Keeps trace records from now on, or keeps none.
    pub fn keep_trace(&self, on: bool) {
        self.lock().machine.keep_trace(on);
    }

    /// The trace's records since the last call, how many more were overwritten, and the moment from which their times
    /// count.
    pub fn take_trace(&self) -> (SystemTime, Vec<TraceRecord>, u64) {
        let (records, lost) = self.lock().machine.take_trace();
        (self.started_at, records, lost)
    }

    /// Lets idle workers' threads end and unwinds the others, and waits for at most `timeout` until other threads have
    /// sent what they were to send. A second call does nothing new.
    pub fn close(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        state.machine.close();
        state.closing = true;
        loop {
            state = self.settle(state);
            let left = deadline.saturating_duration_since(Instant::now());
            if state.outbox.is_empty() || left.is_zero() {
                return;
            }
            state = wait_on(&self.all_sent, state, left);
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One event, and what follows from it.
    fn enter<T>(&self, event: impl FnOnce(&mut Machine, Duration) -> T) -> T {
        let mut state = self.lock();
        let result = event(&mut state.machine, self.now());
        drop(self.settle(state));
        result
    }

    pub(crate) fn settle<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.settle_for(state, None)
    }

    /// Does what the machine asked for, outside the lock, until it asks for nothing more.
    pub(crate) fn settle_for<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        caller: Option<WorkerId>,
    ) -> MutexGuard<'a, State> {
        loop {
            self.update_heartbeat(&mut state);
            let effects = state.machine.take_effects();
            let (mut condvars, mut wake_reader, mut wake_main) = (Vec::new(), false, false);
            for effect in effects {
                match effect {
                    Effect::Send { to, message } => state.outbox.push(to, message),
                    Effect::WakeMain => wake_main = true,
                    Effect::WakeWorker(worker) if Some(worker) == caller => {}
                    Effect::WakeWorker(worker) => {
                        wake_reader |= state.reader.is_some_and(|(reader, thread)| {
                            reader == worker && thread != thread::current().id()
                        });
                        condvars.push(state.condvar(worker));
                    }
                }
            }
            let batch = state.outbox.take();
            if batch.is_empty() && condvars.is_empty() && !wake_main {
                return state;
            }
            drop(state);
            let sent: Vec<_> = batch.iter().map(|(to, _)| *to).collect();
            let (lost, took) = self.send_all(batch);
            for condvar in condvars {
                condvar.notify_one();
            }
            if wake_reader && let Some(transport) = &self.transport {
                transport.wake_reader();
            }
            if wake_main {
                self.main_condvar.notify_one();
            }
            state = self.lock();
            state.outbox.sent(&sent);
            if state.closing && state.outbox.is_empty() {
                self.all_sent.notify_all();
            }
            state.machine.spent_sending(took);
            for (to, error) in lost {
                let now = self.now();
                match error {
                    // The loss itself is reported once (CM-3), with the reason that a failed send may not know.
                    CommError::PeerLost { .. } => {}
                    other => state.machine.send_failed(to, &other.to_string(), now),
                }
            }
        }
    }

    /// Hands messages to the transport: what could not be sent, and how long it took.
    fn send_all(&self, batch: Vec<(Rank, Message)>) -> (Vec<(Rank, CommError)>, Duration) {
        if batch.is_empty() {
            return (Vec::new(), Duration::ZERO);
        }
        let began = Instant::now();
        let lost = batch
            .into_iter()
            .filter_map(|(to, message)| Some((to, self.send(to, message).err()?)))
            .collect();
        (lost, began.elapsed())
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        match &self.transport {
            Some(transport) => transport.send_and_read(to, message),
            None => Err(CommError::Closed),
        }
    }

    fn update_heartbeat(&self, state: &mut State) {
        if let Some(transport) = &self.transport {
            let heartbeat_state = transport.heartbeat_state();
            heartbeat_state.set_executing(state.machine.is_executing());
            let progress = state.machine.progress_count();
            for _ in state.reported_progress..progress {
                heartbeat_state.advance();
            }
            state.reported_progress = progress;
        }
    }
}

impl Server {
    /// An event that a thread of the transport brings. Where the machine panics at it, the step fails on every rank; that
    /// thread reads on, for what comes from others.
    fn receive(&self, from: Rank, event: impl FnOnce(&mut Machine, Duration)) {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.enter(event)));
        if outcome.is_err() {
            let reason = format!("the execution server panicked at what rank {from} sent");
            self.enter(|machine, now| machine.fail_internally(reason, now));
        }
    }
}

impl Receiver for Server {
    fn deliver(&self, from: Rank, mut message: Message) {
        if let Some(transport) = &self.transport {
            let host = transport.peer(from).map_or("", |peer| &peer.host);
            attribute(&mut message, from, host, transport.world());
        }
        self.receive(from, |machine, now| machine.deliver(from, message, now));
    }

    fn peer_lost(&self, from: Rank, loss: Loss) {
        self.receive(from, |machine, now| machine.peer_lost(from, loss, now));
    }

    fn heartbeat(&self, from: Rank, heartbeat: Heartbeat) {
        self.receive(from, |machine, now| machine.heartbeat(from, heartbeat, now));
    }
}
