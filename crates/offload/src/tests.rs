//! The plan's laws, and the storage under threads.

mod laws;
mod mapped;
mod plan;
mod storage;
