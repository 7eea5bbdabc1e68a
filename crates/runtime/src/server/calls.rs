//! The requests that a rank makes, and its answers.

use std::time::{Duration, Instant};

use shardwright_core::{Rank, RequestId, WorkerId};
use shardwright_wire::{Answer, HeldTensor, Phase};

use super::Server;
use crate::failure::ServerError;
use crate::machine::{About, Expected, NewRequest, StateKey, Waiting};
use crate::state::wait_on;

impl Server {
    /// Makes a request; see [`Machine::send_request`].
    pub fn send_request(
        &self,
        worker: Option<WorkerId>,
        to: Rank,
        request: NewRequest,
    ) -> Result<RequestId, ServerError> {
        self.enter(|machine, now| machine.send_request(worker, to, request, now))
    }

    /// Makes a request that another rank sends; see [`Machine::announce_request`].
    pub fn announce_request(
        &self,
        worker: WorkerId,
        to: Rank,
        about: &About,
        expected: Option<Expected>,
    ) -> Result<RequestId, ServerError> {
        self.enter(|machine, _| machine.announce_request(worker, to, about, expected))
    }

    /// Asks for a tensor that another rank holds; see [`Machine::fetch`].
    pub fn fetch(&self, worker: WorkerId, tensor: HeldTensor) -> Result<RequestId, ServerError> {
        self.enter(|machine, now| machine.fetch(worker, tensor, now))
    }

    /// Needs tensors no more; see [`Machine::release`].
    pub fn release(&self, holder: Rank, requests: &[RequestId]) {
        self.lock().machine.release(holder, requests);
    }

    /// Sends a request in another rank's name; see [`Machine::send_request_for`].
    pub fn send_request_for(
        &self,
        worker: WorkerId,
        announced: (Rank, RequestId),
        to: Rank,
        request: NewRequest,
    ) -> Result<(), ServerError> {
        self.enter(|machine, now| machine.send_request_for(worker, announced, to, request, now))
    }

    /// Says which collective a task enters; see [`Machine::enters_collective`].
    pub fn enters_collective(&self, worker: WorkerId, name: String) -> Result<(), ServerError> {
        self.enter(|machine, now| machine.enters_collective(worker, name, now))
    }

    /// Says that no gradient comes back to a forward; see [`Machine::ends_with_forward`].
    pub fn ends_with_forward(&self, worker: WorkerId) -> Result<(), ServerError> {
        self.lock().machine.ends_with_forward(worker)
    }

    /// Suspends a worker until all responses are there.
    pub fn wait(
        &self,
        worker: WorkerId,
        requests: &[RequestId],
        phase: Phase,
    ) -> Result<Vec<Answer>, ServerError> {
        let mut state = self.lock();
        if state.machine.wait(worker, requests, phase, self.now())? == Waiting::Suspended {
            state = self.resumed(state, worker)?;
        } else {
            state = self.settle_for(state, Some(worker));
        }
        state.machine.take_responses(requests)
    }

    /// Makes microbatches come to something that modules keep in their order; see [`Machine::keep_in_order`].
    pub fn keep_in_order(&self, key: StateKey, name: String, stays: Option<u32>) {
        self.lock().machine.keep_in_order(key, name, stays);
    }

    /// Tells the peers when a microbatch's forwards are over; see [`Machine::tell_forwards`].
    pub fn tell_forwards(&self) {
        self.lock().machine.tell_forwards();
    }

    /// Enters a stay where that may be done at once; see [`Machine::try_enter_state`].
    pub fn try_enter_state(&self, worker: WorkerId, key: StateKey) -> Result<bool, ServerError> {
        self.enter(|machine, now| machine.try_enter_state(worker, key, now))
    }

    /// Suspends a worker until its microbatch may enter; see [`Machine::enter_state`].
    pub fn enter_state(&self, worker: WorkerId, key: StateKey) -> Result<(), ServerError> {
        let mut state = self.lock();
        if state.machine.enter_state(worker, key, self.now())? == Waiting::Suspended {
            self.resumed(state, worker).map(drop)
        } else {
            drop(self.settle_for(state, Some(worker)));
            Ok(())
        }
    }

    /// Ends a stay; see [`Machine::leave_state`].
    pub fn leave_state(&self, worker: WorkerId, key: StateKey) -> Result<(), ServerError> {
        self.lock().machine.leave_state(worker, key)
    }

    /// How many stays each microbatch of the step had; see [`Machine::stays`].
    pub fn stays(&self) -> Vec<(StateKey, Option<u32>)> {
        self.lock().machine.stays()
    }

    /// The answers to requests, if they are all there.
    pub fn take_if_answered(&self, requests: &[RequestId]) -> Option<Vec<Answer>> {
        let mut state = self.lock();
        let answered = state.machine.are_answered(requests);
        answered
            .then(|| state.machine.take_responses(requests).ok())
            .flatten()
    }

    /// Begins a wait of the main thread; `None` from [`Self::main_wait`] means that it goes on.
    pub fn begin_main_wait(&self, requests: &[RequestId]) -> Result<(), ServerError> {
        self.enter(|machine, _| machine.main_waits(requests))
            .map(|_| ())
    }

    /// Goes on with the main thread's wait for at most `timeout`.
    pub fn main_wait(
        &self,
        requests: &[RequestId],
        timeout: Duration,
    ) -> Result<Option<Vec<Answer>>, ServerError> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        state.machine.block_main(true);
        let result = loop {
            state.machine.tick(self.now());
            state = self.settle(state);
            match state.machine.poll_main_wait() {
                Ok(Waiting::Over) => break state.machine.take_responses(requests).map(Some),
                Ok(Waiting::Suspended) => {}
                Err(error) => break Err(error),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Ok(None);
            }
            state = wait_on(&self.main_condvar, state, left);
        };
        state.machine.block_main(false);
        drop(self.settle(state));
        result
    }

    /// The main thread waits for something outside the server, or no longer does; see
    /// [`Machine::wait_outside`].
    pub fn wait_outside(&self, waits: bool) -> Duration {
        self.enter(|machine, now| machine.wait_outside(waits, now))
    }

    /// See [`Machine::quiet`].
    pub fn quiet(&self) -> Duration {
        self.lock().machine.quiet(self.now())
    }

    /// See [`Machine::idle_in_step`].
    pub fn idle_in_step(&self) -> Option<(Duration, Duration)> {
        self.lock().machine.idle_in_step(self.now())
    }

    /// The time, for [`Self::recomputed`].
    pub fn clock(&self) -> Duration {
        self.now()
    }

    /// A worker has computed a checkpointed module again since then.
    pub fn recomputed(&self, worker: WorkerId, start: Duration) {
        let mut state = self.lock();
        let now = self.now();
        state.machine.recomputed(worker, start, now);
    }

    /// Leaves weight gradients for later; see [`Machine::defer_weight_gradient`].
    pub fn defer_weight_gradient(&self, worker: WorkerId) -> Result<u64, ServerError> {
        self.enter(|machine, _| machine.defer_weight_gradient(worker))
    }

    /// Answers a request.
    pub fn respond(
        &self,
        requester: Rank,
        id: RequestId,
        answer: impl Into<Answer>,
    ) -> Result<(), ServerError> {
        self.enter(|machine, now| machine.respond(requester, id, answer, now))
    }
}
