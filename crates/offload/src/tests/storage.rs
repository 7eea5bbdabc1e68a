//! The thread, the file and the pool.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shardwright_core::{MicrobatchId, Phase, StepEpoch};
use shardwright_wire::Buffer;

use crate::error::OffloadError;
use crate::file::Places;
use crate::plan::{CallId, Task};
use crate::shell::{Offload, Options};
use crate::trace::Direction;

const KIB: usize = 1 << 10;

fn options(directory: Option<PathBuf>) -> Options {
    Options {
        rank: 3,
        horizon: 2,
        directory,
        most_outgoing: 0,
        timeout: Duration::from_secs(20),
    }
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|place| (place * 31 + seed * 7 + place / 251) as u8)
        .collect()
}

fn storages() -> [Option<PathBuf>; 2] {
    [None, Some(std::env::temp_dir())]
}

fn keep(offload: &Offload, microbatch: u32, seed: usize, len: usize) -> CallId {
    let call = offload
        .add_call(MicrobatchId(microbatch), "layers.1")
        .expect("it is open");
    offload
        .add_tensor(call, Buffer::copy_of(&bytes(seed, len)))
        .expect("there is room");
    call
}

/// A step of one microbatch: so many calls, computed again in reverse order, of which nothing is left.
fn step(offload: &Offload, number: u64, calls: usize, len: usize) {
    let task = |phase| Task {
        phase,
        microbatch: MicrobatchId(0),
    };
    offload
        .begin_step(
            StepEpoch(number),
            [task(Phase::Forward), task(Phase::Backward)],
        )
        .expect("it is open");
    offload
        .begin_task(task(Phase::Forward))
        .expect("it is open");
    let made: Vec<_> = (0..calls)
        .map(|seed| keep(offload, 0, seed, len + seed))
        .collect();
    offload
        .begin_task(task(Phase::Backward))
        .expect("it is open");
    for (seed, call) in made.into_iter().enumerate().rev() {
        let found = offload.take(call).expect("it comes back");
        assert_eq!(found.len(), 1);
        let found = found[0].1.as_ref().expect("it is in memory");
        assert_eq!(found.as_bytes(), bytes(seed, len + seed));
        offload.remove_call(call);
    }
}

#[test]
fn what_went_out_comes_back_byte_for_byte_and_the_file_is_used_again() {
    for directory in storages() {
        let offload = Offload::start(options(directory.clone())).expect("a storage");
        let mut size = None;
        for number in 1..4 {
            step(&offload, number, 9, 40 * KIB);
            let counts = offload.counts().expect("it is open");
            assert_eq!(counts.computed_again, 9 * number);
            assert!(counts.stored >= 6 * number, "{counts:?}");
            assert!(
                counts.loaded > 0 && counts.loaded <= counts.stored,
                "{counts:?}"
            );
            assert_eq!(counts.bytes, 0, "nothing is left");
            if directory.is_some() {
                assert!(counts.file_bytes >= counts.most_bytes);
                assert!(counts.file_bytes <= *size.get_or_insert(9 * 44 * KIB as u64));
            }
        }
        assert_eq!(offload.stays_in_memory(), directory.is_none() || is_tmpfs());
    }
}

/// Whether the temporary directory is in memory here.
fn is_tmpfs() -> bool {
    rustix::fs::statfs(std::env::temp_dir()).is_ok_and(|system| system.f_type == 0x0102_1994)
}

#[test]
fn a_file_has_no_name() {
    let directory =
        std::env::temp_dir().join(format!("shardwright-offload-test-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("a directory");
    let offload = Offload::start(options(Some(directory.clone()))).expect("a storage");
    step(&offload, 1, 5, 8 * KIB);
    assert_eq!(
        std::fs::read_dir(&directory).expect("it is there").count(),
        0
    );
    drop(offload);
    std::fs::remove_dir(&directory).expect("it is empty");
}

#[test]
fn a_directory_that_is_not_there_is_named() {
    let error =
        Offload::start(options(Some("/no/such/directory".into()))).expect_err("no directory");
    let text = error.to_string();
    for part in [
        "rank 3",
        "/no/such/directory",
        "No such file",
        "\"offload_directory\"",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn transfers_are_told_to_timelines() {
    let offload = Offload::start(options(None)).expect("a storage");
    step(&offload, 1, 4, KIB);
    assert_eq!(offload.take_trace(), (Vec::new(), 0));
    offload.keep_trace(true);
    step(&offload, 2, 4, KIB);
    let (spans, lost) = offload.take_trace();
    assert_eq!(lost, 0);
    assert!(spans.iter().any(|span| span.direction == Direction::In));
    for span in spans {
        assert_eq!(
            (span.step, span.module.as_str()),
            (StepEpoch(2), "layers.1")
        );
        assert!(span.start <= span.end && span.bytes >= KIB as u64);
    }
}

#[test]
fn an_end_wakes_who_waits_and_nothing_works_after_it() {
    let offload = Arc::new(Offload::start(options(None)).expect("a storage"));
    let call = keep(&offload, 0, 1, KIB);
    offload.close();
    assert_eq!(offload.take(call), Err(OffloadError::Closed));
    assert!(offload.add_call(MicrobatchId(0), "").is_err());
    offload.remove_call(call);
    offload.close();
}

#[test]
fn no_more_than_so_much_is_on_its_way_out_at_once() {
    let most_outgoing = 100 * KIB as u64;
    let options = Options {
        most_outgoing,
        ..options(Some(std::env::temp_dir()))
    };
    let offload = Offload::start(options).expect("a storage");
    let made: Vec<_> = (0..9)
        .map(|seed| keep(&offload, 0, seed, 40 * KIB))
        .collect();
    // Two stay within the horizon, and three may be on their way.
    let counts = offload.counts().expect("it is open");
    assert!(counts.stored_bytes >= 4 * 40 * KIB as u64, "{counts:?}");
    assert_eq!(made.len(), 9);
}

#[test]
fn places_in_the_file_are_used_again() {
    let mut places = Places::new();
    let taken: Vec<_> = (0..8).map(|_| places.take(10_000).expect("room")).collect();
    assert_eq!(places.size, 7 * 12_288 + 10_000);
    for block in taken {
        places.give_back(block);
    }
    assert!(places.is_empty());
    let again: Vec<_> = (0..8).map(|_| places.take(12_000).expect("room")).collect();
    assert_eq!(places.size, 7 * 12_288 + 12_000);
    assert!(
        again
            .windows(2)
            .all(|pair| pair[0].offset + pair[0].len <= pair[1].offset)
    );
}
