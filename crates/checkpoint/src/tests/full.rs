//! Models whole, in the layout of others, and back.

use std::fs;
use std::num::NonZeroU16;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::division::{Divided, description, divided, held, part_name, views};
use super::files::{Scratch, flat, load, noise};
use crate::{
    Alias, CHUNK_BYTES, Checkpoint, CheckpointError, Directory, Dtype, ExportOptions, ForeignModel,
    PieceView, Region, commit, export_full, write_part,
};

const OPTIONS: ExportOptions = ExportOptions {
    max_shard_bytes: 5_000_000_000,
    replace: false,
};

/// Saves with a configuration, tied weights, and a scalar and a tensor without elements of the model.
fn save(scratch: &Scratch, tensors: &[Divided], files: usize) -> Checkpoint {
    let directory = scratch.directory();
    let mut reports = Vec::new();
    for file in 0..files {
        let held = held(tensors, file);
        let mut views = views(&held);
        if file == 0 {
            for (name, shape, bytes) in [
                ("model/empty", &[0, 4][..], &[][..]),
                ("model/scalar", &[], &[1, 2]),
                ("optimizer/x/step", &[], &[0, 0]),
            ] {
                views.push(PieceView {
                    name,
                    dtype: Dtype::BF16,
                    shape,
                    region: Region::whole(shape),
                    bytes,
                });
            }
        }
        reports.push(write_part(&directory, "t", &part_name(file), &views).unwrap());
    }
    let mut said = description();
    said.user_content = json!({"huggingface_config": {"model_type": "gpt2", "n": [1.5]}});
    said.aliases.push(Alias {
        name: "model/tied".to_owned(),
        of: "model/scalar".to_owned(),
    });
    commit(&directory, "t", said, reports, None).unwrap();
    Checkpoint::open(&directory, None).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    crate::directory::names_in(folder).unwrap()
}

fn export(checkpoint: &Checkpoint, out: &Path, max_shard_bytes: u64) -> crate::Exported {
    let options = ExportOptions {
        max_shard_bytes,
        ..OPTIONS
    };
    export_full(checkpoint, out, options, &mut |_| {}).unwrap()
}

