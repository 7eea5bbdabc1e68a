//! Whole steps, on simulated ranks and on ranks that are threads.

mod failures;
mod rig;
mod steps;
