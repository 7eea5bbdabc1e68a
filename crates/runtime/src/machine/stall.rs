//! Waits are reported, and end when the whole job stands still (EX-8).

use std::fmt::Write;
use std::time::Duration;

use shardwright_core::{ModelId, ModuleId, WorkerId};
use shardwright_wire::Phase;

use super::dispatch::Turn;
use super::workers::WorkerState;
use super::{Machine, Stage};
use crate::failure::FailureKind;

/// So many microbatches that wait are described, and the others are counted.
const DESCRIBED_WAITS: usize = 3;

#[derive(Debug, Default)]
pub(super) struct StallWatch {
    /// The last progress on this rank.
    here: Duration,
    /// The last progress anywhere in the job.
    anywhere: Duration,
    /// After how many reporting intervals the next report is due.
    next_report: u32,
    report: Option<String>,
}

impl StallWatch {
    pub(super) fn begin(&mut self, now: Duration) {
        self.report = None;
        self.progress(now);
    }

    pub(super) fn progress(&mut self, now: Duration) {
        self.here = now;
        self.anywhere = now;
        self.next_report = 1;
    }

    pub(super) fn job_progress(&mut self, now: Duration) {
        self.anywhere = now;
    }

    /// When this rank made progress last.
    pub(super) fn last_here(&self) -> Duration {
        self.here
    }

    /// For how long nothing in the job has made progress.
    pub(super) fn quiet(&self, now: Duration) -> Duration {
        now.saturating_sub(self.anywhere)
    }

    pub(super) fn take_report(&mut self) -> Option<String> {
        self.report.take()
    }

    pub(super) fn has_report(&self) -> bool {
        self.report.is_some()
    }
}

