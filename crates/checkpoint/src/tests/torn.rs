//! Whatever is changed, cut, lost, exchanged or added is noticed, by name.

use std::fs;

use super::files::{Scratch, flat, load, noise, save};
use crate::{CHUNK_BYTES, Checkpoint, CheckpointError, Damage, Directory, hash_chunks};

/// Two tensors over three files; some of each file is larger than a chunk where `chunks` says so.
fn saved(scratch: &Scratch, bytes: u64) -> Directory {
    let directory = scratch.directory();
    let tensors = [flat("a", noise(bytes, 1), 3), flat("b", noise(31, 2), 2)];
    save(&directory, "t", &tensors, 3, None).unwrap();
    directory
}

fn damages(directory: &Directory) -> Vec<Damage> {
    match Checkpoint::open(directory, None) {
        Err(CheckpointError::Damaged { damages, .. }) => damages,
        other => panic!("{other:?}"),
    }
}

fn names(damages: &[Damage]) -> Vec<String> {
    damages.iter().map(Damage::to_string).collect()
}

#[test]
fn every_changed_byte_of_a_small_file_is_noticed_when_read_and_by_verify() {
    let scratch = Scratch::new();
    let directory = saved(&scratch, 100);
    for number in 0..3 {
        let name = format!("part-{number}.safetensors");
        let path = directory.folder("t").join(&name);
        let whole = fs::read(&path).unwrap();
        for place in 0..whole.len() {
            let mut changed = whole.clone();
            changed[place] ^= 1 << (place % 8);
            fs::write(&path, changed).unwrap();
            let checkpoint = Checkpoint::open(&directory, None).unwrap();
            let expected = format!("bytes 0 to {} of {name} have changed", whole.len());
            match load(&checkpoint, "a") {
                Err(CheckpointError::Damaged { damages, .. }) => {
                    assert_eq!(names(&damages), [&*expected], "byte {place}");
                }
                other => panic!("byte {place} of {name}: {other:?}"),
            }
            assert_eq!(names(&checkpoint.verify(|_| {}).unwrap()), [expected]);
        }
        fs::write(&path, whole).unwrap();
    }
    let checkpoint = Checkpoint::open(&directory, None).unwrap();
    assert_eq!(load(&checkpoint, "a").unwrap(), noise(100, 1));
}

#[test]
fn every_cut_of_a_small_file_is_noticed_when_opened() {
    let scratch = Scratch::new();
    let directory = saved(&scratch, 100);
    let path = directory.folder("t").join("part-1.safetensors");
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let expected = format!(
            "part-1.safetensors has {length} bytes and was written with {}",
            whole.len()
        );
        assert_eq!(names(&damages(&directory)), [expected]);
    }
}

#[test]
fn every_change_and_cut_of_the_manifest_is_noticed_when_opened() {
    let scratch = Scratch::new();
    let directory = saved(&scratch, 100);
    let path = directory.folder("t").join("manifest.json");
    let whole = fs::read(&path).unwrap();
    for place in 0..whole.len() {
        let mut changed = whole.clone();
        changed[place] ^= 1 << (place % 8);
        for bytes in [&changed[..], &whole[..place]] {
            fs::write(&path, bytes).unwrap();
            match Checkpoint::open(&directory, None) {
                Err(CheckpointError::Manifest { path: named, .. }) => assert_eq!(named, path),
                other => panic!("byte {place}: {other:?}"),
            }
        }
    }
}

#[test]
fn every_change_and_cut_of_newest_is_noticed_also_where_it_would_name_another() {
    let scratch = Scratch::new();
    let directory = saved(&scratch, 100);
    // Its name is a bit away from the other one's.
    save(&directory, "u", &[flat("a", noise(100, 1), 1)], 1, None).unwrap();
    let path = directory.path().join("newest");
    let whole = fs::read(&path).unwrap();
    assert_eq!(directory.newest().unwrap().as_deref(), Some("u"));
    for place in 0..whole.len() {
        let flips = (0..8).map(|bit| {
            let mut changed = whole.clone();
            changed[place] ^= 1 << bit;
            changed
        });
        for bytes in flips.chain([whole[..place].to_vec()]) {
            fs::write(&path, bytes).unwrap();
            match Checkpoint::open(&directory, None) {
                Err(CheckpointError::Newest { path: named }) => assert_eq!(named, path),
                other => panic!("byte {place}: {other:?}"),
            }
        }
    }
}

