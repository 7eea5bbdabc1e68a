//! Laws of the schedules, on a simulated root whose remote work ends in random order.

mod looped;
mod orders;

use std::num::NonZeroU32;

use proptest::prelude::*;
use shardwright_core::config::PipelineName;
use shardwright_core::{Config, MicrobatchId};

use crate::{Progress, Ready, ReadyKind, Schedule, Turns, configured};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ran {
    Forward(u32),
    Resume(u32),
    Backward(u32),
    Weight(u32),
}

struct Root {
    schedule: Schedule,
    progress: Progress,
    turns: Turns,
    ready: Vec<Ready>,
    /// Microbatches whose remote work is under way, with the kind that makes them ready again.
    away: Vec<(u32, ReadyKind)>,
    arrivals: u64,
    log: Vec<Ran>,
    most_active: u32,
}

impl Root {
    fn new(schedule: Schedule, num_microbatches: u32) -> Self {
        let mut root = Self {
            turns: Turns::of(&schedule),
            schedule,
            progress: Progress {
                num_microbatches,
                ..Progress::default()
            },
            ready: Vec::new(),
            away: Vec::new(),
            arrivals: 0,
            log: Vec::new(),
            most_active: 0,
        };
        for microbatch in 0..num_microbatches {
            root.arrive(microbatch, ReadyKind::RootForward);
        }
        root
    }

    fn arrive(&mut self, microbatch: u32, kind: ReadyKind) {
        self.arrivals += 1;
        self.ready.push(Ready {
            kind,
            microbatch: MicrobatchId(microbatch),
            arrival: self.arrivals,
            visit: self.turns.visit(kind, MicrobatchId(microbatch)),
        });
    }

    /// Runs one chosen item; false when nothing may run.
    fn run_one(&mut self, differentiates: impl Fn(u32) -> bool) -> bool {
        let Some(index) = self.schedule.choose(&self.ready, &self.progress) else {
            return false;
        };
        let item = self.ready.remove(index);
        self.turns.begin(item.kind, item.microbatch);
        self.progress.after_backward = self.turns.last_was_backward();
        let microbatch = item.microbatch.0;
        match item.kind {
            ReadyKind::RootForward => {
                self.progress.started += 1;
                self.log.push(Ran::Forward(microbatch));
                self.away.push((microbatch, ReadyKind::ResumeForward));
            }
            ReadyKind::ResumeForward => {
                self.log.push(Ran::Resume(microbatch));
                self.progress.forwards_done += 1;
                if differentiates(microbatch) {
                    self.arrive(microbatch, ReadyKind::RootBackward);
                } else {
                    self.progress.returned += 1;
                }
            }
            ReadyKind::RootBackward => {
                self.log.push(Ran::Backward(microbatch));
                self.away.push((microbatch, ReadyKind::ResumeBackward));
            }
            ReadyKind::WeightGradient => self.log.push(Ran::Weight(microbatch)),
            _ => {
                self.progress.returned += 1;
                if self.schedule.splits_backward() {
                    self.arrive(microbatch, ReadyKind::WeightGradient);
                }
            }
        }
        let deferred = self
            .ready
            .iter()
            .filter(|item| item.kind == ReadyKind::WeightGradient);
        self.progress.deferred = deferred.count() as u32;
        let held = self.progress.active() + self.progress.deferred;
        self.most_active = self.most_active.max(held);
        true
    }

    fn run(
        mut self,
        mut choices: impl Iterator<Item = usize>,
        differentiates: impl Fn(u32) -> bool,
    ) -> Self {
        loop {
            // Either a remote answer arrives or something runs; the random choice interleaves them.
            let choice = choices.next().expect("the choices never end");
            if choice.is_multiple_of(2) && !self.away.is_empty() || !self.run_one(&differentiates) {
                if self.away.is_empty() {
                    return self;
                }
                let (microbatch, kind) = self.away.swap_remove(choice / 2 % self.away.len());
                self.arrive(microbatch, kind);
            }
        }
    }
}

