//! Other files, the same contents, each byte read once.

use std::fs;
use std::num::NonZeroU16;

use proptest::prelude::*;
use serde_json::json;

use super::division::{DTYPES, Divided, description, divided, held, part_name, views};
use super::files::{Scratch, flat, load, noise, save};
use crate::{
    Alias, CHUNK_BYTES, Checkpoint, CheckpointError, Directory, Dtype, PieceView, Region, commit,
    reshard, unequal, write_part,
};

fn parts(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap()
}

/// Reshards the newest checkpoint into another directory, and opens that.
fn resharded(scratch: &Scratch, from: &Directory, name: &str, number: u16) -> Checkpoint {
    let source = Checkpoint::open(from, None).unwrap();
    let into = Directory::new(scratch.path().join(name)).unwrap();
    let mut told = 0;
    let done = reshard(&source, &into, parts(number), false, &mut |bytes| {
        told += bytes;
    })
    .unwrap();
    let all = source.manifest().tensors.iter();
    assert_eq!(told, all.map(crate::Tensor::num_bytes).sum::<u64>());
    let files = source.manifest().files.iter();
    let read: u64 = files
        .filter(|file| file.bytes > file.data_begin)
        .map(|file| file.bytes)
        .sum();
    assert_eq!(done.touched.bytes, read, "each byte is read once");
    let found = Checkpoint::open(&into, None).unwrap();
    assert_eq!(*found.manifest(), done.manifest);
    found
}

/// What two checkpoints have to have in common.
fn assert_same(a: &Checkpoint, b: &Checkpoint) {
    assert_eq!(unequal(a, b).unwrap(), vec![]);
    assert_eq!(b.verify(|_| {}).unwrap(), vec![]);
    let [a, b] = [a, b].map(Checkpoint::manifest);
    let kinds = |manifest: &crate::Manifest| -> Vec<_> {
        let all = manifest.tensors.iter();
        all.map(|one| (one.name.clone(), one.dtype, one.shape.clone()))
            .collect()
    };
    assert_eq!(kinds(a), kinds(b));
    assert_eq!((&a.tag, a.step, a.degrees), (&b.tag, b.step, b.degrees));
    assert_eq!((&a.aliases, &a.user_content), (&b.aliases, &b.user_content));
}

/// The data of files differ by less than an element.
fn assert_balanced(checkpoint: &Checkpoint) {
    let files = checkpoint.manifest().files.iter();
    let data: Vec<u64> = files.map(|file| file.bytes - file.data_begin).collect();
    let (least, most) = (data.iter().min().unwrap(), data.iter().max().unwrap());
    assert!(most - least <= 16, "{data:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_division_into_any_number_of_files_has_the_same_contents(
        tensors in (divided("x", 3), divided("y", 3), divided("z", 3)),
        first in 1u16..9,
        second in 1u16..9,
    ) {
        let tensors: [Divided; 3] = tensors.into();
        let scratch = Scratch::new();
        save(&scratch.directory(), "t", &tensors, 3, None).unwrap();
        let source = Checkpoint::open(&scratch.directory(), None).unwrap();
        let once = resharded(&scratch, &scratch.directory(), "once", first);
        assert_same(&source, &once);
        assert_balanced(&once);
        for tensor in &tensors {
            prop_assert_eq!(&load(&once, &tensor.name).unwrap(), &tensor.bytes);
        }
        // Whatever files they have been in between: pieces do not become smaller and smaller.
        let between = Directory::new(scratch.path().join("once")).unwrap();
        let twice = resharded(&scratch, &between, "twice", second);
        let direct = resharded(&scratch, &scratch.directory(), "direct", second);
        prop_assert_eq!(&twice.manifest().tensors, &direct.manifest().tensors);
        prop_assert_eq!(&twice.manifest().files, &direct.manifest().files);
    }
}

