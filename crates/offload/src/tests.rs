//! The plan's laws, and the storage under threads.

mod laws;
mod plan;
mod storage;
