//! What has been moved.

/// Numbers of tensors and bytes since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tensors that went out.
    pub stored: u64,
    /// Their bytes.
    pub stored_bytes: u64,
    /// Tensors that came back.
    pub loaded: u64,
    /// Their bytes.
    pub loaded_bytes: u64,
    /// Second computations of calls that had tensors out.
    pub computed_again: u64,
    /// Those of them that had to wait, because a tensor was not back in time.
    pub waited: u64,
    /// For how long all of them waited, in nanoseconds.
    pub waited_ns: u64,
    /// Tensors on their way, or waiting for it.
    pub on_the_way: u64,
    /// Bytes in the storage.
    pub bytes: u64,
    /// The most bytes that were in the storage at once.
    pub most_bytes: u64,
    /// Host memory that is locked for devices, in use or not.
    pub locked_bytes: u64,
    /// The size of the file.
    pub file_bytes: u64,
}
