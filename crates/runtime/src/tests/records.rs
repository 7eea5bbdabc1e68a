//! What a step leaves in the trace.

use std::collections::BTreeSet;

use super::rig::{job, on_every_rank, plan};
use super::steps::chain;
use crate::TraceKind;

#[test]
fn every_task_leaves_a_record_whether_it_was_suspended_or_not() {
    let ranks = job(2);
    let behaviour = chain(2);
    on_every_rank(&ranks, move |rank| {
        rank.step(plan(1, "train_step", 3), &behaviour)
    });
    for rank in &ranks {
        let (_, records) = rank.server.take_trace();
        let served = rank.server.stats().step.served;
        for (kind, num_served) in [
            (TraceKind::Forward, served.forward),
            (TraceKind::Backward, served.backward),
            (TraceKind::Close, served.close),
        ] {
            let seen: BTreeSet<_> = records
                .iter()
                .filter(|record| record.kind == kind)
                .map(|record| (record.peer, record.request))
                .collect();
            assert_eq!(
                seen.len() as u64,
                num_served,
                "{kind:?} on rank {}",
                rank.id
            );
        }
        assert!(records.iter().all(|record| record.start <= record.end));
        rank.shut_down();
    }
}
