//! The compute-only CSV of `torch.distributed.pipelining`: a row for each rank, a cell for each
//! time slot, which is empty where the rank idles.
//!
//! A cell `(0F1;1B0)OVERLAP_F_B` is a pair that a runtime may run together; here its actions
//! follow one another, which is the order that torch's own runtime takes without a custom function.
//! Cells that communicate, shard or reduce (`0SEND_F1`, `0UNSHARD`, ...) belong to torch's lowered
//! form and are refused.

use super::Program;
use super::action::{Action, NotAnAction};
use super::error::ParseProgramError;

const OVERLAP: &str = "OVERLAP_F_B";
/// What torch adds to the computations of a schedule when it lowers it.
const LOWERED: [&str; 7] = [
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
];

impl Program {
    /// Reads the CSV. Idle slots go: an order needs none.
    pub fn from_csv(text: &str) -> Result<Self, ParseProgramError> {
        text.lines()
            .enumerate()
            .map(|(index, line)| read_row(index + 1, line))
            .collect::<Result<_, _>>()
            .map(Self::new)
    }

    /// The CSV, without idle slots.
    pub fn to_csv(&self) -> String {
        let rows = self.ranks().iter().map(|actions| {
            let cells: Vec<String> = actions.iter().map(Action::to_string).collect();
            cells.join(",") + "\n"
        });
        rows.collect()
    }
}

fn read_row(row: usize, line: &str) -> Result<Vec<Action>, ParseProgramError> {
    let mut actions = Vec::new();
    for (index, value) in line.split(',').enumerate() {
        // A spreadsheet may have quoted it.
        let value = value.trim().trim_matches('"').trim();
        let pair = value
            .strip_suffix(OVERLAP)
            .and_then(|pair| pair.strip_prefix('(')?.strip_suffix(')'));
        let parts: Vec<&str> = match pair {
            Some(pair) => pair.split(';').collect(),
            None if value.is_empty() => Vec::new(),
            None => vec![value],
        };
        for part in parts {
            let action = part
                .trim()
                .parse()
                .map_err(|source| refusal(row, index + 1, source))?;
            actions.push(action);
        }
    }
    Ok(actions)
}

fn refusal(row: usize, cell: usize, source: NotAnAction) -> ParseProgramError {
    let word = source
        .value
        .trim_matches(|character: char| character.is_ascii_digit());
    if LOWERED.contains(&word) {
        ParseProgramError::NotComputation {
            row,
            cell,
            value: source.value,
        }
    } else {
        ParseProgramError::NotAnAction { row, cell, source }
    }
}
