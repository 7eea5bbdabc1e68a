//! `Offload`: what checkpointed modules keep, out of memory until their backward is near.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardwright_core::{MicrobatchId, Phase, PipelineRank, StepEpoch};
use shardwright_offload::{CallId, Direction, OffloadError, Options, Task, TensorId};
use shardwright_schedule::Schedule;
use shardwright_simulate::expected_order;
use shardwright_timeline::{Record, RecordKind};
use shardwright_wire::Buffer;

use crate::error::offload_error;
use crate::raw;
use crate::server::seconds;
use crate::timeline::{Timeline, timeline_from};

/// What an order follows from: the schedule, the ranks, this one, and the microbatches.
type Plan = (String, NonZeroU32, u32, NonZeroU32);

/// The offloaded activations of a rank, in a file or in a pool of host memory, and the thread that moves them.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Offload {
    tensors: Arc<shardwright_offload::Offload>,
    rank: u32,
    started_at: SystemTime,
    /// The order of tasks that the newest step was expected to have: most steps have the same.
    expected: Mutex<Option<(Plan, Vec<Task>)>>,
}

#[pymethods]
impl Offload {
    /// Make the storage of a rank: a file in `directory`, or with None a pool of host memory.
    ///
    /// `most_outgoing` bytes may be on their way out at once. Raises `OffloadError` where no file can be made.
    #[new]
    #[pyo3(signature = (*, rank, horizon, directory, most_outgoing, timeout_seconds))]
    fn new(
        rank: u32,
        horizon: u32,
        directory: Option<PathBuf>,
        most_outgoing: u64,
        timeout_seconds: f64,
    ) -> PyResult<Self> {
        let options = Options {
            rank,
            horizon,
            directory,
            most_outgoing,
            timeout: seconds("timeout_seconds", timeout_seconds)?,
        };
        let offload = shardwright_offload::Offload::start(options);
        Ok(Self {
            tensors: Arc::new(offload.map_err(|error| offload_error(&error))?),
            rank,
            started_at: SystemTime::now(),
            expected: Mutex::default(),
        })
    }

    /// Whether what goes out stays in memory, so that nothing is saved.
    fn stays_in_memory(&self) -> bool {
        self.tensors.stays_in_memory()
    }

