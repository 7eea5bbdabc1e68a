//! Laws of the schedules, on a simulated root whose remote work ends in random order.

use std::num::NonZeroU32;

use proptest::prelude::*;
use shardwright_core::MicrobatchId;

use crate::{Ready, ReadyKind, RootProgress, Schedule};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ran {
    Forward(u32),
    Resume(u32),
    Backward(u32),
}

struct Root {
    schedule: Schedule,
    progress: RootProgress,
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
            schedule,
            progress: RootProgress {
                num_microbatches,
                ..RootProgress::default()
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
        });
    }

    /// Runs one chosen item; false when nothing may run.
    fn run_one(&mut self, differentiates: impl Fn(u32) -> bool) -> bool {
        let Some(index) = self.schedule.choose(&self.ready, &self.progress) else {
            return false;
        };
        let item = self.ready.remove(index);
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
            _ => self.progress.returned += 1,
        }
        self.most_active = self.most_active.max(self.progress.active());
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

fn schedules() -> impl Strategy<Value = Schedule> {
    prop_oneof![
        Just(Schedule::Simple),
        (1_u32..6).prop_map(|active| Schedule::Interleaved {
            active: NonZeroU32::new(active).expect("the range starts at one")
        }),
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
    fn interleaved_respects_its_cap(
        active in 1_u32..6, microbatches in 1_u32..12, seed in proptest::collection::vec(0_usize..64, 1..64),
    ) {
        let schedule = Schedule::Interleaved { active: NonZeroU32::new(active).expect("at least one") };
        let root = Root::new(schedule, microbatches).run(seed.into_iter().cycle(), |_| true);
        prop_assert!(root.most_active <= active);
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
    let root = RootProgress {
        num_microbatches: 100,
        started: 99,
        ..RootProgress::default()
    };
    assert!(Schedule::Simple.allows(ReadyKind::RootForward, &root));
}

#[test]
fn lower_microbatch_then_earlier_arrival_goes_first() {
    let item = |kind, microbatch, arrival| Ready {
        kind,
        microbatch: MicrobatchId(microbatch),
        arrival,
    };
    let ready = [
        item(ReadyKind::RequestForward, 2, 0),
        item(ReadyKind::ResumeForward, 1, 2),
        item(ReadyKind::RequestForward, 1, 1),
        item(ReadyKind::RootForward, 0, 3),
    ];
    let schedule: Schedule = "interleaved(active=4)".parse().unwrap();
    assert_eq!(schedule.choose(&ready, &RootProgress::default()), Some(2));
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
    ] {
        let error = text.parse::<Schedule>().unwrap_err();
        assert!(error.to_string().contains(&format!("{text:?}")));
    }
}
