//! `Server`: the execution server as Python pulls on it.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_core::{MicrobatchId, Rank, StepEpoch, WorkerId};
use shardwright_runtime::{FailureKind, LocalError, MachineConfig, MainEvent, StepPlan};
use shardwright_schedule::{ParseScheduleError, Schedule};
use shardwright_system::Owner;
use shardwright_wire::Body;

use crate::error::{failure_error, forked_error, server_error};
use crate::node::Node;
use crate::server_types::{Event, Task, parse_phase};
use crate::tensors::TensorParts;
use crate::values::Spec;

/// The main thread's waits are cut into slices of this length, so that signals get through.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// How long a server that ends waits for messages that other threads are sending.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A rank's execution server: hands out tasks, carries requests and answers, ends failed steps everywhere.
///
/// In a forked child every method raises `ShardwrightError`, except those that tidy up, which do nothing.
#[pyclass(frozen, module = "shardwright._core")]
#[expect(
    clippy::struct_field_names,
    reason = "it is the other crate's server for Python"
)]
pub(crate) struct Server {
    server: Arc<shardwright_runtime::Server>,
    owner: Owner,
    pub(crate) rank: u32,
    /// The schedule of the newest step, with its text: most steps have the same, and a program is long.
    schedule: Mutex<Option<(String, NonZeroU32, Schedule)>>,
}

#[pymethods]
impl Server {
    /// Make the server of a rank. `pp_ranks` are the global ranks of its pipeline, the root first; `tp_ranks` those of
    /// its tensor-parallel group, the one that decides the order of tasks first.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    #[pyo3(signature = (node, *, rank, host, pp_ranks, tp_ranks, stall_report_seconds, stall_timeout_seconds, trace_capacity))]
    fn attach(
        node: Option<&Node>,
        rank: u32,
        host: String,
        pp_ranks: Vec<u32>,
        tp_ranks: Vec<u32>,
        stall_report_seconds: f64,
        stall_timeout_seconds: f64,
        trace_capacity: usize,
    ) -> PyResult<Self> {
        let config = MachineConfig {
            rank: Rank(rank),
            pipeline: pp_ranks.into_iter().map(Rank).collect(),
            tensor_group: tp_ranks.into_iter().map(Rank).collect(),
            hosts: node.map_or_else(|| vec![host], Node::hosts),
            stall_report: seconds("stall_report_seconds", stall_report_seconds)?,
            stall_timeout: seconds("stall_timeout_seconds", stall_timeout_seconds)?,
            trace_capacity,
        };
        let server = shardwright_runtime::Server::attach(node.map(Node::shared_transport), config);
        if let Some(node) = node {
            node.router()
                .set_handler(Arc::<shardwright_runtime::Server>::clone(&server));
        }
        Ok(Self {
            server,
            owner: Owner::this_process(),
            rank,
            schedule: Mutex::default(),
        })
    }