    /// A step begins under a schedule, given as text, on a pipeline of `ranks`, of which this one is `pp_rank`.
    ///
    /// With `one_at_a_time` microbatches run one after another, whatever the schedule.
    #[pyo3(signature = (*, step, schedule, ranks, pp_rank, microbatches, one_at_a_time))]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn begin_step(
        &self,
        py: Python<'_>,
        step: u64,
        schedule: &str,
        ranks: NonZeroU32,
        pp_rank: u32,
        microbatches: NonZeroU32,
        one_at_a_time: bool,
    ) -> PyResult<()> {
        let schedule = if one_at_a_time {
            Schedule::one_at_a_time().to_string()
        } else {
            schedule.to_owned()
        };
        py.detach(|| {
            let coming = self.expect((schedule, ranks, pp_rank, microbatches));
            self.tensors.begin_step(StepEpoch(step), coming)
        })
        .map_err(|error| offload_error(&error))
    }

    /// The rank begins a task of a microbatch, or goes on with it.
    #[pyo3(signature = (microbatch, *, backward))]
    fn begin_task(&self, py: Python<'_>, microbatch: u32, backward: bool) -> PyResult<()> {
        let phase = if backward {
            Phase::Backward
        } else {
            Phase::Forward
        };
        let task = Task {
            phase,
            microbatch: MicrobatchId(microbatch),
        };
        py.detach(|| self.tensors.begin_task(task))
            .map_err(|error| offload_error(&error))
    }

    /// A checkpointed call begins; `module` names in errors and timelines what was called.
    fn add_call(&self, py: Python<'_>, microbatch: u32, module: &str) -> PyResult<OffloadedCall> {
        let call = py
            .detach(|| self.tensors.add_call(MicrobatchId(microbatch), module))
            .map_err(|error| offload_error(&error))?;
        Ok(OffloadedCall {
            tensors: Arc::clone(&self.tensors),
            call,
        })
    }

    /// Locked host memory for so many bytes, which has been used before; None where all is in use.
    #[pyo3(signature = (nbytes, /))]
    fn lease(&self, nbytes: usize) -> Option<HostMemory> {
        let leased = self.tensors.pool().lease(nbytes)?;
        Some(HostMemory(leased.into_buffer()))
    }

    /// New host memory for `nbytes`, of `size` bytes that `owner` has locked at an address and that nobody else uses; it is
    /// used again later.
    #[pyo3(signature = (owner, address, size, nbytes, /))]
    fn lease_new(
        &self,
        owner: Py<PyAny>,
        address: usize,
        size: usize,
        nbytes: usize,
    ) -> PyResult<HostMemory> {
        if nbytes > size {
            let text = format!("{nbytes} bytes do not fit into {size}");
            return Err(PyValueError::new_err(text));
        }
        let block = raw::host_block(owner, address, size);
        let leased = self.tensors.pool().add(block, nbytes);
        Ok(HostMemory(leased.into_buffer()))
    }

    /// What has to be done with tensors of devices, since the last call: those that have to come to host memory, those that
    /// nobody keeps any more, and all that are needed within the horizon.
    #[pyo3(signature = () -> "tuple[list[int], list[int], set[int]]")]
    fn changes(&self, py: Python<'_>) -> PyResult<(Vec<u64>, Vec<u64>, BTreeSet<u64>)> {
        let changes = py.detach(|| self.tensors.changes());
        let changes = changes.map_err(|error| offload_error(&error))?;
        let numbers = |tensors: Vec<TensorId>| tensors.into_iter().map(|tensor| tensor.0);
        Ok((
            numbers(changes.leaving).collect(),
            numbers(changes.gone).collect(),
            numbers(changes.near).collect(),
        ))
    }

    /// A tensor of a device that had to leave is in host memory, which must not be written to any more.
    #[pyo3(signature = (tensor, memory, /))]
    fn arrived(&self, py: Python<'_>, tensor: u64, memory: &HostMemory) -> PyResult<()> {
        let buffer = memory.0.clone();
        py.detach(|| self.tensors.arrived(TensorId(tensor), buffer))
            .map_err(|error| offload_error(&error))
    }

    /// The bytes of a tensor of a device, as a capsule; None where they are not in host memory.
    #[pyo3(signature = (tensor, /) -> "object | None")]
    fn bytes_of(&self, py: Python<'_>, tensor: u64) -> PyResult<Option<Py<PyAny>>> {
        let found = py.detach(|| self.tensors.bytes_of(TensorId(tensor)));
        let found = found.map_err(|error| offload_error(&error))?;
        found
            .map(|buffer| raw::capsule_of_shared(py, buffer))
            .transpose()
    }

    /// What has been moved since the start: tensors and bytes out and back, calls that had to wait, and the most bytes that
    /// were out at once.
    #[pyo3(signature = () -> "dict[str, int]")]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = py.detach(|| self.tensors.counts());
        let counts = counts.map_err(|error| offload_error(&error))?;
        let dict = PyDict::new(py);
        for (name, number) in [
            ("stored", counts.stored),
            ("stored_bytes", counts.stored_bytes),
            ("loaded", counts.loaded),
            ("loaded_bytes", counts.loaded_bytes),
            ("computed_again", counts.computed_again),
            ("waited", counts.waited),
            ("waited_ns", counts.waited_ns),
            ("on_the_way", counts.on_the_way),
            ("bytes", counts.bytes),
            ("most_bytes", counts.most_bytes),
            ("locked_bytes", counts.locked_bytes),
            ("file_bytes", counts.file_bytes),
        ] {
            dict.set_item(name, number)?;
        }
        Ok(dict)
    }

    /// Keep records of transfers from now on, or keep none.
    #[pyo3(signature = (on, /))]
    fn keep_trace(&self, py: Python<'_>, on: bool) {
        py.detach(|| self.tensors.keep_trace(on));
    }

    /// The records since the last call.
    fn take_trace(&self, py: Python<'_>) -> PyResult<Timeline> {
        let (spans, lost) = py.detach(|| self.tensors.take_trace());
        timeline_from(self.started_at, lost, |nanoseconds| {
            let records = spans.into_iter().map(|span| {
                let kind = match span.direction {
                    Direction::Out => RecordKind::Offload,
                    Direction::In => RecordKind::Load,
                };
                Record {
                    start_ns: nanoseconds(span.start),
                    end_ns: nanoseconds(span.end),
                    module: Some(span.module),
                    microbatch: Some(span.microbatch.0),
                    bytes: span.bytes,
                    ..Record::new(self.rank, span.step.0, kind)
                }
            });
            records.collect()
        })
    }

    /// End the thread. What is kept is lost.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.tensors.close());
    }
}

