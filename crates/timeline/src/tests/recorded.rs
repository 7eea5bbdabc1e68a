//! Programs from recorded steps.

use super::{module, record, root};
use crate::{Phase, Record, RecordKind, RecordedError, Timeline};

fn served(kind: RecordKind, start: u64, microbatch: u32, request: u64) -> Record {
    let mut record = module(record(1, kind, start, start + 1));
    (record.microbatch, record.request) = (Some(microbatch), Some(request));
    record
}

fn of_root(phase: Phase, start: u64, microbatch: u32) -> Record {
    let mut record = root(record(0, RecordKind::Root, start, start + 1), phase);
    record.microbatch = Some(microbatch);
    record
}

/// Two microbatches in 1F1B over two ranks, rank 1 visited `visits` times.
fn step(visits: u64) -> Vec<Record> {
    let mut records = Vec::new();
    for microbatch in 0..2 {
        let start = 100 * u64::from(microbatch);
        records.push(of_root(Phase::Forward, start, microbatch));
        for visit in 0..visits {
            let request = 10 * u64::from(microbatch) + visit;
            records.push(served(
                RecordKind::Forward,
                start + 10 + 2 * visit,
                microbatch,
                request,
            ));
            // Between its calls the step function has the turn again.
            records.push(of_root(Phase::Forward, start + 11 + 2 * visit, microbatch));
            records.push(served(
                RecordKind::Backward,
                start + 40 - 2 * visit,
                microbatch,
                request + 5,
            ));
            records.push(of_root(Phase::Backward, start + 41 - 2 * visit, microbatch));
        }
    }
    records
}

#[test]
fn a_step_is_the_order_of_its_tasks() {
    let program = Timeline::new(step(1), 0).program(None).unwrap().to_string();
    assert_eq!(
        program,
        "shardwright program 1\nrank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
    );
}

#[test]
fn each_visit_of_a_rank_is_a_stage_and_its_backwards_come_in_reverse() {
    let program = Timeline::new(step(2), 0)
        .program(Some(0))
        .unwrap()
        .to_string();
    assert!(
        program.ends_with("rank 1: 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1\n"),
        "{program}"
    );
}

#[test]
fn weight_gradients_left_behind_split_the_backward() {
    let mut records = step(1);
    records.push(served(RecordKind::Weight, 300, 0, 90));
    let program = Timeline::new(records, 0).program(None).unwrap().to_string();
    assert!(
        program.ends_with("rank 1: 1F0 1I0 1F1 1B1 1W0\n"),
        "{program}"
    );
}

#[test]
fn the_fastest_step_is_taken() {
    let mut records = step(1);
    let slower = step(2).into_iter().map(|record| Record {
        step: 1,
        start_ns: 2 * record.start_ns,
        end_ns: 2 * record.end_ns,
        ..record
    });
    records.extend(slower);
    let timeline = Timeline::new(records, 0);
    let program = |step| timeline.program(step).unwrap();
    assert_eq!(program(None), program(Some(0)));
    assert_ne!(program(None), program(Some(1)));
}

#[test]
fn what_is_no_program_says_why() {
    let refused = |records| {
        Timeline::new(records, 0)
            .program(None)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(refused(Vec::new()), "the trace has no steps");
    let mut uneven = step(1);
    uneven.push(served(RecordKind::Forward, 180, 1, 77));
    assert_eq!(
        refused(uneven),
        "rank 1 ran 2 forwards for microbatch 1 and 1 for microbatch 0; a program needs the same stages for every \
         microbatch"
    );
    let without: Vec<_> = step(1)
        .into_iter()
        .filter(|r| r.kind != RecordKind::Backward)
        .collect();
    assert!(refused(without).contains("1B0 is missing"));
    let mut two = step(1);
    two.push(Record {
        rank: 2,
        ..of_root(Phase::Forward, 5, 0)
    });
    assert!(refused(two).starts_with("step functions ran on ranks [0, 2]"));
    let lost = Timeline::new(step(1), 3).program(None);
    assert!(matches!(lost, Err(RecordedError::Lost { lost: 3 })));
}
