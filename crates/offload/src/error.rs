//! What goes wrong with a storage.

use std::path::PathBuf;

use shardwright_core::MicrobatchId;
use shardwright_system::Forked;

/// A tensor in messages: whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The rank.
    pub rank: u32,
    /// The module that was called.
    pub module: String,
    /// The microbatch.
    pub microbatch: MicrobatchId,
    /// The tensor's bytes.
    pub bytes: u64,
}

/// Why tensors cannot be offloaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OffloadError {
    /// No file can be made.
    #[error(
        "rank {rank} cannot make a file for {what} in {}: {reason}; set the configuration key \
         \"offload_directory\" to a directory on a fast disk in which it may write", directory.display()
    )]
    Directory {
        /// The rank.
        rank: u32,
        /// What would be in it.
        what: &'static str,
        /// Where.
        directory: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// A write or a read has failed.
    #[error(
        "rank {} could not {what} the activations of {} in microbatch {}: {} bytes at offset {offset} of its file in {}: \
         {reason}{}", subject.rank, subject.module, subject.microbatch, subject.bytes, directory.display(), advice(reason)
    )]
    Transfer {
        /// Whose tensor.
        subject: Subject,
        /// Write or read.
        what: &'static str,
        /// Where.
        directory: PathBuf,
        /// The place in the file.
        offset: u64,
        /// What the system says.
        reason: String,
    },
    /// A tensor of an optimizer's state gets no place in the file, or cannot be read from it.
    #[error(
        "rank {rank} could not {what} {bytes} bytes of the optimizer's state in its file in {}: {reason}{}",
        directory.display(), advice(reason)
    )]
    State {
        /// The rank.
        rank: u32,
        /// What could not be done.
        what: &'static str,
        /// How many bytes.
        bytes: usize,
        /// Where.
        directory: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// There is no memory for a tensor that comes back.
    #[error(
        "rank {}: there is no memory for the activations of {} in microbatch {}, {} bytes, which come back from the storage",
        subject.rank, subject.module, subject.microbatch, subject.bytes
    )]
    NoMemory {
        /// Whose tensor.
        subject: Subject,
    },
    /// The storage does not answer.
    #[error(
        "rank {rank} has waited {seconds} s for the storage of its offloaded activations ({storage}), which has moved \
         nothing meanwhile"
    )]
    Silent {
        /// The rank.
        rank: u32,
        /// For how long.
        seconds: u64,
        /// What it is.
        storage: String,
    },
    /// The thread that moves tensors cannot be started.
    #[error("rank {rank} cannot start the thread that moves offloaded activations: {reason}")]
    NoThread {
        /// The rank.
        rank: u32,
        /// What the system says.
        reason: String,
    },
    /// It is used after its end.
    #[error("the storage of offloaded activations is closed")]
    Closed,
    /// It is used in a forked child.
    #[error(transparent)]
    Forked(#[from] Forked),
}

fn advice(reason: &str) -> &'static str {
    if reason.contains("No space left") || reason.contains("quota") {
        "; free space there, or set the configuration key \"offload_directory\" to another disk"
    } else {
        ""
    }
}
