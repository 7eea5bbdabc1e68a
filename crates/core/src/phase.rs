//! Forward and backward.

use serde::{Deserialize, Serialize};

/// The direction of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
}

impl Phase {
    /// Its name, in reports and configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}
