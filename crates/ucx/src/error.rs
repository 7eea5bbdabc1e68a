//! What can go wrong in the UCX layer, and what it reports.

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::endpoint::EndpointId;

/// An error of a UCX worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UcxError {
    /// A call of UCX failed.
    #[error("UCX could not {action}: {reason}")]
    Call {
        /// What was tried.
        action: &'static str,
        /// UCX's own words.
        reason: String,
    },
    /// A setting was refused.
    #[error("UCX does not take the setting {name}={value}: {reason}")]
    Setting {
        /// The setting, without the prefix `UCX_`.
        name: String,
        /// Its value.
        value: String,
        /// UCX's own words.
        reason: String,
    },
    /// The header is longer than UCX carries.
    #[error("a message header of {length} bytes is longer than UCX carries here ({limit} bytes)")]
    HeaderTooLong {
        /// Its bytes.
        length: usize,
        /// The most.
        limit: usize,
    },
    /// The endpoint failed or was abandoned before.
    #[error("the UCX endpoint to rank {peer} is closed")]
    EndpointClosed {
        /// The other side.
        peer: Rank,
    },
    /// This worker made no such endpoint.
    #[error("UCX endpoint {} was not made by this worker", endpoint.0)]
    NoSuchEndpoint {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// A rank told a place without the key that its messages must carry.
    #[error("rank {peer} told no key for its UCX worker")]
    NoKey {
        /// The rank.
        peer: Rank,
    },
    /// No transport of both sides leads from one to the other.
    #[error("UCX has no way to rank {peer}")]
    Unreachable {
        /// The other side.
        peer: Rank,
    },
    /// The worker was closed.
    #[error("the UCX worker is closed")]
    Closed,
    /// This is a forked child of the worker's process.
    #[error("the UCX worker belongs to another process, of which this one is a forked child")]
    Forked,
}

/// What happened on a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEvent {
    /// A message.
    Received {
        /// Who says to have sent it.
        from: Rank,
        /// Its header.
        header: Vec<u8>,
        /// Its payload's pieces, one after another.
        payload: Buffer,
    },
    /// A message that was not taken; nothing was allocated for it.
    Refused {
        /// Who says to have sent it.
        from: Rank,
        /// Why.
        refusal: ReceiveRefusal,
    },
    /// A message that was announced and did not arrive.
    ReceiveFailed {
        /// Who says to have sent it.
        from: Rank,
        /// Why.
        reason: String,
    },
    /// A message was handed over; its memory is free.
    Sent {
        /// The sender's own name for it.
        token: u64,
    },
    /// A message will not arrive, as far as is known.
    SendFailed {
        /// The sender's own name for it.
        token: u64,
        /// Why.
        reason: String,
    },
    /// A connection failed, and is closed.
    EndpointFailed {
        /// Which.
        endpoint: EndpointId,
        /// To whom.
        peer: Rank,
        /// Why.
        reason: String,
    },
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveRefusal {
    /// Its payload is longer than the worker's limit.
    #[error("a part of {length} bytes, at most {limit} are allowed")]
    TooLong {
        /// Its bytes.
        length: usize,
        /// The most.
        limit: usize,
    },
    /// There is no memory for it.
    #[error("there is no memory for a tensor of {length} bytes")]
    NoMemory {
        /// Its bytes.
        length: usize,
    },
    /// Its sender has announced too much at once.
    #[error("{bytes} bytes announced at once, in {parts} parts and another")]
    TooMuch {
        /// Its parts under way.
        parts: usize,
        /// Their bytes, with this one's.
        bytes: usize,
    },
}
