//! The schedules of the literature, as programs.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use shardwright_core::{MicrobatchId, StageId};

use super::Program;
use super::action::{Action, ActionKind};

/// A schedule whose order is known beforehand.
///
/// With several stages per rank, rank `r` of `p` has the stages `r`, `r + p`, `r + 2p` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// `simple`: all forwards, then all backwards (GPipe, Huang et al. 2019). With several stages
    /// per rank, one stage after the other (breadth first, Lamy-Poirier 2022).
    Simple,
    /// `interleaved`: after a few forwards one forward and one backward in turn (1F1B, Narayanan et
    /// al. 2019). With several stages per rank, in rounds of as many microbatches as there are
    /// ranks (interleaved 1F1B, Narayanan et al. 2021).
    Interleaved,
    /// `zero_bubble`: as `interleaved`, with the backward in parts, and weight gradients where a
    /// rank would idle (ZB-H1, Qi et al. 2023). No rank holds more than in `interleaved`.
    ZeroBubble,
}

/// How large a pipeline is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How many ranks.
    pub num_ranks: NonZeroU32,
    /// How many microbatches.
    pub num_microbatches: NonZeroU32,
    /// How many stages each rank has.
    pub stages_per_rank: NonZeroU32,
}

/// A shape for which a reference schedule is not defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// The microbatches do not make equal rounds.
    #[error(
        "{reference} over several stages per rank divides the microbatches into {num_rounds} equal rounds (one for \
         each time that the {num_ranks} ranks go into them), and {num_microbatches} cannot be divided so; allowed are \
         multiples of {num_rounds}"
    )]
    UnevenRounds {
        /// The schedule.
        reference: Reference,
        /// How many ranks.
        num_ranks: u32,
        /// How many microbatches.
        num_microbatches: u32,
        /// How many rounds.
        num_rounds: u32,
    },
    /// The program would have more stages or actions than one can number.
    #[error(
        "{num_ranks} ranks of {stages_per_rank} stages with {num_microbatches} microbatches are more than {MOST_ACTIONS} actions"
    )]
    TooLarge {
        /// How many ranks.
        num_ranks: u32,
        /// How many stages each rank has.
        stages_per_rank: u32,
        /// How many microbatches.
        num_microbatches: u32,
    },
}

/// So that a slip in a number is an error, and not a machine without memory.
const MOST_ACTIONS: u64 = 100_000_000;

impl Reference {
    /// The program for a pipeline of this shape.
    pub fn program(self, shape: Shape) -> Result<Program, ReferenceError> {
        let num_ranks = shape.num_ranks.get();
        let num_microbatches = shape.num_microbatches.get();
        let stages_per_rank = shape.stages_per_rank.get();
        let num_actions = u64::from(num_ranks)
            .saturating_mul(stages_per_rank.into())
            .saturating_mul(num_microbatches.into())
            .saturating_mul(3);
        if num_actions > MOST_ACTIONS {
            return Err(ReferenceError::TooLarge {
                num_ranks,
                stages_per_rank,
                num_microbatches,
            });
        }
        // One stage per rank needs no rounds.
        let num_rounds = if self == Self::Simple || stages_per_rank == 1 {
            1
        } else {
            (num_microbatches / num_ranks).max(1)
        };
        if !num_microbatches.is_multiple_of(num_rounds) {
            return Err(ReferenceError::UnevenRounds {
                reference: self,
                num_ranks,
                num_microbatches,
                num_rounds,
            });
        }
        let round = num_microbatches / num_rounds;
        let ranks = (0..num_ranks).map(|rank| {
            let order = Order {
                rank,
                num_ranks,
                num_rounds,
                round,
                stages_per_rank,
            };
            let hops = (num_ranks - 1 - rank) as usize;
            let ahead = ((stages_per_rank - 1) * round) as usize;
            match self {
                Self::Simple => order.simple(),
                Self::Interleaved if stages_per_rank == 1 => order.in_turn(hops, None),
                Self::Interleaved => order.in_turn(ahead + 2 * hops, None),
                Self::ZeroBubble => order.in_turn(ahead + hops, Some(rank as usize)),
            }
        });
        Ok(Program::new(ranks.collect()))
    }
}

/// The order of one rank's forwards, and of its backwards.
struct Order {
    rank: u32,
    num_ranks: u32,
    num_rounds: u32,
    /// How many microbatches go through one stage before the next one has its turn.
    round: u32,
    stages_per_rank: u32,
}

impl Order {
    fn tasks(&self, is_backward: bool) -> Vec<(StageId, MicrobatchId)> {
        let mut tasks = Vec::new();
        for round in 0..self.num_rounds {
            for index in 0..self.stages_per_rank {
                let index = if is_backward {
                    self.stages_per_rank - 1 - index
                } else {
                    index
                };
                let stage = StageId(index * self.num_ranks + self.rank);
                let microbatches = round * self.round..(round + 1) * self.round;
                tasks.extend(microbatches.map(|microbatch| (stage, MicrobatchId(microbatch))));
            }
        }
        tasks
    }

    fn simple(&self) -> Vec<Action> {
        let forwards = self.tasks(false).into_iter();
        let backwards = self.tasks(true).into_iter();
        forwards
            .map(|task| action(ActionKind::Forward, task))
            .chain(backwards.map(|task| action(ActionKind::FullBackward, task)))
            .collect()
    }

    /// `warm_up` forwards, then a forward and a backward in turn. With `held_back`, weight
    /// gradients follow that many backwards behind.
    fn in_turn(&self, warm_up: usize, held_back: Option<usize>) -> Vec<Action> {
        let forwards = self.tasks(false);
        let backwards = self.tasks(true);
        let (first, rest) = forwards.split_at(warm_up.min(forwards.len()));
        let mut rest = rest.iter();
        let mut actions: Vec<Action> = first
            .iter()
            .map(|task| action(ActionKind::Forward, *task))
            .collect();
        let kind = match held_back {
            None => ActionKind::FullBackward,
            Some(_) => ActionKind::InputGradient,
        };
        for (index, task) in backwards.iter().enumerate() {
            actions.extend(rest.next().map(|task| action(ActionKind::Forward, *task)));
            actions.push(action(kind, *task));
            let weight = held_back.and_then(|held| backwards.get(index.checked_sub(held)?));
            actions.extend(weight.map(|task| action(ActionKind::WeightGradient, *task)));
        }
        let left = held_back.map_or(0, |held| held.min(backwards.len()));
        let weights = backwards[backwards.len() - left..].iter();
        actions.extend(weights.map(|task| action(ActionKind::WeightGradient, *task)));
        actions
    }
}

fn action(kind: ActionKind, (stage, microbatch): (StageId, MicrobatchId)) -> Action {
    Action {
        stage,
        kind,
        microbatch,
    }
}

const NAMES: [(Reference, &str); 3] = [
    (Reference::Simple, "simple"),
    (Reference::Interleaved, "interleaved"),
    (Reference::ZeroBubble, "zero_bubble"),
];

impl fmt::Display for Reference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(reference, _)| reference == self);
        formatter.write_str(name.expect("every schedule has a name").1)
    }
}

/// A text that names no reference schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no schedule; allowed are `simple`, `interleaved` and `zero_bubble`")]
pub struct ParseReferenceError {
    /// The text.
    pub text: String,
}

impl FromStr for Reference {
    type Err = ParseReferenceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found
            .map(|(reference, _)| *reference)
            .ok_or_else(|| ParseReferenceError {
                text: text.to_owned(),
            })
    }
}
