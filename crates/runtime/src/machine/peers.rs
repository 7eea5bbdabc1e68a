//! Peers that die, fall silent or leave, and when that matters (EX-10).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use shardwright_comm::{Loss, describe_loss};
use shardwright_core::{Rank, StepEpoch};
use shardwright_wire::{ErrorReport, Heartbeat, Phase};

use super::{Machine, Stage};
use crate::failure::{Failure, FailureKind, ServerError};

/// How long a rank that has left in good order may still be part of a collective under way:
/// what it had to send lies in the network, so its partners end soon if it did its part.
const COLLECTIVE_GRACE: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Peers {
    lost: BTreeMap<Rank, (Loss, Duration)>,
    heartbeats: BTreeMap<Rank, Heartbeat>,
    /// The newest step of which each rank has sent a message.
    steps: BTreeMap<Rank, StepEpoch>,
}

impl Peers {
    pub(super) fn is_lost(&self, rank: Rank) -> bool {
        self.lost.contains_key(&rank)
    }

    /// A rank has sent a message of a step.
    pub(super) fn heard_in(&mut self, rank: Rank, step: StepEpoch) {
        let newest = self.steps.entry(rank).or_insert(step);
        *newest = step.max(*newest);
    }

    /// Whether a rank is known to have entered a step.
    fn entered(&self, rank: Rank, step: StepEpoch) -> bool {
        let by_message = self.steps.get(&rank).is_some_and(|newest| *newest >= step);
        let by_heartbeat = self
            .heartbeats
            .get(&rank)
            .is_some_and(|heartbeat| heartbeat.step >= step.0);
        by_message || by_heartbeat
    }

    pub(super) fn heartbeat_of(&self, rank: Rank) -> Option<&Heartbeat> {
        self.heartbeats.get(&rank)
    }
}

impl Machine {
    pub(super) fn require_in_pipeline(&self, rank: Rank) -> Result<(), ServerError> {
        if self.config.pipeline.contains(&rank) {
            return Ok(());
        }
        let pipeline = self.config.pipeline.iter().map(|rank| rank.0).collect();
        Err(ServerError::NotInPipeline { rank, pipeline })
    }

    /// A peer is gone.
    pub fn peer_lost(&mut self, rank: Rank, loss: Loss, now: Duration) {
        let needed = match self.stage {
            Stage::Running | Stage::Ending => {
                !matches!(loss, Loss::Left(None)) || self.still_needs(rank)
            }
            Stage::Committing => !matches!(loss, Loss::Left(None)),
            Stage::Outside | Stage::Aborting(_) | Stage::Failed(_) => false,
        };
        let failure = self.lost_failure(rank, &loss);
        self.peers.lost.entry(rank).or_insert((loss, now));
        if needed {
            self.fail_with(failure, true, now);
        }
    }

    /// A peer's heartbeat: its work is progress for everybody (EX-8).
    pub fn heartbeat(&mut self, rank: Rank, heartbeat: Heartbeat, now: Duration) {
        let moved =
            self.peers.heartbeats.get(&rank).is_none_or(|last| {
                last.progress != heartbeat.progress || last.step != heartbeat.step
            });
        if moved || heartbeat.executing || heartbeat.sending {
            self.stall.job_progress(now);
        }
        self.peers.heartbeats.insert(rank, heartbeat);
    }

    /// Whether a rank that leaves in good order leaves too early for the step that runs.
    ///
    /// The root needs its peers until it has ended the step, and they need it until they know
    /// that it has; a peer that left after the root's word is not missed by the other peers.
    fn still_needs(&self, rank: Rank) -> bool {
        self.config.pipeline.contains(&rank)
            && (self.is_root()
                || (rank == self.root_rank() && self.end_body.is_none())
                || self
                    .outstanding
                    .values()
                    .any(|request| request.to == rank && request.response.is_none()))
    }

    /// The failure of a step that asks something of a rank that is gone.
    pub(super) fn departed_peer(&self, rank: Rank) -> Option<Failure> {
        self.peers
            .lost
            .get(&rank)
            .map(|(loss, _)| self.lost_failure(rank, loss))
    }

    /// The failure of a step that needs, from its beginning, a rank that is gone: any of its
    /// pipeline, or any of the job that did not leave in good order. Of several the one that was
    /// gone first, for whose sake the others may have left.
    pub(super) fn departed_at_entry(&self) -> Option<Failure> {
        let missed = self.peers.lost.iter().filter(|(rank, (loss, _))| {
            self.config.pipeline.contains(rank) || !matches!(loss, Loss::Left(None))
        });
        let (rank, (loss, _)) = missed.min_by_key(|(_, (_, since))| *since)?;
        Some(self.lost_failure(*rank, loss))
    }

    pub(super) fn departed_from_collective(
        &self,
        needed: &[Rank],
        now: Duration,
    ) -> Option<Failure> {
        needed.iter().find_map(|rank| {
            let (loss, since) = self.peers.lost.get(rank)?;
            (now.saturating_sub(*since) >= COLLECTIVE_GRACE).then(|| self.lost_failure(*rank, loss))
        })
    }

    fn lost_failure(&self, rank: Rank, loss: &Loss) -> Failure {
        // Of several requests, the one that it serves first, for that is what it was most likely at.
        let awaited = self
            .outstanding
            .values()
            .filter(|request| request.to == rank && request.response.is_none())
            .min_by_key(|request| (request.phase != Some(Phase::Backward), request.microbatch));
        let report = match loss {
            Loss::Left(Some(report)) => Some(report.as_ref()),
            Loss::Left(None) | Loss::Died | Loss::Silent { .. } | Loss::Broken { .. } => None,
        };
        let mut message = format!(
            "rank {rank} {}; {} needs it",
            describe_loss(loss),
            self.step_text()
        );
        // What was asked of a rank that is not known to have entered the step is not what it was at.
        let entered = self.peers.entered(rank, self.plan.step);
        if let Some(request) = awaited.filter(|_| !entered) {
            let phase = request.phase.map_or("work", Phase::name);
            let module = request
                .module
                .map(|module| format!(" of {:?}", self.module_name(request.model, module)));
            write!(
                message,
                ": nothing has been heard from it in this step, and {phase}{} in microbatch {} was asked of it",
                module.unwrap_or_default(),
                request.microbatch,
            )
            .expect("writing to a string cannot fail");
        }
        let awaited = awaited.filter(|_| entered);
        let kind = FailureKind::PeerLost;
        let report = ErrorReport {
            rank,
            host: self.host(rank),
            module: report.and_then(|report| report.module.clone()).or_else(|| {
                let request = awaited?;
                Some(self.module_name(request.model, request.module?))
            }),
            microbatch: report
                .and_then(|report| report.microbatch)
                .or(awaited.map(|request| request.microbatch)),
            phase: report
                .and_then(|report| report.phase)
                .or(awaited.and_then(|request| request.phase)),
            kind: kind
                .wire_name()
                .expect("a lost peer's failure has a name")
                .to_owned(),
            message,
            traceback: report
                .map(|report| report.traceback.clone())
                .unwrap_or_default(),
        };
        Failure { kind, report }
    }
}
