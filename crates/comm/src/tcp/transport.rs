//! The connected job.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver as Outlet, RecvTimeoutError, SendTimeoutError, Sender, bounded};
use shardwright_core::Rank;
use shardwright_wire::codec::encode;
use shardwright_wire::{ErrorReport, Limits, Message};

use super::acceptor::Acceptor;
use super::connection::Connection;
use super::link::{Hub, Link, read_all, write_all};
use crate::error::CommError;
use crate::exchange::Exchange;
use crate::transport::{CommStats, HeartbeatState, Loss, PeerInfo, Receiver, Transport};
use crate::{BACKLOG_DEADLINE, QUEUE_CAPACITY};
use shardwright_system::Owner;

/// A rank's TCP connections to all others.
pub(crate) struct Tcp {
    rank: Rank,
    owner: Owner,
    encrypted: bool,
    peers: Vec<PeerInfo>,
    links: BTreeMap<Rank, Arc<Link>>,
    hub: Arc<Hub>,
    addresses: BTreeMap<Rank, BTreeMap<String, Vec<u8>>>,
    acceptor: Acceptor,
    threads: Mutex<Vec<JoinHandle<()>>>,
    writers_ended: Outlet<()>,
    readers_ended: Outlet<()>,
}

/// A started job, before its threads run.
pub(super) struct Connected {
    pub(super) rank: Rank,
    pub(super) peers: Vec<PeerInfo>,
    pub(super) connections: BTreeMap<Rank, Connection>,
    pub(super) acceptor: Acceptor,
    pub(super) limits: Limits,
    pub(super) exchange: Exchange,
    pub(super) addresses: BTreeMap<Rank, BTreeMap<String, Vec<u8>>>,
    pub(super) liveness: Duration,
    pub(super) encrypted: bool,
}

impl Tcp {
    /// Where the peers have the transport of a name; nothing unless all ranks have it.
    pub(crate) fn addresses(&self, transport: &str) -> BTreeMap<Rank, Vec<u8>> {
        let found = self.addresses.iter();
        let found: Option<BTreeMap<_, _>> = found
            .map(|(rank, all)| Some((*rank, all.get(transport)?.clone())))
            .collect();
        let mut found = found.unwrap_or_default();
        found.remove(&self.rank);
        found
    }

    /// The persistent buffers.
    pub(crate) fn exchange(&self) -> Arc<Exchange> {
        Arc::clone(&self.hub.exchange)
    }

    fn link(&self, to: Rank) -> Result<&Link, CommError> {
        let link = self.links.get(&to).map(|link| &**link);
        link.ok_or(CommError::NotAPeer {
            rank: to,
            own: self.rank,
            world: self.world(),
        })
    }

    pub(super) fn run(connected: Connected, receiver: Arc<dyn Receiver>) -> io::Result<Self> {
        let Connected {
            rank,
            peers,
            connections,
            acceptor,
            limits,
            exchange,
            addresses,
            liveness,
            encrypted,
        } = connected;
        let hub = Arc::new(Hub {
            receiver,
            heartbeat_state: Arc::default(),
            limits,
            exchange: Arc::new(exchange),
            liveness,
            closing: AtomicBool::new(false),
            messages_sent: AtomicU64::new(0),
            messages_received: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
        });
        let (writer_alive, writers_ended) = bounded(0);
        let (reader_alive, readers_ended) = bounded(0);
        let mut job = Self {
            rank,
            owner: Owner::this_process(),
            encrypted,
            peers,
            links: BTreeMap::new(),
            hub,
            addresses,
            acceptor,
            threads: Mutex::default(),
            writers_ended,
            readers_ended,
        };
        for (peer, connection) in connections {
            job.add_link(peer, connection, writer_alive.clone(), reader_alive.clone())?;
        }
        Ok(job)
    }

    fn add_link(
        &mut self,
        peer: Rank,
        connection: Connection,
        writer_alive: Sender<()>,
        reader_alive: Sender<()>,
    ) -> io::Result<()> {
        let socket = connection.socket();
        socket.set_read_timeout(Some(self.hub.liveness))?;
        socket.set_write_timeout(None)?;
        let (queue, outlet) = bounded(QUEUE_CAPACITY);
        let link = Arc::new(Link::new(peer, connection, queue));
        self.links.insert(peer, Arc::clone(&link));
        let (hub, writer_link) = (Arc::clone(&self.hub), Arc::clone(&link));
        let writer = std::thread::Builder::new()
            .name(format!("sw-write-{peer}"))
            .spawn(move || {
                write_all(&hub, &writer_link, &outlet);
                drop(writer_alive);
            })?;
        let hub = Arc::clone(&self.hub);
        let reader = std::thread::Builder::new()
            .name(format!("sw-read-{peer}"))
            .spawn(move || {
                read_all(&hub, &link);
                drop(reader_alive);
            })?;
        self.threads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend([writer, reader]);
        Ok(())
    }

