//! One order of tasks over a tensor-parallel group: its first rank decides, the others follow (EX-12).
//!
//! Collectives inside modules meet in the order in which tasks have the turn, so every rank of the group has to give it
//! in the same order. The first rank tells the others each turn as it is given; they run what it names once that is
//! ready there, and nothing else. Data moves on demand all the same. What tasks ask for and when they end is compared,
//! so that ranks whose models take different branches end with an error that names where they parted.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shardwright_core::{Rank, RequestId, WorkerId};
use shardwright_wire::{
    Asked, Message, Phase, Request, TaskEvent, TaskName, TaskOrder, TaskSource,
};

use super::dispatch::Subject;
use super::requests::About;
use super::tasks::CurrentTask;
use super::{Effect, Machine, Stage};
use crate::failure::{FailureKind, ServerError};
use crate::trace::TraceKind;

/// So many requests of a step have numbers that no other step's have.
const REQUESTS_OF_A_STEP: u64 = 1_000_000_000;

/// Fetches are counted from here. Each rank has its own, since what is still referenced when a task ends, and so has to be
/// fetched, is also a matter of when Python collects garbage. They must not shift the numbers of requests.
const FIRST_FETCH_OF_A_STEP: u64 = REQUESTS_OF_A_STEP / 2;

/// How far this rank is in the order of its tensor-parallel group.
#[derive(Debug, Default)]
pub(super) struct PeerOrder {
    /// On the first rank: what the others have not been told.
    unreported: Vec<TaskEvent>,
    /// How many messages the first rank has sent, or another one has read.
    messages: u64,
    /// On the others: what has overtaken a message that is still to come. Threads of a rank send beside one another.
    early: BTreeMap<u64, Vec<TaskEvent>>,
    /// On the others: turns that the first rank has given and this one has not.
    turns: VecDeque<TaskName>,
    /// What the tasks of the first rank did, as far as it is not compared.
    theirs: VecDeque<TaskEvent>,
    /// What the tasks of this rank did, as far as it is not compared.
    own: VecDeque<TaskEvent>,
}

/// Whether two names are of one task.
fn is_same(one: &TaskName, other: &TaskName) -> bool {
    one.source == other.source && one.microbatch == other.microbatch
}

/// Whether two calls are one, apart from what is known of the answer.
fn is_same_call(one: &Asked, other: &Asked) -> bool {
    let is_predicted = other.is_predicted;
    Asked {
        is_predicted,
        ..*one
    } == *other
}

impl Machine {
    /// Begins a step. Requests are named by their numbers, which a failed step leaves apart.
    pub(super) fn begin_peer_order(&mut self) {
        self.peer_order = PeerOrder::default();
        if self.has_peers() {
            self.next_request = self.plan.step.0 * REQUESTS_OF_A_STEP;
            self.next_fetch = self.next_request + FIRST_FETCH_OF_A_STEP;
        }
    }

    /// The number of a fetch.
    pub(super) fn fetch_id(&mut self) -> RequestId {
        if !self.has_peers() {
            return self.next_id();
        }
        self.next_fetch += 1;
        RequestId(self.next_fetch)
    }

    /// Whether tasks have one order over several ranks.
    pub fn has_peers(&self) -> bool {
        self.config.tensor_group.len() > 1
    }

    /// The rank whose order this one follows.
    pub(super) fn leader(&self) -> Option<Rank> {
        let first = *self.config.tensor_group.first()?;
        (first != self.config.rank).then_some(first)
    }

    /// The index of the ready item that the first rank has given the turn to.
    pub(super) fn choose_as_told(&self) -> Option<usize> {
        let told = self.peer_order.turns.front()?;
        self.ready
            .iter()
            .position(|item| is_same(&self.name_of(&item.subject, item.ready.microbatch), told))
    }

    /// Whether the first rank goes on with this worker's task now.
    pub(super) fn is_told_to_go_on(&self, worker: WorkerId) -> bool {
        let task = self.workers[worker.0 as usize].task;
        let told = self.peer_order.turns.front();
        task.zip(told)
            .is_some_and(|(task, told)| is_same(&self.task_name(&task), told))
    }

    /// A ready item has the turn, or a worker keeps it.
    pub(super) fn tell_turn(&mut self, name: TaskName) {
        if self.leader().is_some() {
            self.peer_order.turns.pop_front();
        } else {
            self.peer_order.unreported.push(TaskEvent::Turn(name));
            self.tell_peers();
        }
    }

