//! The law of state (EX-15): microbatches come in their order to what modules keep, and never two at once.
//!
//! One process finishes a microbatch before it sees the next. Ranks take turns, so a module that keeps something (a
//! buffer that it writes, an attribute, a list) would meet microbatches in the order in which they happen to come, and
//! one in the middle of another. Python says what is kept, and when a task enters and leaves a module that uses it: a
//! *stay*. A microbatch enters once every earlier one is *past*: it has had as many stays as microbatches have, where
//! that is known, or all its forwards are over, which the root tells.
//!
//! Nobody waits for ever: the first microbatch whose forwards are not over waits for none, and what it needs of the
//! ranks does not depend on those behind it. An earlier one that comes back after a later one has entered breaks the
//! law; the step fails, and Python runs it again in a stricter order.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shardwright_core::{MicrobatchId, ModelId, WorkerId};
use shardwright_schedule::{Part, ReadyKind, Schedule};
use shardwright_wire::{ForwardOver, Message, Phase};

use super::dispatch::Subject;
use super::workers::{Waiting, WorkerState};
use super::{Effect, Machine};
use crate::failure::{FailureKind, ServerError};

/// Something that modules of a model keep, by Python's number for it.
pub type StateKey = (ModelId, u32);

/// What is known of it for good.
#[derive(Debug)]
struct Known {
    name: String,
    /// How many stays a microbatch has; `None` where that is not known, and its forwards have to be over.
    stays: Option<u32>,
}

/// How often a microbatch has entered and left.
#[derive(Clone, Copy, Debug, Default)]
struct Visits {
    entered: u32,
    left: u32,
}

/// Which microbatches have been where modules keep something.
#[derive(Debug, Default)]
pub(super) struct Stays {
    known: BTreeMap<StateKey, Known>,
    /// Whether other ranks have to be told of forwards that are over.
    tells: bool,
    /// The microbatches in the order in which their forwards begin on this rank, where that is not their own.
    order: Vec<MicrobatchId>,
    visits: BTreeMap<StateKey, BTreeMap<MicrobatchId, Visits>>,
    /// On the root: the step function is past the forward, but answers may be missing.
    ending: BTreeSet<MicrobatchId>,
    over: BTreeSet<MicrobatchId>,
}

impl Stays {
    fn place(&self, microbatch: MicrobatchId) -> usize {
        let listed = self.order.iter().position(|other| *other == microbatch);
        listed.unwrap_or(microbatch.0 as usize)
    }

    fn visits(&self, key: StateKey, microbatch: MicrobatchId) -> Visits {
        let visits = self.visits.get(&key).and_then(|all| all.get(&microbatch));
        visits.copied().unwrap_or_default()
    }

    fn visits_mut(&mut self, key: StateKey, microbatch: MicrobatchId) -> &mut Visits {
        let visits = self.visits.entry(key).or_default();
        visits.entry(microbatch).or_default()
    }

    /// Whether a microbatch will not come any more.
    fn is_past(&self, key: StateKey, microbatch: MicrobatchId) -> bool {
        let stays = self.known.get(&key).and_then(|known| known.stays);
        self.over.contains(&microbatch)
            || stays.is_some_and(|stays| self.visits(key, microbatch).left >= stays)
    }

    /// The first microbatch before this one that may still come.
    fn awaited(&self, key: StateKey, before: MicrobatchId, all: u32) -> Option<MicrobatchId> {
        let place = self.place(before);
        (0..all)
            .map(MicrobatchId)
            .filter(|other| self.place(*other) < place && !self.is_past(key, *other))
            .min_by_key(|other| self.place(*other))
    }

    /// A microbatch behind this one that has entered already.
    fn ahead(&self, key: StateKey, microbatch: MicrobatchId) -> Option<MicrobatchId> {
        let place = self.place(microbatch);
        let mut all = self.visits.get(&key).into_iter().flatten();
        all.find(|(other, visits)| self.place(**other) > place && visits.entered > 0)
            .map(|(other, _)| *other)
    }
}

