//! Shardwright schedule.
