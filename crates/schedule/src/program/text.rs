//! Our own text form: a line with the version, then a line for each rank.
//!
//! ```text
//! shardwright program 1
//! rank 0: 0F0 0F1 0B0 0B1
//! rank 1: 1F0 1B0 1F1 1B1
//! ```
//!
//! Empty lines, and what follows a `#`, are for the reader.

use std::fmt;
use std::str::FromStr;

use shardwright_core::PipelineRank;

use super::Program;
use super::error::ParseProgramError;

/// What the first line begins with.
pub(super) const NAME: &str = "shardwright program ";
const VERSION: u64 = 1;

impl fmt::Display for Program {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{NAME}{VERSION}")?;
        for (rank, actions) in self.ranks.iter().enumerate() {
            write!(formatter, "rank {rank}:")?;
            for action in actions {
                write!(formatter, " {action}")?;
            }
            writeln!(formatter)?;
        }
        Ok(())
    }
}

impl FromStr for Program {
    type Err = ParseProgramError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut lines = text.lines().enumerate();
        check_header(lines.next().map_or("", |(_, line)| line))?;
        let mut ranks = Vec::new();
        for (index, line) in lines {
            let line = line
                .split_once('#')
                .map_or(line, |(before, _)| before)
                .trim();
            if line.is_empty() {
                continue;
            }
            let row = ranks.len() + 1;
            let cells = line
                .strip_prefix(&format!("rank {}:", ranks.len()))
                .ok_or_else(|| ParseProgramError::NotTheRank {
                    line: index + 1,
                    value: line
                        .split_inclusive(':')
                        .next()
                        .unwrap_or_default()
                        .to_owned(),
                    expected: PipelineRank(ranks.len() as u32),
                })?;
            let actions = cells.split_whitespace().enumerate().map(|(index, cell)| {
                cell.parse()
                    .map_err(|source| ParseProgramError::NotAnAction {
                        row,
                        cell: index + 1,
                        source,
                    })
            });
            ranks.push(actions.collect::<Result<_, _>>()?);
        }
        Ok(Self::new(ranks))
    }
}

fn check_header(line: &str) -> Result<(), ParseProgramError> {
    let version = line
        .strip_prefix(NAME)
        .and_then(|rest| rest.trim_end().parse::<u64>().ok())
        .filter(|version| *version > 0);
    match version {
        Some(version) if version <= VERSION => Ok(()),
        Some(version) => Err(ParseProgramError::NewerVersion {
            version,
            newest: VERSION,
        }),
        None => Err(ParseProgramError::NoHeader {
            value: line.to_owned(),
            expected: format!("{NAME}{VERSION}"),
        }),
    }
}
