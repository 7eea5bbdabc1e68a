//! What CUDA's driver says when a call fails.

/// A failed call of the driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {name} ({code})")]
pub struct CudaError {
    /// The function.
    pub call: &'static str,
    /// Its result.
    pub code: i32,
    /// The result's name.
    pub name: String,
}