fn active() -> impl Strategy<Value = NonZeroU32> {
    (1_u32..6).prop_map(|active| NonZeroU32::new(active).expect("the range starts at one"))
}

fn schedules() -> impl Strategy<Value = Schedule> {
    prop_oneof![
        Just(Schedule::Simple),
        active().prop_map(|active| Schedule::Interleaved { active }),
        active().prop_map(|active| Schedule::Looped { active }),
        active().prop_map(|active| Schedule::ZeroBubble { active }),
    ]
}

proptest! {
    #[test]
    fn every_microbatch_runs_and_nothing_starves(
        schedule in schedules(), microbatches in 1_u32..12, seed in proptest::collection::vec(0_usize..64, 1..64),
        trains in any::<u16>(),
    ) {
        let differentiates = |microbatch: u32| trains >> (microbatch % 16) & 1 == 1;
        let root = Root::new(schedule, microbatches).run(seed.into_iter().cycle(), differentiates);
        prop_assert_eq!(root.progress.returned, microbatches);
        prop_assert!(root.ready.is_empty());
        let starts: Vec<_> =
            root.log.iter().filter_map(|ran| if let Ran::Forward(m) = ran { Some(*m) } else { None }).collect();
        prop_assert_eq!(starts, (0..microbatches).collect::<Vec<_>>());
    }

    #[test]
    fn what_a_root_holds_has_a_cap(
        active in active(), which in 0_usize..3, microbatches in 1_u32..12,
        seed in proptest::collection::vec(0_usize..64, 1..64),
    ) {
        let schedule = match which {
            0 => Schedule::Interleaved { active },
            1 => Schedule::Looped { active },
            _ => Schedule::ZeroBubble { active },
        };
        let root = Root::new(schedule, microbatches).run(seed.into_iter().cycle(), |_| true);
        prop_assert!(root.most_active <= active.get());
    }

    #[test]
    fn weight_gradients_run_when_nothing_else_may(
        active in active(), microbatches in 1_u32..12, seed in proptest::collection::vec(0_usize..64, 1..64),
    ) {
        let root = Root::new(Schedule::ZeroBubble { active }, microbatches).run(seed.into_iter().cycle(), |_| true);
        let weights = root.log.iter().filter(|ran| matches!(ran, Ran::Weight(_))).count();
        prop_assert_eq!(weights as u32, microbatches);
    }

    #[test]
    fn simple_runs_no_backward_before_the_last_forward(
        microbatches in 1_u32..12, seed in proptest::collection::vec(0_usize..64, 1..64), trains in any::<u16>(),
    ) {
        let differentiates = |microbatch: u32| trains >> (microbatch % 16) & 1 == 1;
        let root = Root::new(Schedule::Simple, microbatches).run(seed.into_iter().cycle(), differentiates);
        let first_backward = root.log.iter().position(|ran| matches!(ran, Ran::Backward(_)));
        let last_forward = root.log.iter().rposition(|ran| !matches!(ran, Ran::Backward(_)));
        if let (Some(backward), Some(forward)) = (first_backward, last_forward) {
            prop_assert!(forward < backward);
        }
    }

    #[test]
    fn text_form_round_trips(schedule in schedules()) {
        prop_assert_eq!(schedule.to_string().parse::<Schedule>(), Ok(schedule));
    }
}

#[test]
fn simple_ignores_the_number_of_active_microbatches() {
    let root = Progress {
        num_microbatches: 100,
        started: 99,
        ..Progress::default()
    };
    let forward = Ready {
        kind: ReadyKind::RootForward,
        microbatch: MicrobatchId(99),
        arrival: 0,
        visit: 0,
    };
    assert_eq!(Schedule::Simple.choose([&forward], &root), Some(0));
}

