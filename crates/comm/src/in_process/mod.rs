//! Ranks that share a process: for tests, and for several ranks in a notebook. Messages pass as they are.

#[cfg(any(test, feature = "faults"))]
pub(crate) mod faults;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver as Outlet, RecvTimeoutError, SendTimeoutError, Sender, bounded};
use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Heartbeat, Message};

use crate::error::CommError;
use crate::transport::{CommStats, HeartbeatState, Loss, PeerInfo, Receiver, Transport};
use crate::{BACKLOG_DEADLINE, QUEUE_CAPACITY};
use shardwright_system::Owner;

/// Often enough for the runtime's stall detection in tests.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);

enum Event {
    Message(Message),
    #[cfg(any(test, feature = "faults"))]
    Numbered(faults::Numbered),
    Lost(Loss),
    Heartbeat(Heartbeat),
    Stop,
}

type Inbox = Sender<(Rank, Event)>;

/// What lies between the ranks.
trait Medium: Send + Sync {
    /// A message as it goes into its receiver's inbox.
    fn put(
        &self,
        from: Rank,
        to: Rank,
        message: Message,
        sender: &Shared,
    ) -> Result<Event, CommError>;

    /// Delivers to a rank what comes into its inbox, until it closes.
    fn deliver_all(&self, end: &End);
}

/// A rank as its delivery thread knows it.
struct End {
    rank: Rank,
    outlet: Outlet<(Rank, Event)>,
    receiver: Arc<dyn Receiver>,
    shared: Arc<Shared>,
    inboxes: Vec<Inbox>,
}

/// Nothing: messages pass as they are.
struct Nothing;

/// One of several ranks in this process.
pub struct InProcess {
    rank: Rank,
    peers: Vec<PeerInfo>,
    inboxes: Vec<Inbox>,
    shared: Arc<Shared>,
    medium: Arc<dyn Medium>,
    thread: Mutex<Option<JoinHandle<()>>>,
    owner: Owner,
}

#[derive(Default)]
struct Shared {
    heartbeat_state: Arc<HeartbeatState>,
    closed: AtomicBool,
    lost: Mutex<BTreeMap<Rank, Loss>>,
    sent: AtomicU64,
    received: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
}

/// Connects as many ranks as there are receivers.
pub fn in_process(receivers: Vec<Arc<dyn Receiver>>) -> std::io::Result<Vec<Arc<InProcess>>> {
    connect(receivers, &(Arc::new(Nothing) as _))
}

fn connect(
    receivers: Vec<Arc<dyn Receiver>>,
    medium: &Arc<dyn Medium>,
) -> std::io::Result<Vec<Arc<InProcess>>> {
    let world = u32::try_from(receivers.len()).unwrap_or(u32::MAX);
    let peers: Vec<PeerInfo> = (0..world)
        .map(|rank| PeerInfo {
            rank: Rank(rank),
            host: "localhost".to_owned(),
            pid: std::process::id(),
        })
        .collect();
    let (inboxes, outlets): (Vec<Inbox>, Vec<_>) =
        receivers.iter().map(|_| bounded(QUEUE_CAPACITY)).unzip();
    let mut ranks = Vec::new();
    for ((peer, receiver), outlet) in peers.iter().zip(receivers).zip(outlets) {
        let shared = Arc::new(Shared::default());
        let rank = peer.rank;
        let end = End {
            rank,
            outlet,
            receiver,
            shared: Arc::clone(&shared),
            inboxes: inboxes.clone(),
        };
        let medium_of_thread = Arc::clone(medium);
        let spawn = || {
            let thread = std::thread::Builder::new().name(format!("sw-inproc-{rank}"));
            thread.spawn(move || medium_of_thread.deliver_all(&end))
        };
        // A job of one rank has nothing to deliver.
        let thread = (world > 1).then(spawn).transpose()?;
        ranks.push(Arc::new(InProcess {
            rank,
            peers: peers.clone(),
            inboxes: inboxes.clone(),
            shared,
            medium: Arc::clone(medium),
            thread: Mutex::new(thread),
            owner: Owner::this_process(),
        }));
    }
    Ok(ranks)
}

impl Medium for Nothing {
    fn put(&self, _: Rank, _: Rank, message: Message, _: &Shared) -> Result<Event, CommError> {
        Ok(match message {
            Message::ShutdownNotice(report) => Event::Lost(Loss::Left(report)),
            message => Event::Message(message),
        })
    }

