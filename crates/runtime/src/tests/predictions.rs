//! Laws of static mode's predictions, against a history of everything that calls gave.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use shardwright_core::{ModelId, ModuleId};
use shardwright_wire::{Answer, AnswerKind, Body, ResultNotes, Value};

use crate::{Expected, PredictionRules, Predictions, SiteId, SiteKey};

const FUNCTIONS: [&str; 2] = ["train", "evaluate"];

fn described(number: i64) -> Arc<Expected> {
    Arc::new(Expected {
        kind: AnswerKind::Value,
        value: Value::Int(number),
        tensors: Vec::new(),
    })
}

fn key(number: u32) -> SiteKey {
    SiteKey {
        caller: None,
        number,
        model: ModelId(0),
        asked: vec![(ModuleId(number), None)],
        modes: vec![true],
        autocast: Vec::new(),
    }
}

/// What a job does.
#[derive(Clone, Copy, Debug)]
enum Event {
    Step {
        function: usize,
        predicts: bool,
    },
    Call {
        site: u32,
        given: i64,
        answer: i64,
        observed: bool,
    },
    Wants {
        site: u32,
    },
    Ordered {
        site: u32,
    },
    Restart,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let step = (0..2_usize, prop::bool::weighted(0.8));
    // Few different answers, so that calls are steady often enough to be predicted.
    let call = (
        0..2_u32,
        0..20_i64,
        prop::bool::weighted(0.05),
        prop::bool::weighted(0.1),
    );
    vec(
        prop_oneof![
            3 => step.prop_map(|(function, predicts)| Event::Step { function, predicts }),
            8 => call.prop_map(|(site, given, odd, observed)| Event::Call {
                site, given: given % if site == 0 { 2 } else { 20 }, answer: given + i64::from(odd), observed
            }),
            1 => (0..2_u32).prop_map(|site| Event::Wants { site }),
            1 => prop::bool::weighted(0.5).prop_filter_map("seldom", |happens| happens.then_some(Event::Restart)),
            1 => (0..2_u32, prop::bool::weighted(0.1)).prop_filter_map("seldom", |(site, happens)| happens.then_some(Event::Ordered { site })),
        ],
        0..120,
    )
}

fn rules() -> impl Strategy<Value = PredictionRules> {
    (any::<(bool, bool, bool)>(), 0..4_u64).prop_map(|((handles, fast, learns), static_steps)| {
        PredictionRules {
            handles,
            fast,
            learns,
            static_steps,
        }
    })
}

/// Everything that happened at one call: the steps, arguments and answers that were learned.
#[derive(Default)]
struct History {
    learned: Vec<(u64, i64, i64)>,
    wanted: Option<u64>,
    ordered: bool,
}

