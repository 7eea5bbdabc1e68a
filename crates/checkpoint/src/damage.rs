//! What is wrong with a file of a checkpoint.

use std::fmt;

/// How a file is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Damage {
    /// It is not there.
    Missing {
        /// The file.
        file: String,
    },
    /// It is not of this checkpoint.
    Extra {
        /// The file.
        file: String,
    },
    /// It is a link, a folder, a pipe or a device.
    NotRegular {
        /// The file.
        file: String,
    },
    /// It has another size.
    Size {
        /// The file.
        file: String,
        /// Its size.
        found: u64,
        /// The size that it was written with.
        expected: u64,
    },
    /// Bytes have changed.
    Chunk {
        /// The file.
        file: String,
        /// The range of bytes among which they are.
        begin: u64,
        /// Behind the last one.
        end: u64,
        /// The file of the same checkpoint whose bytes these are.
        belongs_to: Option<String>,
    },
    /// Its header says something else than the manifest.
    Header {
        /// The file.
        file: String,
        /// What.
        problem: String,
    },
}

impl Damage {
    /// The name of the file.
    pub fn file(&self) -> &str {
        match self {
            Self::Missing { file }
            | Self::Extra { file }
            | Self::NotRegular { file }
            | Self::Size { file, .. }
            | Self::Chunk { file, .. }
            | Self::Header { file, .. } => file,
        }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { file } => write!(f, "{file} is missing"),
            Self::Extra { file } => write!(f, "{file} does not belong to it"),
            Self::NotRegular { file } => write!(f, "{file} is no regular file"),
            Self::Size {
                file,
                found,
                expected,
            } => write!(
                f,
                "{file} has {found} bytes and was written with {expected}"
            ),
            Self::Chunk {
                file,
                begin,
                end,
                belongs_to,
            } => {
                write!(f, "bytes {begin} to {end} of {file} have changed")?;
                match belongs_to {
                    Some(other) => write!(f, ": they are those of {other}"),
                    None => Ok(()),
                }
            }
            Self::Header { file, problem } => write!(f, "the header of {file}: {problem}"),
        }
    }
}
