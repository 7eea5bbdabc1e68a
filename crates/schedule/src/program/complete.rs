//! Programs in which every action is there once: who needs what, and in which order it can run.

use std::collections::BTreeMap;

use shardwright_core::{MicrobatchId, PipelineRank, StageId};

use super::Program;
use super::action::{Action, ActionKind};
use super::error::{Deadlock, ProgramError, Wait};

/// A program in which every stage does forward and backward of every microbatch exactly once, and
/// is on one rank. Ranks may still wait for each other for ever.
#[derive(Debug)]
pub struct Complete<'a> {
    program: &'a Program,
    /// The rank of every stage.
    stage_ranks: Vec<PipelineRank>,
    num_microbatches: u32,
    /// Whether the backward is in parts, by stage and microbatch.
    is_split: Vec<bool>,
}

impl<'a> Complete<'a> {
    /// Checks that a program is complete.
    pub fn new(program: &'a Program) -> Result<Self, ProgramError> {
        let mut places = BTreeMap::new();
        let mut stage_ranks = BTreeMap::new();
        let mut last_microbatch = MicrobatchId(0);
        for (rank, action) in all_actions(program) {
            if let Some(first) = places.insert(action, rank) {
                return Err(ProgramError::Twice {
                    action,
                    first,
                    second: rank,
                });
            }
            let first = *stage_ranks.entry(action.stage).or_insert(rank);
            if first != rank {
                return Err(ProgramError::TwoRanks {
                    action,
                    first,
                    second: rank,
                });
            }
            last_microbatch = last_microbatch.max(action.microbatch);
        }
        let Some((&last_stage, _)) = stage_ranks.last_key_value() else {
            return Err(ProgramError::Empty);
        };
        let missing = |action| ProgramError::Missing {
            action,
            last_stage,
            last_microbatch,
        };
        let mut is_split = Vec::new();
        // Ends at the first gap, so never much later than the actions do, however large their numbers.
        for stage in (0..=last_stage.0).map(StageId) {
            for microbatch in (0..=last_microbatch.0).map(MicrobatchId) {
                let action = |kind| Action {
                    stage,
                    kind,
                    microbatch,
                };
                let [forward, whole, input, weight] = ActionKind::ALL.map(action);
                let has = |action| places.contains_key(&action);
                if !has(forward) {
                    return Err(missing(forward));
                }
                match (has(whole), has(input), has(weight)) {
                    (true, false, false) => is_split.push(false),
                    (false, true, true) => is_split.push(true),
                    (false, false, false) => return Err(missing(whole)),
                    (false, true, false) => return Err(missing(weight)),
                    (false, false, true) => return Err(missing(input)),
                    (true, has_input, _) => {
                        let part = if has_input { input } else { weight };
                        return Err(ProgramError::WholeAndPart { whole, part });
                    }
                }
            }
        }
        Ok(Self {
            program,
            stage_ranks: stage_ranks.into_values().collect(),
            num_microbatches: last_microbatch.0 + 1,
            is_split,
        })
    }

    /// How many stages.
    pub fn num_stages(&self) -> usize {
        self.stage_ranks.len()
    }

    /// How many microbatches.
    pub fn num_microbatches(&self) -> usize {
        self.num_microbatches as usize
    }

    /// The rank of a stage of this program.
    pub fn rank(&self, stage: StageId) -> PipelineRank {
        self.stage_ranks[stage.0 as usize]
    }

    /// What has to end before an action of this program starts, beside what its rank does before it.
    pub fn needs(&self, action: Action) -> impl Iterator<Item = Action> + use<> {
        let Action {
            stage,
            kind,
            microbatch,
        } = action;
        let own = |kind| Action {
            stage,
            kind,
            microbatch,
        };
        let (first, second) = match kind {
            ActionKind::Forward => {
                let previous = stage.0.checked_sub(1).map(|previous| Action {
                    stage: StageId(previous),
                    ..action
                });
                (previous, None)
            }
            ActionKind::FullBackward | ActionKind::InputGradient => {
                let next = StageId(stage.0 + 1);
                let next = (self.stage_ranks.len() > next.0 as usize).then(|| Action {
                    stage: next,
                    kind: self.backward(next, microbatch),
                    microbatch,
                });
                (Some(own(ActionKind::Forward)), next)
            }
            ActionKind::WeightGradient => (Some(own(ActionKind::InputGradient)), None),
        };
        first.into_iter().chain(second)
    }

    /// A number for each action, unique among those of one program and less than [`Self::num_places`].
    pub fn place(&self, action: Action) -> usize {
        let pair = self.pair(action.stage, action.microbatch);
        let part = match action.kind {
            ActionKind::Forward => 0,
            ActionKind::FullBackward | ActionKind::InputGradient => 1,
            ActionKind::WeightGradient => 2,
        };
        pair * 3 + part
    }

    /// See [`Self::place`].
    pub fn num_places(&self) -> usize {
        self.is_split.len() * 3
    }

    /// Visits every action after all that it needs and after those that its rank runs before it.
    /// Where this is impossible, it visits those that can run and tells who waits for whom.
    pub fn walk(&self, mut visit: impl FnMut(PipelineRank, Action)) -> Result<(), Deadlock> {
        let ranks = self.program.ranks();
        let mut positions = vec![0; ranks.len()];
        let mut is_done = vec![false; self.num_places()];
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, (actions, position)) in ranks.iter().zip(&mut positions).enumerate() {
                while let Some(action) = actions.get(*position)
                    && self
                        .needs(*action)
                        .all(|needed| is_done[self.place(needed)])
                {
                    visit(PipelineRank(rank as u32), *action);
                    is_done[self.place(*action)] = true;
                    *position += 1;
                    moved = true;
                }
            }
        }
        let waits = |rank: PipelineRank| {
            let index = rank.0 as usize;
            let action = *ranks[index].get(positions[index])?;
            let needs = self
                .needs(action)
                .find(|needed| !is_done[self.place(*needed)])?;
            let of = self.rank(needs.stage);
            Some(Wait {
                rank,
                action,
                needs,
                of,
            })
        };
        let stuck = (0..ranks.len() as u32).map(PipelineRank).find_map(waits);
        match stuck {
            None => Ok(()),
            Some(wait) => Err(Deadlock {
                cycle: find_cycle(wait, waits),
            }),
        }
    }

    fn backward(&self, stage: StageId, microbatch: MicrobatchId) -> ActionKind {
        if self.is_split[self.pair(stage, microbatch)] {
            ActionKind::InputGradient
        } else {
            ActionKind::FullBackward
        }
    }

    fn pair(&self, stage: StageId, microbatch: MicrobatchId) -> usize {
        stage.0 as usize * self.num_microbatches() + microbatch.0 as usize
    }
}

fn all_actions(program: &Program) -> impl Iterator<Item = (PipelineRank, Action)> {
    let ranks = program.ranks().iter().enumerate();
    ranks.flat_map(|(rank, actions)| {
        let rank = PipelineRank(rank as u32);
        actions.iter().map(move |action| (rank, *action))
    })
}

/// Follows the waits until a rank comes up again: only from there on do they go round.
fn find_cycle(first: Wait, waits: impl Fn(PipelineRank) -> Option<Wait>) -> Vec<Wait> {
    let mut path = vec![first];
    loop {
        let last = path.last().expect("it begins with one");
        let next = waits(last.of).expect("who has not run what is needed stands before it");
        if let Some(start) = path.iter().position(|wait| wait.rank == next.rank) {
            return path.split_off(start);
        }
        path.push(next);
    }
}
