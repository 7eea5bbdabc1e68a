//! Which of UCX's transports work on this machine.

use super::library::Library;
use super::options::Options;
use super::raw::{Context, RawWorker};

/// The transports that a job may use, by UCX's names.
const TRIED: &[&str] = &["self", "posix", "tcp"];

/// The transports of which UCX can make a context and a worker here.
pub fn transports(library: &Library) -> Vec<String> {
    let works = |name: &&&str| {
        let options = Options {
            transports: (**name).to_string(),
            ..Options::default()
        };
        let (required, wanted) = (options.required(), options.wanted());
        Context::create(library.functions(), &required, &wanted, 1)
            .is_ok_and(|context| RawWorker::create(context, 0, 0, false).is_ok())
    };
    TRIED
        .iter()
        .filter(works)
        .map(|name| (*name).to_owned())
        .collect()
}
