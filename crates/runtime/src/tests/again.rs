//! A failed step is run again on all ranks, or on none, whatever each has found and heard first (EX-5).

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::time::Duration;

use shardwright_core::{Rank, StepEpoch};
use shardwright_wire::Message;

use super::rig::{config, plan};
use super::script::Dice;
use crate::{Effect, LocalError, Machine};

const WORLD: u32 = 3;
const KINDS: [&str; 4] = [
    "StateWriteError",
    "StateOrderError",
    "DepartureError",
    "ValueError",
];
const NOW: Duration = Duration::ZERO;

struct Ranks {
    machines: Vec<Machine>,
    /// First in, first out for each pair of ranks, and no order between pairs.
    network: BTreeMap<(usize, usize), VecDeque<Message>>,
    /// What each rank was the first to say.
    told: Vec<String>,
}

impl Ranks {
    fn new() -> Self {
        let pipeline: Vec<u32> = (0..WORLD).collect();
        Self {
            machines: pipeline
                .iter()
                .map(|rank| Machine::new(config(*rank, &pipeline, WORLD)))
                .collect(),
            network: BTreeMap::new(),
            told: Vec::new(),
        }
    }

    fn send(&mut self, from: usize) {
        for effect in self.machines[from].take_effects() {
            if let Effect::Send { to, message } = effect {
                if let Message::Abort(abort) = &message {
                    self.told.push(abort.error.kind.clone());
                }
                let pair = (from, to.0 as usize);
                self.network.entry(pair).or_default().push_back(message);
            }
        }
    }

    fn enter(&mut self, rank: usize) {
        let entered = self.machines[rank].begin_step(plan(1, "train_step", 2), NOW);
        drop(entered); // it has failed elsewhere already
        self.send(rank);
    }

    fn fail(&mut self, rank: usize, kind: &str) {
        let error = LocalError {
            kind: kind.to_owned(),
            ..LocalError::default()
        };
        self.machines[rank].fail(None, error, NOW);
        self.send(rank);
    }

    fn deliver(&mut self, pair: (usize, usize)) {
        let message = self.network.get_mut(&pair).unwrap().pop_front().unwrap();
        self.machines[pair.1].deliver(Rank(pair.0 as u32), message, NOW);
        self.send(pair.1);
    }

    /// Whether each rank would run the step again, once it has heard all.
    fn verdicts(&self, departures: bool) -> Vec<bool> {
        let step = StepEpoch(1);
        self.machines
            .iter()
            .map(|one| {
                one.would_run_again(step, departures)
                    && one.check_run_again(step, departures).is_ok()
            })
            .collect()
    }
}

#[derive(Clone, Copy)]
enum Choice {
    Enter(usize),
    Fail(usize),
    Deliver((usize, usize)),
}

#[test]
fn all_ranks_run_a_failed_step_again_or_none() {
    let (mut again, mut ended) = (0, 0);
    for seed in 0..4000 {
        let mut dice = Dice(seed);
        let mut ranks = Ranks::new();
        let fails: Vec<Option<&str>> = (0..WORLD)
            .map(|rank| (rank == 0 || dice.roll(2) == 0).then(|| KINDS[dice.roll(KINDS.len())]))
            .collect();
        let mut left: Vec<Choice> = (0..WORLD as usize).map(Choice::Enter).collect();
        loop {
            let mut choices = left.clone();
            let waiting = ranks.network.iter().filter(|(_, queue)| !queue.is_empty());
            choices.extend(waiting.map(|(pair, _)| Choice::Deliver(*pair)));
            if choices.is_empty() {
                break;
            }
            let index = dice.roll(choices.len());
            let choice = choices[index];
            if index < left.len() {
                left.swap_remove(index);
            }
            match choice {
                Choice::Enter(rank) => {
                    ranks.enter(rank);
                    if fails[rank].is_some() {
                        left.push(Choice::Fail(rank));
                    }
                }
                Choice::Fail(rank) => ranks.fail(rank, fails[rank].unwrap()),
                Choice::Deliver(pair) => ranks.deliver(pair),
            }
        }
        for departures in [true, false] {
            let verdicts = ranks.verdicts(departures);
            let ends = ranks
                .told
                .iter()
                .any(|kind| kind == "ValueError" || (kind == "DepartureError" && !departures));
            assert_eq!(
                verdicts,
                vec![!ends; WORLD as usize],
                "seed {seed}, {fails:?}"
            );
            *(if ends { &mut ended } else { &mut again }) += 1;
        }
    }
    assert!(again > 1000 && ended > 1000, "{again} again, {ended} ended");
}
