//! UCX for tests.

use std::path::{Path, PathBuf};

use super::{Candidates, Library};

/// The variable that says where UCX is; without it, it is looked for in the project's environment.
const LIBRARY_VARIABLE: &str = "SHARDWRIGHT_UCX_LIBRARY";

/// The UCX of the tests. A machine without one cannot test the transports over it, and says so.
pub fn library() -> Library {
    let candidates = Candidates {
        configured: Some(place()),
        ..Candidates::default()
    };
    Library::find(&candidates).unwrap_or_else(|error| {
        panic!("no UCX for the tests: set {LIBRARY_VARIABLE}, or run `make setup`: {error}")
    })
}

/// The directory in which the tests look for it.
pub fn place() -> PathBuf {
    std::env::var_os(LIBRARY_VARIABLE).map_or_else(of_the_project, PathBuf::from)
}

fn of_the_project() -> PathBuf {
    let libraries = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = std::fs::read_dir(&libraries).into_iter().flatten();
    pythons
        .filter_map(Result::ok)
        .map(|python| python.path().join("site-packages/libucx/lib"))
        .find(|path| path.is_dir())
        .unwrap_or(libraries)
}
