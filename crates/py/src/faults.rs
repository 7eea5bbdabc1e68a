//! Ranks of one process between which messages go wrong, for tests; in no wheel.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_comm::Faults;

use crate::node::Node;

#[pymethods]
impl Node {
    /// Nodes of ranks that share this process, and between which messages go wrong, in the same way each time:
    /// `"seed=7 delay=0.1 reorder=0.2 drop=0.01 after=30 from=1 deadline=2"`.
    #[staticmethod]
    fn in_process_with_faults(world: usize, faults: &str) -> PyResult<Vec<Self>> {
        let faults = faults.parse::<Faults>();
        let faults = faults.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let nodes = shardwright_comm::Node::in_process_with_faults(world, &faults)?;
        Ok(nodes.into_iter().map(Self::from).collect())
    }
}
