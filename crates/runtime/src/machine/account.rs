//! What a step's time is charged to. The turn's changes and the messages that end waits tell.

use std::time::Duration;

use shardwright_core::Rank;

use super::Machine;
use super::tasks::CurrentTask;
use crate::usage::Usage;

/// Which part of a step passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    /// None that is counted: between steps, in a failing one, or in one without tasks.
    #[default]
    None,
    /// Tasks run.
    Tasks,
    /// Gradients are finished.
    Commit,
}

/// The usage of the step under way, of the newest that has ended, and of all.
#[derive(Debug, Default)]
pub(super) struct Account {
    part: Part,
    /// Until when the step's time has been charged.
    charged: Duration,
    /// Whether a model is divided in this step, whose time would say nothing about others.
    divides: bool,
    step: Usage,
    newest: Usage,
    total: Usage,
}

impl Account {
    pub(super) fn begin(&mut self, now: Duration) {
        *self = Self {
            part: Part::Tasks,
            charged: now,
            newest: std::mem::take(&mut self.newest),
            total: std::mem::take(&mut self.total),
            ..Self::default()
        };
    }

    pub(super) fn abandon(&mut self) {
        self.part = Part::None;
    }

    /// Time that has not been charged yet.
    fn take(&mut self, now: Duration) -> Duration {
        now.saturating_sub(std::mem::replace(&mut self.charged, now))
    }

    /// The step divides a model.
    pub(super) fn divides(&mut self) {
        self.divides = true;
    }

    /// A task has had the turn since it was given.
    pub(super) fn ran(&mut self, task: &CurrentTask, now: Duration) {
        if self.part == Part::Tasks {
            let time = self.take(now);
            self.step.ran(task.kind, task.phase, time);
        }
    }

    /// The main thread has had the turn.
    pub(super) fn ran_on_main(&mut self, now: Duration) {
        if self.part == Part::Tasks {
            let time = self.take(now);
            self.step.other += time;
        }
    }

    /// Nothing has run since the last charge; a message of `from` has ended that, or nobody's.
    pub(super) fn idled(&mut self, from: Option<Rank>, now: Duration) {
        if self.part == Part::Tasks {
            let time = self.take(now);
            match from.filter(|_| !time.is_zero()) {
                Some(rank) => *self.step.waiting.entry(rank).or_default() += time,
                None => self.step.overhead += time,
            }
        }
    }

    pub(super) fn end_tasks(&mut self, now: Duration) {
        if self.part == Part::Tasks {
            self.idled(None, now);
            self.part = Part::Commit;
        }
    }

    /// The step is over, and well. `ideal` is its schedule's bubble.
    pub(super) fn end(&mut self, ideal: Option<f64>, now: Duration) {
        if self.part == Part::Commit {
            let time = self.take(now);
            self.step.commit += time;
            self.newest = Usage::default();
            self.newest.add(&self.step, ideal);
            if !self.divides {
                self.total.add(&self.step, ideal);
            }
        }
        self.part = Part::None;
    }

    pub(super) fn sent(&mut self, bytes: u64) {
        self.step.sent_bytes += bytes;
    }

    pub(super) fn received(&mut self, bytes: u64) {
        self.step.received_bytes += bytes;
    }
}

impl Machine {
    /// Where the time of all steps went that ended well and divided no model.
    pub fn usage(&self) -> &Usage {
        &self.account.total
    }

    /// Where the time of the newest step went that has ended well.
    pub fn newest_usage(&self) -> &Usage {
        &self.account.newest
    }

    /// Messages were handed to the transport for so long.
    pub fn spent_sending(&mut self, time: Duration) {
        if self.account.part != Part::None {
            self.account.step.sending += time;
        }
    }
}