impl Machine {
    /// From now on microbatches come in their order to something that modules keep.
    ///
    /// `stays` is how often a microbatch enters those modules; `None` where that is not known.
    pub fn keep_in_order(&mut self, key: StateKey, name: String, stays: Option<u32>) {
        self.stays.known.insert(key, Known { name, stays });
    }

    /// On the root: other ranks have modules that keep something, and are told when a microbatch's forwards are over.
    pub fn tell_forwards(&mut self) {
        self.stays.tells = true;
    }

    /// How many stays each microbatch of the step had, where all had as many.
    pub fn stays(&self) -> Vec<(StateKey, Option<u32>)> {
        let all = self.plan.num_microbatches;
        let count = |key: StateKey| {
            let mut counts = (0..all).map(|one| self.stays.visits(key, MicrobatchId(one)).left);
            let first = counts.next()?;
            counts.all(|other| other == first).then_some(first)
        };
        let keys = self.stays.known.keys();
        keys.map(|key| (*key, count(*key))).collect()
    }

    /// Begins a step: nobody has been anywhere.
    pub(super) fn begin_stays(&mut self) {
        let order: Vec<_> = match (&self.plan.schedule, &self.order) {
            (Schedule::List(list), _) => list
                .entries()
                .iter()
                .filter(|start| start.is_forward())
                .map(|start| start.microbatch)
                .collect(),
            (_, Some(order)) => {
                let mut listed = Vec::new();
                for unit in order.units() {
                    if unit.part == Part::Forward && !listed.contains(&unit.microbatch) {
                        listed.push(unit.microbatch);
                    }
                }
                listed
            }
            _ => Vec::new(),
        };
        self.stays.order = order;
        self.stays.visits.clear();
        self.stays.ending.clear();
        self.stays.over.clear();
    }

    /// Enters a stay of a worker's task, if its microbatch may do so now; whether it has.
    ///
    /// Never over a tensor-parallel group, whose ranks have to agree on when a task goes on.
    pub fn try_enter_state(
        &mut self,
        worker: WorkerId,
        key: StateKey,
        now: Duration,
    ) -> Result<bool, ServerError> {
        let microbatch = self.comes_to_state(worker, key, now)?;
        let enters = !self.has_peers() && self.is_open(key, microbatch);
        if enters {
            self.stays.visits_mut(key, microbatch).entered += 1;
        }
        Ok(enters)
    }

    /// Enters a stay of a worker's task: PENDING until every earlier microbatch is past.
    pub fn enter_state(
        &mut self,
        worker: WorkerId,
        key: StateKey,
        now: Duration,
    ) -> Result<Waiting, ServerError> {
        let microbatch = self.comes_to_state(worker, key, now)?;
        let kind = ReadyKind::ResumeForward;
        let open = self.is_open(key, microbatch);
        if open {
            self.stays.visits_mut(key, microbatch).entered += 1;
            if !self.has_peers() {
                return Ok(Waiting::Over);
            }
            if self.goes_first(worker, kind, microbatch) {
                self.continues(worker, kind, microbatch);
                return Ok(Waiting::Over);
            }
            self.push_ready(kind, microbatch, Subject::Worker(worker));
        }
        self.suspend(worker, WorkerState::AwaitsState { key, open }, now);
        Ok(Waiting::Suspended)
    }

    /// A worker's task leaves a stay, or its microbatch one of several at once.
    pub fn leave_state(&mut self, worker: WorkerId, key: StateKey) -> Result<(), ServerError> {
        let Some(slot) = self.workers.get(worker.0 as usize) else {
            return Err(ServerError::UnknownWorker { worker });
        };
        if let Some(task) = slot.task {
            self.stays.visits_mut(key, task.microbatch).left += 1;
            self.open_states();
        }
        Ok(())
    }

