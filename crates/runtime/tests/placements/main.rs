//! No placement of modules makes a step in static mode wait for itself: see "One order within a microbatch" in
//! `docs/design/execution.md`. The whole search is `cargo run --release -p shardwright-runtime --example placements`.

mod job;
mod search;
mod trees;
mod worker;

use search::{Found, read_at_times, search, unread};
use trees::Program;

/// Of placements one in `share`, for each number of calls.
fn come_to_an_end(searches: &[(usize, u32, u32, u64)], vary: fn(&Program, u64) -> Vec<Program>) {
    let mut found = Found::default();
    for (nodes, ranks, num_microbatches, share) in searches {
        found.add(search(*nodes, *ranks, *num_microbatches, *share, vary));
    }
    assert!(
        found.placements > 100 && found.programs > found.placements && found.steps > found.programs
    );
    let first = found.stuck.first();
    assert!(
        first.is_none(),
        "{} of {} steps: {first:?}",
        found.stuck.len(),
        found.steps
    );
}

#[test]
fn placements_over_two_ranks_come_to_an_end() {
    come_to_an_end(
        &[
            (2, 2, 1, 1),
            (3, 2, 1, 1),
            (4, 2, 1, 1),
            (5, 2, 1, 1),
            (6, 2, 1, 5),
            (7, 2, 1, 61),
        ],
        unread,
    );
}

#[test]
fn placements_over_three_ranks_come_to_an_end() {
    come_to_an_end(
        &[(4, 3, 1, 1), (5, 3, 1, 2), (6, 3, 1, 31), (7, 3, 1, 307)],
        unread,
    );
}

#[test]
fn placements_come_to_an_end_with_several_microbatches_whoever_looks_at_results() {
    come_to_an_end(
        &[(4, 2, 3, 1), (5, 3, 3, 11), (6, 3, 2, 97), (7, 3, 2, 997)],
        read_at_times,
    );
}
