//! Why a text is no program, and why a program cannot be run.

use std::fmt;

use shardwright_core::{MicrobatchId, PipelineRank, StageId};

use super::action::{Action, NotAnAction};

/// A text that is no program. Lines and cells are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseProgramError {
    /// The first line is not that of a program.
    #[error("line 1 is {value:?}; a program begins with {expected:?}")]
    NoHeader {
        /// The line.
        value: String,
        /// What it has to be.
        expected: String,
    },
    /// The program was written by a later release.
    #[error(
        "this is a program of format version {version}; this release reads versions up to {newest}"
    )]
    NewerVersion {
        /// Its version.
        version: u64,
        /// The newest one that can be read.
        newest: u64,
    },
    /// A line does not begin with the rank whose turn it is.
    #[error("line {line} begins with {value:?}; allowed is \"rank {expected}:\"")]
    NotTheRank {
        /// The line.
        line: usize,
        /// How it begins.
        value: String,
        /// Which rank was to come.
        expected: PipelineRank,
    },
    /// A cell is no action.
    #[error("row {row} (rank {}), cell {cell}: {source}", .row - 1)]
    NotAnAction {
        /// The row, which is the rank plus 1.
        row: usize,
        /// The cell in the row.
        cell: usize,
        /// Its text.
        source: NotAnAction,
    },
    /// A cell communicates, so the file is not the compute-only form.
    #[error(
        "row {row} (rank {}), cell {cell}: {value:?} is no computation; allowed are F, B, I and W, \
         as torch writes them with format=\"compute_only\"", .row - 1
    )]
    NotComputation {
        /// The row, which is the rank plus 1.
        row: usize,
        /// The cell in the row.
        cell: usize,
        /// Its text.
        value: String,
    },
}

/// A program that cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// There is nothing to run.
    #[error("the program has no actions")]
    Empty,
    /// An action is not there.
    #[error(
        "{action} is missing: every stage (0 to {last_stage}) needs the forward and the backward of every \
         microbatch (0 to {last_microbatch})"
    )]
    Missing {
        /// The action.
        action: Action,
        /// The highest stage that occurs.
        last_stage: StageId,
        /// The highest microbatch that occurs.
        last_microbatch: MicrobatchId,
    },
    /// An action is there twice.
    #[error("{action} stands twice, on rank {first} and on rank {second}")]
    Twice {
        /// The action.
        action: Action,
        /// Where it stands.
        first: PipelineRank,
        /// Where it stands once more.
        second: PipelineRank,
    },
    /// A backward is there as a whole and in parts.
    #[error("{part} is part of {whole}, which stands in the program too; allowed is one of both")]
    WholeAndPart {
        /// The whole backward.
        whole: Action,
        /// Its part.
        part: Action,
    },
    /// A stage's actions are on several ranks.
    #[error("{action} is on rank {second}, but stage {} is on rank {first}", .action.stage)]
    TwoRanks {
        /// An action of the stage.
        action: Action,
        /// Where the stage's first action is.
        first: PipelineRank,
        /// Where this one is.
        second: PipelineRank,
    },
    /// Ranks wait for each other.
    #[error("{0}")]
    Deadlock(Deadlock),
}

/// A rank that stands at an action which needs another one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The rank.
    pub rank: PipelineRank,
    /// The action that it cannot start.
    pub action: Action,
    /// What that action needs.
    pub needs: Action,
    /// The rank that was to run it, and waits too (or this rank, later).
    pub of: PipelineRank,
}

/// Ranks that wait for each other in a circle: each for the next, the last for the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// The circle.
    pub cycle: Vec<Wait>,
}

impl fmt::Display for Deadlock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the ranks wait for each other")?;
        for (index, wait) in self.cycle.iter().enumerate() {
            let Wait {
                rank,
                action,
                needs,
                of,
            } = wait;
            let blocking = self.cycle[(index + 1) % self.cycle.len()].action;
            let separator = if index == 0 { ':' } else { ';' };
            write!(
                formatter,
                "{separator} rank {rank} stands at {action}, which needs {needs} of rank {of}"
            )?;
            if blocking != *needs {
                write!(formatter, ", where {blocking} comes first")?;
            }
        }
        Ok(())
    }
}
