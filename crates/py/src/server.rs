//! `Server`: the execution server as Python pulls on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use shardwright_core::{
    CallId, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch, WorkerId,
};
use shardwright_runtime::{
    FailureKind, LocalError, MachineConfig, MainEvent, NewRequest, ServerError, StepPlan,
};
use shardwright_schedule::Schedule;
use shardwright_wire::{Body, Place, SequentialRange, TaskContext, Work};

use crate::error::{failure_error, server_error};
use crate::node::Node;
use crate::server_types::{Event, Request, Task, parse_phase, stats_dict, trace_list};
use crate::tensors::TensorParts;
use crate::values::Spec;

/// The main thread's waits are cut into slices of this length, so that signals get through.
const SLICE: Duration = Duration::from_millis(100);

/// A rank's execution server: hands out tasks, carries requests and answers, ends failed steps everywhere.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Server {
    server: Arc<shardwright_runtime::Server>,
    rank: u32,
}

#[pymethods]
impl Server {
    /// Make the server of a rank. `pp_ranks` are the global ranks of its pipeline, the root first.
    #[staticmethod]
    #[pyo3(signature = (node, *, rank, host, pp_ranks, stall_report_seconds, stall_timeout_seconds, trace_capacity))]
    fn attach(
        node: Option<&Node>,
        rank: u32,
        host: String,
        pp_ranks: Vec<u32>,
        stall_report_seconds: f64,
        stall_timeout_seconds: f64,
        trace_capacity: usize,
    ) -> PyResult<Self> {
        let config = MachineConfig {
            rank: Rank(rank),
            pipeline: pp_ranks.into_iter().map(Rank).collect(),
            hosts: node.map_or_else(|| vec![host], Node::hosts),
            stall_report: seconds("stall_report_seconds", stall_report_seconds)?,
            stall_timeout: seconds("stall_timeout_seconds", stall_timeout_seconds)?,
            trace_capacity,
        };
        let server = shardwright_runtime::Server::attach(node.map(Node::transport), config);
        if let Some(node) = node {
            node.router()
                .set_handler(Arc::<shardwright_runtime::Server>::clone(&server));
        }
        Ok(Self { server, rank })
    }

    /// Enter a step with this rank's pipeline. The root tells its peers; they compare.
    #[pyo3(signature = (*, step, function, num_microbatches, pipeline, active_microbatches))]
    fn begin_step(
        &self,
        py: Python<'_>,
        step: u64,
        function: String,
        num_microbatches: u32,
        pipeline: &str,
        active_microbatches: u32,
    ) -> PyResult<()> {
        let text = match pipeline {
            "interleaved" => format!("interleaved(active={active_microbatches})"),
            other => other.to_owned(),
        };
        let schedule: Schedule =
            text.parse()
                .map_err(|error: shardwright_schedule::ParseScheduleError| {
                    PyValueError::new_err(error.to_string())
                })?;
        let plan = StepPlan {
            step: StepEpoch(step),
            function,
            num_microbatches,
            schedule,
        };
        self.await_unwound(py)?;
        py.detach(|| self.server.begin_step(plan))
            .map_err(|error| server_error(&error))
    }

    /// From now on until the step ends, start a microbatch only when the one before it has ended.
    fn run_microbatches_one_at_a_time(&self) {
        self.server.one_at_a_time();
    }

    /// Enter a step whose function the main thread runs itself, because the pipeline has one rank.
    ///
    /// The step is then only one that fails together with the job's other ranks: see `check_abort`.
    #[pyo3(signature = (*, step, function))]
    fn begin_alone(&self, py: Python<'_>, step: u64, function: String) -> PyResult<()> {
        self.await_unwound(py)?;
        py.detach(|| self.server.begin_alone(StepEpoch(step), function))
            .map_err(|error| server_error(&error))
    }

