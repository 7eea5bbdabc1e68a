//! Whole steps, on simulated ranks and on ranks that are threads.

mod alone;
mod failures;
mod laws;
mod reading;
mod records;
mod rig;
mod rules;
mod script;
mod simulated_worker;
mod simulation;
mod steps;
mod waits;
