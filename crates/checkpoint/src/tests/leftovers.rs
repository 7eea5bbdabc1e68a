//! What ended jobs leave.

use std::fs;

use super::files::{Scratch, flat, save};
use crate::directory::names_in;
use crate::{Checkpoint, CheckpointError, Directory, remove_unfinished, reshard};

#[test]
fn the_next_save_removes_what_was_being_removed() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    let save = |tag: &str| save(&directory, tag, &[flat("a", vec![1; 9], 2)], 2, None);
    save("a").unwrap();
    for name in [".old_partial.removing", ".b_partial.writing", "x.removing"] {
        let folder = directory.path().join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("file"), "x").unwrap();
    }
    save("c").unwrap();
    let left = names_in(directory.path()).unwrap();
    let expected = [
        ".b_partial.writing",
        "a_partial",
        "c_partial",
        "newest",
        "x.removing",
    ];
    assert_eq!(left, expected);
}

#[test]
fn who_has_the_lock_removes_what_was_being_written_but_of_its_own_tag() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    save(&directory, "a", &[flat("a", vec![1; 9], 2)], 2, None).unwrap();
    for name in [".b_partial.writing", ".c_partial.writing", "b.writing"] {
        let folder = directory.path().join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("part-00000.safetensors"), "x").unwrap();
    }
    fs::write(directory.path().join(".d_partial.writing"), "a file").unwrap();
    let lock = directory.try_lock().unwrap().unwrap();
    remove_unfinished(&directory, &lock, "c").unwrap();
    let left = names_in(directory.path()).unwrap();
    let expected = [
        ".c_partial.writing",
        ".d_partial.writing",
        "a_partial",
        "b.writing",
        "newest",
    ];
    assert_eq!(left, expected);
}

#[test]
fn nothing_is_resharded_into_a_directory_into_which_a_job_saves() {
    let scratch = Scratch::new();
    let directory = scratch.directory();
    save(&directory, "a", &[flat("a", vec![1; 9], 2)], 2, None).unwrap();
    let other = Directory::new(scratch.directory().path().join("other")).unwrap();
    let _lock = other.try_lock().unwrap().unwrap();
    let source = Checkpoint::open(&directory, Some("a")).unwrap();
    let parts = 1.try_into().unwrap();
    let error = reshard(&source, &other, parts, false, &mut |_| {}).unwrap_err();
    assert!(matches!(error, CheckpointError::Busy { .. }), "{error}");
}
