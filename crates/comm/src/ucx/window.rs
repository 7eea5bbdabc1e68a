//! What is on its way to one peer: it is counted until all that was sent before it has left too, so that what the peer
//! has to keep until earlier messages are complete is bounded as well.

use std::collections::VecDeque;

use super::assembly::{HELD_BYTES, WINDOW};

/// Bytes that may be on their way to one peer before a sender waits for some to arrive: half of what the peer keeps,
/// which may see a message leave later than its sender does.
const BYTES_UNDER_WAY: u64 = HELD_BYTES / 2;

/// The same of messages.
const MESSAGES_UNDER_WAY: usize = (WINDOW / 2) as usize;

/// Messages from the oldest that has not left to the last.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// The number of the first of `pending`.
    first: u64,
    pending: VecDeque<Pending>,
    bytes: u64,
    parts: usize,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    parts: usize,
    bytes: u64,
}

impl Window {
    /// How many messages were begun so far: the next one's number.
    pub(super) fn next(&self) -> u64 {
        self.first + self.pending.len() as u64
    }

    /// How many parts have not left.
    pub(super) fn parts(&self) -> usize {
        self.parts
    }

    /// Whether there is room for so many bytes more; a message of any size may go alone.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.pending.is_empty()
            || (self.bytes.saturating_add(bytes) <= BYTES_UNDER_WAY
                && self.pending.len() < MESSAGES_UNDER_WAY)
    }

    /// A message of so many bytes begins to leave, with no part yet; its number.
    pub(super) fn begin(&mut self, bytes: u64) -> u64 {
        let number = self.next();
        self.pending.push_back(Pending { parts: 0, bytes });
        self.bytes += bytes;
        number
    }

    /// A part of a message is on its way.
    pub(super) fn add(&mut self, message: u64) {
        if let Some(pending) = self.find(message) {
            pending.parts += 1;
            self.parts += 1;
        }
    }

    /// A part of a message has left, or will not arrive.
    pub(super) fn remove(&mut self, message: u64) {
        if let Some(pending) = self.find(message) {
            pending.parts -= 1;
            self.parts -= 1;
        }
        self.settle();
    }

    /// All parts of what was begun are on their way.
    pub(super) fn settle(&mut self) {
        while let Some(oldest) = self.pending.front().filter(|oldest| oldest.parts == 0) {
            self.bytes -= oldest.bytes;
            self.first += 1;
            self.pending.pop_front();
        }
    }

    fn find(&mut self, message: u64) -> Option<&mut Pending> {
        let place = usize::try_from(message.checked_sub(self.first)?).ok()?;
        self.pending.get_mut(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(window: &mut Window, bytes: u64, parts: usize) -> u64 {
        let message = window.begin(bytes);
        (0..parts).for_each(|_| window.add(message));
        window.settle();
        message
    }

    #[test]
    fn what_overtakes_counts_until_the_oldest_has_left() {
        let mut window = Window::default();
        let slow = send(&mut window, BYTES_UNDER_WAY - 100, 2);
        let quick = send(&mut window, 100, 1);
        window.remove(quick);
        assert!(!window.has_room(1), "the peer keeps it behind the slow one");
        window.remove(slow);
        assert!(!window.has_room(1));
        window.remove(slow);
        assert!(
            window.has_room(u64::MAX),
            "a message of any size goes alone"
        );
        assert_eq!((window.next(), window.parts(), window.bytes), (2, 0, 0));
    }

    #[test]
    fn messages_are_bounded_too() {
        let mut window = Window::default();
        for _ in 0..MESSAGES_UNDER_WAY {
            assert!(window.has_room(0));
            send(&mut window, 0, 1);
        }
        assert!(!window.has_room(0));
        window.remove(0);
        assert!(window.has_room(0));
    }
}
