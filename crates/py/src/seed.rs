//! `derive_seed`.

use pyo3::prelude::*;

/// A seed for the `number`-th part of what `seed` stands for; well mixed, and the same everywhere.
#[pyfunction]
#[pyo3(signature = (seed, number, /))]
pub(crate) fn derive_seed(seed: u64, number: u64) -> u64 {
    shardwright_core::derive_seed(seed, number)
}
