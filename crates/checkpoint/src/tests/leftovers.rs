//! What ended jobs leave.

use std::fs;

use super::files::{Scratch, flat, save};
use crate::directory::names_in;

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