    /// A worker's task asks another rank for something.
    pub(super) fn tell_asked(
        &mut self,
        worker: Option<WorkerId>,
        to: Rank,
        about: &About,
        is_predicted: bool,
    ) {
        if !self.has_peers() {
            return;
        }
        let task = worker.and_then(|worker| self.workers[worker.0 as usize].task);
        if let Some(task) = task {
            let asked = Asked {
                place: self.place_of(to),
                phase: about.kind.phase(),
                microbatch: task.microbatch,
                module: (about.model, about.module),
                is_predicted,
            };
            self.happened(TaskEvent::Asks(asked));
        }
    }

    /// A worker's task enters a collective of the group, for something of this name.
    pub fn enters_collective(
        &mut self,
        worker: WorkerId,
        name: String,
        now: Duration,
    ) -> Result<(), ServerError> {
        self.require_running("enters_collective")?;
        self.require_turn(worker, "enters_collective")?;
        if self.has_peers() {
            // At once: a rank of the group that does something else must not be waited for.
            self.happened(TaskEvent::Enters(name));
            self.tell_peers();
            self.compare_with_leader(now);
        }
        Ok(())
    }

    /// A task is over.
    pub(super) fn tell_end(&mut self, task: &CurrentTask) {
        if self.has_peers() && matches!(self.stage, Stage::Running | Stage::Ending) {
            self.happened(TaskEvent::Ends(self.task_name(task)));
        }
    }

    /// A backward has left weight gradients for later.
    pub(super) fn tell_deferred(&mut self, name: TaskName) {
        if self.has_peers() {
            self.happened(TaskEvent::Defers(name));
        }
    }

    fn happened(&mut self, event: TaskEvent) {
        if self.leader().is_some() {
            self.peer_order.own.push_back(event);
        } else {
            self.peer_order.unreported.push(event);
        }
    }

    /// Tells the others what has happened since they were last told.
    pub(super) fn tell_peers(&mut self) {
        let events = std::mem::take(&mut self.peer_order.unreported);
        if events.is_empty() {
            return;
        }
        let (step, number) = (self.plan.step, self.peer_order.messages);
        self.peer_order.messages += 1;
        for to in self.config.tensor_group.iter().skip(1) {
            let order = TaskOrder {
                step,
                number,
                events: events.clone(),
            };
            self.effects.push(Effect::Send {
                to: *to,
                message: Message::TaskOrder(Box::new(order)),
            });
        }
    }

    pub(super) fn on_task_order(&mut self, from: Rank, order: TaskOrder, now: Duration) {
        if self.leader() != Some(from) {
            self.stats.unexpected_messages += 1;
            return;
        }
        let peers = &mut self.peer_order;
        peers.early.insert(order.number, order.events);
        while let Some(events) = peers.early.remove(&peers.messages) {
            peers.messages += 1;
            for event in events {
                match event {
                    TaskEvent::Turn(task) => peers.turns.push_back(task),
                    TaskEvent::Asks(_)
                    | TaskEvent::Enters(_)
                    | TaskEvent::Ends(_)
                    | TaskEvent::Defers(_) => peers.theirs.push_back(event),
                }
            }
        }
        self.compare_with_leader(now);
    }

    /// Holds what the tasks here did against what those of the first rank did, as far as both are known.
    pub(super) fn compare_with_leader(&mut self, now: Duration) {
        while let (Some(theirs), Some(own)) =
            (self.peer_order.theirs.front(), self.peer_order.own.front())
        {
            let fits = match (theirs, own) {
                (TaskEvent::Ends(theirs), TaskEvent::Ends(own)) => is_same(theirs, own),
                _ => theirs == own,
            };
            if !fits {
                match (theirs, own) {
                    (TaskEvent::Asks(theirs), TaskEvent::Asks(own))
                        if is_same_call(theirs, own) =>
                    {
                        let own = *own;
                        self.predict_apart(&own, now);
                    }
                    _ => {
                        let (theirs, own) = (self.event_text(theirs), self.event_text(own));
                        self.fail_apart(&theirs, &own, now);
                    }
                }
                return;
            }
            self.peer_order.theirs.pop_front();
            self.peer_order.own.pop_front();
        }
    }

    /// Whether the ready item that has the name of the first rank's task is about the same module; fails the step if not.
    pub(super) fn check_told(&mut self, index: usize, now: Duration) -> bool {
        let Some(told) = self.peer_order.turns.front().copied() else {
            return true;
        };
        let item = &self.ready[index];
        let found = self.name_of(&item.subject, item.ready.microbatch);
        let fits = found.module == told.module;
        if !fits {
            let theirs = format!("runs {}", self.task_text(&told));
            let own = format!("has {} in its place", self.task_text(&found));
            self.fail_apart(&theirs, &own, now);
        }
        fits
    }