#[test]
fn large_tensors_are_cut_and_what_the_job_said_stays() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    let bytes = noise(3 * CHUNK_BYTES + 12345, 5);
    let tensors = [flat("a", bytes.clone(), 2), flat("b", noise(999, 6), 2)];
    let mut reports = Vec::new();
    for file in 0..2 {
        let held = held(&tensors, file);
        let mut views = views(&held);
        if file == 1 {
            for (name, dtype, shape, bytes) in [
                ("empty", Dtype::F32, &[3, 0][..], &[][..]),
                ("scalar", Dtype::F64, &[], &[1; 8]),
                ("flags", Dtype::BOOL, &[3], &[0, 1, 0]),
                ("eight", Dtype::F8_E4M3, &[2], &[7, 9]),
                ("brain", Dtype::BF16, &[1], &[1, 2]),
            ] {
                views.push(PieceView {
                    name,
                    dtype,
                    shape,
                    region: Region::whole(shape),
                    bytes,
                });
            }
        }
        reports.push(write_part(&directory, "t", &part_name(file), &views).unwrap());
    }
    let mut said = description();
    said.user_content = json!({"epoch": [1, {"x": null}]});
    said.aliases.push(Alias {
        name: "tied".to_owned(),
        of: "a".to_owned(),
    });
    commit(&directory, "t", said, reports, None).unwrap();
    let source = Checkpoint::open(&directory, None).unwrap();
    let found = resharded(&scratch, &directory, "other", 5);
    assert_same(&source, &found);
    assert_balanced(&found);
    assert_eq!(load(&found, "tied").unwrap(), bytes);
    assert!(load(&found, "empty").unwrap().is_empty());
    assert_eq!(found.manifest().files.len(), 5);
}

#[test]
fn thousands_of_tensors_with_long_names() {
    let scratch = Scratch::new();
    let many: Vec<Divided> = (0..3000)
        .map(|number| flat(&format!("{number:05}/{}", "x".repeat(500)), vec![7; 3], 2))
        .collect();
    save(&scratch.directory(), "t", &many, 2, None).unwrap();
    let source = Checkpoint::open(&scratch.directory(), None).unwrap();
    let found = resharded(&scratch, &scratch.directory(), "other", 3);
    assert_same(&source, &found);
}

#[test]
fn a_damaged_source_is_named_and_nothing_is_left() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    save(&directory, "t", &[flat("a", noise(99, 1), 3)], 3, None).unwrap();
    let source = Checkpoint::open(&directory, None).unwrap();
    let path = directory.folder("t").join("part-1.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let into = Directory::new(scratch.path().join("other")).unwrap();
    let error = reshard(&source, &into, parts(2), false, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("part-1.safetensors"), "{error}");
    assert!(!into.path().exists());
    let deep = Directory::new(scratch.path().join("some/where/else")).unwrap();
    reshard(&source, &deep, parts(2), false, &mut |_| {}).unwrap_err();
    assert!(!scratch.path().join("some").exists());
    fs::create_dir(into.path()).unwrap();
    reshard(&source, &into, parts(2), false, &mut |_| {}).unwrap_err();
    assert_eq!(fs::read_dir(into.path()).unwrap().count(), 0);
    // The folder goes while it is read.
    fs::remove_dir_all(directory.folder("t")).unwrap();
    let error = reshard(&source, &into, parts(2), false, &mut |_| {}).unwrap_err();
    assert!(matches!(error, CheckpointError::Gone { .. }), "{error}");
}

#[test]
fn neither_the_source_nor_another_checkpoint_is_overwritten() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    save(&directory, "t", &[flat("a", noise(99, 1), 3)], 3, None).unwrap();
    let source = Checkpoint::open(&directory, None).unwrap();
    let beside = Directory::new(directory.path().join("..").join("checkpoints")).unwrap();
    let error = reshard(&source, &beside, parts(2), true, &mut |_| {}).unwrap_err();
    assert!(
        matches!(error, CheckpointError::SameDirectory { .. }),
        "{error}"
    );
    resharded(&scratch, &directory, "other", 2);
    let into = Directory::new(scratch.path().join("other")).unwrap();
    let error = reshard(&source, &into, parts(4), false, &mut |_| {}).unwrap_err();
    assert!(matches!(error, CheckpointError::Exists { .. }), "{error}");
    assert_eq!(
        Checkpoint::open(&into, None)
            .unwrap()
            .manifest()
            .files
            .len(),
        2
    );
    reshard(&source, &into, parts(4), true, &mut |_| {}).unwrap();
    assert_eq!(
        Checkpoint::open(&into, None)
            .unwrap()
            .manifest()
            .files
            .len(),
        4
    );
}

#[test]
fn every_type_is_moved_as_it_is() {
    let scratch = Scratch::new();
    let tensors = DTYPES.map(|dtype| {
        let mut one = flat("", noise(64, 9), 1);
        one.name = format!("{dtype}");
        one.dtype = dtype;
        one.shape = vec![64 / crate::item_bytes(dtype).unwrap()];
        one.pieces = vec![(0, Region::whole(&one.shape))];
        one
    });
    save(&scratch.directory(), "t", &tensors, 1, None).unwrap();
    let source = Checkpoint::open(&scratch.directory(), None).unwrap();
    assert_same(&source, &resharded(&scratch, &scratch.directory(), "o", 7));
}