proptest! {
    #[test]
    fn a_call_is_predicted_only_as_it_always_was(rules in rules(), events in events()) {
        let mut predictions = Predictions::new(rules);
        let (mut step, mut function, mut predicts, mut restarts) = (0, 0, true, 0);
        let mut histories: Vec<((usize, u32), SiteId, History)> = Vec::new();
        for event in events {
            let number = match event {
                Event::Step { function: next, predicts: may } => {
                    (step, function, predicts) = (step + 1, next, may);
                    predictions.begin_step(step, FUNCTIONS[function], predicts);
                    prop_assert_eq!(predictions.predicts(), rules.learns && predicts && restarts < 8);
                    continue;
                }
                Event::Restart => {
                    restarts += 1;
                    prop_assert_eq!(predictions.restart(), restarts < 8);
                    let learned = histories.iter_mut().flat_map(|(_, _, history)| &mut history.learned);
                    learned.for_each(|(since, _, _)| *since = step);
                    continue;
                }
                Event::Call { site, .. } | Event::Wants { site } | Event::Ordered { site } => site,
            };
            if step == 0 {
                continue; // calls are made in steps
            }
            let site = predictions.site(key(number));
            let name = (function, number);
            if !histories.iter().any(|(known, _, _)| *known == name) {
                histories.push((name, site, History::default()));
            }
            // A call of one step function is never that of another.
            prop_assert!(histories.iter().all(|(known, id, _)| (*known == name) == (*id == site)));
            let (_, _, history) = histories.iter_mut().find(|(known, _, _)| *known == name).expect("just made");
            match event {
                Event::Call { given, answer, observed, .. } => {
                    let described_given = described(given);
                    let seen = (rules.learns && !observed).then_some(&*described_given);
                    let told = predictions.predict(site, seen, observed);
                    let same: Vec<_> = history.learned.iter().filter(|(_, known, _)| *known == given).collect();
                    let is_steady = same.iter().all(|(_, _, known)| *known == same[0].2);
                    let is_old = same.first().is_some_and(|(since, _, _)| step - since >= rules.static_steps);
                    let may = rules.learns && !observed && predicts && restarts < 8;
                    let expects = may && !history.ordered && is_steady && is_old;
                    let expected = expects.then(|| vec![described(same[0].2)]);
                    prop_assert_eq!(&told.answers, &expected);
                    // Within a step all calls go the same way, whoever uses values meanwhile.
                    let comes = history.wanted.is_some_and(|wanted| wanted < step);
                    let stays = rules.handles || (expects && rules.fast);
                    prop_assert_eq!(told.hold, stays && !comes && !observed);
                    if seen.is_some() && told.answers.is_none() {
                        predictions.learn(site, described_given, vec![described(answer)]);
                        let mut kinds: Vec<_> = history.learned.iter().map(|(_, known, _)| *known).collect();
                        kinds.sort_unstable();
                        kinds.dedup();
                        // A call whose arguments vary without end is not remembered without end.
                        if kinds.contains(&given) || kinds.len() < 16 {
                            history.learned.push((step, given, answer));
                        }
                    }
                }
                Event::Wants { .. } => {
                    predictions.wants(site);
                    history.wanted.get_or_insert(step);
                }
                Event::Ordered { .. } => {
                    predictions.set_ordered(site);
                    history.ordered = true;
                }
                Event::Step { .. } | Event::Restart => unreachable!("it is over"),
            }
        }
    }
}

/// A result whose memory is kept, by number.
fn kept(arguments: &[u32], results: &[u32]) -> Expected {
    let notes = ResultNotes {
        kept_arguments: arguments.to_vec(),
        kept_results: results.to_vec(),
        ..ResultNotes::default()
    };
    Expected {
        kind: AnswerKind::Result(Arc::new(notes)),
        value: Value::None,
        tensors: Vec::new(),
    }
}

#[test]
fn a_call_is_predicted_with_all_that_any_of_its_answers_kept() {
    let mut predictions = Predictions::new(PredictionRules {
        handles: true,
        fast: false,
        learns: true,
        static_steps: 1,
    });
    predictions.begin_step(1, "train", true);
    let site = predictions.site(key(0));
    for answer in [kept(&[1], &[]), kept(&[], &[2]), kept(&[0, 1], &[])] {
        predictions.learn(site, described(0), vec![Arc::new(answer)]);
    }
    predictions.begin_step(2, "train", true);
    let told = predictions.predict(site, Some(&described(0)), false);
    let answers = told.answers.expect("all that differs is what is kept");
    assert_eq!(*answers[0], kept(&[0, 1], &[2]));
    let given = |expected: Expected| Answer {
        kind: expected.kind,
        body: Body {
            value: expected.value,
            tensors: Vec::new(),
        },
    };
    assert!(answers[0].is(&given(kept(&[], &[]))));
    assert!(answers[0].is(&given(kept(&[1], &[2]))));
    assert!(
        !answers[0].is(&given(kept(&[], &[3]))),
        "nobody would see writes to it"
    );
}
