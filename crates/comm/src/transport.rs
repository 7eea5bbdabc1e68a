//! The two traits between those who move messages and those who use them.
//!
//! - CM-1: no send waits for its receiver to ask for anything.
//! - CM-2: messages between two ranks arrive in the order of sending; there is
//!   no order between different pairs.
//! - CM-3: every lost peer is reported once, and nothing of it is delivered afterwards.
//! - CM-4: after `close` has returned, the receiver is not called again.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Heartbeat, Message};

use crate::counters::{ByReason, ByRoute};
use crate::error::CommError;

/// How a peer was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Its connection ended without a shutdown notice.
    Died,
    /// Not a byte came from it for this long.
    Silent {
        /// For how long.
        seconds: u64,
    },
    /// It sent a shutdown notice, with an error when it leaves because of one.
    Left(Option<Box<ErrorReport>>),
    /// It sent something that cannot be read.
    Broken {
        /// What was wrong.
        reason: String,
    },
}

/// Where a rank lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// The rank.
    pub rank: Rank,
    /// Its host's name.
    pub host: String,
    /// Its process id.
    pub pid: u32,
}

/// Counters since the start of the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommStats {
    /// Messages handed to the network.
    pub messages_sent: u64,
    /// Messages taken from the network.
    pub messages_received: u64,
    /// Bytes handed to the network, headers and heartbeats included.
    pub bytes_sent: u64,
    /// Bytes taken from the network, headers and heartbeats included.
    pub bytes_received: u64,
    /// Connections dropped because they did not prove the job's secret.
    pub unknown_peers_dropped: u64,
    /// Bytes of the persistent buffer that are in use here, or that ranks of this host hold.
    pub buffer_used_bytes: u64,
    /// Bytes of the persistent buffer on this rank's device, once it is used.
    pub device_buffer_bytes: u64,
    /// Bytes of host memory that are locked for copies to and from the device.
    pub locked_bytes: u64,
    /// What each route carried.
    pub by_route: ByRoute,
    /// Why tensors were sent by the routes they took.
    pub by_reason: ByReason,
}

/// What a waiting thread sees when it looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// What it waits for is there.
    Done,
    /// It is not, and this rank has nothing else to do: the processor is free for looking again at once.
    Idle,
    /// It is not, and another thread of this rank computes, from which looking would take the processor.
    Busy,
}

/// A rank's connection to the other ranks of its job.
///
/// A message's tensors travel apart from its control part, so that a transport
/// may move them by other means.
pub trait Transport: Send + Sync {
    /// This rank.
    fn rank(&self) -> Rank;

    /// The number of ranks.
    fn world(&self) -> u32;

    /// Queues a message (CM-1). An error means that it will not arrive.
    fn send(&self, to: Rank, message: Message) -> Result<(), CommError>;

    /// Like [`Self::send`], by a thread that may be called back: where the transport finds messages that have
    /// arrived meanwhile, it delivers them in this thread.
    fn send_and_read(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.send(to, message)
    }

    /// An error when a rank is known not to hear any more.
    fn check(&self, _to: Rank) -> Result<(), CommError> {
        Ok(())
    }

    /// Breaks all connections, as the end of the process would.
    #[cfg(test)]
    fn vanish(&self) {
        unimplemented!("no test has this rank die")
    }

    /// Where a rank lives; `None` for a rank outside the job.
    fn peer(&self, rank: Rank) -> Option<&PeerInfo>;

    /// The state that this rank's heartbeats report.
    fn heartbeat_state(&self) -> &Arc<HeartbeatState>;

    /// Lets the calling thread, which waits, receive by itself until it sees [`Observation::Done`] or for `slice`:
    /// deliveries then happen in this thread, and nobody has to wake it. `false`, at once, where
    /// the transport has no such way or another thread does it already.
    fn read_until(&self, _slice: Duration, _look: &mut dyn FnMut() -> Observation) -> bool {
        false
    }

    /// Lets the thread in [`Self::read_until`] look again.
    fn wake_reader(&self) {}

    /// Sends everybody a shutdown notice after what is queued, and ends all threads,
    /// within a few seconds. A second call does nothing.
    fn close(&self, report: Option<ErrorReport>);

    /// By what a rank is reached, in a word or two for people.
    fn reached_by(&self, _rank: Rank) -> Cow<'static, str> {
        Cow::Borrowed("memory of this process")
    }

    /// How this rank's device stands to another's, in words for people.
    fn devices(&self, _rank: Rank) -> Cow<'static, str> {
        Cow::Borrowed("not used")
    }

    /// The counters.
    fn stats(&self) -> CommStats;
}

/// Takes what arrives. Called on the transport's threads, and on threads in [`Transport::read_until`] and
/// [`Transport::send_and_read`]: it returns quickly, and calls of different peers may overlap.
pub trait Receiver: Send + Sync {
    /// A message. ([`Message::ShutdownNotice`] comes as [`Loss::Left`] instead.)
    fn deliver(&self, from: Rank, message: Message);

    /// A peer is gone (CM-3).
    fn peer_lost(&self, from: Rank, loss: Loss);

    /// A peer's heartbeat.
    fn heartbeat(&self, from: Rank, heartbeat: Heartbeat);
}

/// What this rank's heartbeats say; written by the runtime, read by the transport.
#[derive(Debug, Default)]
pub struct HeartbeatState {
    step: AtomicU64,
    executing: AtomicBool,
    progress: AtomicU64,
}

impl HeartbeatState {
    /// Enters a step.
    pub fn enter_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Says whether a worker is executing.
    pub fn set_executing(&self, executing: bool) {
        self.executing.store(executing, Ordering::Relaxed);
    }

    /// Counts a finished task.
    pub fn advance(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// The state now.
    pub fn heartbeat(&self, sending: bool) -> Heartbeat {
        Heartbeat {
            step: self.step.load(Ordering::Relaxed),
            executing: self.executing.load(Ordering::Relaxed),
            sending,
            progress: self.progress.load(Ordering::Relaxed),
        }
    }
}
