//! Messages as they arrive: of this step, of an older one, of a newer one (EX-4).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shardwright_core::{Rank, StepEpoch};
use shardwright_wire::{Abort, ErrorReport, Message, StepBegin};

use super::dispatch::Turn;
use super::{Machine, Stage};
use crate::failure::{Failure, FailureKind, strength_of};

/// What arrived for a step before this rank could use it.
#[derive(Debug, Default)]
pub(super) struct EarlyMessages {
    messages: BTreeMap<StepEpoch, VecDeque<(Rank, Message)>>,
    aborts: BTreeMap<StepEpoch, ErrorReport>,
    count: usize,
}

impl EarlyMessages {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    fn keep(&mut self, step: StepEpoch, from: Rank, message: Message) {
        self.count += 1;
        self.messages
            .entry(step)
            .or_default()
            .push_back((from, message));
    }

    fn keep_abort(&mut self, abort: Abort) {
        match self.aborts.entry(abort.step) {
            Entry::Vacant(entry) => {
                entry.insert(abort.error);
            }
            Entry::Occupied(mut entry) => {
                if strength_of(&abort.error) > strength_of(entry.get()) {
                    entry.insert(abort.error);
                }
            }
        }
    }

    /// What was kept for a step; all that is older is forgotten, and counted.
    pub(super) fn take(&mut self, step: StepEpoch) -> (VecDeque<(Rank, Message)>, u64) {
        let newer = self.messages.split_off(&StepEpoch(step.0 + 1));
        let mut older = std::mem::replace(&mut self.messages, newer);
        let taken = older.remove(&step).unwrap_or_default();
        let stale: usize = older.values().map(VecDeque::len).sum();
        self.count -= taken.len() + stale;
        (taken, stale as u64)
    }

    pub(super) fn abort_of(&self, step: StepEpoch) -> Option<ErrorReport> {
        self.aborts.get(&step).cloned()
    }

    pub(super) fn take_abort(&mut self, step: StepEpoch) -> Option<ErrorReport> {
        let newer = self.aborts.split_off(&StepEpoch(step.0 + 1));
        std::mem::replace(&mut self.aborts, newer).remove(&step)
    }
}

impl Machine {
    /// A message has arrived.
    pub fn deliver(&mut self, from: Rank, message: Message, now: Duration) {
        let step = match &message {
            Message::Request(request) => request.step,
            Message::Response(response) => response.step,
            Message::Fetch(fetch) => fetch.step,
            Message::Delivery(delivery) => delivery.step,
            Message::StepBegin(begin) => begin.step,
            Message::StepEnd(end) => end.step,
            Message::TaskOrder(order) => order.step,
            Message::ForwardOver(over) => over.step,
            Message::Abort(_) => {
                if let Message::Abort(abort) = message {
                    self.on_abort(*abort, now);
                }
                return;
            }
            Message::Object(_) | Message::ShutdownNotice(_) => {
                self.stats.unexpected_messages += 1;
                return;
            }
        };
        self.peers.heard_in(from, step);
        self.stall.progress(now);
        if step > self.plan.step || (step == self.plan.step && self.must_wait_for_begin(&message)) {
            self.kept.keep(step, from, message);
        } else if step < self.plan.step || !matches!(self.stage, Stage::Running | Stage::Ending) {
            self.stats.stale_messages += 1;
        } else {
            // What was kept for the root's word comes in with it: it was the root that was waited for.
            let outer = self.receiving_from;
            self.receiving_from = outer.or(Some(from));
            self.take_in(from, message, now);
            self.dispatch(None, now);
            self.receiving_from = outer;
        }
    }

    /// Whether this rank has entered the step but does not know yet that its root has entered the same.
    fn must_wait_for_begin(&self, message: &Message) -> bool {
        !self.begun && self.stage == Stage::Running && !matches!(message, Message::StepBegin(_))
    }

    /// A message of the step that runs here.
    fn take_in(&mut self, from: Rank, message: Message, now: Duration) {
        match message {
            Message::Request(request) => self.on_request(from, request, now),
            Message::Response(response) => self.on_response(from, *response, now),
            Message::Fetch(fetch) => self.on_fetch(from, fetch, now),
            Message::Delivery(delivery) => self.on_delivery(from, *delivery, now),
            Message::TaskOrder(order) => self.on_task_order(from, *order, now),
            Message::ForwardOver(over) if from == self.root_rank() => {
                self.on_forward_over(over.microbatch);
            }
            Message::StepBegin(begin) if from == self.root_rank() && !self.begun => {
                self.on_step_begin(&begin, now);
            }
            Message::StepEnd(end)
                if from == self.root_rank() && !self.is_root() && self.end_body.is_none() =>
            {
                if self.turn == Turn::Free {
                    self.account.idled(Some(from), now);
                }
                self.end_body = Some(end.body);
            }
            Message::StepBegin(_)
            | Message::ForwardOver(_)
            | Message::StepEnd(_)
            | Message::Abort(_)
            | Message::Object(_)
            | Message::ShutdownNotice(_) => self.stats.unexpected_messages += 1,
        }
    }

    fn on_step_begin(&mut self, begin: &StepBegin, now: Duration) {
        if begin.function != self.plan.function
            || begin.num_microbatches != self.plan.num_microbatches
        {
            let message = format!(
                "in step {}, rank {}, the root of the pipeline, called step function {:?} with {} microbatches, \
                 but rank {} called {:?} with {}",
                begin.step,
                self.root_rank(),
                begin.function,
                begin.num_microbatches,
                self.config.rank,
                self.plan.function,
                self.plan.num_microbatches,
            );
            let failure = self.own_failure(
                FailureKind::StepMismatch,
                "StepMismatchError",
                message,
                None,
            );
            self.fail_with(failure, true, now);
            return;
        }
        if begin.one_at_a_time {
            self.one_at_a_time();
        }
        self.begun = true;
        self.take_kept(now);
    }

    /// Delivers again what was kept for the step just entered, or just begun by its root.
    pub(super) fn take_kept(&mut self, now: Duration) {
        let (kept, stale) = self.kept.take(self.plan.step);
        self.stats.stale_messages += stale;
        for (from, message) in kept {
            self.deliver(from, message, now);
        }
    }

    /// Another rank says that a step has failed (EX-5).
    fn on_abort(&mut self, abort: Abort, now: Duration) {
        let newest = self.plan.step;
        if abort.step > newest {
            self.kept.keep_abort(abort);
            return;
        }
        let failure = Failure::remote(abort.error);
        if abort.step == newest && matches!(self.stage, Stage::Aborting(_) | Stage::Failed(_)) {
            self.hear_beside(failure);
            return;
        }
        if self.failed_steps.contains(abort.step) {
            return;
        }
        if abort.step == newest && self.in_step() {
            self.fail_with(failure, false, now);
        } else {
            // The step was a success here and a failure there: the ranks' weights may differ,
            // so the next thing that this rank does has to fail as well.
            self.fail_late(failure, now);
        }
    }
}
