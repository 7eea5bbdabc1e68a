//! Why a model cannot be divided as asked.

use thiserror::Error;

/// Why a model cannot be divided as asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PartitionError {
    /// The text is not a request, or not a decision.
    #[error("not a {what}: {reason}")]
    Format {
        /// What was expected.
        what: &'static str,
        /// What the parser found.
        reason: String,
    },
    /// Written by a newer version of the library.
    #[error(
        "the {what} has format_version {found}; this version of the library reads up to {known}"
    )]
    NewerFormat {
        /// What has the version.
        what: &'static str,
        /// Its version.
        found: u32,
        /// The newest version known here.
        known: u32,
    },
    /// A number outside its range.
    #[error("{what} is {value}; allowed: {allowed}")]
    NotAllowed {
        /// What the number is.
        what: String,
        /// The number.
        value: String,
        /// What would be allowed.
        allowed: String,
    },
    /// The modules do not form one hierarchy.
    #[error("module {module:?} (number {number}) {problem}")]
    Hierarchy {
        /// The module's name.
        module: String,
        /// Its place in `named_modules()`.
        number: usize,
        /// What is wrong.
        problem: &'static str,
    },
    /// A parameter that no module holds.
    #[error("parameter {parameter:?} is held by no module")]
    Orphan {
        /// Its name, or its number where it has none.
        parameter: String,
    },
    /// Modules that must share a rank are placed on different ones.
    #[error(
        "module {first:?} is placed on partition {first_rank} and module {second:?} on partition {second_rank}, but they must share one: {reason}"
    )]
    Conflict {
        /// A module.
        first: String,
        /// Its place.
        first_rank: u32,
        /// Another one.
        second: String,
        /// Its place.
        second_rank: u32,
        /// Why they must share a rank.
        reason: String,
    },
}
