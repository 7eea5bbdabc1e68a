//! Finding the library, and what loading it leaves alone.

use std::path::{Path, PathBuf};

use super::super::library::{NEWEST_TESTED_VERSION, OLDEST_VERSION, Source};
use super::super::{Candidates, Library, transports};
use super::library;
use crate::testing::place;

#[test]
fn what_was_tried_is_told_with_the_reasons() {
    let candidates = Candidates {
        configured: None,
        without_system: true,
        packages: vec![PathBuf::from("/nowhere/one"), PathBuf::from("/nowhere/two")],
    };
    let error = Library::find(&candidates).unwrap_err();
    let paths: Vec<&Path> = error
        .tried
        .iter()
        .map(|attempt| attempt.path.as_path())
        .collect();
    assert_eq!(
        paths,
        [Path::new("/nowhere/one"), Path::new("/nowhere/two")]
    );
    let text = error.to_string();
    assert!(text.contains("Python package /nowhere/one: "), "{text}");
    assert!(text.contains("No such file or directory"), "{text}");
}

#[test]
fn a_configured_path_is_the_only_one_that_is_tried() {
    let candidates = Candidates {
        configured: Some(PathBuf::from("/nowhere")),
        without_system: false,
        packages: vec![PathBuf::from("/nowhere/else")],
    };
    let error = Library::find(&candidates).unwrap_err();
    assert_eq!(error.tried.len(), 1);
    assert_eq!(error.tried[0].source, Source::Configured);
}

#[test]
fn a_library_that_is_not_ucx_is_refused() {
    let candidates = Candidates {
        configured: Some(PathBuf::from("libc.so.6")),
        ..Candidates::default()
    };
    let error = Library::find(&candidates).unwrap_err();
    assert!(error.to_string().contains("ucp_get_version"), "{error}");
}

#[test]
fn the_found_library_is_described() {
    let library = library();
    let found = library.found();
    assert_eq!(found.source, Source::Configured);
    assert!(found.path.is_file(), "{}", found.path.display());
    let configured = place();
    assert!(
        found
            .path
            .starts_with(configured.canonicalize().unwrap().parent().unwrap())
    );
    assert!(found.version >= OLDEST_VERSION);
    if !found.newer_than_tested {
        assert!(found.version.minor <= NEWEST_TESTED_VERSION.minor);
    }
}

#[test]
fn the_transports_of_every_machine_work() {
    let library = library();
    let found = transports(&library);
    for name in ["self", "posix", "tcp"] {
        assert!(
            found.iter().any(|other| other == name),
            "no {name} in {found:?}"
        );
    }
    assert!(!found.iter().any(|name| name == "sysv"));
}
