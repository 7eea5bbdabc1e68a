//! Writing and reading on a disk.

use std::fs::{self, File};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;

use super::division::{DTYPES, Divided, description, divided, held, part_name, region, views};
use crate::eager::write_slices;
use crate::{
    CHUNK_BYTES, Checkpoint, CheckpointError, Committed, Directory, EntryState, Region, Touched,
    Wanted, abandon, commit, write_part,
};

/// A folder that goes with the test.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("shardwright-checkpoint-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn directory(&self) -> Directory {
        Directory::new(self.0.join("checkpoints")).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

pub(super) fn save(
    directory: &Directory,
    tag: &str,
    tensors: &[Divided],
    files: usize,
    keep: Option<u32>,
) -> Result<Committed, CheckpointError> {
    let mut reports = Vec::new();
    for file in 0..files {
        let held = held(tensors, file);
        reports.push(write_part(directory, tag, &part_name(file), &views(&held))?);
    }
    let keep = keep.map(|keep| NonZeroU32::new(keep).unwrap());
    commit(directory, tag, description(), reports, keep)
}

pub(super) fn load(checkpoint: &Checkpoint, name: &str) -> Result<Vec<u8>, CheckpointError> {
    let tensor = checkpoint.manifest().tensor(name).unwrap();
    let mut bytes = vec![0; tensor.num_bytes() as usize];
    let wanted = Wanted {
        name,
        region: Region::whole(&tensor.shape),
        into: &mut bytes,
    };
    checkpoint.read(vec![wanted])?;
    Ok(bytes)
}

/// A tensor of bytes in one dimension, in equal parts.
pub(super) fn flat(name: &str, bytes: Vec<u8>, parts: u64) -> Divided {
    let count = bytes.len() as u64;
    let cut = |part: u64| count * part / parts;
    let pieces = (0..parts).map(|part| {
        let (begin, end) = (cut(part), cut(part + 1));
        (part as usize, Region::boxed(vec![begin], vec![end - begin]))
    });
    Divided {
        name: name.to_owned(),
        dtype: DTYPES[0],
        shape: vec![count],
        pieces: pieces.collect(),
        bytes,
    }
}

pub(super) fn noise(count: u64, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..count).map(next).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_division_is_read_back_in_any_other(
        case in (divided("x", 3), divided("y", 3)).prop_flat_map(|(x, y)| {
            let regions = (region(&x.shape), region(&y.shape));
            (Just([x, y]), regions)
        })
    ) {
        let (tensors, (x, y)) = case;
        let scratch = Scratch::new();
        save(&scratch.directory(), "t", &tensors, 3, None).unwrap();
        let checkpoint = Checkpoint::open(&scratch.directory(), None).unwrap();
        let expected = [tensors[0].bytes_of(&x), tensors[1].bytes_of(&y)];
        let mut found = expected.clone().map(|bytes| vec![0xEE; bytes.len()]);
        let [into_x, into_y] = &mut found;
        let wanted = vec![
            Wanted { name: "x", region: x, into: into_x },
            Wanted { name: "y", region: y, into: into_y },
        ];
        checkpoint.read(wanted).unwrap();
        prop_assert_eq!(found, expected);
        prop_assert_eq!(checkpoint.verify(|_| {}).unwrap(), vec![]);
    }
}

#[test]
fn each_touched_chunk_is_read_once_and_no_other() {
    let bytes = noise(5 * CHUNK_BYTES + 77, 3);
    let scratch = Scratch::new();
    let tensors = [flat("a", bytes.clone(), 1)];
    save(&scratch.directory(), "t", &tensors, 1, None).unwrap();
    let checkpoint = Checkpoint::open(&scratch.directory(), Some("t")).unwrap();
    assert_eq!(load(&checkpoint, "a").unwrap(), bytes);
    // In the third chunk, and across the border of the next: the header's chunk, and these two.
    let begin = 2 * CHUNK_BYTES + 100;
    let mut parts = [vec![0; 500], vec![0; CHUNK_BYTES as usize]];
    let [first, second] = &mut parts;
    let wanted = |begin: u64, into| Wanted {
        name: "a",
        region: Region::whole(&[bytes.len() as u64]).run(begin, 0),
        into,
    };
    let mut wanted = vec![
        wanted(begin, &mut first[..]),
        wanted(begin + 9, &mut second[..]),
    ];
    for one in &mut wanted {
        one.region.elements.as_mut().unwrap().count = one.into.len() as u64;
    }
    let touched = checkpoint.read(wanted).unwrap();
    let expected = Touched {
        files: 1,
        chunks: 3,
        bytes: 3 * CHUNK_BYTES,
    };
    assert_eq!(touched, expected);
    let begin = begin as usize;
    assert_eq!(parts[0], bytes[begin..begin + 500]);
    assert_eq!(parts[1], bytes[begin + 9..begin + 9 + CHUNK_BYTES as usize]);
}

