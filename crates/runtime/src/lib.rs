//! Shardwright runtime.
