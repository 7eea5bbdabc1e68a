//! Parts that threads write.

use std::fs;

use super::division::{description, held, views};
use super::files::{Scratch, flat, load, noise};
use crate::{Background, Checkpoint, CheckpointError, PieceView, Region, commit};

#[test]
fn what_is_written_is_what_the_memory_held_at_the_call() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    let background = Background::default();
    for round in 0..4u8 {
        let mut bytes = noise(100_000 + 1000 * u64::from(round % 2), round.into());
        let expected = bytes.clone();
        let shape = [bytes.len() as u64];
        let piece = PieceView {
            name: "a",
            dtype: safetensors::Dtype::U8,
            shape: &shape,
            region: Region::whole(&shape),
            bytes: &bytes,
        };
        let part = background.write_part(&directory, "t", "part", &[piece]);
        bytes.fill(0);
        let report = part.unwrap().wait().unwrap();
        commit(&directory, "t", description(), vec![report], None).unwrap();
        let checkpoint = Checkpoint::open(&directory, None).unwrap();
        assert_eq!(load(&checkpoint, "a").unwrap(), expected);
    }
}

#[test]
fn a_failure_is_told_to_whoever_waits_or_at_the_next_call_and_once() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    let background = Background::default();
    let tensors = [flat("a", vec![1; 9], 1)];
    let held = held(&tensors, 0);
    let write = || background.write_part(&directory, "t", "part", &views(&held));
    fs::write(directory.path(), "no folder").unwrap();
    let part = write().unwrap();
    let told = part.wait().unwrap_err();
    assert!(matches!(*told, CheckpointError::Io { .. }), "{told}");
    assert_eq!(part.wait().unwrap_err().to_string(), told.to_string());
    let unheard = write().unwrap(); // the one before was heard of
    while !unheard.is_done() {
        std::thread::yield_now();
    }
    drop(unheard);
    let error = write().unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("an earlier part of a checkpoint could not be written: {told}")
    );
    fs::remove_file(directory.path()).unwrap();
    write().unwrap().wait().unwrap();
}

#[test]
fn what_makes_no_sense_is_refused_at_once() {
    let scratch = Scratch::new();
    let piece = PieceView {
        name: "a",
        dtype: safetensors::Dtype::U8,
        shape: &[3],
        region: Region::whole(&[3]),
        bytes: &[1, 2],
    };
    let background = Background::default();
    let error = background.write_part(&scratch.directory(), "t", "part", &[piece]);
    assert!(matches!(error, Err(CheckpointError::Piece { .. })));
}