    /// Wait for at most `timeout` seconds until the stacks of a failed step are gone; whether they are.
    fn unwind(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        while !py.detach(|| self.server.await_unwound(SLICE)) {
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
    /// itself is the event `aborted_locally`.
    fn supervise(&self, py: Python<'_>) -> PyResult<Event> {
        loop {
            match py.detach(|| self.server.supervise(SLICE)) {
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
        let task = py
            .detach(|| self.server.next_task(WorkerId(worker)))
            .map_err(|error| server_error(&error))?;
        task.map(|task| Task::new(py, task)).transpose()
    }

    /// Make a request of a rank of the pipeline; its id.
    #[pyo3(signature = (worker, *, to, kind, model, module, range, forward, control, microbatch, parent, call,
                        grad_mode, inference_mode, autocast, checkpointing, spec, parts))]
    #[expect(
        clippy::too_many_arguments,
        reason = "one for each field of appendix B"
    )]
    fn send_request(
        &self,
        py: Python<'_>,
        worker: Option<u32>,
        to: u32,
        kind: &str,
        model: u32,
        module: u32,
        range: Option<(u32, u32)>,
        forward: Option<u64>,
        control: Option<String>,
        microbatch: u32,
        parent: Option<u64>,
        call: u32,
        grad_mode: bool,
        inference_mode: bool,
        autocast: Vec<(String, String, bool)>,
        checkpointing: bool,
        spec: &Spec,
        parts: &TensorParts,
    ) -> PyResult<u64> {
        let module = ModuleId(module);
        let range = range.map(|(start, end)| SequentialRange { start, end });
        let work = match (kind, forward.map(RequestId), control) {
            ("forward", None, None) => Work::Forward { module, range },
            ("backward", Some(forward), None) if range.is_none() => {
                Work::Backward { module, forward }
            }
            ("close", Some(forward), None) if range.is_none() => Work::Close { module, forward },
            ("control", None, Some(name)) if range.is_none() => Work::Control { name },
            _ => {
                return Err(PyValueError::new_err(format!(
                    "a request of kind {kind:?} with these arguments; allowed are \"forward\" (with a range or \
                     without), \"backward\" and \"close\" (with forward), \"control\" (with control)"
                )));
            }
        };
        let request = NewRequest {
            model: ModelId(model),
            work,
            microbatch: MicrobatchId(microbatch),
            place: Place {
                parent: parent.map(RequestId),
                call: CallId(call),
            },
            context: TaskContext {
                grad_mode,
                inference_mode,
                autocast,
                checkpointing,
            },
            body: body(spec, parts),
        };
        py.detach(|| {
            self.server
                .send_request(worker.map(WorkerId), Rank(to), request)
        })
        .map(|id| id.0)
        .map_err(|error| server_error(&error))
    }

    /// Wait for the answers to requests, in their order. A worker is PENDING meanwhile.
    ///
    /// `worker` is None on the main thread; `phase` is that of the task which waits.
    fn wait(
        &self,
        py: Python<'_>,
        worker: Option<u32>,
        requests: Vec<u64>,
        phase: &str,
    ) -> PyResult<Vec<(Spec, TensorParts)>> {
        let requests: Vec<_> = requests.into_iter().map(RequestId).collect();
        let bodies = match worker {
            Some(worker) => {
                let phase = parse_phase(phase)?;
                py.detach(|| self.server.wait(WorkerId(worker), &requests, phase))
            }
            None => self.wait_on_main(py, &requests)?,
        };
        let bodies = bodies.map_err(|error| server_error(&error))?;
        Ok(bodies
            .into_iter()
            .map(|body| (Spec(body.value), TensorParts::received(body.tensors)))
            .collect())
    }

    /// Wait in a root task until the schedule grants its backward.
    fn await_backward(&self, py: Python<'_>, worker: u32) -> PyResult<()> {
        py.detach(|| self.server.await_backward(WorkerId(worker)))
            .map_err(|error| server_error(&error))
    }

    /// Answer a request that this rank was given.
    fn respond(
        &self,
        py: Python<'_>,
        request: &Request,
        spec: &Spec,
        parts: &TensorParts,
    ) -> PyResult<()> {
        let (requester, id) = request.key();
        let body = body(spec, parts);
        py.detach(|| self.server.respond(requester, id, body))
            .map_err(|error| server_error(&error))
    }

    /// Report an exception of this rank: the step ends on every rank of the job. The first failure wins.
    ///
    /// `step` names a step that this rank may not have entered yet, but would have.
    #[pyo3(signature = (*, module, microbatch, phase, kind, message, traceback, step=None))]
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
    ) -> PyResult<()> {
        let phase = phase.map(parse_phase).transpose()?;
        let microbatch = microbatch.map(MicrobatchId);
        let error = LocalError {
            module,
            microbatch,
            phase,
            kind,
            message,
            traceback,
        };
        py.detach(|| self.server.fail(step.map(StepEpoch), error));
        Ok(())
    }

    /// End the step on the root's peers, which get this value.
    fn end_step(&self, py: Python<'_>, spec: &Spec, parts: &TensorParts) -> PyResult<()> {
        let body = body(spec, parts);
        py.detach(|| self.server.end_step(body))
            .map_err(|error| server_error(&error))
    }

    /// The commit is done; this rank is between steps.
    fn leave_step(&self) -> PyResult<()> {
        self.server
            .leave_step()
            .map_err(|error| server_error(&error))
    }

    /// Raise a failure of the step elsewhere, while waiting for something other than the server.
    ///
    /// `needed` are ranks that take part in what is waited for: that one of them has left the
    /// job in good order is a failure too, if it stays unfinished for 2 s after.
    #[pyo3(signature = (step, needed=Vec::new()))]
    fn check_abort(&self, step: u64, needed: Vec<u32>) -> PyResult<()> {
        let needed: Vec<_> = needed.into_iter().map(Rank).collect();
        self.server
            .check_abort(StepEpoch(step), &needed)
            .map_err(|error| server_error(&error))
    }

    /// Say that the main thread waits outside the server, or no longer does: a rank that waits is no progress.
    /// The seconds since the last progress anywhere in the job.
    fn wait_outside(&self, waits: bool) -> f64 {
        self.server.wait_outside(waits).as_secs_f64()
    }

    /// Give the modules of a model their names, by id, for reports and timelines.
    fn name_modules(&self, model: u32, names: Vec<String>) {
        self.server.name_modules(ModelId(model), names);
    }

    /// What this rank does, or another was last heard to do: one line, for any thread.
    #[pyo3(signature = (rank=None))]
    fn describe(&self, rank: Option<u32>) -> String {
        rank.map_or_else(
            || self.server.describe(),
            |rank| self.server.last_heard(Rank(rank)),
        )
    }

    /// Counters: of the newest step (`step`), since the start (`total`), and of the present.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_dict(py, &self.server.stats())
    }

    /// The records of what ran, waited and travelled since the last call, oldest first.
    ///
    /// Times are nanoseconds since the Unix epoch, so that ranks of one host share a clock.
    #[pyo3(signature = () -> "list[dict[str, Any]]")]
    fn take_trace<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (origin, records) = self.server.take_trace();
        trace_list(py, self.rank, origin, &records, |model, module| {
            self.server.module_name(model, module)
        })
    }

    /// End the server: idle workers get None as their next task. A second call does nothing.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.server.close());
    }
}

impl Server {
    /// Waits until the stacks of a failed step that nobody supervised to its end are gone.
    fn await_unwound(&self, py: Python<'_>) -> PyResult<()> {
        while !py.detach(|| self.server.await_unwound(SLICE)) {
            py.check_signals()?;
        }
        Ok(())
    }

    fn wait_on_main(
        &self,
        py: Python<'_>,
        requests: &[RequestId],
    ) -> PyResult<Result<Vec<Body>, ServerError>> {
        if let Err(error) = self.server.begin_main_wait(requests) {
            return Ok(Err(error));
        }
        loop {
            match py
                .detach(|| self.server.main_wait(requests, SLICE))
                .transpose()
            {
                Some(result) => return Ok(result),
                None => py.check_signals()?,
            }
        }
    }
}

fn body(spec: &Spec, parts: &TensorParts) -> Body {
    Body {
        value: spec.0.clone(),
        tensors: parts.take(),
    }
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .ok()
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| PyValueError::new_err(format!("{name} is {value}; it has to be positive")))
}
