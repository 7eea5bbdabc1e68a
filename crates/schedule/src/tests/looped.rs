//! The order of `looped`, and that no other schedule heeds what it goes by.

use proptest::prelude::*;
use shardwright_core::MicrobatchId;

use super::schedules;
use crate::{Progress, Ready, ReadyKind, Schedule, Turns};

fn ready(kind: ReadyKind, microbatch: u32, visit: u32) -> Ready {
    Ready {
        kind,
        microbatch: MicrobatchId(microbatch),
        arrival: u64::from(100 - microbatch),
        visit,
    }
}

/// All that are ready, in the order in which `looped(active=4)` takes them after a forward, or after a backward.
fn order(mut items: Vec<Ready>, after_backward: bool) -> Vec<(ReadyKind, u32)> {
    let schedule: Schedule = "looped(active=4)".parse().expect("a schedule");
    let progress = Progress {
        after_backward,
        ..Progress::default()
    };
    let mut order = Vec::new();
    while let Some(index) = schedule.choose(&items, &progress) {
        let item = items.remove(index);
        order.push((item.kind, item.microbatch.0));
    }
    order
}

#[test]
fn forward_and_backward_alternate_and_a_close_waits_for_neither() {
    let forward = ready(ReadyKind::RequestForward, 0, 0);
    let backward = ready(ReadyKind::RequestBackward, 9, 1);
    let close = ready(ReadyKind::RequestClose, 11, 0);
    let kinds = |after_backward| {
        let items = vec![forward, backward, close];
        order(items, after_backward)
            .into_iter()
            .map(|(kind, _)| kind)
            .collect::<Vec<_>>()
    };
    let [closes, forwards, backwards] = [close, forward, backward].map(|item| item.kind);
    assert_eq!(kinds(false), [closes, backwards, forwards]);
    assert_eq!(kinds(true), [closes, forwards, backwards]);
}

#[test]
fn without_the_other_direction_the_same_one_goes_on() {
    assert_eq!(
        order(vec![ready(ReadyKind::RootForward, 0, 0)], false).len(),
        1
    );
    assert_eq!(
        order(vec![ready(ReadyKind::ResumeBackward, 0, 0)], true).len(),
        1
    );
}

#[test]
fn a_group_goes_round_by_round_before_the_next_group_begins() {
    use ReadyKind::{RequestForward, ResumeForward, RootForward};
    let items = vec![
        ready(RequestForward, 2, 0),
        ready(ResumeForward, 0, 2),
        ready(RootForward, 3, 0),
        ready(RootForward, 1, 0),
        ready(ResumeForward, 0, 1),
        ready(ResumeForward, 1, 1),
    ];
    let expected = [
        (RootForward, 1),
        (ResumeForward, 0),
        (ResumeForward, 1),
        (ResumeForward, 0),
        (RequestForward, 2),
        (RootForward, 3),
    ];
    assert_eq!(order(items, false), expected);
    let backward = |microbatch, visit| ready(ReadyKind::RequestBackward, microbatch, visit);
    let items = vec![backward(2, 0), backward(0, 1), backward(1, 0)];
    let microbatches = order(items, false)
        .into_iter()
        .map(|(_, microbatch)| microbatch);
    assert_eq!(microbatches.collect::<Vec<_>>(), [1, 0, 2]);
}

#[test]
fn a_group_is_half_of_the_microbatches_in_flight() {
    let chosen = |active: u32, first: (u32, u32), second: (u32, u32)| {
        let schedule: Schedule = format!("looped(active={active})")
            .parse()
            .expect("a schedule");
        let items = [first, second]
            .map(|(microbatch, visit)| ready(ReadyKind::RequestForward, microbatch, visit));
        schedule.choose(&items, &Progress::default())
    };
    // In one group the earlier visit goes first, else the earlier group.
    assert_eq!(chosen(1, (0, 1), (1, 0)), Some(0));
    assert_eq!(chosen(3, (0, 1), (1, 0)), Some(1));
    assert_eq!(chosen(3, (1, 1), (2, 0)), Some(0));
    assert_eq!(chosen(8, (0, 1), (3, 0)), Some(1));
    assert_eq!(chosen(8, (0, 1), (4, 0)), Some(0));
}

#[test]
fn turns_are_counted_by_microbatch_and_direction_and_closes_are_none() {
    let [zero, one] = [0, 1].map(MicrobatchId);
    let mut turns = Turns::of(&"looped(active=4)".parse().expect("a schedule"));
    assert!(!turns.last_was_backward());
    turns.begin(ReadyKind::RootForward, zero);
    turns.begin(ReadyKind::ResumeForward, zero);
    assert_eq!(turns.visit(ReadyKind::RequestForward, zero), 2);
    assert_eq!(turns.visit(ReadyKind::RequestForward, one), 0);
    assert_eq!(turns.visit(ReadyKind::RootBackward, zero), 0);
    turns.begin(ReadyKind::ResumeBackward, zero);
    turns.begin(ReadyKind::RequestClose, zero);
    assert_eq!(turns.visit(ReadyKind::RequestBackward, zero), 1);
    assert!(turns.last_was_backward());
    turns.begin(ReadyKind::RequestForward, one);
    turns.begin(ReadyKind::RequestClose, zero);
    assert!(!turns.last_was_backward());
}

proptest! {
    #[test]
    fn other_schedules_heed_neither_visits_nor_turns(
        schedule in schedules(),
        items in prop::collection::vec((0_usize..7, 0_u32..6, 0_u32..4), 1..8),
        started in 0_u32..6,
        after_backward in any::<bool>(),
    ) {
        prop_assume!(!matches!(schedule, Schedule::Looped { .. }));
        let kinds = [
            ReadyKind::RootForward,
            ReadyKind::RootBackward,
            ReadyKind::RequestForward,
            ReadyKind::RequestBackward,
            ReadyKind::RequestClose,
            ReadyKind::ResumeForward,
            ReadyKind::ResumeBackward,
        ];
        let of = |with: u32| {
            let items = items.iter();
            items.map(move |(kind, microbatch, visit)| ready(kinds[*kind], *microbatch, with * visit))
        };
        let progress = Progress { num_microbatches: 6, started, ..Progress::default() };
        let plain: Vec<_> = of(0).collect();
        let told: Vec<_> = of(1).collect();
        let chosen = schedule.choose(&told, &Progress { after_backward, ..progress });
        prop_assert_eq!(chosen, schedule.choose(&plain, &progress));
    }
}