    /// One rank takes an answer to be known and another waits for it, so that they would not go on at the same time: the
    /// step is run again without predictions.
    fn predict_apart(&mut self, own: &Asked, now: Duration) {
        let leader = self.config.tensor_group[0];
        let (predicts, waits) = if own.is_predicted {
            (self.config.rank, leader)
        } else {
            (leader, self.config.rank)
        };
        let message = format!(
            "the ranks of a tensor-parallel group do not know the same calls: for rank {predicts} the results are as in the \
             steps recorded for static mode, and rank {waits} has not called it with such arguments so often",
        );
        let kind = FailureKind::Departure;
        let mut failure = self.own_failure(kind, "DepartureError", message, None);
        let (model, module) = own.module;
        failure.report.module = module.map(|module| self.module_name(model, module));
        failure.report.microbatch = Some(own.microbatch);
        failure.report.phase = own.phase;
        self.fail_with(failure, true, now);
    }

    fn fail_apart(&mut self, theirs: &str, own: &str, now: Duration) {
        let group = &self.config.tensor_group;
        let own_place = group.iter().position(|rank| *rank == self.config.rank);
        let message = format!(
            "the ranks of a tensor-parallel group have to run the same modules in the same order, but in {} tp_rank 0 \
             (rank {}) {theirs}, where tp_rank {} (rank {}) {own}",
            self.step_text(),
            group[0],
            own_place.unwrap_or_default(),
            self.config.rank,
        );
        let kind = FailureKind::StepMismatch;
        let failure = self.own_failure(kind, "StepMismatchError", message, None);
        self.fail_with(failure, true, now);
    }

    pub(super) fn name_of(
        &self,
        subject: &Subject,
        microbatch: shardwright_core::MicrobatchId,
    ) -> TaskName {
        match subject {
            Subject::Root => TaskName {
                source: TaskSource::Root,
                phase: Phase::Forward,
                microbatch,
                module: None,
            },
            Subject::Request(request) => self.request_name(request),
            Subject::WeightGradient(deferred) => TaskName {
                source: TaskSource::WeightGradient {
                    token: deferred.token,
                },
                phase: Phase::Backward,
                microbatch,
                module: deferred.model.zip(deferred.module),
            },
            Subject::Worker(worker) => {
                let task = self.workers[worker.0 as usize].task;
                self.task_name(&task.expect("a suspended worker has a task"))
            }
        }
    }

    fn request_name(&self, request: &Request) -> TaskName {
        TaskName {
            source: TaskSource::Request {
                place: self.place_of(request.requester),
                id: request.id,
            },
            phase: request.work.kind().phase().unwrap_or(Phase::Forward),
            microbatch: request.microbatch,
            module: request.work.module().map(|module| (request.model, module)),
        }
    }

    pub(super) fn task_name(&self, task: &CurrentTask) -> TaskName {
        let source = match (task.request, task.kind) {
            (Some((requester, id)), _) => TaskSource::Request {
                place: self.place_of(requester),
                id,
            },
            (None, TraceKind::WeightGradient) => TaskSource::WeightGradient { token: task.token },
            (None, _) => TaskSource::Root,
        };
        TaskName {
            source,
            phase: task.phase,
            microbatch: task.microbatch,
            module: task.model.zip(task.module),
        }
    }

    fn place_of(&self, rank: Rank) -> u32 {
        let pipeline = &self.config.pipeline;
        let place = pipeline.iter().position(|one| *one == rank);
        place.expect("requests stay in a pipeline") as u32
    }

    fn task_text(&self, task: &TaskName) -> String {
        let microbatch = task.microbatch;
        let (phase, module) = (task.phase.name(), task.module);
        module.map_or_else(
            || format!("the step function for microbatch {microbatch}"),
            |(model, module)| {
                let name = self.module_name(model, module);
                format!("{phase} of {name} for microbatch {microbatch}")
            },
        )
    }

    fn event_text(&self, event: &TaskEvent) -> String {
        match event {
            TaskEvent::Asks(asked) => {
                let (model, module) = asked.module;
                let name = module.map_or_else(String::new, |one| self.module_name(model, one));
                let phase = asked.phase.map_or("a control request", Phase::name);
                let microbatch = asked.microbatch;
                format!("calls {phase} of {name} for microbatch {microbatch}")
            }
            TaskEvent::Enters(name) => format!("runs {name}"),
            TaskEvent::Ends(task) => format!("has ended {}", self.task_text(task)),
            TaskEvent::Defers(task) => format!(
                "leaves weight gradients for later in {}",
                self.task_text(task)
            ),
            TaskEvent::Turn(task) => format!("runs {}", self.task_text(task)),
        }
    }
}
