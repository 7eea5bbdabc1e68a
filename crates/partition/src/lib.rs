//! Shardwright partition.
