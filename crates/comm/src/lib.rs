//! Shardwright comm.
