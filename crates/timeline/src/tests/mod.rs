//! Timelines: their figures, their pictures, their files.

mod files;
mod foreign;
mod laws;
mod pictures;
mod profile;
mod recorded;
mod sums;

use crate::{Phase, Record, RecordKind, Timeline};

const MS: u64 = 1_000_000;

/// A record in milliseconds, of step 0.
fn record(rank: u32, kind: RecordKind, start: u64, end: u64) -> Record {
    Record {
        start_ns: start * MS,
        end_ns: end * MS,
        microbatch: Some(0),
        ..Record::new(rank, 0, kind)
    }
}

fn module(mut record: Record) -> Record {
    record.module = Some("transformer.h.2".to_owned());
    (record.worker, record.peer, record.request) = (Some(0), Some(0), Some(7));
    record
}

fn message(record: Record, peer: u32, request: u64, bytes: u64) -> Record {
    Record {
        peer: Some(peer),
        request: Some(request),
        bytes,
        ..record
    }
}

fn root(record: Record, phase: Phase) -> Record {
    Record {
        phase: Some(phase),
        worker: Some(0),
        ..record
    }
}

/// A step over two ranks, offset on the clock as real ones are.
fn records() -> Vec<Record> {
    vec![
        root(record(0, RecordKind::Root, 1000, 1010), Phase::Forward),
        message(record(0, RecordKind::Send, 1010, 1010), 1, 7, 4096),
        root(record(0, RecordKind::Wait, 1010, 1030), Phase::Forward),
        message(record(0, RecordKind::Send, 1011, 1011), 1, 8, 1024),
        message(record(1, RecordKind::Receive, 1012, 1012), 0, 7, 4096),
        module(record(1, RecordKind::Forward, 1012, 1022)),
        message(record(1, RecordKind::Receive, 1013, 1013), 0, 8, 1024),
        module(record(1, RecordKind::Backward, 1022, 1028)),
        module(record(1, RecordKind::Weight, 1030, 1034)),
        root(record(0, RecordKind::Root, 1030, 1040), Phase::Backward),
    ]
}

fn timeline() -> Timeline {
    Timeline::join([Timeline::new(records(), 0)])
}

/// Every record, so many steps later and a second after for each.
fn later(steps: u64) -> Vec<Record> {
    let mut records = records();
    for record in &mut records {
        record.step += steps;
        record.start_ns += 1000 * MS * steps;
        record.end_ns += 1000 * MS * steps;
    }
    records
}
