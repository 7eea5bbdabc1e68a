//! Which of UCX's transports work on this machine.

use super::library::Library;
use super::options::Options;
use super::raw::{Context, RawWorker};

/// The transports that are tried, by UCX's names. `sysv` is left out, because it may leave
/// segments behind.
const TRIED: &[&str] = &[
    "self",
    "posix",
    "tcp",
    "rc",
    "dc",
    "ud",
    "cma",
    "xpmem",
    "knem",
    "cuda_copy",
    "cuda_ipc",
    "gdr_copy",
];

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
