//! How many programs come to an end in static mode, over all placements of all trees of up to seven calls on two and three
//! ranks, and a share of them with several microbatches: one line of JSON. The exit status is 1 where one does not.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "it tells what it has found"
)]

use std::process::ExitCode;
use std::time::Instant;

#[path = "../tests/placements/job.rs"]
mod job;
#[path = "../tests/placements/search.rs"]
mod search;
#[path = "../tests/placements/trees.rs"]
mod trees;
#[path = "../tests/placements/worker.rs"]
mod worker;

use search::{Found, read_at_times, search, unread};

fn main() -> ExitCode {
    let start = Instant::now();
    let mut total = Found::default();
    for nodes in 2..=7 {
        for (ranks, num_microbatches, share) in [(2, 1, 1), (3, 1, 1), (2, 2, 23), (3, 3, 97)] {
            let vary = if share == 1 { unread } else { read_at_times };
            let found = search(nodes, ranks, num_microbatches, share, vary);
            eprintln!(
                "{nodes} nodes, {ranks} ranks, {num_microbatches} microbatches: {} placements, {} programs, {} steps",
                found.placements, found.programs, found.steps
            );
            for (program, timing) in found.stuck.iter().take(3) {
                eprintln!("stuck: {program:?} {timing:?}");
            }
            total.add(found);
        }
    }
    println!(
        "{{\"placements\": {}, \"programs\": {}, \"steps\": {}, \"stuck\": {}, \"seconds\": {:.0}}}",
        total.placements,
        total.programs,
        total.steps,
        total.stuck.len(),
        start.elapsed().as_secs_f64(),
    );
    ExitCode::from(u8::from(!total.stuck.is_empty()))
}