impl Machine {
    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        if !matches!(self.stage, Stage::Running) {
            return;
        }
        if matches!(self.turn, Turn::Worker(_)) || !self.main_blocked {
            self.stall.progress(now);
            return;
        }
        let quiet = now.saturating_sub(self.stall.here);
        if quiet >= self.config.stall_report * self.stall.next_report {
            // Reports of one wait come after 1, 2, 4, ... intervals.
            self.stall.next_report = self.stall.next_report.saturating_mul(2);
            let text = format!("{}: {}", self.step_text(), self.waits_text(now));
            self.stall.report = Some(text);
        }
        let quiet = self.stall.quiet(now);
        if quiet >= self.config.stall_timeout {
            let message = format!(
                "nothing in the job has made progress for {:.1} s in {}; {}",
                quiet.as_secs_f64(),
                self.step_text(),
                self.waits_text(now),
            );
            let failure = self.own_failure(FailureKind::Stall, "StallError", message, None);
            self.fail_with(failure, true, now);
            return;
        }
        self.check_held(now);
    }

    /// The step, for messages: `step 7 (train_step)`.
    pub(super) fn step_text(&self) -> String {
        format!("step {} ({})", self.plan.step, self.plan.function)
    }

    /// A module's name, or its number where Python has not named it.
    pub fn module_name(&self, model: ModelId, module: ModuleId) -> String {
        self.names
            .get(&model)
            .and_then(|names| names.get(module.0 as usize))
            .cloned()
            .unwrap_or_else(|| format!("module {module} of model {model}"))
    }

    /// Who waits for whom on this rank.
    pub(super) fn waits_text(&self, now: Duration) -> String {
        let mut text = format!(
            "rank {} on host {:?}",
            self.config.rank,
            self.host(self.config.rank)
        );
        let mut waits = 0_usize;
        for (index, worker) in self
            .workers
            .iter()
            .enumerate()
            .filter(|(_, worker)| worker.is_pending())
        {
            let separator = if waits == 0 { ':' } else { ';' };
            waits += 1;
            if waits > DESCRIBED_WAITS {
                continue;
            }
            let id = WorkerId(index as u32);
            let seconds = now.saturating_sub(worker.since).as_secs_f64();
            let microbatch = worker
                .task
                .map(|task| task.microbatch.0)
                .unwrap_or_default();
            write_to(
                &mut text,
                format_args!(
                    "{separator} microbatch {microbatch} (worker {id}) has waited {seconds:.1} s for "
                ),
            );
            match worker.state {
                WorkerState::AwaitsBackward => text.push_str("its turn to run backward"),
                WorkerState::AwaitsState { key, open: false } => {
                    text.push_str(&self.state_wait_text(id, key));
                }
                _ => self.write_awaited(&mut text, id),
            }
        }
        if waits > DESCRIBED_WAITS {
            let more = waits - DESCRIBED_WAITS;
            write_to(
                &mut text,
                format_args!("; more microbatches that wait: {more}"),
            );
        }
        if waits == 0 {
            let waited = now.saturating_sub(self.stall.here).as_secs_f64();
            let root = self.root_rank();
            if self.is_root() {
                write_to(
                    &mut text,
                    format_args!(" has had nothing to run for {waited:.1} s"),
                );
            } else if self.begun {
                write_to(
                    &mut text,
                    format_args!(" has waited {waited:.1} s for requests; the root is rank {root}"),
                );
            } else {
                write_to(
                    &mut text,
                    format_args!(
                        " has waited {waited:.1} s for rank {root}, the root, to enter the step"
                    ),
                );
            }
            self.write_heartbeat(&mut text, root);
        }
        if self.order.is_some() {
            text.push(';');
            text += &self.order_text();
        }
        text
    }

    /// What this rank does at the moment, whatever that is, for a picture of the job.
    pub fn describe(&self, now: Duration) -> String {
        let rank = self.config.rank;
        let place = format!("rank {rank} on host {:?}", self.host(rank));
        match &self.stage {
            Stage::Outside if self.plan.step.0 == 0 => format!("{place} is before its first step"),
            Stage::Outside => format!("{place} is between steps, after {}", self.step_text()),
            Stage::Committing => {
                format!("{place} finishes the gradients of {}", self.step_text())
            }
            Stage::Aborting(_) | Stage::Failed(_) => {
                format!("{place} leaves {}, which has failed", self.step_text())
            }
            Stage::Running | Stage::Ending => {
                format!("{}: {}", self.step_text(), self.activity_text(&place, now))
            }
        }
    }

    /// What other ranks were last heard to do; nothing of a rank that never was.
    pub fn last_heartbeat(&self, rank: shardwright_core::Rank) -> String {
        let mut text = String::new();
        self.write_heartbeat(&mut text, rank);
        text.trim_start().to_owned()
    }

    fn activity_text(&self, place: &str, now: Duration) -> String {
        let Turn::Worker(worker) = self.turn else {
            return self.waits_text(now);
        };
        let slot = &self.workers[worker.0 as usize];
        let seconds = now.saturating_sub(slot.since).as_secs_f64();
        let running = slot.task.map_or_else(
            || format!("worker {worker} has begun {seconds:.1} s ago"),
            |task| {
                let phase = task.phase.name();
                let module = match (task.model, task.module) {
                    (Some(model), Some(module)) => self.module_name(model, module),
                    _ => "the step function".to_owned(),
                };
                let microbatch = task.microbatch;
                format!(
                    "microbatch {microbatch} (worker {worker}) has run {phase} of {module} for {seconds:.1} s"
                )
            },
        );
        if self
            .workers
            .iter()
            .any(super::workers::WorkerSlot::is_pending)
        {
            format!("{}; {running}", self.waits_text(now))
        } else {
            format!("{place}: {running}")
        }
    }

    fn write_awaited(&self, text: &mut String, worker: WorkerId) {
        let mut first = true;
        for (id, request) in self
            .outstanding
            .iter()
            .filter(|(_, request)| request.waits(worker))
        {
            let separator = if first { "" } else { " and " };
            first = false;
            let phase = match request.phase {
                Some(Phase::Forward) => "forward of ",
                Some(Phase::Backward) => "backward of ",
                None => "a control request",
            };
            let module = request
                .module
                .map(|module| self.module_name(request.model, module))
                .unwrap_or_default();
            write_to(
                text,
                format_args!(
                    "{separator}rank {} to answer request {id} ({phase}{module})",
                    request.to
                ),
            );
            self.write_heartbeat(text, request.to);
        }
        if first {
            text.push_str("its turn");
        }
    }

    fn write_heartbeat(&self, text: &mut String, rank: shardwright_core::Rank) {
        if let Some(heartbeat) = self.peers.heartbeat_of(rank) {
            let state = if heartbeat.executing {
                "executing"
            } else {
                "waiting"
            };
            write_to(
                text,
                format_args!(
                    " [last heard: {state} in step {}, {} tasks done]",
                    heartbeat.step, heartbeat.progress
                ),
            );
        }
    }
}

fn write_to(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments)
        .expect("writing to a string does not fail");
}
