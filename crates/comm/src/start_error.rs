//! Why a job did not start.

use std::fmt::Write as _;
use std::time::Duration;

use shardwright_core::Rank;

use crate::error::seconds;
use crate::secret::WeakSecret;

/// What of a rank has to equal rank 0's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// The library's version.
    Version,
    /// The number of ranks.
    World,
    /// The configuration.
    Configuration,
}

impl Agreement {
    fn noun(self) -> &'static str {
        match self {
            Self::Version => "library version",
            Self::World => "number of ranks",
            Self::Configuration => "configuration",
        }
    }
}

/// An error before the job was complete. The text goes to every rank.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Rank 0's port belongs to another process.
    #[error("rank 0 cannot listen on {address}: the port is in use by another process")]
    PortInUse {
        /// Host and port.
        address: String,
    },
    /// No listener on this address.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Host and port.
        address: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Rank 0 was not found.
    #[error("rank {own} did not reach rank 0 at {address} within {} s: {reason}", seconds(*waited))]
    Unreachable {
        /// This rank.
        own: Rank,
        /// Where rank 0 should be.
        address: String,
        /// For how long it tried.
        waited: Duration,
        /// What happened last.
        reason: String,
    },
    /// Rank 0 did not come to where the ranks of a host meet.
    #[error("waited {:.1} s for rank 0, which did not start", waited.as_secs_f64())]
    NoLeader {
        /// For how long.
        waited: Duration,
    },
    /// Where the ranks of a host are to meet, another process waits already.
    #[error(
        "process {process} of user {user} waits already where the ranks of this job are to meet: the job runs twice, or another one has the same MASTER_PORT"
    )]
    MeetingTaken {
        /// That process.
        process: i32,
        /// Its user.
        user: u32,
    },
    /// Where the ranks of a host are to meet, a process of another user waits.
    #[error(
        "a process of user {user} waits where the ranks of this job of user {own} are to meet; give the job another MASTER_PORT"
    )]
    ForeignMeeting {
        /// That user.
        user: u32,
        /// This process's.
        own: u32,
    },
    /// The other side does not know this rank's secret.
    #[error(
        "rank {other} did not prove the job's secret to rank {own}: the two were started with different secrets"
    )]
    WrongSecret {
        /// This rank.
        own: Rank,
        /// The other.
        other: Rank,
    },
    /// This rank was given too weak a secret.
    #[error("the job's secret {0}")]
    WeakSecret(#[from] WeakSecret),
    /// Ranks did not come.
    #[error("{} did not join the job within {} s{doubts}", list_ranks(ranks), seconds(*waited))]
    Missing {
        /// Which.
        ranks: Vec<Rank>,
        /// For how long rank 0 waited.
        waited: Duration,
        /// What is known of those who said to be these ranks and did not prove it; clauses, or nothing.
        doubts: String,
    },
    /// Two ranks differ in something they must agree about.
    #[error("rank 0 and rank {other} differ in {}: {}", what.noun(), differences(ours, *other, theirs))]
    Mismatch {
        /// In what.
        what: Agreement,
        /// The other rank.
        other: Rank,
        /// Rank 0's value.
        ours: String,
        /// The other's.
        theirs: String,
    },
    /// Two processes are the same rank.
    #[error("two processes joined as rank {rank}: {first} and {second}")]
    Duplicate {
        /// The rank.
        rank: Rank,
        /// One process.
        first: String,
        /// The other.
        second: String,
    },
    /// A rank outside the job, or a rank 0 that did not expect this one.
    #[error("rank {rank} is outside a job of {world} ranks")]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        world: u32,
    },
    /// Another rank found the job unable to start.
    #[error("{message}")]
    Refused {
        /// What it said.
        message: String,
    },
    /// A rank has not what a job needs.
    #[error("rank {rank} on host {host:?} {lacks}")]
    Lacking {
        /// Which.
        rank: Rank,
        /// Its host.
        host: String,
        /// What is missing, as the rest of the sentence.
        lacks: String,
    },
    /// A rank disappeared while the job was starting.
    #[error("rank {rank} was lost while the job was starting: {reason}")]
    Lost {
        /// Which.
        rank: Rank,
        /// How.
        reason: String,
    },
    /// The other side speaks another version of the handshake.
    #[error(
        "rank {other} speaks version {theirs} of the handshake, rank {own} version {ours}: they run different versions of the library"
    )]
    Handshake {
        /// This rank.
        own: Rank,
        /// The other.
        other: Rank,
        /// This rank's version.
        ours: u16,
        /// The other's.
        theirs: u16,
    },
    /// Starting was ended from outside, by a signal for example.
    #[error("starting the job was cancelled")]
    Cancelled,
    /// The system refused something.
    #[error("{what}: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        reason: String,
    },
}

fn list_ranks(ranks: &[Rank]) -> String {
    let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}

/// Of values of several lines, only the lines that differ.
fn differences(ours: &str, other: Rank, theirs: &str) -> String {
    if !ours.contains('\n') && !theirs.contains('\n') {
        return format!("rank 0 has {ours}, rank {other} has {theirs}");
    }
    let mut text = String::new();
    for (rank, mine, yours) in [(Rank(0), ours, theirs), (other, theirs, ours)] {
        let only: Vec<&str> = mine
            .lines()
            .filter(|line| !yours.lines().any(|yours| yours == *line))
            .collect();
        let only = if only.is_empty() {
            "nothing more".to_owned()
        } else {
            only.join(", ")
        };
        let separator = if text.is_empty() { "" } else { "; " };
        write!(text, "{separator}rank {rank} has {only}").expect("writing to a string cannot fail");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_long_it_took_is_told_in_tenths_of_a_second() {
        for (waited, told) in [(60_000_103, "60 s"), (300_052, "0.3 s"), (2_049_999, "2 s")] {
            let waited = Duration::from_micros(waited);
            let error = StartError::Missing {
                ranks: vec![Rank(1)],
                waited,
                doubts: String::new(),
            };
            let expected = format!("rank 1 did not join the job within {told}");
            assert_eq!(error.to_string(), expected);
            let error = crate::CommError::Timeout {
                rank: Rank(1),
                what: "answer".to_owned(),
                waited,
            };
            assert_eq!(
                error.to_string(),
                format!("no answer from rank 1 within {told}")
            );
        }
    }

    #[test]
    fn a_mismatch_names_only_the_lines_that_differ() {
        let error = StartError::Mismatch {
            what: Agreement::Configuration,
            other: Rank(2),
            ours: "microbatches=4\nseed=1".to_owned(),
            theirs: "microbatches=2\nseed=1".to_owned(),
        };
        assert_eq!(
            error.to_string(),
            "rank 0 and rank 2 differ in configuration: rank 0 has microbatches=4; rank 2 has microbatches=2"
        );
    }
}
