//! The commit of simulated ranks: what each of them prepares, and their vote, as `model/vote.py` has it.

use shardwright_core::{Rank, StepEpoch};

use super::simulation::{Main, RankSimulation, Simulation};
use crate::{FailureKind, LocalError, ServerError};

impl RankSimulation {
    /// The step is over for this rank.
    pub(super) fn end(&mut self, end: Result<(), FailureKind>) {
        self.main = Main::Away;
        self.ended = Some(end);
    }
}

impl Simulation {
    /// Whether the failure that is to come comes in this operation.
    pub(super) fn fails_now(&mut self, rank: usize) -> bool {
        match self.fail_after {
            Some(0) => {
                self.fail_after = None;
                self.failed_by = Some(rank);
                true
            }
            Some(left) => {
                self.fail_after = Some(left - 1);
                false
            }
            None => false,
        }
    }

    /// A rank finishes its gradients, runs its hooks, and votes, unless they fail.
    pub(super) fn vote(&mut self, rank: usize) {
        if self.fails_now(rank) {
            let simulated = &mut self.ranks[rank];
            simulated.machine.fail(None, raised(), self.now);
            simulated.end(Err(FailureKind::Local));
            self.settle(rank);
            return;
        }
        let step = self.ranks[rank].machine.newest_step();
        let others = (0..self.ranks.len()).filter(|other| *other != rank);
        self.ballots.extend(others.map(|other| (rank, other, step)));
        self.ranks[rank].main = Main::AwaitsVotes;
    }

    /// A rank looks whether it has the votes of all others, and else whether they can still come.
    pub(super) fn await_votes(&mut self, rank: usize) {
        let now = self.now;
        let step = self.ranks[rank].machine.newest_step();
        let missing = self.missing_vote(rank, step);
        let simulated = &mut self.ranks[rank];
        let Some(missing) = missing else {
            simulated.machine.leave_step(now).unwrap();
            simulated.end(Ok(()));
            assert_eq!(simulated.machine.stats().live_requests, 0, "EX-7");
            // A rank that is lost after its vote fails the step for those who hear of it before they have left.
            if self.dead.is_none() {
                assert_eq!(
                    simulated.machine.newest_usage().total(),
                    now.saturating_sub(simulated.entered),
                    "all of a step's time is charged, once"
                );
            }
            return;
        };
        match simulated.machine.check_abort(step, &[], now) {
            Ok(()) if self.dead == Some(missing) && !self.untold.contains(&rank) => {
                let error = LocalError {
                    origin: Some((Rank(missing as u32), format!("host{missing}"))),
                    kind: "PeerLostError".to_owned(),
                    ..LocalError::default()
                };
                simulated.machine.fail(None, error, now);
                simulated.end(Err(FailureKind::PeerLost));
            }
            Ok(()) => {}
            Err(ServerError::Failed(failure)) => simulated.end(Err(failure.kind)),
            Err(other) => panic!("{other}"),
        }
        self.settle(rank);
    }

    /// A rank whose vote for a step has not come to this one.
    fn missing_vote(&self, rank: usize, step: StepEpoch) -> Option<usize> {
        let votes = &self.ranks[rank].votes;
        (0..self.ranks.len()).find(|other| *other != rank && !votes.contains(&(*other, step)))
    }
}

/// An exception of a script.
pub(super) fn raised() -> LocalError {
    LocalError {
        kind: "ValueError".to_owned(),
        ..LocalError::default()
    }
}