    /// Enter a step with this rank's pipeline. The root tells its peers; they compare.
    ///
    /// `pipeline` is the text form of a schedule, or the name of one that has at most `active_microbatches` in flight.
    ///
    /// `one_at_a_time` starts a microbatch only when the one before it has ended, whatever the schedule; what the root
    /// gives holds for its peers.
    #[pyo3(signature = (*, step, function, num_microbatches, pipeline, active_microbatches, one_at_a_time=false))]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn begin_step(
        &self,
        py: Python<'_>,
        step: u64,
        function: String,
        num_microbatches: u32,
        pipeline: &str,
        active_microbatches: NonZeroU32,
        one_at_a_time: bool,
    ) -> PyResult<()> {
        let server = self.here()?;
        let schedule = self.read_schedule(pipeline, active_microbatches)?;
        let plan = StepPlan {
            step: StepEpoch(step),
            function,
            num_microbatches,
            one_at_a_time,
            schedule,
        };
        self.await_unwound(py)?;
        py.detach(|| server.begin_step(plan))
            .map_err(|error| server_error(&error))
    }

    /// From now on until the step ends, start a microbatch only when the one before it has ended.
    fn run_microbatches_one_at_a_time(&self) -> PyResult<()> {
        self.here()?.one_at_a_time();
        Ok(())
    }

    /// Whether they do so whatever the schedule, because the root has said so or the model that was divided needs it.
    fn keeps_one_at_a_time(&self) -> PyResult<bool> {
        Ok(self.here()?.keeps_one_at_a_time())
    }

    /// Whether the microbatches of the step start one after another.
    fn runs_one_at_a_time(&self) -> PyResult<bool> {
        Ok(self.here()?.runs_one_at_a_time())
    }

    /// Enter a step whose function the main thread runs itself, because the pipeline has one rank.
    ///
    /// The step is then only one that fails together with the job's other ranks: see `check_abort`.
    #[pyo3(signature = (*, step, function))]
    fn begin_alone(&self, py: Python<'_>, step: u64, function: String) -> PyResult<()> {
        let server = self.here()?;
        self.await_unwound(py)?;
        py.detach(|| server.begin_alone(StepEpoch(step), function))
            .map_err(|error| server_error(&error))
    }

    /// Wait for at most `timeout` seconds until the stacks of a failed step are gone; whether they are.
    fn unwind(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let server = self.here()?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        while !py.detach(|| server.await_unwound(SLICE)) {
            py.check_signals()?;
            if Instant::now() >= deadline {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Wait for the main thread's next event.
    ///
    /// Raises the step's failure (`RemoteError`, `PeerLostError`, `StallError`,
    /// `StepMismatchError`) once every worker is idle; a failure that this rank reported
    /// itself is the event `ABORTED_LOCALLY`.
    fn supervise(&self, py: Python<'_>) -> PyResult<Event> {
        let server = self.here()?;
        loop {
            match py.detach(|| server.supervise(SLICE)) {
                None => py.check_signals()?,
                Some(MainEvent::Failed(failure)) if failure.kind != FailureKind::Local => {
                    return Err(failure_error(&failure));
                }
                Some(event) => return Event::new(py, event),
            }
        }
    }

    /// Give up the turn and wait for a task; None when the thread may end.
    fn next_task(&self, py: Python<'_>, worker: u32) -> PyResult<Option<Task>> {
        let server = self.here()?;
        let task = py
            .detach(|| server.next_task(WorkerId(worker)))
            .map_err(|error| server_error(&error))?;
        task.map(|task| Task::new(py, task)).transpose()
    }

    /// Wait in a root task until the schedule grants its backward.
    fn await_backward(&self, py: Python<'_>, worker: u32) -> PyResult<()> {
        let server = self.here()?;
        py.detach(|| server.await_backward(WorkerId(worker)))
            .map_err(|error| server_error(&error))
    }

    /// Whether a root task may ask another rank for its backward at once, without `await_backward`.
    fn begin_backward_elsewhere(&self, worker: u32) -> PyResult<bool> {
        self.here()?
            .begin_backward_elsewhere(WorkerId(worker))
            .map_err(|error| server_error(&error))
    }

    /// Say that no gradient will come back to the forward that a worker serves.
    fn ends_with_forward(&self, worker: u32) -> PyResult<()> {
        self.here()?
            .ends_with_forward(WorkerId(worker))
            .map_err(|error| server_error(&error))
    }

    /// Say which collective of its tensor-parallel group a worker's task enters, before it does.
    fn enters_collective(&self, worker: u32, name: String) -> PyResult<()> {
        self.here()?
            .enters_collective(WorkerId(worker), name)
            .map_err(|error| server_error(&error))
    }

    /// The time, for `recomputed`.
    fn clock_ns(&self) -> PyResult<u64> {
        Ok(self.here()?.clock().as_nanos() as u64)
    }

    /// Record that a worker has computed a checkpointed module again since then.
    #[pyo3(signature = (worker, began_ns, /))]
    fn recomputed(&self, worker: u32, began_ns: u64) -> PyResult<()> {
        self.here()?
            .recomputed(WorkerId(worker), Duration::from_nanos(began_ns));
        Ok(())
    }

    /// Leave the weight gradients of the backward that a worker runs for later: a task `WEIGHT_GRADIENT` with the token
    /// that is returned.
    fn defer_weight_gradient(&self, worker: u32) -> PyResult<u64> {
        self.here()?
            .defer_weight_gradient(WorkerId(worker))
            .map_err(|error| server_error(&error))
    }

    /// Say that the thread of a worker is gone: the step ends on every rank.
    fn worker_gone(&self, py: Python<'_>, worker: u32) {
        if let Ok(server) = self.here() {
            py.detach(|| server.worker_gone(WorkerId(worker)));
        }
    }

    /// Report an exception of this rank: the step ends on every rank of the job. The first failure wins.
    ///
    /// `step` names a step that this rank may not have entered yet, but would have.
    ///
    /// `origin` is the rank that failed and its host, where that is another one.
    #[pyo3(signature = (*, module, microbatch, phase, kind, message, traceback, step=None, origin=None))]
    #[expect(clippy::too_many_arguments, reason = "one for each field of a report")]
    fn fail(
        &self,
        py: Python<'_>,
        module: Option<String>,
        microbatch: Option<u32>,
        phase: Option<&str>,
        kind: String,
        message: String,
        traceback: String,
        step: Option<u64>,
        origin: Option<(u32, String)>,
    ) -> PyResult<()> {
        let server = self.here()?;
        let phase = phase.map(parse_phase).transpose()?;
        let microbatch = microbatch.map(MicrobatchId);
        let error = LocalError {
            origin: origin.map(|(rank, host)| (Rank(rank), host)),
            module,
            microbatch,
            phase,
            kind,
            message,
            traceback,
        };
        py.detach(|| server.fail(step.map(StepEpoch), error));
        Ok(())
    }

    /// End the step on the root's peers, which get this value.
    fn end_step(&self, py: Python<'_>, spec: &Spec, parts: &TensorParts) -> PyResult<()> {
        let server = self.here()?;
        let body = body(spec, parts);
        py.detach(|| server.end_step(body))
            .map_err(|error| server_error(&error))
    }

    /// The commit is done; this rank is between steps.
    fn leave_step(&self) -> PyResult<()> {
        self.here()?
            .leave_step()
            .map_err(|error| server_error(&error))
    }

    /// Raise a failure of the step elsewhere, while waiting for something other than the server.
    ///
    /// `needed` are ranks that take part in what is waited for: that one of them has left the
    /// job in good order is a failure too, if it stays unfinished for 2 s after.
    #[pyo3(signature = (step, needed=Vec::new()))]
    fn check_abort(&self, step: u64, needed: Vec<u32>) -> PyResult<()> {
        let server = self.here()?;
        let needed: Vec<_> = needed.into_iter().map(Rank).collect();
        server
            .check_abort(StepEpoch(step), &needed)
            .map_err(|error| server_error(&error))
    }

    /// Whether a step that has failed would be run again for this rank's own reason: the order of microbatches or, with
    /// `departures`, that modules departed from what was predicted.
    fn would_run_again(&self, step: u64, departures: bool) -> PyResult<bool> {
        Ok(self.here()?.would_run_again(StepEpoch(step), departures))
    }

    /// Raise the reason of another rank that ends such a step there, once it is known.
    fn check_run_again(&self, step: u64, departures: bool) -> PyResult<()> {
        self.here()?
            .check_run_again(StepEpoch(step), departures)
            .map_err(|error| server_error(&error))
    }

    /// Say that the main thread waits outside the server, or no longer does: a rank that waits is no progress.
    /// The seconds since the last progress anywhere in the job.
    fn wait_outside(&self, waits: bool) -> PyResult<f64> {
        Ok(self.here()?.wait_outside(waits).as_secs_f64())
    }

    /// For how many seconds nothing in the job has made progress, as far as this rank knows.
    fn quiet(&self) -> PyResult<f64> {
        Ok(self.here()?.quiet().as_secs_f64())
    }

    /// While a step runs in which this rank has nothing to do: when it made progress last, in nanoseconds of the
    /// server's clock, and for how many seconds it has made none. None at any other time.
    fn idle_in_step(&self) -> PyResult<Option<(u64, f64)>> {
        let idle = self.here()?.idle_in_step();
        Ok(idle.map(|(last, idle)| (last.as_nanos() as u64, idle.as_secs_f64())))
    }

    /// End the server: idle workers get None as their next task. A second call does nothing.
    fn close(&self, py: Python<'_>) {
        if let Ok(server) = self.here() {
            py.detach(|| server.close(CLOSE_TIMEOUT));
        }
    }
}

impl Server {
    /// The server, in the process that made it. A forked child has none of its threads, and one of them may have held the
    /// server's lock when the child was made: whoever entered there would wait for ever.
    pub(crate) fn here(&self) -> PyResult<&shardwright_runtime::Server> {
        self.owner.check().map_err(forked_error)?;
        Ok(&self.server)
    }

    fn read_schedule(&self, text: &str, active: NonZeroU32) -> PyResult<Schedule> {
        let mut newest = self.schedule.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, _, schedule)) = newest
            .as_ref()
            .filter(|(read, of, _)| read == text && *of == active)
        {
            return Ok(schedule.clone());
        }
        let schedule = Schedule::of_name(text, active).map_or_else(
            || {
                text.parse()
                    .map_err(|error: ParseScheduleError| PyValueError::new_err(error.to_string()))
            },
            Ok,
        )?;
        *newest = Some((text.to_owned(), active, schedule.clone()));
        Ok(schedule)
    }

    /// Waits until the stacks of a failed step that nobody supervised to its end are gone.
    fn await_unwound(&self, py: Python<'_>) -> PyResult<()> {
        let server = self.here()?;
        while !py.detach(|| server.await_unwound(SLICE)) {
            py.check_signals()?;
        }
        Ok(())
    }
}

pub(crate) fn body(spec: &Spec, parts: &TensorParts) -> Body {
    Body {
        value: spec.0.clone(),
        tensors: parts.take(),
    }
}

pub(crate) fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .ok()
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| PyValueError::new_err(format!("{name} is {value}; it has to be positive")))
}
