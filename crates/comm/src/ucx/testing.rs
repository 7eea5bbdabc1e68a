//! UCX for tests.

use std::path::{Path, PathBuf};

use std::sync::Arc;

use super::transport::ready;
use super::{Candidates, Library, Options, Worker};
use crate::job::{JobOptions, Memory};
use crate::layers::{Layer, Prepared};
use crate::start_error::StartError;
use crate::transport::Receiver;

/// The variable that says where UCX is; without it, it is looked for in the project's environment.
const LIBRARY_VARIABLE: &str = "SHARDWRIGHT_UCX_LIBRARY";

/// The UCX of the tests. A machine without one cannot test the transports over it, and says so.
pub(crate) fn library() -> Library {
    let candidates = Candidates {
        configured: Some(place()),
        ..Candidates::default()
    };
    Library::find(&candidates).unwrap_or_else(|error| {
        panic!("no UCX for the tests: set {LIBRARY_VARIABLE}, or run `make setup`: {error}")
    })
}

/// The directory in which the tests look for it.
pub(crate) fn place() -> PathBuf {
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

/// UCX among the transports of a job, over some of its own.
pub(crate) struct Over(pub(crate) &'static str);

impl Layer for Over {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn prepare(
        &self,
        options: &JobOptions,
        _: &Memory,
        receiver: &Arc<dyn Receiver>,
    ) -> Result<Option<Box<dyn Prepared>>, StartError> {
        let over = Options {
            transports: self.0.to_owned(),
            ..Options::default()
        };
        let worker = Worker::create(&library(), options.rank, &over).unwrap();
        ready(worker, options, Arc::clone(receiver)).map(Some)
    }
}
