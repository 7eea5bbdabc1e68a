//! What can go wrong between ranks, by what the caller can do about it.

use std::time::Duration;

use shardwright_core::Rank;
use shardwright_system::Forked;
use shardwright_wire::ErrorReport;

use crate::transport::Loss;

/// A duration in seconds as errors tell it: with a tenth, where that says something.
pub(crate) fn seconds(waited: Duration) -> f64 {
    (waited.as_secs_f64() * 10.0).round() / 10.0
}

/// An error of a connected job.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommError {
    /// The other rank is gone.
    #[error("rank {rank} {}", describe_loss(loss))]
    PeerLost {
        /// The rank.
        rank: Rank,
        /// How it was lost.
        loss: Loss,
    },
    /// The connection was closed here.
    #[error("the connection to the job is closed")]
    Closed,
    /// No such rank, or this rank itself.
    #[error("rank {rank} is not a peer of rank {own} in a job of {world} ranks")]
    NotAPeer {
        /// The rank.
        rank: Rank,
        /// This rank.
        own: Rank,
        /// The number of ranks.
        world: u32,
    },
    /// The message breaks a limit of the format.
    #[error("the message for rank {rank} cannot be sent: {reason}")]
    Unsendable {
        /// The receiver.
        rank: Rank,
        /// The limit.
        reason: String,
    },
    /// The peer is alive and takes nothing.
    #[error("rank {rank} has taken none of {queued} queued messages for {} s", waited.as_secs())]
    Backlog {
        /// The receiver.
        rank: Rank,
        /// How many messages wait.
        queued: usize,
        /// For how long.
        waited: Duration,
    },
    /// More objects arrived from a rank than may wait.
    #[error(
        "more than {capacity} objects (or {capacity_bytes} bytes of them) from rank {rank} wait without being received; there was no room for one on channel {channel:?}"
    )]
    Overflow {
        /// The sender.
        rank: Rank,
        /// The channel of the first that had no room.
        channel: String,
        /// How many may wait.
        capacity: usize,
        /// How many bytes of tensors they may have.
        capacity_bytes: u64,
    },
    /// What was waited for did not come in time.
    #[error("no {what} from rank {rank} within {} s", seconds(*waited))]
    Timeout {
        /// The rank waited for.
        rank: Rank,
        /// What was waited for.
        what: String,
        /// For how long.
        waited: Duration,
    },
    /// Waiting was ended from outside, by a signal for example.
    #[error("waiting was cancelled")]
    Cancelled,
    /// The job failed elsewhere while waiting.
    #[error("rank {} failed: {}: {}", report.rank, report.kind, report.message)]
    Interrupted {
        /// What failed.
        report: Box<ErrorReport>,
    },
    /// The process was forked; the connection belongs to its parent.
    #[error(transparent)]
    Forked(#[from] Forked),
}

/// A loss, as the rest of a sentence that begins with the rank.
pub fn describe_loss(loss: &Loss) -> String {
    match loss {
        Loss::Died => "died: its connection ended without a shutdown notice".to_owned(),
        Loss::Silent { seconds } => {
            format!("has been silent for {seconds} s: it is frozen or unreachable")
        }
        Loss::Left(None) => "has left the job".to_owned(),
        Loss::Left(Some(report)) => {
            format!(
                "has left the job after an error: {}: {}",
                report.kind, report.message
            )
        }
        Loss::Broken { reason } => format!("sent something unreadable: {reason}"),
    }
}
