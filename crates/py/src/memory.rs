//! The account of a rank's memory.

use std::num::NonZeroU32;

use pyo3::prelude::*;
use shardwright_core::Phase;
use shardwright_memory::{Categories, Expected, Meter, Situation, advise};
use shardwright_schedule::Schedule;

use crate::config::Config;
use crate::error::argument_error;

/// Bytes of a rank by category; None where they are not known.
#[pyclass(frozen, eq, get_all, module = "shardwright._core")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct MemoryCategories {
    parameters: Option<u64>,
    gradients: Option<u64>,
    optimizer_state: Option<u64>,
    activations: Option<u64>,
    buffers: Option<u64>,
    communication: Option<u64>,
}

impl From<Categories> for MemoryCategories {
    fn from(categories: Categories) -> Self {
        Self {
            parameters: categories.parameters,
            gradients: categories.gradients,
            optimizer_state: categories.optimizer_state,
            activations: categories.activations,
            buffers: categories.buffers,
            communication: categories.communication,
        }
    }
}

impl From<&MemoryCategories> for Categories {
    fn from(categories: &MemoryCategories) -> Self {
        Self {
            parameters: categories.parameters,
            gradients: categories.gradients,
            optimizer_state: categories.optimizer_state,
            activations: categories.activations,
            buffers: categories.buffers,
            communication: categories.communication,
        }
    }
}

#[pymethods]
impl MemoryCategories {
    /// What was measured, in bytes.
    #[new]
    #[pyo3(signature = (*, parameters, gradients, optimizer_state, activations, buffers, communication))]
    fn new(
        parameters: Option<u64>,
        gradients: Option<u64>,
        optimizer_state: Option<u64>,
        activations: Option<u64>,
        buffers: Option<u64>,
        communication: Option<u64>,
    ) -> Self {
        Self {
            parameters,
            gradients,
            optimizer_state,
            activations,
            buffers,
            communication,
        }
    }

    /// What is expected of a rank before it runs: with `activation_bytes` for each microbatch, of which `in_flight`
    /// are kept at most, and an optimizer that keeps `optimizer_bytes`, and master weights, over `optimizer_shards`
    /// ranks.
    #[staticmethod]
    #[pyo3(signature = (*, parameter_bytes, gradient_bytes, buffer_bytes, activation_bytes, in_flight, optimizer_bytes,
        master_bytes, optimizer_shards))]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn expected(
        parameter_bytes: u64,
        gradient_bytes: u64,
        buffer_bytes: u64,
        activation_bytes: Option<u64>,
        in_flight: u32,
        optimizer_bytes: Option<u64>,
        master_bytes: u64,
        optimizer_shards: u32,
    ) -> Self {
        let expected = Expected {
            parameter_bytes,
            gradient_bytes,
            buffer_bytes,
            activation_bytes,
            in_flight,
            optimizer_bytes,
            master_bytes,
            optimizer_shards,
        };
        expected.categories().into()
    }

    /// The sum of what is known.
    fn total(&self) -> u64 {
        Categories::from(self).total()
    }

    /// The settings that would save memory, the largest saving first: setting, bytes, what it costs.
    ///
    /// `checkpointed` has the most bytes that checkpointed calls kept in memory at once, and the number of these calls;
    /// `offloadable` the bytes of optimizer state that would leave the memory that the rank computes in, which is a device's
    /// with `on_device`.
    #[pyo3(signature = (config, *, in_flight, microbatches, replicas, checkpointed, offloadable, on_device) -> "list[tuple[str, int, str]]")]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn advice(
        &self,
        config: &Config,
        in_flight: u32,
        microbatches: u32,
        replicas: u32,
        checkpointed: (u64, u32),
        offloadable: u64,
        on_device: bool,
    ) -> Vec<(String, u64, &'static str)> {
        let advice = advise(&Situation {
            config: &config.0,
            categories: self.into(),
            in_flight,
            microbatches,
            replicas,
            checkpointed,
            offloadable,
            on_device,
        });
        let row = |one: shardwright_memory::Advice| (one.setting, one.saves, one.price);
        advice.into_iter().map(row).collect()
    }
}

/// The peak of the activations of one step, from samples of the bytes in use between its tasks.
#[pyclass(module = "shardwright._core")]
pub(crate) struct MemoryMeter(Meter);

#[pymethods]
impl MemoryMeter {
    /// Begins with the bytes that are in use.
    #[new]
    fn new(in_use: u64) -> Self {
        Self(Meter::new(in_use))
    }

    /// Notes the bytes in use when a task of a forward or backward is about to begin.
    fn sample(&mut self, in_use: u64, backward: bool) {
        let phase = if backward {
            Phase::Backward
        } else {
            Phase::Forward
        };
        self.0.sample(in_use, phase);
    }

    /// The most bytes of activations, when the tasks have ended with `in_use`.
    fn activations(&self, in_use: u64) -> u64 {
        self.0.activations(in_use)
    }
}

/// Bytes that the C library's heaps have given out; None where it does not tell.
#[pyfunction]
pub(crate) fn heap_bytes() -> Option<u64> {
    shardwright_system::heap_bytes()
}

/// Has the C library keep allocations of so many bytes or more out of its heaps, and give them back to the system when
/// they are freed; returns whether it does.
#[pyfunction]
pub(crate) fn map_large_allocations(bytes: i32) -> bool {
    shardwright_system::map_large_allocations(bytes)
}

/// Bytes of this process that are in memory, the most that ever were, and those shared with other processes; None where
/// the system does not tell.
#[pyfunction]
#[pyo3(signature = () -> "tuple[int, int, int] | None")]
pub(crate) fn process_memory() -> Option<(u64, u64, u64)> {
    let memory = shardwright_system::process_memory()?;
    Some((memory.resident, memory.peak, memory.shared))
}

/// The least of the limits on this process's memory, in bytes: of its control group, its address space and its data.
#[pyfunction]
pub(crate) fn memory_limit() -> Option<u64> {
    shardwright_system::memory_limit()
}

/// The most microbatches in flight on each rank of a pipeline, under a schedule that is given as text.
///
/// Raises `ConfigError` for a schedule that cannot be run.
#[pyfunction]
#[pyo3(signature = (schedule, *, ranks, microbatches))]
pub(crate) fn in_flight(
    schedule: &str,
    ranks: NonZeroU32,
    microbatches: NonZeroU32,
) -> PyResult<Vec<u32>> {
    let schedule: Schedule = schedule.parse().map_err(argument_error)?;
    shardwright_simulate::in_flight(&schedule, ranks, microbatches).map_err(argument_error)
}
