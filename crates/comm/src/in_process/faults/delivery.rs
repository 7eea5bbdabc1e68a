//! The delivery thread of a rank whose connections have faults: it plays the wire,
//! and then does what the receiver of a real transport would do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, TrySendError};
use shardwright_core::Rank;
use shardwright_wire::codec::encode;
use shardwright_wire::{Limits, Message};

use super::Numbered;
use super::frame::{pack, unpack};
use super::line::{FaultyLink, Packet};
use super::planned_delivery::Faults;
use super::sequence::Sequencer;
use crate::QUEUE_CAPACITY;
use crate::error::CommError;
use crate::in_process::{End, Event, HEARTBEAT_INTERVAL, Inbox, Medium, Shared};
use crate::transport::{Loss, Receiver};

/// What the ranks of a job with faults have in common.
pub(super) struct Wire {
    faults: Arc<Faults>,
    pairs: BTreeMap<(Rank, Rank), Pair>,
}

/// From one rank to another.
#[derive(Default)]
struct Pair {
    sent: AtomicU64,
    /// A heartbeat found no room in the receiver's queue.
    alive: AtomicBool,
}

impl Wire {
    pub(super) fn new(faults: Faults, world: u32) -> Self {
        let pairs = (0..world).flat_map(|from| (0..world).map(move |to| (Rank(from), Rank(to))));
        Self {
            faults: Arc::new(faults),
            pairs: pairs.map(|pair| (pair, Pair::default())).collect(),
        }
    }

    /// The number of the next message. One that is then not sent for want of room is missing, as
    /// its sender was told.
    fn next_number(&self, from: Rank, to: Rank) -> u64 {
        self.pairs[&(from, to)].sent.fetch_add(1, Ordering::SeqCst)
    }
}

impl Medium for Wire {
    fn put(
        &self,
        from: Rank,
        to: Rank,
        message: Message,
        sender: &Shared,
    ) -> Result<Event, CommError> {
        let frame = encode(&message, &Limits::default());
        let frame = frame.map_err(|error| CommError::Unsendable {
            rank: to,
            reason: error.to_string(),
        })?;
        let number = self.next_number(from, to);
        let bytes = pack(number, &frame);
        let count = bytes.len() as u64;
        sender.bytes_sent.fetch_add(count, Ordering::Relaxed);
        Ok(Event::Numbered(Numbered::Frame(number, bytes)))
    }

    fn deliver_all(&self, end: &End) {
        Delivery::new(end, self).run(&end.outlet);
    }
}

/// The state of the delivery thread.
struct Delivery<'a> {
    rank: Rank,
    receiver: &'a dyn Receiver,
    shared: &'a Shared,
    inboxes: &'a [Inbox],
    wire: &'a Wire,
    peers: BTreeMap<Rank, Peer>,
    /// Peers that are to learn that this rank has given them up.
    unreported: Vec<Rank>,
    clock: Clock,
}

struct Peer {
    line: FaultyLink,
    sequencer: Sequencer<Message>,
    last_received: Duration,
}

/// Counts the time in which this thread listens: while it is with the receiver, its peers cannot
/// be late.
struct Clock {
    started: Instant,
    elsewhere: Duration,
}

impl Clock {
    fn now(&self) -> Duration {
        self.started.elapsed().saturating_sub(self.elsewhere)
    }

    fn aside(&mut self, work: impl FnOnce()) {
        let began = Instant::now();
        work();
        self.elsewhere += began.elapsed();
    }
}

impl<'a> Delivery<'a> {
    fn new(end: &'a End, wire: &'a Wire) -> Self {
        let rank = end.rank;
        let others = wire
            .pairs
            .keys()
            .filter(|(from, to)| *to == rank && *from != rank);
        let peer = |from: Rank| Peer {
            line: FaultyLink::new(from, rank, Arc::clone(&wire.faults)),
            sequencer: Sequencer::new(QUEUE_CAPACITY),
            last_received: Duration::ZERO,
        };
        Self {
            rank,
            receiver: &*end.receiver,
            shared: &end.shared,
            inboxes: &end.inboxes,
            wire,
            peers: others.map(|(from, _)| (*from, peer(*from))).collect(),
            unreported: Vec::new(),
            clock: Clock {
                started: Instant::now(),
                elsewhere: Duration::ZERO,
            },
        }
    }