    fn deliver_all(&self, end: &End) {
        let (shared, receiver) = (&*end.shared, &*end.receiver);
        let mut next_heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
        loop {
            match end.outlet.recv_deadline(next_heartbeat) {
                Ok((_, Event::Stop)) | Err(RecvTimeoutError::Disconnected) => return,
                Ok((from, event)) if !shared.is_lost(from) => match event {
                    Event::Message(message) => {
                        shared.received.fetch_add(1, Ordering::Relaxed);
                        receiver.deliver(from, message);
                    }
                    Event::Lost(loss) => {
                        shared.lose(from, loss.clone());
                        receiver.peer_lost(from, loss);
                    }
                    Event::Heartbeat(heartbeat) => receiver.heartbeat(from, heartbeat),
                    #[cfg(any(test, feature = "faults"))]
                    Event::Numbered(_) => {}
                    Event::Stop => {}
                },
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    next_heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
                    let heartbeat = shared.heartbeat_state.heartbeat(false);
                    for (index, inbox) in end.inboxes.iter().enumerate() {
                        if index != end.rank.0 as usize
                            && inbox
                                .try_send((end.rank, Event::Heartbeat(heartbeat)))
                                .is_err()
                        {
                            // A full inbox shows that its owner is alive; a closed one needs no heartbeat.
                        }
                    }
                }
            }
        }
    }
}

impl Shared {
    fn is_lost(&self, rank: Rank) -> bool {
        self.lost
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains_key(&rank)
    }

    fn lose(&self, rank: Rank, loss: Loss) {
        self.lost
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(rank)
            .or_insert(loss);
    }
}

impl InProcess {
    fn leave(&self, loss: &Loss) {
        if !self.owner.is_here() || self.shared.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        for peer in self.others() {
            let event = self.report(peer, loss);
            if self.inboxes[peer.0 as usize]
                .send_timeout((self.rank, event), BACKLOG_DEADLINE)
                .is_err()
            {
                tracing::debug!(%peer, "a rank that had ended got no shutdown notice");
            }
        }
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(thread) = thread else {
            return;
        };
        let own = &self.inboxes[self.rank.0 as usize];
        if own
            .send_timeout((self.rank, Event::Stop), BACKLOG_DEADLINE)
            .is_err()
        {
            tracing::debug!(rank = %self.rank, "the delivery thread had ended");
        }
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!(rank = %self.rank, "the delivery thread panicked");
        }
    }

    fn report(&self, to: Rank, loss: &Loss) -> Event {
        let Loss::Left(report) = loss else {
            return Event::Lost(loss.clone());
        };
        let shutdown_notice = Message::ShutdownNotice(report.clone());
        let shutdown_notice = self
            .medium
            .put(self.rank, to, shutdown_notice, &self.shared);
        shutdown_notice.unwrap_or_else(|_| Event::Lost(loss.clone()))
    }

    fn others(&self) -> impl Iterator<Item = Rank> {
        let own = self.rank;
        (0..self.world()).map(Rank).filter(move |rank| *rank != own)
    }
}

impl Transport for InProcess {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> u32 {
        u32::try_from(self.peers.len()).unwrap_or(u32::MAX)
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.owner.check()?;
        if self.shared.closed.load(Ordering::SeqCst) {
            return Err(CommError::Closed);
        }
        let inbox = self
            .inboxes
            .get(to.0 as usize)
            .filter(|_| to != self.rank)
            .ok_or(CommError::NotAPeer {
                rank: to,
                own: self.rank,
                world: self.world(),
            })?;
        let lost = self
            .shared
            .lost
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&to)
            .cloned();
        if let Some(loss) = lost {
            return Err(CommError::PeerLost { rank: to, loss });
        }
        let event = self.medium.put(self.rank, to, message, &self.shared)?;
        match inbox.send_timeout((self.rank, event), BACKLOG_DEADLINE) {
            Ok(()) => {
                self.shared.sent.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            Err(SendTimeoutError::Timeout(_)) => Err(CommError::Backlog {
                rank: to,
                queued: inbox.len(),
                waited: BACKLOG_DEADLINE,
            }),
            Err(SendTimeoutError::Disconnected(_)) => Err(CommError::PeerLost {
                rank: to,
                loss: Loss::Died,
            }),
        }
    }

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.peers.get(rank.0 as usize)
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        &self.shared.heartbeat_state
    }

    fn close(&self, report: Option<ErrorReport>) {
        self.leave(&Loss::Left(report.map(Box::new)));
    }

    fn stats(&self) -> CommStats {
        CommStats {
            messages_sent: self.shared.sent.load(Ordering::Relaxed),
            messages_received: self.shared.received.load(Ordering::Relaxed),
            bytes_sent: self.shared.bytes_sent.load(Ordering::Relaxed),
            bytes_received: self.shared.bytes_received.load(Ordering::Relaxed),
            ..CommStats::default()
        }
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.leave(&Loss::Left(None));
    }
}
