//! Schedules as data: what each rank of a pipeline does, in order.

mod action;
mod complete;
mod csv;
mod error;
mod reference;
mod text;

#[cfg(test)]
mod tests;

pub use action::{Action, ActionKind, NotAnAction};
pub use complete::Complete;
pub use error::{Deadlock, ParseProgramError, ProgramError, Wait};
pub use reference::{ParseReferenceError, Reference, ReferenceError, Shape};

/// For each rank of a pipeline the tasks that it runs, one after another.
///
/// A stage is a part of the model on one rank; a rank may have several. The stages form a chain:
/// forward goes through it from stage 0 on, backward comes back. A rank runs its next action as
/// soon as it is done with the one before and has what the action needs; so a program has an order
/// and no times, and an idle slot of a text form means nothing.
///
/// It has two text forms: one of our own (`Display` and `FromStr`), and the compute-only CSV of
/// `torch.distributed.pipelining`. Any lists of actions are a `Program`; [`Program::validate`]
/// tells whether it can be run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    ranks: Vec<Vec<Action>>,
}

impl Program {
    /// A program of these actions, by pipeline rank.
    pub fn new(ranks: Vec<Vec<Action>>) -> Self {
        Self { ranks }
    }

    /// The actions, by pipeline rank.
    pub fn ranks(&self) -> &[Vec<Action>] {
        &self.ranks
    }

    /// Reads either text form: ours is known by its first line.
    pub fn read(text: &str) -> Result<Self, ParseProgramError> {
        if Self::is_own_text(text) {
            text.parse()
        } else {
            Self::from_csv(text)
        }
    }

    /// Whether a text begins as our text form does.
    pub fn is_own_text(text: &str) -> bool {
        text.starts_with(text::NAME)
    }

    /// Whether it can be run: every stage does the forward and the backward of every microbatch
    /// exactly once, on one rank, and no rank waits for ever.
    pub fn validate(&self) -> Result<(), ProgramError> {
        Complete::new(self)?
            .walk(|_, _| {})
            .map_err(ProgramError::Deadlock)
    }
}