    /// Runs until the rank closes.
    fn run(mut self, outlet: &crossbeam_channel::Receiver<(Rank, Event)>) {
        let mut next_tick = HEARTBEAT_INTERVAL;
        loop {
            self.deliver_due();
            self.hang_up();
            if self.clock.now() >= next_tick {
                self.heartbeat();
                self.give_up();
                next_tick = self.clock.now() + HEARTBEAT_INTERVAL;
            }
            let due = self.peers.values().filter_map(|peer| peer.line.next_due());
            let wake = due.min().map_or(next_tick, |due| due.min(next_tick));
            match outlet.recv_timeout(wake.saturating_sub(self.clock.now())) {
                Ok((_, Event::Stop)) | Err(RecvTimeoutError::Disconnected) => return,
                Ok((from, event)) => self.enter(from, event),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Something has been put on the wire.
    fn enter(&mut self, from: Rank, event: Event) {
        let now = self.clock.now();
        let Some(peer) = self.peers.get_mut(&from) else {
            return; // lost before (CM-3)
        };
        match event {
            Event::Numbered(Numbered::Frame(number, bytes)) => {
                let count = bytes.len() as u64;
                self.shared
                    .bytes_received
                    .fetch_add(count, Ordering::Relaxed);
                peer.line.put(number, bytes, now);
            }
            Event::Lost(loss) => peer.line.end(loss, now),
            Event::Numbered(Numbered::Heartbeat(heartbeat, sent)) if !peer.line.is_cut() => {
                peer.sequencer.announce(sent, now);
                let receiver = self.receiver;
                self.clock.aside(|| receiver.heartbeat(from, heartbeat));
            }
            Event::Numbered(Numbered::Heartbeat(..))
            | Event::Heartbeat(_)
            | Event::Message(_)
            | Event::Stop => {}
        }
        if !peer.line.is_cut() {
            peer.last_received = now;
        }
    }

    fn deliver_due(&mut self) {
        let ranks: Vec<Rank> = self.peers.keys().copied().collect();
        for from in ranks {
            let now = self.clock.now();
            while let Some(packet) = self
                .peers
                .get_mut(&from)
                .and_then(|peer| peer.line.take_due(now))
            {
                self.arrive(from, packet);
            }
        }
    }

    /// Something comes off the wire.
    fn arrive(&mut self, from: Rank, packet: Packet) {
        let bytes = match packet {
            Packet::Frame(bytes) => bytes,
            Packet::Ended(loss) => return self.lose(from, loss),
        };
        let now = self.clock.now();
        let Some(peer) = self.peers.get_mut(&from) else {
            return;
        };
        let (number, message) = match unpack(&bytes, &Limits::default()) {
            Ok(unpacked) => unpacked,
            Err(error) => return self.lose_broken(from, error.to_string()),
        };
        let ready: Vec<Message> = match peer.sequencer.accept(number, message, now) {
            Ok(ready) => ready.collect(),
            Err(error) => return self.lose_broken(from, error.to_string()),
        };
        for message in ready {
            if let Message::ShutdownNotice(report) = message {
                return self.lose(from, Loss::Left(report));
            }
            self.shared.received.fetch_add(1, Ordering::Relaxed);
            let receiver = self.receiver;
            self.clock.aside(|| receiver.deliver(from, message));
        }
    }

    fn lose_broken(&mut self, from: Rank, reason: String) {
        self.lose(from, Loss::Broken { reason });
    }

    fn lose(&mut self, from: Rank, loss: Loss) {
        if self.peers.remove(&from).is_none() {
            return;
        }
        // One that is dead will not hear it; one that lives would wait for answers.
        if !matches!(loss, Loss::Left(_)) {
            self.unreported.push(from);
        }
        self.shared.lose(from, loss.clone());
        let receiver = self.receiver;
        self.clock.aside(|| receiver.peer_lost(from, loss));
    }

    fn heartbeat(&self) {
        let heartbeat = self.shared.heartbeat_state.heartbeat(false);
        for to in self.peers.keys() {
            let pair = &self.wire.pairs[&(self.rank, *to)];
            let sent = pair.sent.load(Ordering::SeqCst);
            let event = Event::Numbered(Numbered::Heartbeat(heartbeat, sent));
            if let Err(TrySendError::Full(_)) =
                self.inboxes[to.0 as usize].try_send((self.rank, event))
            {
                pair.alive.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Loses those from whom something is overdue.
    fn give_up(&mut self) {
        let (now, deadline) = (self.clock.now(), self.wire.faults.deadline);
        let mut given_up = Vec::new();
        for (from, peer) in &mut self.peers {
            let pair = &self.wire.pairs[&(*from, self.rank)];
            if pair.alive.swap(false, Ordering::SeqCst) && !peer.line.is_cut() {
                peer.last_received = now;
            }
            if let Some(gap) = peer.sequencer.overdue(now, deadline) {
                given_up.push((*from, gap.loss(deadline)));
            } else if now.saturating_sub(peer.last_received) >= deadline {
                let seconds = deadline.as_millis().div_ceil(1000) as u64;
                given_up.push((*from, Loss::Silent { seconds }));
            }
        }
        for (from, loss) in given_up {
            self.lose(from, loss);
        }
    }

    /// Ends the connection with those given up.
    fn hang_up(&mut self) {
        let (inboxes, own) = (self.inboxes, self.rank);
        self.unreported.retain(|peer| {
            let event = (own, Event::Lost(Loss::Died));
            matches!(
                inboxes[peer.0 as usize].try_send(event),
                Err(TrySendError::Full(_))
            )
        });
    }
}