#[test]
fn changed_bytes_are_noticed_where_they_are_read_and_nowhere_else() {
    let scratch = Scratch::new();
    let bytes = 9 * CHUNK_BYTES + 5;
    let directory = saved(&scratch, bytes);
    let places = noise(48, 7);
    for (number, place) in places.chunks(4).enumerate() {
        let name = format!("part-{}.safetensors", number % 3);
        let path = directory.folder("t").join(&name);
        let mut whole = fs::read(&path).unwrap();
        let place = place.iter().fold(0, |all, byte| all * 256 + *byte as usize) % whole.len();
        whole[place] ^= 16;
        fs::write(&path, &whole).unwrap();
        let checkpoint = Checkpoint::open(&directory, None).unwrap();
        let chunk = place as u64 / CHUNK_BYTES;
        let range = chunk * CHUNK_BYTES..((chunk + 1) * CHUNK_BYTES).min(whole.len() as u64);
        let expected = format!(
            "bytes {} to {} of {name} have changed",
            range.start, range.end
        );
        assert_eq!(names(&checkpoint.verify(|_| {}).unwrap()), [&*expected]);
        let error = load(&checkpoint, "a").unwrap_err().to_string();
        assert!(error.ends_with(&expected), "{error}");
        // The file's other chunks can be used.
        let small = load(&checkpoint, "b");
        assert_eq!(
            small.is_err(),
            chunk_holds_b(&checkpoint, &name, chunk),
            "byte {place} of {name}"
        );
        whole[place] ^= 16;
        fs::write(&path, &whole).unwrap();
    }
}

/// Whether reading tensor `b` touches a chunk: with some of it, or with the header of a file that has some.
fn chunk_holds_b(checkpoint: &Checkpoint, name: &str, chunk: u64) -> bool {
    let manifest = checkpoint.manifest();
    let pieces = manifest.tensor("b").unwrap().pieces.iter();
    let mut here = pieces.filter(|piece| manifest.files[piece.file].name == name);
    here.any(|piece| {
        let data = manifest.files[piece.file].data_begin;
        let first = (data + piece.bytes.begin) / CHUNK_BYTES;
        let last = (data + piece.bytes.end - 1) / CHUNK_BYTES;
        chunk == 0 || (first..=last).contains(&chunk)
    })
}

#[test]
fn lost_added_and_longer_files_are_named() {
    let scratch = Scratch::new();
    let directory = saved(&scratch, 100);
    let folder = directory.folder("t");
    fs::write(folder.join("part-3.safetensors"), "x").unwrap();
    assert_eq!(
        names(&damages(&directory)),
        ["part-3.safetensors does not belong to it"]
    );
    fs::remove_file(folder.join("part-3.safetensors")).unwrap();
    fs::remove_file(folder.join("part-0.safetensors")).unwrap();
    assert_eq!(
        names(&damages(&directory)),
        ["part-0.safetensors is missing"]
    );
    let (checkpoint, _) = Checkpoint::inspect(&folder, None).unwrap();
    let found = checkpoint.verify(|_| {}).unwrap();
    assert_eq!(names(&found), ["part-0.safetensors is missing"]);
}

#[test]
fn exchanged_files_are_named() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    save(&directory, "t", &[flat("a", noise(99, 1), 3)], 3, None).unwrap();
    let folder = directory.folder("t");
    let [first, second] = [0, 1].map(|part| folder.join(format!("part-{part}.safetensors")));
    fs::rename(&first, folder.join("aside")).unwrap();
    fs::rename(&second, &first).unwrap();
    fs::rename(folder.join("aside"), &second).unwrap();
    let checkpoint = Checkpoint::open(&directory, None).unwrap();
    let length = fs::metadata(&first).unwrap().len();
    let says = |part: u32, other: u32| {
        format!(
            "bytes 0 to {length} of part-{part}.safetensors have changed: they are those of part-{other}.safetensors"
        )
    };
    let found = names(&checkpoint.verify(|_| {}).unwrap());
    assert_eq!(found, [says(0, 1), says(1, 0)]);
    let error = load(&checkpoint, "a").unwrap_err().to_string();
    assert!(error.ends_with(&says(0, 1)), "{error}");
}

#[test]
fn a_manifest_of_another_checkpoint_is_named() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    for tag in ["one", "two"] {
        save(&directory, tag, &[flat("a", noise(99, 1), 3)], 3, None).unwrap();
    }
    let [one, two] = ["one", "two"].map(|tag| directory.folder(tag).join("manifest.json"));
    fs::copy(one, two).unwrap();
    let error = Checkpoint::open(&directory, None).unwrap_err().to_string();
    let expected = "is the manifest of checkpoint \"one\", not of \"two\"";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_header_that_says_something_else_than_the_manifest_is_named() {
    let scratch = Scratch::new();
    let directory = saved(&scratch, 100);
    let folder = directory.folder("t");
    let path = folder.join("part-0.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let text = String::from_utf8_lossy(&bytes[8..]);
    let shape = text
        .find("[33]")
        .expect("tensor a has 33 of its bytes here");
    bytes[8 + shape..][..4].copy_from_slice(b"[32]");
    fs::write(&path, &bytes).unwrap();
    let (checkpoint, _) = Checkpoint::inspect(&folder, None).unwrap();
    let mut manifest = checkpoint.manifest().clone();
    manifest.files[0].chunks = hash_chunks([&bytes[..]]);
    fs::write(folder.join("manifest.json"), manifest.to_bytes()).unwrap();
    let found = Checkpoint::open(&directory, None)
        .unwrap()
        .verify(|_| {})
        .unwrap();
    assert!(
        matches!(&found[..], [Damage::Header { file, .. }] if file == "part-0.safetensors"),
        "{found:?}"
    );
}
