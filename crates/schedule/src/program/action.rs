//! One task of a program, such as `0F3`.

use std::fmt;
use std::str::FromStr;

use shardwright_core::{MicrobatchId, StageId};

/// What an action does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionKind {
    /// The forward: `F`.
    Forward,
    /// The whole backward: `B`.
    FullBackward,
    /// The part of the backward that makes gradients of the stage's inputs: `I`.
    InputGradient,
    /// The part of the backward that makes gradients of the stage's parameters: `W`.
    WeightGradient,
}

impl ActionKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [
        Self::Forward,
        Self::FullBackward,
        Self::InputGradient,
        Self::WeightGradient,
    ];

    /// Its letter in the text forms.
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::FullBackward => 'B',
            Self::InputGradient => 'I',
            Self::WeightGradient => 'W',
        }
    }
}

/// A stage's task for a microbatch. Its text form is stage, letter, microbatch: `1B3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// The stage.
    pub stage: StageId,
    /// What it does.
    pub kind: ActionKind,
    /// For which microbatch.
    pub microbatch: MicrobatchId,
}

impl fmt::Display for Action {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            stage,
            kind,
            microbatch,
        } = self;
        write!(formatter, "{stage}{}{microbatch}", kind.letter())
    }
}

/// A text that is no action.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{value:?} is no action; allowed are a stage, one of F, B, I and W, and a microbatch, such as 0F0, 1B3, 0I2 or 0W2"
)]
pub struct NotAnAction {
    /// The text.
    pub value: String,
}

impl FromStr for Action {
    type Err = NotAnAction;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (at, letter) = text
                .char_indices()
                .find(|(_, character)| !character.is_ascii_digit())?;
            let kind = ActionKind::ALL
                .into_iter()
                .find(|kind| kind.letter() == letter)?;
            Some(Self {
                stage: StageId(number(&text[..at])?),
                kind,
                microbatch: MicrobatchId(number(&text[at + letter.len_utf8()..])?),
            })
        };
        parse().ok_or_else(|| NotAnAction {
            value: text.to_owned(),
        })
    }
}

/// Digits only: `parse` would take a sign too.
fn number(text: &str) -> Option<u32> {
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}
