//! How a worker's thread waits for its turn: asleep, or receiving messages meanwhile.

use std::time::Duration;

use shardwright_comm::Observation;
use shardwright_comm::sync::{Condvar, MutexGuard, thread};
use shardwright_core::WorkerId;

use crate::failure::ServerError;
use crate::machine::Grant;
use crate::server::Server;
use crate::state::{State, wait_on};

/// A suspended worker looks at the clock this often, so that a stall is noticed even while the
/// main thread is elsewhere.
const WORKER_SLICE: Duration = Duration::from_secs(1);

impl Server {
    /// Waits for a grant that resumes a suspended worker.
    pub(crate) fn resumed<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        worker: WorkerId,
    ) -> Result<MutexGuard<'a, State>, ServerError> {
        match self.await_grant(state, worker) {
            (Grant::Resume, state) => Ok(state),
            (Grant::Aborted | Grant::Closed, _) => Err(ServerError::Aborted),
            (Grant::Task(_), _) => unreachable!("a suspended worker gets no new task"),
        }
    }

    pub(crate) fn await_grant<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        worker: WorkerId,
    ) -> (Grant, MutexGuard<'a, State>) {
        let mut state = state;
        let condvar = state.condvar(worker);
        loop {
            if let Some(grant) = state.machine.take_grant(worker) {
                // Its own wake-up is no news to this worker.
                state = self.settle_for(state, Some(worker));
                return (grant, state);
            }
            state = self.settle(state);
            if let Some(grant) = state.machine.take_grant(worker) {
                return (grant, state);
            }
            state = self.rest(state, worker, &condvar);
            state.machine.tick(self.now());
        }
    }

    /// Sleeps until it is notified, or for a while; receives messages meanwhile where the transport lets one thread do so.
    fn rest<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        worker: WorkerId,
        condvar: &Condvar,
    ) -> MutexGuard<'a, State> {
        if let Some(transport) = self.transport.as_ref().filter(|_| state.reader.is_none()) {
            state.reader = Some((worker, thread::current().id()));
            drop(state);
            let read = transport.read_until(WORKER_SLICE, &mut || {
                let machine = &self.lock().machine;
                match (machine.has_grant(worker), machine.turn_is_free()) {
                    (true, _) => Observation::Done,
                    (false, true) => Observation::Idle,
                    (false, false) => Observation::Busy,
                }
            });
            state = self.lock();
            state.reader = None;
            if read || state.machine.has_grant(worker) {
                return state;
            }
        }
        wait_on(condvar, state, WORKER_SLICE)
    }
}