impl Offload {
    /// An order that is not known is none: backwards then come by microbatch.
    fn expect(&self, plan: Plan) -> Vec<Task> {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tasks)) = expected.as_ref().filter(|(known, _)| *known == plan) {
            return tasks.clone();
        }
        let (schedule, ranks, pp_rank, microbatches) = &plan;
        let order = schedule.parse().ok().and_then(|schedule: Schedule| {
            expected_order(&schedule, *ranks, PipelineRank(*pp_rank), *microbatches).ok()
        });
        let order = order.unwrap_or_default().into_iter();
        let tasks: Vec<_> = order
            .map(|(phase, microbatch)| Task { phase, microbatch })
            .collect();
        *expected = Some((plan, tasks.clone()));
        tasks
    }
}

/// Locked host memory that is used again when nobody has it any more.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct HostMemory(Buffer);

#[pymethods]
impl HostMemory {
    /// Its bytes as a capsule, for a device to write to.
    #[pyo3(signature = () -> "object")]
    fn bytes(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        raw::capsule_of_shared(py, self.0.clone())
    }
}

/// What one checkpointed call keeps. It is given up with this object.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct OffloadedCall {
    tensors: Arc<shardwright_offload::Offload>,
    call: CallId,
}

#[pymethods]
impl OffloadedCall {
    /// Keep a copy of the bytes of a dense tensor in host memory, and return its number.
    #[pyo3(signature = (address, nbytes, /))]
    fn add(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<u64> {
        let added = py.detach(|| {
            self.tensors
                .add_tensor(self.call, raw::copy_to_heap(address, nbytes))
        });
        added
            .map(|tensor| tensor.0)
            .map_err(|error| offload_error(&error))
    }

    /// Keep a tensor of a device, which the caller has until it has to leave, and return its number.
    #[pyo3(signature = (nbytes, /))]
    fn add_on_device(&self, py: Python<'_>, nbytes: u64) -> PyResult<u64> {
        let added = py.detach(|| self.tensors.add_device_tensor(self.call, nbytes));
        added
            .map(|tensor| tensor.0)
            .map_err(|error| offload_error(&error))
    }

    /// Keep a tensor that other calls keep; false where none does any more.
    #[pyo3(signature = (tensor, /))]
    fn share(&self, py: Python<'_>, tensor: u64) -> PyResult<bool> {
        py.detach(|| self.tensors.share(self.call, TensorId(tensor)))
            .map_err(|error| offload_error(&error))
    }

    /// The tensors by number, as capsules of bytes that must not be written to. Waits for those that are not back. Those of
    /// devices that are not in host memory are None.
    #[pyo3(signature = () -> "list[tuple[int, object | None]]")]
    fn take(&self, py: Python<'_>) -> PyResult<Vec<(u64, Option<Py<PyAny>>)>> {
        let taken = py.detach(|| self.tensors.take(self.call));
        let taken = taken.map_err(|error: OffloadError| offload_error(&error))?;
        let tensors = taken.into_iter();
        tensors
            .map(|(tensor, buffer)| {
                let capsule = buffer.map(|buffer| raw::capsule_of_shared(py, buffer));
                Ok((tensor.0, capsule.transpose()?))
            })
            .collect()
    }
}

impl Drop for OffloadedCall {
    fn drop(&mut self) {
        self.tensors.remove_call(self.call);
    }
}