    fn lost(&self, link: &Link) -> CommError {
        if self.hub.closing.load(Ordering::SeqCst) {
            return CommError::Closed;
        }
        CommError::PeerLost {
            rank: link.peer,
            loss: link.loss().unwrap_or(Loss::Died),
        }
    }

    fn send_shutdown_notice(&self, report: Option<ErrorReport>, deadline: Instant) {
        let shutdown_notice = encode(
            &Message::ShutdownNotice(report.map(Box::new)),
            &self.hub.limits,
        );
        // Behind what is queued, for which there may be no room left amid traffic.
        for link in self.links.values() {
            if let (Ok(shutdown_notice), Some(queue)) = (&shutdown_notice, link.queue())
                && queue
                    .send_deadline(shutdown_notice.clone(), deadline)
                    .is_err()
            {
                tracing::debug!(peer = %link.peer, "no room for a shutdown notice");
            }
            link.close_queue();
        }
    }
}

fn all_ended(ended: &Outlet<()>, deadline: Instant) -> bool {
    matches!(
        ended.recv_deadline(deadline),
        Err(RecvTimeoutError::Disconnected)
    )
}

impl Transport for Tcp {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> u32 {
        u32::try_from(self.peers.len()).expect("ranks are counted in 32 bits")
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.owner.check()?;
        let link = self.link(to)?;
        // A rank that is leaving sends nothing more but its shutdown notice.
        let queue = link
            .queue()
            .filter(|_| !self.hub.closing.load(Ordering::SeqCst));
        let Some(queue) = queue else {
            return Err(self.lost(link));
        };
        let frame = self.hub.exchange.encode(to, &message, &self.hub.limits)?;
        // Its memory is with the receiver from now on, or in the frame.
        drop(message);
        match queue.send_timeout(frame, BACKLOG_DEADLINE) {
            Ok(()) => Ok(()),
            Err(SendTimeoutError::Disconnected(_)) => Err(self.lost(link)),
            Err(SendTimeoutError::Timeout(_)) => Err(CommError::Backlog {
                rank: to,
                queued: queue.len(),
                waited: BACKLOG_DEADLINE,
            }),
        }
    }

    fn check(&self, to: Rank) -> Result<(), CommError> {
        let link = self.link(to)?;
        if link.queue().is_none() {
            return Err(self.lost(link));
        }
        Ok(())
    }

    #[cfg(test)]
    fn vanish(&self) {
        self.hub.closing.store(true, Ordering::SeqCst);
        for link in self.links.values() {
            link.connection.shut();
        }
    }

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.peers.get(rank.0 as usize)
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        &self.hub.heartbeat_state
    }

    fn close(&self, report: Option<ErrorReport>) {
        if !self.owner.is_here() || self.hub.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        self.acceptor.close();
        // A peer that is there, however busy its machine is, is not told less than one that may still be.
        let deadline = Instant::now() + self.hub.liveness;
        self.send_shutdown_notice(report, deadline);
        // A connection closed with unread bytes would take the shutdown notice with it: the peers end it instead.
        if !(all_ended(&self.writers_ended, deadline) && all_ended(&self.readers_ended, deadline)) {
            tracing::debug!(rank = %self.rank, "not every peer took the shutdown notice");
        }
        for link in self.links.values() {
            link.connection.shut();
        }
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let own = std::thread::current().id();
        for thread in threads
            .into_iter()
            .filter(|thread| thread.thread().id() != own)
        {
            if thread.join().is_err() {
                tracing::error!(rank = %self.rank, "a connection's thread panicked");
            }
        }
        self.hub.exchange.close();
    }

    fn reached_by(&self, _rank: Rank) -> Cow<'static, str> {
        Cow::Borrowed(if self.encrypted {
            "tcp, encrypted"
        } else {
            "tcp"
        })
    }

    fn stats(&self) -> CommStats {
        let device = self.hub.exchange.reach.device.as_ref();
        let (device_buffer_bytes, locked_bytes) = device.map_or((0, 0), |one| one.held_bytes());
        CommStats {
            messages_sent: self.hub.messages_sent.load(Ordering::Relaxed),
            messages_received: self.hub.messages_received.load(Ordering::Relaxed),
            bytes_sent: self.hub.bytes_sent.load(Ordering::Relaxed),
            bytes_received: self
                .links
                .values()
                .map(|link| link.bytes_received.load(Ordering::Relaxed))
                .sum(),
            unknown_peers_dropped: self.acceptor.unknown_peers(),
            buffer_used_bytes: self.hub.exchange.buffer_used_bytes(),
            device_buffer_bytes,
            locked_bytes,
            by_route: self.hub.exchange.counters().by_route(),
            by_reason: self.hub.exchange.counters().by_reason(),
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.close(None);
    }
}
