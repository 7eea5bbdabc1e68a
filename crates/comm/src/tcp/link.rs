//! One peer's connection: a thread that reads, a thread that writes.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender};
use shardwright_core::Rank;
use shardwright_wire::codec::heartbeat_frame;
use shardwright_wire::{Frame, Limits, Message};

use super::connection::Connection;
use super::stream::{Counted, ReadError, Received, read_frame, write_frame};
use crate::exchange::Exchange;
use crate::transport::{HeartbeatState, Loss, Receiver};

/// What the links of a rank share.
pub(super) struct Hub {
    pub(super) receiver: Arc<dyn Receiver>,
    pub(super) heartbeat_state: Arc<HeartbeatState>,
    pub(super) limits: Limits,
    pub(super) exchange: Arc<Exchange>,
    pub(super) liveness: Duration,
    pub(super) closing: AtomicBool,
    pub(super) messages_sent: AtomicU64,
    pub(super) messages_received: AtomicU64,
    pub(super) bytes_sent: AtomicU64,
}

/// A connection to one peer.
pub(super) struct Link {
    pub(super) peer: Rank,
    pub(super) connection: Connection,
    pub(super) bytes_received: AtomicU64,
    queue: Mutex<Option<Sender<Frame>>>,
    loss: Mutex<Option<Loss>>,
}

impl Link {
    pub(super) fn new(peer: Rank, connection: Connection, queue: Sender<Frame>) -> Self {
        Self {
            peer,
            connection,
            bytes_received: AtomicU64::new(0),
            queue: Mutex::new(Some(queue)),
            loss: Mutex::new(None),
        }
    }

    pub(super) fn queue(&self) -> Option<Sender<Frame>> {
        lock(&self.queue).clone()
    }

    /// Nothing more is queued; the writer ends when it has written the rest.
    pub(super) fn close_queue(&self) {
        lock(&self.queue).take();
    }

    pub(super) fn loss(&self) -> Option<Loss> {
        lock(&self.loss).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reader's loop: ends when the peer is lost (CM-3).
pub(super) fn read_all(hub: &Hub, link: &Link) {
    let mut stream = Counted::new(&link.connection, &link.bytes_received, hub.liveness);
    let loss = loop {
        stream.begin_frame();
        match read_frame(&mut stream, link.peer, &hub.limits, &hub.exchange) {
            Ok(Received::Message(Message::ShutdownNotice(report))) => break Loss::Left(report),
            Ok(Received::Message(message)) => {
                hub.messages_received.fetch_add(1, Ordering::Relaxed);
                if !hub.closing.load(Ordering::SeqCst) {
                    hub.receiver.deliver(link.peer, message);
                }
            }
            Ok(Received::Heartbeat(heartbeat)) => {
                if !hub.closing.load(Ordering::SeqCst) {
                    hub.receiver.heartbeat(link.peer, heartbeat);
                }
            }
            Err(error) => break loss_of(error, hub.liveness),
        }
    };
    *lock(&link.loss) = Some(loss.clone());
    link.close_queue();
    link.connection.shut();
    if !hub.closing.load(Ordering::SeqCst) {
        hub.receiver.peer_lost(link.peer, loss);
    }
    hub.exchange.lost(link.peer);
}

fn loss_of(error: ReadError, liveness: Duration) -> Loss {
    match error {
        ReadError::Io(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Loss::Silent {
                seconds: liveness.as_secs(),
            },
            // What an encrypted connection cannot open.
            io::ErrorKind::InvalidData => Loss::Broken {
                reason: error.to_string(),
            },
            _ => Loss::Died,
        },
        error @ (ReadError::Codec(_) | ReadError::Shared(_) | ReadError::NoMemory(_)) => {
            Loss::Broken {
                reason: error.to_string(),
            }
        }
    }
}

/// The writer's loop: ends when the queue is closed and empty, or the connection breaks.
pub(super) fn write_all(hub: &Hub, link: &Link, queue: &crossbeam_channel::Receiver<Frame>) {
    // A peer must hear from this rank four times within the time after which it gives it up (TCP-2).
    let interval = (hub.liveness / 4).min(Duration::from_secs(1));
    let mut next_heartbeat = Instant::now();
    loop {
        let written = match queue.recv_deadline(next_heartbeat) {
            Ok(frame) => {
                hub.messages_sent.fetch_add(1, Ordering::Relaxed);
                write_frame(&link.connection, &frame, &hub.bytes_sent)
            }
            Err(RecvTimeoutError::Timeout) => {
                next_heartbeat = Instant::now() + interval;
                let heartbeat = hub.heartbeat_state.heartbeat(!queue.is_empty());
                write_frame(
                    &link.connection,
                    &heartbeat_frame(heartbeat),
                    &hub.bytes_sent,
                )
            }
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Err(error) = written {
            // What the peer had sent before can still be read; then the reader finds the end.
            tracing::debug!(peer = %link.peer, %error, "cannot write to a peer");
            link.connection.shut();
            return;
        }
    }
    if let Err(error) = link.connection.end_writing() {
        tracing::trace!(peer = %link.peer, %error, "the connection had ended");
    }
}
