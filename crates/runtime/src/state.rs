//! What the server's lock guards, and the condition variables that wake those who wait for it.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use shardwright_comm::sync::thread::ThreadId;
use shardwright_comm::sync::{Condvar, MutexGuard};
use shardwright_core::WorkerId;

use crate::machine::Machine;
use crate::outbox::Outbox;

pub(crate) struct State {
    pub(crate) machine: Machine,
    pub(crate) condvars: Vec<Arc<Condvar>>,
    /// The suspended worker whose thread receives messages while it waits: no condition variable reaches it.
    pub(crate) reader: Option<(WorkerId, ThreadId)>,
    /// What the machine had sent and no thread has handed to the transport yet.
    pub(crate) outbox: Outbox,
    /// What the heartbeats have been told of the machine's progress.
    pub(crate) reported_progress: u64,
    /// Whether somebody closes the server and waits until all is sent.
    pub(crate) closing: bool,
}

impl State {
    pub(crate) fn condvar(&mut self, worker: WorkerId) -> Arc<Condvar> {
        let index = worker.0 as usize;
        if self.condvars.len() <= index {
            self.condvars.resize_with(index + 1, Arc::default);
        }
        Arc::clone(&self.condvars[index])
    }
}

/// Sleeps until it is notified, or for `timeout`.
pub(crate) fn wait_on<'a>(
    condvar: &Condvar,
    state: MutexGuard<'a, State>,
    timeout: Duration,
) -> MutexGuard<'a, State> {
    condvar
        .wait_timeout(state, timeout)
        .unwrap_or_else(PoisonError::into_inner)
        .0
}