#[test]
fn a_tag_that_is_saved_again_is_replaced() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    save(&directory, "t", &[flat("a", vec![1; 40], 3)], 3, None).unwrap();
    let again = save(&directory, "t", &[flat("a", vec![2; 30], 2)], 2, None).unwrap();
    assert_eq!(again.manifest.sequence, 1);
    let checkpoint = Checkpoint::open(&directory, None).unwrap();
    assert_eq!(load(&checkpoint, "a").unwrap(), vec![2; 30]);
    let left: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn only_so_many_are_kept() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    let save = |tag: &str, keep| save(&directory, tag, &[flat("a", vec![1; 9], 2)], 2, keep);
    save("z", None).unwrap();
    save("y", None).unwrap();
    // One that was ended while it was written, and one that cannot be read: neither counts, and neither goes.
    write_part(&directory, "half", "part-0.safetensors", &[]).unwrap();
    fs::create_dir(directory.folder("broken")).unwrap();
    assert_eq!(save("x", Some(2)).unwrap().removed, ["z"]);
    assert_eq!(save("w", Some(1)).unwrap().removed, ["y", "x"]);
    let entries = directory.entries().unwrap();
    let found: Vec<(&str, bool)> = entries
        .iter()
        .map(|one| (&*one.tag, matches!(one.state, EntryState::Complete(_))))
        .collect();
    assert_eq!(found, [("w", true), ("broken", false), ("half", false)]);
    assert!(matches!(entries[1].state, EntryState::Unusable(_)));
    assert!(matches!(entries[2].state, EntryState::Incomplete));
}

#[test]
fn what_an_ended_job_left_does_not_get_into_the_next_checkpoint() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    let old = flat("a", vec![1; 90], 3);
    for file in 0..3 {
        let held = held(std::slice::from_ref(&old), file);
        write_part(&directory, "t", &part_name(file), &views(&held)).unwrap();
    }
    save(&directory, "t", &[flat("a", vec![2; 30], 2)], 2, None).unwrap();
    let checkpoint = Checkpoint::open(&directory, Some("t")).unwrap();
    assert_eq!(checkpoint.manifest().files.len(), 2);
    assert_eq!(load(&checkpoint, "a").unwrap(), vec![2; 30]);
}

#[test]
fn a_failed_save_leaves_what_was_there() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    save(&directory, "one", &[flat("a", vec![1; 40], 2)], 2, None).unwrap();
    let next = [flat("a", vec![2; 40], 2)];
    let pieces = held(&next, 0);
    let report = write_part(&directory, "two", "part-0.safetensors", &views(&pieces)).unwrap();
    let lost = commit(&directory, "two", description(), vec![report.clone()], None).unwrap_err();
    assert!(
        lost.to_string().contains("they hold 20 of its 40"),
        "{lost}"
    );
    let mut elsewhere = report;
    elsewhere.file.name = "part-1.safetensors".to_owned();
    let lost = commit(&directory, "two", description(), vec![elsewhere], None).unwrap_err();
    assert!(
        matches!(lost, CheckpointError::PartElsewhere { .. }),
        "{lost}"
    );
    abandon(&directory, "two").unwrap();
    let checkpoint = Checkpoint::open(&directory, None).unwrap();
    assert_eq!(checkpoint.manifest().tag, "one");
    assert_eq!(load(&checkpoint, "a").unwrap(), vec![1; 40]);
    assert_eq!(directory.entries().unwrap().len(), 1);
}

#[test]
fn a_full_disk_is_told_with_the_file_and_how_far_it_was_written() {
    let path = Path::new("/dev/full");
    let mut full = File::options().write(true).open(path).unwrap();
    let error = write_slices(&mut full, path, &[&[1; 5], &[2; 7]]).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("/dev/full: 0 of 12 bytes were written: No space left"),
        "{text}"
    );
    let mut some = [0; 8];
    let error = write_slices(&mut &mut some[..], path, &[&[1; 5], &[2; 7]]).unwrap_err();
    assert!(error.to_string().contains("8 of 12 bytes"), "{error}");
}

#[test]
fn a_part_that_cannot_be_written_leaves_no_file() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    let tensors = [flat("a", vec![1; 40], 1)];
    let pieces = held(&tensors, 0);
    let mut views = views(&pieces);
    views[0].bytes = &views[0].bytes[1..];
    let error = write_part(&directory, "t", "part-0.safetensors", &views).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("39 bytes were given for [0:40], which has 40"),
        "{error}"
    );
    for name in ["", "..", "a/b", "manifest.json"] {
        let error = write_part(&directory, "t", name, &[]).unwrap_err();
        assert!(matches!(error, CheckpointError::Name { .. }), "{error}");
        if name != "manifest.json" {
            assert!(write_part(&directory, name, "part", &[]).is_err());
        }
    }
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn what_is_not_there_is_told_with_what_is() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    let none = Checkpoint::open(&directory, None).unwrap_err().to_string();
    assert!(
        none.ends_with("names no newest checkpoint; no checkpoint is there"),
        "{none}"
    );
    save(&directory, "one", &[flat("a", vec![1; 40], 2)], 2, None).unwrap();
    let other = Checkpoint::open(&directory, Some("two")).unwrap_err();
    assert!(other.to_string().ends_with("; there are one"), "{other}");
    let checkpoint = Checkpoint::open(&directory, Some("one")).unwrap();
    let wanted = |name, into| Wanted {
        name,
        region: Region::whole(&[40]),
        into,
    };
    let error = checkpoint.read(vec![wanted("b", &mut [])]).unwrap_err();
    assert!(
        error.to_string().ends_with("has no tensor \"b\""),
        "{error}"
    );
    let error = checkpoint
        .read(vec![wanted("a", &mut [0; 39])])
        .unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("39 bytes of memory were given for 40"),
        "{error}"
    );
}