    /// The microbatch of a task that is about to enter; the step fails if that comes too late.
    fn comes_to_state(
        &mut self,
        worker: WorkerId,
        key: StateKey,
        now: Duration,
    ) -> Result<MicrobatchId, ServerError> {
        self.require_running("enter_state")?;
        self.require_turn(worker, "enter_state")?;
        let Some(task) = self.workers[worker.0 as usize].task else {
            return Err(ServerError::NotExecuting {
                worker,
                call: "enter_state",
            });
        };
        let microbatch = task.microbatch;
        let Some(ahead) = self.stays.ahead(key, microbatch) else {
            return Ok(microbatch);
        };
        let message = format!(
            "microbatch {microbatch} came to {} after microbatch {ahead}, which it goes before in one process",
            self.state_name(key),
        );
        let kind = FailureKind::StateOrder;
        let failure = self.own_failure(kind, "StateOrderError", message, Some(&task));
        self.fail_with(failure, true, now);
        Err(ServerError::Aborted)
    }

    fn is_open(&self, key: StateKey, microbatch: MicrobatchId) -> bool {
        let all = self.plan.num_microbatches;
        self.stays.awaited(key, microbatch, all).is_none()
    }

    /// Lets in those that wait for nobody any more.
    fn open_states(&mut self) {
        for index in 0..self.workers.len() {
            let slot = &self.workers[index];
            let (WorkerState::AwaitsState { key, open: false }, Some(task)) =
                (slot.state, slot.task)
            else {
                continue;
            };
            let microbatch = task.microbatch;
            if self.is_open(key, microbatch) {
                self.workers[index].state = WorkerState::AwaitsState { key, open: true };
                self.stays.visits_mut(key, microbatch).entered += 1;
                let subject = Subject::Worker(WorkerId(index as u32));
                self.push_ready(ReadyKind::ResumeForward, microbatch, subject);
            }
        }
    }

    /// On the root: a step function has reached its backward, or returned.
    pub(super) fn root_is_past_forward(&mut self, microbatch: MicrobatchId) {
        let concerns = self.stays.tells || !self.stays.known.is_empty();
        if concerns && !self.stays.over.contains(&microbatch) {
            self.stays.ending.insert(microbatch);
            self.end_forwards();
        }
    }

    /// On the root: forwards are over when they have been executed everywhere. A caller that has not waited for an
    /// answer may be past its forward before that.
    pub(super) fn end_forwards(&mut self) {
        if self.stays.ending.is_empty() {
            return;
        }
        let executes = |microbatch: &MicrobatchId| {
            self.outstanding.values().any(|request| {
                request.microbatch == *microbatch
                    && request.phase == Some(Phase::Forward)
                    && request.response.is_none()
            })
        };
        let ending = self.stays.ending.iter();
        let over: Vec<_> = ending.filter(|one| !executes(one)).copied().collect();
        for microbatch in over {
            self.stays.ending.remove(&microbatch);
            if self.stays.tells {
                let step = self.plan.step;
                for to in self.pipeline_peers() {
                    let message = Message::ForwardOver(ForwardOver { step, microbatch });
                    self.effects.push(Effect::Send { to, message });
                }
            }
            self.on_forward_over(microbatch);
        }
    }

    /// All forwards of a microbatch have been executed.
    pub(super) fn on_forward_over(&mut self, microbatch: MicrobatchId) {
        self.stays.over.insert(microbatch);
        self.open_states();
    }

    /// What a worker waits for, in words.
    pub(super) fn state_wait_text(&self, worker: WorkerId, key: StateKey) -> String {
        let task = self.workers[worker.0 as usize].task;
        let all = self.plan.num_microbatches;
        let awaited = task.and_then(|task| self.stays.awaited(key, task.microbatch, all));
        let earlier = awaited.map_or_else(String::new, |one| format!("microbatch {one} "));
        format!(
            "{earlier}to be through with {}, which microbatches use in their order",
            self.state_name(key)
        )
    }

    fn state_name(&self, key: StateKey) -> &str {
        let known = self.stays.known.get(&key);
        known.map_or("what a module keeps", |known| &known.name)
    }
}
