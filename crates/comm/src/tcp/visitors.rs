//! Those at the door who have not proved anything yet: how many there may be, and who goes first.

use std::collections::VecDeque;
use std::time::Duration;

/// Connections that may be proving themselves at once: more ranks than start at one moment, and few enough for any
/// limit of open files. Whoever comes when there are so many takes the place of another.
pub(super) const MOST_VISITORS: usize = 256;

/// A visitor, as far as this list cares.
pub(super) trait Visitor {
    /// Whether it has said who it is.
    fn has_spoken(&self) -> bool;
}

/// Visitors by the time of their coming. Pure: the time comes in as the time since a moment of the owner's choice.
pub(super) struct Visitors<V> {
    waiting: VecDeque<(Duration, V)>,
    patience: Duration,
}

impl<V: Visitor> Visitors<V> {
    /// Each may stay for so long.
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            waiting: VecDeque::new(),
            patience,
        }
    }

    /// Takes one in; the one that has to go for it, if there are too many: the oldest of those that have not said a
    /// word, else the oldest. So idle visitors, however many, keep no rank out.
    pub(super) fn enter(&mut self, visitor: V, now: Duration) -> Option<V> {
        let displaced = (self.waiting.len() >= MOST_VISITORS).then(|| {
            let mut waiting = self.waiting.iter();
            waiting
                .position(|(_, visitor)| !visitor.has_spoken())
                .unwrap_or(0)
        });
        let displaced = displaced.and_then(|place| self.waiting.remove(place));
        self.waiting.push_back((now, visitor));
        displaced.map(|(_, visitor)| visitor)
    }

    /// Those whose time is over.
    pub(super) fn expire(&mut self, now: Duration) -> Vec<V> {
        let is_over = |since: Duration| now.saturating_sub(since) >= self.patience;
        let over = self.waiting.partition_point(|(since, _)| is_over(*since));
        self.waiting
            .drain(..over)
            .map(|(_, visitor)| visitor)
            .collect()
    }

    /// How long until the next one's time is over; `None` while nobody is here.
    pub(super) fn next_end(&self, now: Duration) -> Option<Duration> {
        let (since, _) = self.waiting.front()?;
        Some(self.patience.saturating_sub(now.saturating_sub(*since)))
    }

    /// Everybody, in the order of coming.
    pub(super) fn iter(&self) -> impl Iterator<Item = &V> {
        self.waiting.iter().map(|(_, visitor)| visitor)
    }

    /// The one at a place of [`Self::iter`], and how it goes on: who is done is let go.
    pub(super) fn advance<T>(
        &mut self,
        place: usize,
        step: impl FnOnce(&mut V) -> Option<T>,
    ) -> Option<(V, T)> {
        let (_, visitor) = self.waiting.get_mut(place)?;
        let outcome = step(visitor)?;
        let (_, visitor) = self.waiting.remove(place)?;
        Some((visitor, outcome))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Guest {
        number: usize,
        has_spoken: bool,
    }

    impl Visitor for Guest {
        fn has_spoken(&self) -> bool {
            self.has_spoken
        }
    }

    const PATIENCE: Duration = Duration::from_secs(5);

    fn numbers(guests: &[Guest]) -> Vec<usize> {
        guests.iter().map(|guest| guest.number).collect()
    }

    #[test]
    fn the_oldest_mute_visitor_goes_when_there_are_too_many_else_the_oldest() {
        let mut visitors = Visitors::new(PATIENCE);
        for number in 0..MOST_VISITORS {
            let guest = Guest {
                number,
                has_spoken: number != 3 && number != 5,
            };
            assert!(visitors.enter(guest, Duration::ZERO).is_none());
        }
        let mut enter = |number| {
            let guest = Guest {
                number,
                has_spoken: true,
            };
            visitors.enter(guest, Duration::ZERO).unwrap().number
        };
        assert_eq!([enter(1000), enter(1001), enter(1002)], [3, 5, 0]);
        assert_eq!(visitors.iter().count(), MOST_VISITORS);
    }

    #[test]
    fn each_visitor_has_its_time_and_no_more() {
        let mut visitors = Visitors::new(PATIENCE);
        assert_eq!(visitors.next_end(Duration::ZERO), None);
        for number in 0..3 {
            let guest = Guest {
                number,
                has_spoken: false,
            };
            visitors.enter(guest, Duration::from_secs(number as u64));
        }
        assert_eq!(
            visitors.next_end(Duration::from_secs(2)),
            Some(Duration::from_secs(3))
        );
        assert_eq!(numbers(&visitors.expire(Duration::from_secs(6))), [0, 1]);
        let stays = visitors.advance(0, |_| None::<()>);
        assert!(stays.is_none());
        let (gone, ()) = visitors.advance(0, |_| Some(())).unwrap();
        assert_eq!(gone.number, 2);
        assert!(visitors.advance(0, |_| Some(())).is_none());
    }
}