#[test]
fn weight_gradients_of_many_microbatches_go_before_forwards() {
    let item = |kind, microbatch| Ready {
        kind,
        microbatch: MicrobatchId(microbatch),
        arrival: 0,
        visit: 0,
    };
    let schedule: Schedule = "zero_bubble(active=2)".parse().unwrap();
    let mut ready = vec![
        item(ReadyKind::RequestForward, 3),
        item(ReadyKind::WeightGradient, 0),
    ];
    let holding = |deferred| Progress {
        deferred,
        ..Progress::default()
    };
    assert_eq!(schedule.choose(&ready, &holding(1)), Some(0));
    assert_eq!(schedule.choose(&ready, &holding(2)), Some(1));
    ready.push(item(ReadyKind::RequestBackward, 2));
    assert_eq!(schedule.choose(&ready, &holding(2)), Some(2));
}

#[test]
fn lower_microbatch_then_earlier_arrival_goes_first() {
    let item = |kind, microbatch, arrival| Ready {
        kind,
        microbatch: MicrobatchId(microbatch),
        arrival,
        visit: 0,
    };
    let ready = [
        item(ReadyKind::RequestForward, 2, 0),
        item(ReadyKind::ResumeForward, 1, 2),
        item(ReadyKind::RequestForward, 1, 1),
        item(ReadyKind::RootForward, 0, 3),
    ];
    let schedule: Schedule = "interleaved(active=4)".parse().unwrap();
    assert_eq!(schedule.choose(&ready, &Progress::default()), Some(2));
}

#[test]
fn texts_that_are_no_schedule_are_named() {
    for text in [
        "",
        "Simple",
        "interleaved",
        "interleaved(active=0)",
        "interleaved(active=+1)",
        "interleaved(active=)",
        "looped",
        "looped(active=0)",
        "zero_bubble",
        "zero_bubble(active=0)",
    ] {
        let error = text.parse::<Schedule>().unwrap_err();
        assert!(error.to_string().contains(&format!("{text:?}")));
    }
}

#[test]
fn a_schedules_ideal_is_that_of_a_pipeline_that_fills_and_drains_once() {
    let of = |text: &str, ranks, microbatches| {
        let schedule: Schedule = text.parse().unwrap();
        schedule.ideal_bubble(ranks, microbatches)
    };
    assert_eq!(of("simple", 4, 16), Some(3.0 / 19.0));
    assert_eq!(of("interleaved(active=6)", 4, 16), Some(3.0 / 19.0));
    assert_eq!(of("simple", 1, 8), Some(0.0));
    assert_eq!(of("interleaved(active=2)", 2, 8), Some(1.0 / 9.0));
    assert_eq!(of("interleaved(active=2)", 4, 2), Some(3.0 / 5.0));
    assert_eq!(of("interleaved(active=2)", 4, 8), None);
    assert_eq!(of("looped(active=8)", 4, 8), None);
    assert_eq!(of("looped(active=8)", 1, 8), Some(0.0));
    assert_eq!(of("zero_bubble(active=8)", 4, 8), None);
    assert_eq!(of("zero_bubble(active=8)", 1, 8), Some(0.0));
}

#[test]
fn every_name_of_the_configuration_but_two_is_that_of_a_policy() {
    let others = [PipelineName::Auto, PipelineName::OnlyForward];
    let policies = PipelineName::ALL
        .iter()
        .filter(|name| !others.contains(name));
    for name in policies.map(|name| name.name()) {
        let schedule = Schedule::of_name(name, NonZeroU32::MIN).unwrap();
        let text = schedule.to_string();
        assert_eq!(text.split('(').next(), Some(name));
        assert_eq!(text.parse(), Ok(schedule));
    }
    for other in others {
        assert_eq!(Schedule::of_name(other.name(), NonZeroU32::MIN), None);
        let text = format!(r#"{{"pipeline": "{}", "microbatches": 4}}"#, other.name());
        let schedule = configured(&Config::parse(&text).unwrap()).unwrap();
        assert_eq!(schedule.to_string(), "interleaved(active=3)");
    }
}
