//! Laws of any records.

use proptest::prelude::*;

use crate::{Phase, Record, RecordKind, Timeline};

fn any_record() -> impl Strategy<Value = Record> {
    let kinds = prop::sample::select(RecordKind::ALL.to_vec());
    let phase = prop::sample::select(vec![None, Some(Phase::Forward), Some(Phase::Backward)]);
    let place = (0..3_u32, 0..3_u64, kinds, phase);
    let time = (0..10_000_000_000_u64, 0..100_000_000_u64);
    let more = (
        prop::option::of(0..4_u32),
        prop::option::of("[a-z.]{1,9}"),
        prop::option::of(0..9_u32),
        prop::option::of(0..3_u32),
        prop::option::of(0..20_u64),
        0..5_000_u64,
    );
    (place, time, more).prop_map(|((rank, step, kind, phase), (start_ns, length), more)| {
        let (worker, module, microbatch, peer, request, bytes) = more;
        Record {
            start_ns,
            end_ns: start_ns + length,
            phase,
            worker,
            module,
            microbatch,
            peer,
            request,
            bytes,
            ..Record::new(rank, step, kind)
        }
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(records in prop::collection::vec(any_record(), 0..40), lost in 0..9_u64) {
        let timeline = Timeline::new(records, lost);
        prop_assert_eq!(&Timeline::from_json(&timeline.to_json()).unwrap(), &timeline);
        let read = Timeline::from_trace(&timeline.to_trace()).unwrap();
        let mut sorted = [timeline.records().to_vec(), read.records().to_vec()];
        for records in &mut sorted {
            records.sort_by_key(|record| format!("{record:?}"));
        }
        prop_assert_eq!(&sorted[0], &sorted[1]);
        prop_assert_eq!(read.lost(), timeline.lost());
    }

    #[test]
    fn a_rank_is_never_idle_for_longer_than_the_step(records in prop::collection::vec(any_record(), 1..40)) {
        let timeline = Timeline::join([Timeline::new(records, 0)]);
        for step in timeline.steps() {
            let summary = timeline.summary(Some(step));
            for rank in &summary.ranks {
                let sums = rank.sums;
                let busy = sums.forward_ns + sums.backward_ns + sums.weight_ns + sums.other_ns;
                prop_assert!(sums.idle_ns <= sums.step_ns);
                prop_assert!(sums.busy_ns() <= busy, "overlaps count once");
            }
        }
        for width in [1, 60] {
            let drawings = timeline.steps().into_iter().map(|step| timeline.drawing(step, width));
            prop_assert!(drawings.into_iter().all(|drawing| !drawing.is_empty()));
        }
    }
}
