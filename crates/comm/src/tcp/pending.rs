//! Those at the listener who have not proved anything yet: how many there may be, and who goes first.

use std::collections::VecDeque;
use std::time::Duration;

/// Connections that may be proving themselves at once: more ranks than start at one moment, and few enough for any
/// limit of open files. Whoever comes when there are so many takes the place of another.
pub(super) const MAX_PENDING: usize = 256;

/// A connection, as far as this list cares.
pub(super) trait Pending {
    /// Whether it has said who it is.
    fn has_spoken(&self) -> bool;
}

/// Pending connections by the time of their coming. Pure: the time comes in as the time since a moment of the owner's choice.
pub(super) struct PendingConnections<V> {
    waiting: VecDeque<(Duration, V)>,
    timeout: Duration,
}

impl<V: Pending> PendingConnections<V> {
    /// Each may stay for so long.
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            waiting: VecDeque::new(),
            timeout,
        }
    }

    /// Takes one in; the one that has to go for it, if there are too many: the oldest of those that have not said a
    /// word, else the oldest. So idle connections, however many, keep no rank out.
    pub(super) fn enter(&mut self, connection: V, now: Duration) -> Option<V> {
        let displaced = (self.waiting.len() >= MAX_PENDING).then(|| {
            let mut waiting = self.waiting.iter();
            waiting
                .position(|(_, connection)| !connection.has_spoken())
                .unwrap_or(0)
        });
        let displaced = displaced.and_then(|place| self.waiting.remove(place));
        self.waiting.push_back((now, connection));
        displaced.map(|(_, connection)| connection)
    }

    /// Those whose time is over.
    pub(super) fn expire(&mut self, now: Duration) -> Vec<V> {
        let is_over = |since: Duration| now.saturating_sub(since) >= self.timeout;
        let over = self.waiting.partition_point(|(since, _)| is_over(*since));
        self.waiting
            .drain(..over)
            .map(|(_, connection)| connection)
            .collect()
    }

    /// How long until the next one's time is over; `None` while nobody is here.
    pub(super) fn next_end(&self, now: Duration) -> Option<Duration> {
        let (since, _) = self.waiting.front()?;
        Some(self.timeout.saturating_sub(now.saturating_sub(*since)))
    }

    /// Everybody, in the order of coming.
    pub(super) fn iter(&self) -> impl Iterator<Item = &V> {
        self.waiting.iter().map(|(_, connection)| connection)
    }

    /// The one at a place of [`Self::iter`], and how it goes on: one that is done is removed.
    pub(super) fn advance<T>(
        &mut self,
        place: usize,
        step: impl FnOnce(&mut V) -> Option<T>,
    ) -> Option<(V, T)> {
        let (_, connection) = self.waiting.get_mut(place)?;
        let outcome = step(connection)?;
        let (_, connection) = self.waiting.remove(place)?;
        Some((connection, outcome))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct PendingHandshake {
        number: usize,
        has_spoken: bool,
    }

    impl Pending for PendingHandshake {
        fn has_spoken(&self) -> bool {
            self.has_spoken
        }
    }

    const TIMEOUT: Duration = Duration::from_secs(5);

    fn numbers(handshakes: &[PendingHandshake]) -> Vec<usize> {
        handshakes
            .iter()
            .map(|handshake| handshake.number)
            .collect()
    }

    #[test]
    fn the_oldest_mute_visitor_goes_when_there_are_too_many_else_the_oldest() {
        let mut pending = PendingConnections::new(TIMEOUT);
        for number in 0..MAX_PENDING {
            let handshake = PendingHandshake {
                number,
                has_spoken: number != 3 && number != 5,
            };
            assert!(pending.enter(handshake, Duration::ZERO).is_none());
        }
        let mut enter = |number| {
            let handshake = PendingHandshake {
                number,
                has_spoken: true,
            };
            pending.enter(handshake, Duration::ZERO).unwrap().number
        };
        assert_eq!([enter(1000), enter(1001), enter(1002)], [3, 5, 0]);
        assert_eq!(pending.iter().count(), MAX_PENDING);
    }

    #[test]
    fn each_visitor_has_its_time_and_no_more() {
        let mut pending = PendingConnections::new(TIMEOUT);
        assert_eq!(pending.next_end(Duration::ZERO), None);
        for number in 0..3 {
            let handshake = PendingHandshake {
                number,
                has_spoken: false,
            };
            pending.enter(handshake, Duration::from_secs(number as u64));
        }
        assert_eq!(
            pending.next_end(Duration::from_secs(2)),
            Some(Duration::from_secs(3))
        );
        assert_eq!(numbers(&pending.expire(Duration::from_secs(6))), [0, 1]);
        let stays = pending.advance(0, |_| None::<()>);
        assert!(stays.is_none());
        let (gone, ()) = pending.advance(0, |_| Some(())).unwrap();
        assert_eq!(gone.number, 2);
        assert!(pending.advance(0, |_| Some(())).is_none());
    }
}
