//! `Server`: in which order microbatches come to what modules keep.

use pyo3::prelude::*;
use shardwright_core::{ModelId, WorkerId};

use crate::error::server_error;
use crate::server::Server;

#[pymethods]
impl Server {
    /// From now on, let microbatches come in their order to something that modules of a model keep.
    ///
    /// `stays` is how often a microbatch enters the modules that use it; None where that is not known.
    #[pyo3(signature = (model, state, *, name, stays))]
    fn keep_in_order(
        &self,
        model: u32,
        state: u32,
        name: String,
        stays: Option<u32>,
    ) -> PyResult<()> {
        self.here()?
            .keep_in_order((ModelId(model), state), name, stays);
        Ok(())
    }

    /// On the root: tell the peers from now on when all forwards of a microbatch have been executed.
    fn tell_forwards(&self) -> PyResult<()> {
        self.here()?.tell_forwards();
        Ok(())
    }

    /// Enter a module that uses the state, if no other microbatch goes first; whether the task is in it now.
    fn try_enter_state(&self, worker: u32, model: u32, state: u32) -> PyResult<bool> {
        self.here()?
            .try_enter_state(WorkerId(worker), (ModelId(model), state))
            .map_err(|error| server_error(&error))
    }

    /// Wait until no other microbatch goes first, and enter.
    fn enter_state(&self, py: Python<'_>, worker: u32, model: u32, state: u32) -> PyResult<()> {
        let server = self.here()?;
        py.detach(|| server.enter_state(WorkerId(worker), (ModelId(model), state)))
            .map_err(|error| server_error(&error))
    }

    /// Leave a module that uses the state.
    fn leave_state(&self, worker: u32, model: u32, state: u32) -> PyResult<()> {
        self.here()?
            .leave_state(WorkerId(worker), (ModelId(model), state))
            .map_err(|error| server_error(&error))
    }

    /// How often each microbatch of the newest step entered the modules that use a state: model, state, and the number,
    /// None where it was not the same for all.
    fn stays(&self) -> PyResult<Vec<(u32, u32, Option<u32>)>> {
        let stays = self.here()?.stays().into_iter();
        Ok(stays
            .map(|((model, state), count)| (model.0, state, count))
            .collect())
    }
}
