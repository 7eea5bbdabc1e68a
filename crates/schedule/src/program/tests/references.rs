use super::shape;
use crate::{Program, Reference};

fn text(reference: Reference, ranks: u32, microbatches: u32, stages: u32) -> String {
    let program = reference
        .program(shape(ranks, microbatches, stages))
        .expect("to be defined");
    program.to_csv().replace(',', " ")
}

#[test]
fn the_orders_are_those_of_the_literature() {
    assert_eq!(
        text(Reference::Simple, 2, 3, 1),
        "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2\n"
    );
    assert_eq!(
        text(Reference::Interleaved, 3, 4, 1),
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n\
         1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n\
         2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n"
    );
    assert_eq!(
        text(Reference::ZeroBubble, 3, 4, 1),
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3\n\
         1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3\n\
         2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3\n"
    );
    assert_eq!(
        text(Reference::Interleaved, 2, 4, 2),
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n\
         1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3\n"
    );
}

#[test]
fn every_reference_program_can_be_run() {
    let mut refused = 0;
    for reference in [
        Reference::Simple,
        Reference::Interleaved,
        Reference::ZeroBubble,
    ] {
        for (ranks, microbatches) in (1..6).flat_map(|p| (1..13).map(move |m| (p, m))) {
            for stages in 1..4 {
                match reference.program(shape(ranks, microbatches, stages)) {
                    Ok(program) => assert_eq!(
                        program.validate(),
                        Ok(()),
                        "{reference} {ranks} {microbatches} {stages}\n{program}"
                    ),
                    Err(error) => {
                        assert!(stages > 1 && reference != Reference::Simple, "{error}");
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(refused > 0);
}

/// What a rank holds between a forward and the end of its backward.
fn most_held(program: &Program) -> usize {
    let held = program.ranks().iter().map(|actions| {
        let mut held = 0_usize;
        let most = actions.iter().map(|action| {
            match action.kind.letter() {
                'F' => held += 1,
                'B' | 'W' => held -= 1,
                _ => {}
            }
            held
        });
        most.max().unwrap_or(0)
    });
    held.max().unwrap_or(0)
}

#[test]
fn zero_bubble_holds_no_more_than_interleaved() {
    for (ranks, microbatches) in (1..6).flat_map(|p| (1..13).map(move |m| (p, m))) {
        let shape = shape(ranks, microbatches, 1);
        let held = |reference: Reference| most_held(&reference.program(shape).expect("one stage"));
        assert_eq!(
            held(Reference::Interleaved),
            ranks.min(microbatches) as usize
        );
        assert_eq!(
            held(Reference::ZeroBubble),
            ranks.min(microbatches) as usize
        );
        assert_eq!(held(Reference::Simple), microbatches as usize);
    }
}

#[test]
fn what_cannot_be_made_is_refused_with_the_numbers() {
    let error = Reference::Interleaved.program(shape(2, 5, 2)).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("5 cannot be divided so; allowed are multiples of 2")
    );
    let error = Reference::Simple
        .program(shape(u32::MAX, u32::MAX, u32::MAX))
        .unwrap_err();
    assert!(error.to_string().contains("more than 100000000 actions"));
    let error = "gpipe".parse::<Reference>().unwrap_err();
    assert!(error.to_string().contains("\"gpipe\"") && error.to_string().contains("`simple`"));
    for name in ["simple", "interleaved", "zero_bubble"] {
        assert_eq!(
            name.parse::<Reference>().map(|found| found.to_string()),
            Ok(name.to_owned())
        );
    }
}
