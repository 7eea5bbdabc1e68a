//! One direction of a connection, on which messages go wrong as planned. Pure: the
//! time is passed in, as the time since the connection began.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardwright_core::Rank;

use super::planned_delivery::{Cut, Faults, LONGEST_DELAY, flip_bits};
use crate::transport::Loss;

/// What comes out at the receiver.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Packet {
    /// A message's bytes.
    Frame(Vec<u8>),
    /// The connection has ended.
    Ended(Loss),
}

/// What is on its way from one rank to another.
pub(super) struct FaultyLink {
    from: Rank,
    to: Rank,
    faults: Arc<Faults>,
    /// By the time of arrival, then by the order in which they were put in.
    in_flight: BTreeMap<(Duration, u64), Packet>,
    held: Vec<Held>,
    put: u64,
    passed: u64,
    last_due: Duration,
    cut: bool,
}

/// A message that is being overtaken.
struct Held {
    until_passed: u64,
    at_last: Duration,
    bytes: Vec<u8>,
}

impl FaultyLink {
    pub(super) fn new(from: Rank, to: Rank, faults: Arc<Faults>) -> Self {
        Self {
            from,
            to,
            faults,
            in_flight: BTreeMap::new(),
            held: Vec::new(),
            put: 0,
            passed: 0,
            last_due: Duration::ZERO,
            cut: false,
        }
    }

    /// Whether nothing passes any more, heartbeats included.
    pub(super) fn is_cut(&self) -> bool {
        self.cut
    }

    /// The sender sends a message.
    pub(super) fn put(&mut self, number: u64, mut bytes: Vec<u8>, now: Duration) {
        if self.cut {
            return;
        }
        let plan = self.faults.plan(self.from, self.to, number);
        if let Some(cut) = plan.cut {
            if cut == Cut::Noticed {
                self.end(Loss::Died, now);
            }
            self.cut = true;
            return;
        }
        if let Some(seed) = plan.corrupt {
            flip_bits(&mut bytes, seed);
        }
        self.last_due = self.last_due.max(now + plan.delay);
        self.passed += 1;
        let [original, copy] = plan.copies;
        if let Some(overtaking) = copy {
            self.hold(bytes.clone(), overtaking);
        }
        match original {
            None => {}
            Some(0) => self.fly(Packet::Frame(bytes)),
            Some(overtaking) => self.hold(bytes, overtaking),
        }
        let passed = self.passed;
        self.release(|held| held.until_passed <= passed);
    }

    /// The sender's end is gone; what is on its way still arrives.
    pub(super) fn end(&mut self, loss: Loss, now: Duration) {
        if self.cut {
            return;
        }
        self.last_due = self.last_due.max(now);
        self.release(|_| true);
        self.fly(Packet::Ended(loss));
    }

    /// The next that has arrived.
    pub(super) fn take_due(&mut self, now: Duration) -> Option<Packet> {
        self.release(|held| held.at_last <= now);
        let first = self.in_flight.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    /// When the next arrives.
    pub(super) fn next_due(&self) -> Option<Duration> {
        let flying = self.in_flight.keys().next().map(|(due, _)| *due);
        let held = self.held.iter().map(|held| held.at_last);
        flying.into_iter().chain(held).min()
    }

    fn fly(&mut self, packet: Packet) {
        self.put += 1;
        self.in_flight.insert((self.last_due, self.put), packet);
    }

    fn hold(&mut self, bytes: Vec<u8>, overtaking: u64) {
        self.held.push(Held {
            until_passed: self.passed + overtaking,
            // Where too few follow.
            at_last: self.last_due + LONGEST_DELAY,
            bytes,
        });
    }

    fn release(&mut self, when: impl Fn(&Held) -> bool) {
        for held in self
            .held
            .extract_if(.., |held| when(held))
            .collect::<Vec<_>>()
        {
            self.fly(Packet::Frame(held.bytes));
        }
    }
}

#[cfg(test)]
mod tests;
