//! Searches for programs and placements that come to no end.

use crate::job::{Job, Timing};
use crate::trees::{Program, trees};

/// What a search has found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Trees of calls with a rank for each.
    pub(crate) placements: u64,
    /// Those with what each call is given.
    pub(crate) programs: u64,
    /// Steps that were run.
    pub(crate) steps: u64,
    /// Programs that come to no end, and when.
    pub(crate) stuck: Vec<(Program, Timing)>,
}

impl Found {
    /// What several searches have found together.
    pub(crate) fn add(&mut self, other: Self) {
        self.placements += other.placements;
        self.programs += other.programs;
        self.steps += other.steps;
        self.stuck.extend(other.stuck);
    }
}

/// Runs every placement of every tree with so many nodes over up to so many ranks, in each timing; of the placements one
/// in `share`.
pub(crate) fn search(
    nodes: usize,
    ranks: u32,
    num_microbatches: u32,
    share: u64,
    vary: impl Fn(&Program, u64) -> Vec<Program>,
) -> Found {
    let mut found = Found::default();
    let mut number = 0;
    let placed = trees(nodes).into_iter().flat_map(|tree| tree.placed(ranks));
    for placement in placed.filter(|one| one.ranks.iter().any(|rank| *rank > 0)) {
        number += 1;
        if number % share != 0 {
            continue;
        }
        found.placements += 1;
        for program in placement
            .given()
            .iter()
            .flat_map(|given| vary(given, number))
        {
            found.programs += 1;
            for timing in [
                Timing::CallersFirst,
                Timing::MessagesFirst,
                Timing::Chance(number),
            ] {
                found.steps += 1;
                if !Job::new(&program, num_microbatches, timing).comes_to_an_end() {
                    found.stuck.push((program.clone(), timing));
                }
            }
        }
    }
    found
}

/// Results that nobody looks at, one by one and in chains.
pub(crate) fn unread(program: &Program, _: u64) -> Vec<Program> {
    let chained = Program {
        chains: true,
        ..program.clone()
    };
    let is_longer = program.is_given_last.contains(&true);
    std::iter::once(program.clone())
        .chain(is_longer.then_some(chained))
        .collect()
}

/// The same, and some of the results looked at.
pub(crate) fn read_at_times(program: &Program, number: u64) -> Vec<Program> {
    let bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let mut programs = unread(program, number);
    programs.extend(unread(&program.looking_at(bits as u32), number));
    programs
}
