//! The only unsafe code of this crate: UCX's C interface, wrapped so that the rest is safe.
//!
//! Who upholds what:
//! - A worker's handle, endpoints and operations are reached through [`RawWorker`] alone, which is
//!   `Send` and not `Sync`: one thread at a time, as UCX's serialised mode asks.
//! - UCX runs callbacks only inside calls of this worker's functions, on the calling thread. They
//!   put events into the [`CallbackState`], call nobody's code, and no Rust borrow is held across a call.
//! - Memory that UCX may still use belongs to an operation in the inbox, and is freed by its
//!   callback, or after the worker is destroyed, and never before.
#![expect(unsafe_code, reason = "UCX is a C library")]
#![cfg_attr(
    feature = "shuttle",
    allow(
        dead_code,
        unreachable_pub,
        unused_imports,
        reason = "checks of concurrency have workers of their own"
    )
)]

mod callback_state;
mod callbacks;
mod context;
mod environment;
mod functions;
mod layout;
mod sending;
mod worker;

pub(crate) use callbacks::SENDER_BYTES;
pub(crate) use context::Context;
pub(crate) use functions::UcpFunctions;
pub use worker::EventHandle;
pub(crate) use worker::RawWorker;
