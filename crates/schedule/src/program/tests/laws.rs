use std::collections::BTreeMap;

use proptest::prelude::*;

use super::complete_programs;
use crate::{Action, Complete, Deadlock, Program, ProgramError};

/// Whether the graph of what goes before what has no circle: by taking away what nothing is before.
fn has_an_order(program: &Program, complete: &Complete<'_>) -> bool {
    let mut before: BTreeMap<Action, Vec<Action>> = BTreeMap::new();
    for actions in program.ranks() {
        let mut previous = None;
        for action in actions {
            let needs = complete.needs(*action).chain(previous);
            before.insert(*action, needs.collect());
            previous = Some(*action);
        }
    }
    while let Some(free) = before
        .iter()
        .find_map(|(action, before)| before.is_empty().then_some(*action))
    {
        before.remove(&free);
        for needs in before.values_mut() {
            needs.retain(|needed| *needed != free);
        }
    }
    before.is_empty()
}

fn check_cycle(program: &Program, complete: &Complete<'_>, deadlock: &Deadlock) {
    let cycle = &deadlock.cycle;
    for (index, wait) in cycle.iter().enumerate() {
        let next = cycle[(index + 1) % cycle.len()];
        assert_eq!(complete.rank(wait.action.stage), wait.rank);
        assert!(
            complete
                .needs(wait.action)
                .any(|needed| needed == wait.needs)
        );
        assert_eq!(complete.rank(wait.needs.stage), wait.of);
        assert_eq!(wait.of, next.rank);
        let place = |action| {
            let actions = &program.ranks()[next.rank.0 as usize];
            actions.iter().position(|other| *other == action)
        };
        assert!(place(next.action) <= place(wait.needs), "{deadlock}");
    }
}

proptest! {
    #[test]
    fn a_program_is_accepted_if_its_actions_have_an_order(program in complete_programs()) {
        let complete = Complete::new(&program).expect("swaps leave it complete");
        match program.validate() {
            Ok(()) => prop_assert!(has_an_order(&program, &complete)),
            Err(ProgramError::Deadlock(deadlock)) => {
                prop_assert!(!has_an_order(&program, &complete));
                check_cycle(&program, &complete, &deadlock);
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn a_program_without_one_of_its_actions_is_refused(
        program in complete_programs(), rank in any::<prop::sample::Index>(), place in any::<prop::sample::Index>(),
    ) {
        let mut ranks = program.ranks().to_vec();
        let rank = rank.index(ranks.len());
        let place = place.index(ranks[rank].len());
        let gone = ranks[rank].remove(place);
        if ranks.iter().all(Vec::is_empty) {
            return Ok(());
        }
        match Program::new(ranks).validate() {
            Err(ProgramError::Missing { action, .. }) => {
                prop_assert_eq!((action.stage, action.microbatch), (gone.stage, gone.microbatch));
            }
            // Without its last stage or microbatch it may be a smaller program.
            other => prop_assert!(!matches!(other, Err(ProgramError::Empty)), "{other:?}"),
        }
    }

    #[test]
    fn places_are_distinct(program in complete_programs()) {
        let complete = Complete::new(&program).expect("swaps leave it complete");
        let actions = program.ranks().iter().flatten();
        let mut places: Vec<usize> = actions.map(|action| complete.place(*action)).collect();
        prop_assert!(places.iter().all(|place| *place < complete.num_places()));
        places.sort_unstable();
        places.dedup();
        prop_assert_eq!(places.len(), program.ranks().iter().map(Vec::len).sum::<usize>());
    }
}

#[test]
fn what_is_wrong_is_named() {
    let cases = [
        ("", "the program has no actions"),
        ("0F0,0B0,0F0\n", "0F0 stands twice, on rank 0 and on rank 0"),
        (
            "0F0,0B0\n0F1,0B1\n",
            "0F1 is on rank 1, but stage 0 is on rank 0",
        ),
        (
            "0F0,0B0,0W0\n",
            "0W0 is part of 0B0, which stands in the program too; allowed is one of both",
        ),
        (
            "0F0,0I0\n",
            "0W0 is missing: every stage (0 to 0) needs the forward and the backward of every microbatch (0 to 0)",
        ),
        (
            "0F0,0B0\n4294967295F0,4294967295B0\n",
            "1F0 is missing: every stage (0 to 4294967295) needs",
        ),
        (
            "0F0,0B0,0F4294967295\n",
            "0F1 is missing: every stage (0 to 0) needs",
        ),
    ];
    for (csv, expected) in cases {
        let program = Program::from_csv(csv).expect("to be read");
        let error = program.validate().unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn a_rank_can_wait_for_itself() {
    let program = Program::from_csv("0F0,0W0,0I0\n").expect("to be read");
    assert_eq!(
        program.validate().unwrap_err().to_string(),
        "the ranks wait for each other: rank 0 stands at 0W0, which needs 0I0 of rank 0, where 0W0 comes first"
    );
}

#[test]
fn ranks_that_only_wait_for_the_circle_are_not_part_of_it() {
    // Rank 0 waits for rank 1, which waits for rank 2, which waits for rank 1.
    let csv = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n";
    let program = Program::from_csv(csv).expect("to be read");
    assert_eq!(
        program.validate().unwrap_err().to_string(),
        "the ranks wait for each other: rank 1 stands at 1B0, which needs 2B0 of rank 2, where 2F1 comes first; \
         rank 2 stands at 2F1, which needs 1F1 of rank 1, where 1B0 comes first"
    );
}
