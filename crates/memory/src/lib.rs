//! What fills the memory of a rank: predicted, measured, and which settings would need less of it.
//! Pure: no clock, no I/O, no threads; what is measured comes from outside.

mod account;
mod advice;
mod meter;

#[cfg(test)]
mod tests;

pub use account::{Categories, Expected};
pub use advice::{Advice, Situation, advise};
pub use meter::Meter;
