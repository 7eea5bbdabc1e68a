//! What is known about UCX.

/// What the UCX layer found when it looked for the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UcxReport {
    /// No library was found.
    NotFound {
        /// Where it was looked for.
        looked_at: Vec<String>,
    },
    /// A library was found that cannot be used.
    Unusable {
        /// Its path.
        path: String,
        /// Why not.
        problem: String,
    },
    /// A library is in use.
    Loaded {
        /// Its path.
        path: String,
        /// Its version.
        version: String,
        /// Whether this version is one that is tested.
        tested: bool,
        /// Its transports that work here.
        transports: Vec<String>,
    },
}
