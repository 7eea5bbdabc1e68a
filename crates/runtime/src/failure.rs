//! How steps fail, and how the server is misused.

use shardwright_core::{MicrobatchId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_wire::{ErrorReport, Message, Phase, ResponseOutcome};

/// Which exception a failed step becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// This rank's own code raised; Python re-raises the original.
    Local,
    /// Another rank's code raised.
    Remote,
    /// A needed rank died, fell silent or left.
    PeerLost,
    /// Nothing in the job made progress for too long, or nothing can.
    Stall,
    /// Ranks called different step functions.
    StepMismatch,
    /// A module did not do what was recorded of it.
    Departure,
    /// Microbatches came to what a module keeps in another order than they have (EX-15).
    StateOrder,
    /// Something that modules keep was written where only microbatches one after another are exact.
    StateWrite,
}

impl FailureKind {
    /// The name under which the kind travels in a report's `kind`; `None` for exceptions of user code.
    pub fn wire_name(self) -> Option<&'static str> {
        match self {
            Self::Local | Self::Remote => None,
            Self::PeerLost => Some("PeerLostError"),
            Self::Stall => Some("StallError"),
            Self::StepMismatch => Some("StepMismatchError"),
            Self::Departure => Some("DepartureError"),
            Self::StateOrder => Some("StateOrderError"),
            Self::StateWrite => Some("StateWriteError"),
        }
    }

    fn of_remote(report: &ErrorReport) -> Self {
        [
            Self::PeerLost,
            Self::Stall,
            Self::StepMismatch,
            Self::Departure,
            Self::StateOrder,
            Self::StateWrite,
        ]
        .into_iter()
        .find(|kind| kind.wire_name() == Some(report.kind.as_str()))
        .unwrap_or(Self::Remote)
    }
}

/// How strong a reason for the end of a step is. The weaker ones end in running it again, unless a rank has a stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Strength {
    /// In another order of microbatches it may succeed.
    Order,
    /// Without predictions it may succeed, unless the job has departures end the step.
    Departure,
    /// It is the script's.
    Final,
}

/// Makes a report that names no rank of the job its sender's own: an error says of whom it comes.
pub(crate) fn attribute(message: &mut Message, from: Rank, host: &str, world: u32) {
    let report = match message {
        Message::Abort(abort) => &mut abort.error,
        Message::Response(response) => match &mut response.outcome {
            ResponseOutcome::Failed(report) => report,
            ResponseOutcome::Value(_) => return,
        },
        _ => return,
    };
    if report.rank.0 >= world {
        report.rank = from;
        host.clone_into(&mut report.host);
    }
}

/// Why a step failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What it becomes.
    pub kind: FailureKind,
    /// What and where it was.
    pub report: ErrorReport,
}

impl Failure {
    /// A failure that another rank reported.
    pub fn remote(report: ErrorReport) -> Self {
        Self {
            kind: FailureKind::of_remote(&report),
            report,
        }
    }

    /// How strong it is, on whichever rank it came up.
    pub fn strength(&self) -> Strength {
        strength_of(&self.report)
    }
}

/// How strong a reported failure is.
pub(crate) fn strength_of(report: &ErrorReport) -> Strength {
    match FailureKind::of_remote(report) {
        FailureKind::StateOrder | FailureKind::StateWrite => Strength::Order,
        FailureKind::Departure => Strength::Departure,
        _ => Strength::Final,
    }
}

/// An exception of this rank, as Python describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalError {
    /// The rank that failed and its host, when that is another one of which only this rank knows yet.
    pub origin: Option<(Rank, String)>,
    /// The module, when one was running.
    pub module: Option<String>,
    /// The microbatch, when one was running.
    pub microbatch: Option<MicrobatchId>,
    /// The phase, when a task was running.
    pub phase: Option<Phase>,
    /// The exception's type.
    pub kind: String,
    /// The exception's text.
    pub message: String,
    /// The traceback as text.
    pub traceback: String,
}

/// Why a call of the server did not do what it says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServerError {
    /// The step is being unwound: the caller's stack has to go.
    #[error("the step was aborted")]
    Aborted,
    /// The step has failed.
    #[error("rank {} failed: {}: {}", .0.report.rank, .0.report.kind, .0.report.message)]
    Failed(Box<Failure>),
    /// The call belongs inside a step.
    #[error("{call} was called outside a step")]
    NotInStep {
        /// The call.
        call: &'static str,
    },
    /// The call belongs elsewhere in a step's life.
    #[error("{call} was called while step {step} ({function}) is under way")]
    InStep {
        /// The call.
        call: &'static str,
        /// The step.
        step: StepEpoch,
        /// Its function.
        function: String,
    },
    /// Steps are numbered upwards.
    #[error("step {asked} was begun after step {newest}")]
    StaleStep {
        /// The number given.
        asked: StepEpoch,
        /// The newest number so far.
        newest: StepEpoch,
    },
    /// A step has at least one microbatch.
    #[error("step {step} was begun with no microbatches")]
    NoMicrobatches {
        /// The step.
        step: StepEpoch,
    },
    /// The server started no such worker.
    #[error("there is no worker {worker}")]
    UnknownWorker {
        /// The worker.
        worker: WorkerId,
    },
    /// Only the worker that has the turn may do this.
    #[error("worker {worker} called {call} without having the turn")]
    NotExecuting {
        /// The worker.
        worker: WorkerId,
        /// The call.
        call: &'static str,
    },
    /// Only a worker that runs a root task may do this.
    #[error("worker {worker} called await_backward outside a root task")]
    NotARootTask {
        /// The worker.
        worker: WorkerId,
    },
    /// No such request is under way, or its response has been taken.
    #[error("request {id} is not outstanding")]
    UnknownRequest {
        /// The request.
        id: RequestId,
    },
    /// No such request is being served, or it has its answer.
    #[error("request {id} of rank {requester} is not being served")]
    NotServed {
        /// Who asked.
        requester: Rank,
        /// The request.
        id: RequestId,
    },
    /// Only the root of a pipeline may do this.
    #[error("{call} was called on rank {rank}, which is not the root of its pipeline")]
    NotRoot {
        /// The call.
        call: &'static str,
        /// This rank.
        rank: Rank,
    },
    /// A request goes to a rank of the same pipeline.
    #[error("rank {rank} is not in this pipeline, which has ranks {pipeline:?}")]
    NotInPipeline {
        /// The rank.
        rank: Rank,
        /// The ranks of the pipeline.
        pipeline: Vec<u32>,
    },
}

#[cfg(test)]
mod tests {
    use shardwright_wire::Abort;

    use super::*;

    #[test]
    fn a_report_that_names_no_rank_of_the_job_is_its_senders() {
        let of = |rank| ErrorReport {
            rank: Rank(rank),
            host: "a".to_owned(),
            module: None,
            microbatch: None,
            phase: None,
            kind: "E".to_owned(),
            message: String::new(),
            traceback: String::new(),
        };
        for (named, expected) in [
            (0, (0, "a")),
            (3, (3, "a")),
            (4, (1, "b")),
            (u32::MAX, (1, "b")),
        ] {
            let (step, error) = (StepEpoch(1), of(named));
            let mut abort = Message::Abort(Box::new(Abort { step, error }));
            attribute(&mut abort, Rank(1), "b", 4);
            let Message::Abort(abort) = abort else {
                panic!("an abort");
            };
            assert_eq!((abort.error.rank.0, &*abort.error.host), expected);
        }
    }
}
