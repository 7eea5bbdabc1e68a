//! Whole steps, on simulated ranks and on ranks that are threads.

mod failures;
mod laws;
mod rig;
mod script;
mod simulation;
mod steps;
