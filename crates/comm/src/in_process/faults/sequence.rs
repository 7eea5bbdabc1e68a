//! Puts numbered messages of one peer back into the order of their sending.
//!
//! Pure: the owner passes the time in, as the time since a moment of its choice,
//! and turns what it learns into a loss of the peer.
//!
//! - SQ-1: every item comes out once, in the order of the numbers, which begin with 0.
//! - SQ-2: no number makes the sequencer keep more than its window.
//! - SQ-3: a number that stays missing, although a later one arrived or the peer
//!   says that it was sent, is reported once the deadline has passed.

use std::collections::VecDeque;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::transport::Loss;

/// The items of one peer that have arrived and wait for earlier ones.
#[derive(Debug)]
pub(super) struct Sequencer<T> {
    /// The number that is to come out next: the place of the window's first slot.
    next: u64,
    /// Without empty slots at the end.
    slots: VecDeque<Option<T>>,
    window: usize,
    /// How many the peer says it has sent.
    announced: u64,
    missing_since: Option<Duration>,
    duplicates: u64,
}

/// A number so far ahead that it cannot be kept: what lies between never arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "message {next} did not arrive, while message {number} did; at most {window} messages may overtake one"
)]
pub(super) struct TooFarAhead {
    /// The number.
    pub(super) number: u64,
    /// The number that is missing.
    pub(super) next: u64,
    /// How many are kept.
    pub(super) window: usize,
}

/// Numbers that are missing, and since when that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// The missing ones.
    pub(super) missing: RangeInclusive<u64>,
    /// Those that arrived right behind them; `None` when the peer only says that it has sent more.
    pub(super) arrived: Option<RangeInclusive<u64>>,
    /// Since when nothing came out of the sequencer although something should have.
    pub(super) since: Duration,
}

impl<T> Sequencer<T> {
    /// For at most `window` items at a time.
    ///
    /// # Panics
    /// When the window is empty.
    pub(super) fn new(window: usize) -> Self {
        assert!(window > 0, "an item has to be kept while it is handed out");
        Self {
            next: 0,
            slots: VecDeque::new(),
            window,
            announced: 0,
            missing_since: None,
            duplicates: 0,
        }
    }

    /// Takes an item, and gives those that can be delivered now. What the caller leaves in the
    /// iterator comes out at the next call.
    pub(super) fn accept(
        &mut self,
        number: u64,
        item: T,
        now: Duration,
    ) -> Result<Deliverable<'_, T>, TooFarAhead> {
        match number.checked_sub(self.next) {
            None => self.duplicates += 1,
            Some(ahead) if ahead >= self.window as u64 => {
                return Err(TooFarAhead {
                    number,
                    next: self.next,
                    window: self.window,
                });
            }
            Some(ahead) => {
                let slot = ahead as usize;
                if self.slots.len() <= slot {
                    self.slots.resize_with(slot + 1, || None);
                }
                if self.slots[slot].is_some() {
                    self.duplicates += 1;
                } else {
                    self.slots[slot] = Some(item);
                }
            }
        }
        self.announced = self.announced.max(number.saturating_add(1));
        self.note_missing(now);
        Ok(Deliverable {
            sequencer: self,
            now,
        })
    }

    /// The peer says that it has sent so many messages, which shows also the loss of its last one.
    pub(super) fn announce(&mut self, sent: u64, now: Duration) {
        self.announced = self.announced.max(sent);
        self.note_missing(now);
    }

    /// What is missing, if anything is.
    pub(super) fn gap(&self) -> Option<Gap> {
        let since = self.missing_since?;
        let present = |slot: &Option<T>| slot.is_some();
        let Some(first) = self.slots.iter().position(present) else {
            return Some(Gap {
                missing: self.next..=self.announced.saturating_sub(1),
                arrived: None,
                since,
            });
        };
        let run = self
            .slots
            .iter()
            .skip(first)
            .take_while(|slot| present(slot));
        let begin = self.next + first as u64;
        Some(Gap {
            missing: self.next..=begin - 1,
            arrived: Some(begin..=begin + run.count() as u64 - 1),
            since,
        })
    }

    /// The gap that makes the peer lost: one that is older than the deadline.
    pub(super) fn overdue(&self, now: Duration, deadline: Duration) -> Option<Gap> {
        let since = self.missing_since?;
        if now.saturating_sub(since) < deadline {
            return None;
        }
        self.gap()
    }

    /// How many messages came more than once.
    #[cfg(test)]
    pub(super) fn duplicates(&self) -> u64 {
        self.duplicates
    }

    /// How many have come out.
    #[cfg(test)]
    pub(super) fn delivered(&self) -> u64 {
        self.next
    }

    fn note_missing(&mut self, now: Duration) {
        let waiting = matches!(self.slots.front(), Some(Some(_)));
        if waiting || self.announced <= self.next {
            self.missing_since = None;
        } else if self.missing_since.is_none() {
            self.missing_since = Some(now);
        }
    }
}

/// The items that can be delivered now.
#[derive(Debug)]
#[must_use = "the items are to be delivered"]
pub(super) struct Deliverable<'a, T> {
    sequencer: &'a mut Sequencer<T>,
    now: Duration,
}

impl<T> Iterator for Deliverable<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let item = self.sequencer.slots.front_mut()?.take()?;
        self.sequencer.slots.pop_front();
        self.sequencer.next += 1;
        // Something came out: what is missing now is missing only since now.
        self.sequencer.missing_since = None;
        self.sequencer.note_missing(self.now);
        Some(item)
    }
}

impl Gap {
    /// The loss of the peer, once the gap is older than `deadline`.
    pub(super) fn loss(&self, deadline: Duration) -> Loss {
        let seconds = deadline.as_secs_f64();
        let reason = match &self.arrived {
            Some(arrived) => format!(
                "{} did not arrive within {seconds} s while {} did",
                Numbered(&self.missing),
                Numbers(arrived)
            ),
            None => format!(
                "{} did not arrive within {seconds} s although sent",
                Numbered(&self.missing),
            ),
        };
        Loss::Broken { reason }
    }
}

/// `17`, or `17 to 21`.
struct Numbers<'a>(&'a RangeInclusive<u64>);

impl fmt::Display for Numbers<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.0.start(), self.0.end());
        if first == last {
            return write!(formatter, "{first}");
        }
        write!(formatter, "{first} to {last}")
    }
}

/// `message 17`, or `messages 17 to 21`.
struct Numbered<'a>(&'a RangeInclusive<u64>);

impl fmt::Display for Numbered<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0.start() == self.0.end() {
            ""
        } else {
            "s"
        };
        write!(formatter, "message{plural} {}", Numbers(self.0))
    }
}

#[cfg(test)]
mod tests;
