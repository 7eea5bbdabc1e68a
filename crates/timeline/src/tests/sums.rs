//! What records add up to, and two timelines side by side.

use super::{MS, later, message, record, records, timeline};
use crate::{Activity, Comparison, Record, RecordKind, Timeline};

#[test]
fn time_without_a_task_is_idle_within_the_step() {
    let summary = timeline().summary(None);
    let [first, second] = summary.ranks[..] else {
        panic!("two ranks")
    };
    assert_eq!((first.rank, second.rank), (0, 1));
    let (first, second) = (first.sums, second.sums);
    assert_eq!((first.forward_ns, first.backward_ns), (10 * MS, 10 * MS));
    assert_eq!((second.forward_ns, second.backward_ns), (10 * MS, 6 * MS));
    assert_eq!((second.weight_ns, second.other_ns), (4 * MS, 0));
    assert_eq!((first.idle_ns, second.idle_ns), (20 * MS, 20 * MS));
    assert_eq!((first.step_ns, second.step_ns), (40 * MS, 40 * MS));
    assert_eq!((first.sent_bytes, first.received_bytes), (5120, 0));
    assert_eq!((second.sent_bytes, second.received_bytes), (0, 5120));
    assert_eq!(summary.total.idle_ns, 40 * MS);
    assert!((summary.total.idle_share() - 0.5).abs() < 1e-12);
}

#[test]
fn the_pause_between_steps_is_not_idle() {
    let both = Timeline::new([records(), later(1)].concat(), 0);
    let sums = both.summary(None).ranks[0].sums;
    assert_eq!((sums.step_ns, sums.idle_ns), (80 * MS, 40 * MS));
    assert_eq!(both.summary(Some(1)).ranks[0].sums.step_ns, 40 * MS);
    assert_eq!(both.steps(), [0, 1]);
}

#[test]
fn a_message_lasts_until_it_arrives() {
    let sends: Vec<_> = timeline()
        .records()
        .iter()
        .filter(|record| record.kind == RecordKind::Send)
        .map(|record| (record.start_ns / MS, record.end_ns / MS))
        .collect();
    assert_eq!(sends, [(1010, 1012), (1011, 1013)]);
}

#[test]
fn a_request_and_an_answer_of_one_number_are_told_apart_by_their_order() {
    // Rank 0 sends its own request 7, and then the answer to request 7 of rank 1.
    let messages = vec![
        message(record(0, RecordKind::Send, 1, 1), 1, 7, 10),
        message(record(0, RecordKind::Send, 2, 2), 1, 7, 20),
        message(record(1, RecordKind::Receive, 5, 5), 0, 7, 10),
        message(record(1, RecordKind::Receive, 9, 9), 0, 7, 20),
    ];
    let joined = Timeline::join([Timeline::new(messages, 0)]);
    let ends: Vec<_> = joined.records()[..2]
        .iter()
        .map(|record| record.end_ns / MS)
        .collect();
    assert_eq!(ends, [5, 9]);
}

#[test]
fn steps_of_which_a_rank_has_lost_records_are_left_out() {
    let of = |rank: u32, lost: u64, from: u64| {
        let all: Vec<Record> = (from..4).flat_map(later).collect();
        Timeline::new(
            all.into_iter().filter(|own| own.rank == rank).collect(),
            lost,
        )
    };
    // Rank 1 has lost records up to some of step 1.
    let joined = Timeline::join([of(0, 0, 0), of(1, 3, 1)]);
    assert_eq!((joined.steps(), joined.lost()), (vec![2, 3], 3));
}

#[test]
fn a_comparison_is_by_step_and_names_the_largest_difference_first() {
    let a = Timeline::new(records(), 0);
    let mut slower = [records(), later(1)].concat();
    for record in &mut slower {
        if record.kind == RecordKind::Weight {
            record.end_ns += 5 * MS;
        }
    }
    let compared = Comparison::new(&a, &Timeline::new(slower, 0));
    assert_eq!((compared.num_steps.a, compared.num_steps.b), (1, 2));
    assert_eq!((compared.step_ns.a, compared.step_ns.b), (40 * MS, 40 * MS));
    let rank = compared.ranks[1];
    assert_eq!((rank.idle_ns.a, rank.idle_ns.b), (20 * MS, 15 * MS));
    let most = &compared.modules[0];
    assert_eq!(
        (most.module.as_str(), most.activity),
        ("transformer.h.2", Activity::Weight)
    );
    assert_eq!((most.time_ns.a, most.time_ns.b), (4 * MS, 9 * MS));
    assert!((most.tasks.b - 1.0).abs() < 1e-12);
    insta::assert_snapshot!(compared.to_text(2));
}

#[test]
fn a_task_that_was_suspended_counts_once() {
    let parts = vec![
        record(0, RecordKind::Forward, 0, 1),
        record(0, RecordKind::Forward, 3, 4),
    ];
    let timeline = Timeline::new(parts, 0);
    let compared = Comparison::new(&timeline, &timeline);
    assert!((compared.modules[0].tasks.a - 1.0).abs() < 1e-12);
    assert_eq!(compared.modules[0].time_ns.a, 2 * MS);
}
