//! How often a device is asked whether it is done.

use std::time::Duration;

/// The shortest pause between two looks: what is noticed late by it still counts as small.
const SHORTEST: Duration = Duration::from_micros(50);
/// The longest.
const LONGEST: Duration = Duration::from_millis(1);
/// A pause is this part of what was waited so far.
const PART: u32 = 8;

/// The pause before the next look, for who has waited so long: what takes long may be noticed late by a part of that.
pub fn pause(waited: Duration) -> Duration {
    (waited / PART).clamp(SHORTEST, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many looks a wait of this length takes, and when the last one is.
    fn looks(needed: Duration) -> (u32, Duration) {
        let (mut number, mut now) = (1, Duration::ZERO);
        while now < needed {
            now += pause(now);
            number += 1;
        }
        (number, now)
    }

    #[test]
    fn a_slow_copy_is_looked_at_a_thousand_times_a_second_at_most() {
        for millis in [10, 100, 1_000, 10_000] {
            let (number, _) = looks(Duration::from_millis(millis));
            assert!(u64::from(number) <= 40 + millis, "{number} in {millis} ms");
        }
    }

    #[test]
    fn the_end_is_noticed_late_by_the_shortest_pause_or_a_part_of_the_wait_and_never_by_more_than_the_longest()
     {
        for micros in (1..20_000).step_by(7) {
            let needed = Duration::from_micros(micros);
            let (_, noticed) = looks(needed);
            let latest = needed + (needed / PART).clamp(SHORTEST, LONGEST);
            assert!(noticed <= latest, "{noticed:?} after {needed:?}");
        }
    }
}
