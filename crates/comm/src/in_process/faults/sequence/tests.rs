//! Laws of the sequencer (SQ-1 to SQ-3).

use std::time::Duration;

use proptest::prelude::*;

use super::*;

const WINDOW: usize = 32;
const DEADLINE: Duration = Duration::from_secs(5);

fn at(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Feeds numbers, a millisecond apart; what came out.
fn feed(sequencer: &mut Sequencer<u64>, numbers: &[u64]) -> Vec<u64> {
    let mut out = Vec::new();
    for (index, number) in numbers.iter().enumerate() {
        let now = at(index as u64);
        out.extend(sequencer.accept(*number, *number, now).unwrap());
    }
    out
}

/// The numbers below `count` in an order in which none is overtaken by a number `WINDOW` or more above it.
fn shuffled(count: u64) -> impl Strategy<Value = Vec<u64>> {
    // Each moves back by less than half a window, so that two differ by less than a whole one.
    let delays = proptest::collection::vec(0..WINDOW as u64 / 2, count as usize);
    delays.prop_map(|delays| {
        let mut numbers: Vec<u64> = (0..delays.len() as u64).collect();
        numbers.sort_by_key(|number| (number + delays[*number as usize], u64::MAX - number));
        numbers
    })
}

proptest! {
    #[test]
    fn any_order_within_the_window_comes_out_once_and_in_order(numbers in shuffled(200)) {
        let mut sequencer = Sequencer::new(WINDOW);
        prop_assert_eq!(feed(&mut sequencer, &numbers), (0..200).collect::<Vec<_>>());
        prop_assert_eq!(sequencer.gap(), None);
        prop_assert_eq!((sequencer.delivered(), sequencer.duplicates()), (200, 0));
    }

    #[test]
    fn duplicates_are_counted_and_never_come_out(
        numbers in shuffled(100),
        again in proptest::collection::vec((any::<proptest::sample::Index>(), 0..40_usize), 0..50),
    ) {
        let mut doubled = numbers.clone();
        for (index, later) in &again {
            let place = index.index(doubled.len());
            let number = doubled[place];
            doubled.insert((place + 1 + later).min(doubled.len()), number);
        }
        let mut sequencer = Sequencer::new(WINDOW);
        prop_assert_eq!(feed(&mut sequencer, &doubled), (0..100).collect::<Vec<_>>());
        prop_assert_eq!(sequencer.duplicates(), again.len() as u64);
    }

    #[test]
    fn whatever_is_dropped_is_reported_and_nothing_behind_it_comes_out(
        numbers in shuffled(24),
        dropped in 0..24_u64,
    ) {
        let left: Vec<u64> = numbers.into_iter().filter(|number| *number != dropped).collect();
        let mut sequencer = Sequencer::new(WINDOW);
        prop_assert_eq!(feed(&mut sequencer, &left), (0..dropped).collect::<Vec<_>>());
        // Nothing behind the last one shows that it is missing, but its sender's word.
        sequencer.announce(24, at(30));
        let gap = sequencer.gap().expect("a gap");
        prop_assert_eq!(&gap.missing, &(dropped..=dropped));
        let arrived = (dropped < 23).then(|| dropped + 1..=23);
        prop_assert_eq!(&gap.arrived, &arrived);
        prop_assert!(gap.since <= at(30));
        prop_assert_eq!(sequencer.overdue(gap.since + at(4999), DEADLINE), None);
        prop_assert_eq!(sequencer.overdue(gap.since + DEADLINE, DEADLINE), Some(gap));
    }

    #[test]
    fn no_number_takes_more_than_the_window(numbers in proptest::collection::vec(
        prop_oneof![0..80_u64, any::<u64>()], 0..200,
    )) {
        let mut sequencer = Sequencer::new(WINDOW);
        let mut out = Vec::new();
        for number in numbers {
            let next = sequencer.delivered();
            match sequencer.accept(number, number, at(0)) {
                Ok(ready) => out.extend(ready),
                Err(error) => {
                    prop_assert!(number - next >= WINDOW as u64);
                    prop_assert_eq!(error, TooFarAhead { number, next, window: WINDOW });
                }
            }
            prop_assert!(sequencer.slots.len() <= WINDOW);
            prop_assert!(sequencer.slots.back().is_none_or(Option::is_some));
        }
        prop_assert_eq!(out, (0..sequencer.delivered()).collect::<Vec<_>>());
    }
}

#[test]
fn a_gap_is_as_old_as_the_last_progress() {
    let mut sequencer = Sequencer::new(WINDOW);
    let mut accept =
        |number, now| -> Vec<u64> { sequencer.accept(number, number, at(now)).unwrap().collect() };
    assert!(accept(1, 100).is_empty());
    assert!(accept(3, 200).is_empty());
    assert_eq!(accept(0, 300), [0, 1]);
    let gap = sequencer.gap().unwrap();
    assert_eq!((gap.missing, gap.arrived), (2..=2, Some(3..=3)));
    assert_eq!(gap.since, at(300));
}

#[test]
fn what_is_left_in_the_iterator_comes_out_at_the_next_call() {
    let mut sequencer = Sequencer::new(WINDOW);
    drop(sequencer.accept(0, 'a', at(0)).unwrap());
    assert_eq!(sequencer.gap(), None);
    let rest: String = sequencer.accept(1, 'b', at(0)).unwrap().collect();
    assert_eq!(rest, "ab");
}

#[test]
fn a_loss_names_what_is_missing_and_what_came() {
    let mut sequencer = Sequencer::new(WINDOW);
    let numbers: Vec<u64> = (0..17).chain(18..22).chain(25..26).collect();
    assert_eq!(feed(&mut sequencer, &numbers).len(), 17);
    let reason = |sequencer: &Sequencer<u64>| match sequencer.gap().unwrap().loss(DEADLINE) {
        Loss::Broken { reason } => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        reason(&sequencer),
        "message 17 did not arrive within 5 s while 18 to 21 did"
    );
    assert_eq!(sequencer.accept(17, 17, at(30)).unwrap().count(), 5);
    assert_eq!(
        reason(&sequencer),
        "messages 22 to 24 did not arrive within 5 s while 25 did"
    );
    assert_eq!(feed(&mut sequencer, &[22, 23, 24]), [22, 23, 24, 25]);
    sequencer.announce(27, at(40));
    assert_eq!(
        reason(&sequencer),
        "message 26 did not arrive within 5 s although sent"
    );
}
