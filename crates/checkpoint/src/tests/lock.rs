//! Jobs take turns at a directory.

use super::files::Scratch;
use crate::Directory;

#[test]
fn one_at_a_time_has_a_directory() {
    let scratch = Scratch::new();
    let path = scratch.path().join("new");
    let (first, second) = (
        Directory::new(&path).unwrap(),
        Directory::new(&path).unwrap(),
    );
    let lock = first.try_lock().unwrap();
    assert!(lock.is_some());
    assert!(second.try_lock().unwrap().is_none());
    assert!(scratch.directory().try_lock().unwrap().is_some());
    drop(lock);
    assert!(second.try_lock().unwrap().is_some());
}
