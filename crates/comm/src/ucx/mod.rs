//! UCX among the transports of a job: who sends, who reads, and how messages become whole.
//!
//! - UE: who moves messages through a worker ([`engine`]).

mod assembly;
mod closing;
#[cfg(test)]
#[cfg(feature = "shuttle")]
mod concurrency;
mod engine;
mod find;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod reading;
mod sending;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests;
mod transport;
mod window;

pub(crate) use transport::UcxLayer;
