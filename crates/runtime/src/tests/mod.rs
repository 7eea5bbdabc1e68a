//! Whole steps, on simulated ranks and on ranks that are threads.

mod again;
mod alone;
#[cfg(feature = "shuttle")]
mod concurrency;
mod failures;
mod held;
mod laws;
mod line;
mod looped;
#[cfg(feature = "shuttle")]
mod network;
mod order;
mod peer_order;
mod predictions;
mod reading;
mod records;
mod rig;
mod rules;
mod script;
mod sending;
mod simulated_vote;
mod simulated_worker;
mod simulation;
mod stays;
mod steps;
mod usage;
mod waits;
