//! What a step leaves in the trace.

use std::collections::BTreeSet;

use shardwright_core::StepEpoch;
use shardwright_wire::Phase;

use super::alone::at;
use super::rig::{job, on_every_rank, plan};
use super::steps::chain;
use crate::{AloneRecorder, TraceKind};

#[test]
fn every_task_leaves_a_record_whether_it_was_suspended_or_not() {
    let ranks = job(2);
    for rank in &ranks {
        rank.server.keep_trace(true);
    }
    let behaviour = chain(2);
    on_every_rank(&ranks, move |rank| {
        rank.step(plan(1, "train_step", 3), &behaviour)
    });
    for rank in &ranks {
        let (_, records, lost) = rank.server.take_trace();
        assert_eq!(lost, 0);
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

#[test]
fn a_rank_alone_leaves_records_of_its_microbatches_without_gaps() {
    let mut recorder = AloneRecorder::new(16);
    recorder.keep_trace(true);
    recorder.passed(Phase::Backward, at(1));
    recorder.begin(StepEpoch(3), at(2));
    recorder.passed(Phase::Forward, at(4));
    recorder.passed(Phase::Backward, at(5));
    recorder.next_microbatch(at(7));
    recorder.passed(Phase::Forward, at(8));
    recorder.end(at(8));
    recorder.passed(Phase::Backward, at(9));
    let seen: Vec<_> = recorder
        .take()
        .0
        .into_iter()
        .map(|record| {
            assert_eq!(record.step, StepEpoch(3));
            assert_eq!(record.kind, TraceKind::Root);
            let microbatch = record.microbatch.map(|microbatch| microbatch.0);
            (microbatch, record.phase, record.start, record.end)
        })
        .collect();
    assert_eq!(
        seen,
        [
            (Some(0), Some(Phase::Forward), at(2), at(4)),
            (Some(0), Some(Phase::Backward), at(4), at(5)),
            (Some(0), Some(Phase::Forward), at(5), at(7)),
            (Some(1), Some(Phase::Forward), at(7), at(8)),
        ]
    );
    assert!(recorder.take().0.is_empty());
}
