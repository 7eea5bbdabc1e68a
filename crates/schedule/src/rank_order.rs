//! One rank's part of a program, for who follows it: what comes when, by the rank's own stages.

use std::collections::BTreeMap;

use shardwright_core::{MicrobatchId, PipelineRank, StageId};

use crate::program::{Action, ActionKind, Program};

/// Which part of a stage's work for a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The forward.
    Forward,
    /// The backward; where it is split, the input gradients.
    Backward,
    /// The weight gradients that a split backward leaves.
    WeightGradient,
}

/// A part of one of the rank's own stages, for a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StagePart {
    /// The stage among those of the rank, from 0.
    pub stage: usize,
    /// Which part.
    pub part: Part,
    /// The microbatch.
    pub microbatch: MicrobatchId,
}

/// The order of one rank.
///
/// Where a program splits any backward, all are run in two parts: a whole one is its parts in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankOrder {
    units: Vec<StagePart>,
    /// For each unit the index of the action that it is of.
    cells: Vec<usize>,
    actions: Vec<Action>,
    places: BTreeMap<StagePart, usize>,
    stages: Vec<StageId>,
    /// How many stages of other ranks come before each of this rank's.
    calls_before: Vec<usize>,
}

impl RankOrder {
    /// The order of a rank of this program; empty for a rank that it does not have.
    pub fn new(program: &Program, rank: PipelineRank) -> Self {
        let actions = program.ranks().get(rank.0 as usize).cloned();
        let actions = actions.unwrap_or_default();
        let mut stages: Vec<_> = actions.iter().map(|action| action.stage).collect();
        stages.sort_unstable();
        stages.dedup();
        let mut all: Vec<_> = program.ranks().iter().flatten().map(|a| a.stage).collect();
        all.sort_unstable();
        all.dedup();
        let calls_before = stages.iter().enumerate().map(|(own_before, stage)| {
            let before = all.partition_point(|other| other < stage);
            before - own_before
        });
        let is_split = program
            .ranks()
            .iter()
            .flatten()
            .any(|action| action.kind == ActionKind::WeightGradient);
        let mut units = Vec::new();
        let mut cells = Vec::new();
        for (cell, action) in actions.iter().enumerate() {
            let parts: &[Part] = match action.kind {
                ActionKind::Forward => &[Part::Forward],
                ActionKind::FullBackward if is_split => &[Part::Backward, Part::WeightGradient],
                ActionKind::FullBackward | ActionKind::InputGradient => &[Part::Backward],
                ActionKind::WeightGradient => &[Part::WeightGradient],
            };
            for part in parts {
                let stage = stages.binary_search(&action.stage);
                units.push(StagePart {
                    stage: stage.expect("the stages are those of the actions"),
                    part: *part,
                    microbatch: action.microbatch,
                });
                cells.push(cell);
            }
        }
        let places = units.iter().enumerate().map(|(at, unit)| (*unit, at));
        Self {
            places: places.collect(),
            calls_before: calls_before.collect(),
            units,
            cells,
            actions,
            stages,
        }
    }

    /// What comes, in order.
    pub fn units(&self) -> &[StagePart] {
        &self.units
    }

    /// How many stages the rank has.
    pub fn num_stages(&self) -> usize {
        self.stages.len()
    }

    /// How many calls of other ranks come before a stage of this rank, if each of their stages is one.
    pub fn calls_before(&self, stage: usize) -> Option<usize> {
        self.calls_before.get(stage).copied()
    }

    /// The stage of this rank that follows so many calls of other ranks.
    pub fn stage_after(&self, calls: usize) -> Option<usize> {
        self.calls_before.binary_search(&calls).ok()
    }

    /// Where a unit stands in the order; `None` if the program does not name it.
    pub fn place(&self, unit: StagePart) -> Option<usize> {
        self.places.get(&unit).copied()
    }

    /// The action of the unit at this place, and its number in the rank's list, counted from 1.
    pub fn action(&self, place: usize) -> Option<(Action, usize)> {
        let cell = *self.cells.get(place)?;
        Some((self.actions[cell], cell + 1))
    }

    /// How many actions the rank has.
    pub fn num_actions(&self) -> usize {
        self.actions.len()
    }
}