/// What the format's own library reads of the files.
fn read_back(out: &Path, files: &[String]) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
    let mut found = Vec::new();
    for file in files {
        let bytes = fs::read(out.join(file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in tensors.iter() {
            let (dtype, shape) = (view.dtype(), view.shape().to_vec());
            found.push((name.to_owned(), dtype, shape, view.data().to_vec()));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

fn imported(scratch: &Scratch, folder: &Path, parts: u16) -> Checkpoint {
    let into = Directory::new(scratch.path().join(format!("imported-{parts}"))).unwrap();
    let parts = NonZeroU16::new(parts).unwrap();
    let mut model = ForeignModel::open(folder).unwrap();
    model.import(&into, "t", parts, false, &mut |_| {}).unwrap();
    Checkpoint::open(&into, None).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_division_is_exported_whole_in_any_sizes_and_imported_again(
        tensors in (divided("model/x", 3), divided("model/y.z", 3), divided("half_precision/x", 3)),
        max_shard_bytes in prop_oneof![1u64..2000, Just(u64::MAX)],
        parts in 1u16..5,
    ) {
        let tensors: [Divided; 3] = tensors.into();
        let scratch = Scratch::new();
        let checkpoint = save(&scratch, &tensors, 3);
        let out = scratch.path().join("out");
        let exported = export(&checkpoint, &out, max_shard_bytes);
        let found = read_back(&out, &exported.files);
        let model = found.iter().map(|(name, ..)| &**name);
        prop_assert_eq!(model.collect::<Vec<_>>(), ["empty", "scalar", "x", "y.z"]);
        for (place, tensor) in [(2, &tensors[0]), (3, &tensors[1])] {
            let (_, dtype, shape, bytes) = &found[place];
            prop_assert_eq!(*dtype, tensor.dtype);
            prop_assert_eq!(shape.iter().map(|side| *side as u64).collect::<Vec<_>>(), tensor.shape.clone());
            prop_assert_eq!(bytes, &tensor.bytes);
        }
        for file in &exported.files {
            let bytes = fs::read(out.join(file)).unwrap();
            let held = SafeTensors::deserialize(&bytes).unwrap();
            let data: usize = held.iter().map(|(_, view)| view.data().len()).sum();
            prop_assert!(data as u64 <= max_shard_bytes || held.len() == 1);
        }
        let back = imported(&scratch, &out, parts);
        prop_assert_eq!(back.verify(|_| {}).unwrap(), vec![]);
        for tensor in &tensors[..2] {
            prop_assert_eq!(&load(&back, &tensor.name).unwrap(), &tensor.bytes);
        }
        prop_assert_eq!(back.manifest().files.len(), usize::from(parts));
        prop_assert_eq!(&back.manifest().user_content, &checkpoint.manifest().user_content);
    }
}

#[test]
fn a_large_model_is_read_once_and_has_an_index() {
    let scratch = Scratch::new();
    let large = noise(5 * CHUNK_BYTES + 77, 3);
    let tensors = [
        flat("model/a", large.clone(), 3),
        flat("model/b", noise(1000, 4), 2),
        flat("optimizer/a", noise(30 * CHUNK_BYTES, 5), 1),
    ];
    let checkpoint = save(&scratch, &tensors, 3);
    let out = scratch.path().join("out");
    let exported = export(&checkpoint, &out, 2 * CHUNK_BYTES);
    let files = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ];
    assert_eq!(exported.files, files);
    let mut expected = [
        "config.json",
        files[0],
        files[1],
        "model.safetensors.index.json",
    ];
    expected.sort_unstable();
    assert_eq!(names(&out), expected);
    let index = fs::read(out.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let total = large.len() + 1000 + 2;
    assert_eq!(index["metadata"]["total_size"], json!(total));
    assert_eq!(index["weight_map"]["a"], files[0]);
    assert_eq!(index["weight_map"]["scalar"], files[1]);
    assert_eq!(read_back(&out, &exported.files)[0].3, large);
    // What the optimizer has is not read, but for what lies in the same chunks.
    assert!(exported.touched.bytes < 10 * CHUNK_BYTES, "{exported:?}");
    assert_eq!(
        load(&imported(&scratch, &out, 4), "model/a").unwrap(),
        large
    );
}

#[test]
fn what_is_there_is_replaced_only_when_asked_and_only_an_export() {
    let scratch = Scratch::new();
    let checkpoint = save(&scratch, &[flat("model/a", noise(99, 1), 3)], 3);
    let out = scratch.path().join("out");
    export(&checkpoint, &out, 50);
    let before = names(&out);
    let again = |replace| {
        let options = ExportOptions { replace, ..OPTIONS };
        export_full(&checkpoint, &out, options, &mut |_| {})
    };
    let error = again(false).unwrap_err();
    assert!(matches!(error, CheckpointError::Exists { .. }), "{error}");
    assert_eq!(names(&out), before);
    fs::write(out.join("tokenizer.json"), "{}").unwrap();
    let error = again(true).unwrap_err().to_string();
    assert!(error.contains("it holds tokenizer.json"), "{error}");
    fs::remove_file(out.join("tokenizer.json")).unwrap();
    assert_eq!(again(true).unwrap().files, ["model.safetensors"]);
    assert_eq!(names(&out), ["config.json", "model.safetensors"]);
    // Neither a link nor a file is taken for a folder of ours.
    let link = scratch.path().join("link");
    symlink(&out, &link).unwrap();
    let options = ExportOptions {
        replace: true,
        ..OPTIONS
    };
    let error = export_full(&checkpoint, &link, options, &mut |_| {}).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NotReplaceable { .. }),
        "{error}"
    );
    assert_eq!(left(&scratch), ["checkpoints", "link", "out"]);
}

fn left(scratch: &Scratch) -> Vec<String> {
    names(scratch.path())
}

#[test]
fn a_damaged_or_vanished_checkpoint_leaves_nothing_of_an_export() {
    let scratch = Scratch::new();
    let checkpoint = save(&scratch, &[flat("model/a", noise(99, 1), 3)], 3);
    let path = checkpoint.folder().join("part-2.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let out = scratch.path().join("out");
    let error = export_full(&checkpoint, &out, OPTIONS, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("part-2.safetensors"), "{error}");
    let mut gone = false;
    let folder = checkpoint.folder().to_owned();
    let error = export_full(&checkpoint, &out, OPTIONS, &mut |_| {
        if !gone {
            fs::remove_dir_all(&folder).unwrap();
            gone = true;
        }
    })
    .unwrap_err();
    assert!(matches!(error, CheckpointError::Gone { .. }), "{error}");
    assert_eq!(left(&scratch), ["checkpoints"]);
}

#[test]
fn a_full_disk_leaves_nothing_of_an_export() {
    // A link to a device that is always full stands where the file would be: it is not written to either.
    let scratch = Scratch::new();
    let checkpoint = save(&scratch, &[flat("model/a", noise(99, 1), 3)], 3);
    let path = PathBuf::from("/dev/full");
    let mut file = crate::stream::Streamed::new(
        fs::OpenOptions::new().write(true).open(&path).unwrap(),
        &path,
        10,
    );
    let error = file.write(&[1; 10]).unwrap_err().to_string();
    assert!(
        error.starts_with("/dev/full: 0 of 10 bytes were written"),
        "{error}"
    );
    // What an ended run left is replaced, whatever it is.
    let beside = scratch.path().join(".out.writing");
    fs::create_dir(&beside).unwrap();
    symlink("/dev/full", beside.join("model.safetensors")).unwrap();
    export(&checkpoint, &scratch.path().join("out"), u64::MAX);
    assert_eq!(left(&scratch), ["checkpoints", "out"]);
}

#[test]
fn a_folder_of_links_is_imported_as_caches_of_downloads_are() {
    let scratch = Scratch::new();
    let checkpoint = save(&scratch, &[flat("model/a", noise(99, 1), 3)], 3);
    let (out, links) = (scratch.path().join("out"), scratch.path().join("links"));
    export(&checkpoint, &out, 50);
    fs::create_dir(&links).unwrap();
    for name in names(&out) {
        symlink(out.join(&name), links.join(&name)).unwrap();
    }
    assert_eq!(
        load(&imported(&scratch, &links, 1), "model/a").unwrap(),
        noise(99, 1)
    );
}

#[test]
fn a_checkpoint_without_a_model_is_refused() {
    let scratch = Scratch::new();
    super::files::save(
        &scratch.directory(),
        "t",
        &[flat("a", vec![1; 9], 1)],
        1,
        None,
    )
    .unwrap();
    let checkpoint = Checkpoint::open(&scratch.directory(), None).unwrap();
    let error = export_full(&checkpoint, &scratch.path().join("o"), OPTIONS, &mut |_| {});
    assert!(matches!(error, Err(CheckpointError::NoModel { .. })));
    assert_eq!(left(&scratch), ["checkpoints"]);
}
