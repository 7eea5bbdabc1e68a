//! What is known about UCX.

use std::path::PathBuf;

use shardwright_ucx::{Candidates, Library, transports};

/// What a job on this machine would find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UcxReport {
    /// No library was found.
    NotFound {
        /// Where it was looked for.
        looked_at: Vec<String>,
    },
    /// A library is in use.
    Loaded {
        /// Its path.
        path: String,
        /// Its version.
        version: String,
        /// Whether this version is one that is tested.
        tested: bool,
        /// Its transports that work here.
        transports: Vec<String>,
    },
}

impl UcxReport {
    /// Looks for the library as a job does that names none; `packages` are directories of Python packages that hold it.
    pub fn of_this_machine(packages: Vec<PathBuf>) -> Self {
        let candidates = Candidates {
            packages,
            ..Candidates::default()
        };
        match Library::find(&candidates) {
            Err(error) => Self::NotFound {
                looked_at: error.to_string().lines().map(str::to_owned).collect(),
            },
            Ok(library) => Self::Loaded {
                path: library.found().path.display().to_string(),
                version: library.found().version.to_string(),
                tested: !library.found().newer_than_tested,
                transports: transports(&library),
            },
        }
    }
}
