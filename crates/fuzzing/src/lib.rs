//! What the fuzz targets do with bytes, as plain functions: the fuzzer calls them, and so do the tests, which run its
//! kept inputs on every change. Each panics when a law is broken.
//!
//! - FZ-1: nothing panics, whatever arrives.
//! - FZ-2: reading holds at most [`PER_BYTE`] bytes of memory for each byte that has arrived, [`CONSTANT`] bytes
//!   besides, and one tensor of the size that the limits allow.
//! - FZ-3: what is understood can be sent on, and is understood as the same.
//! - FZ-4: only the genuine bytes of a rank that knows the secret are accepted, and before that nobody gets more than
//!   a challenge and a verdict.
//! - FZ-5: a message over UCX is believed only if it shows the receiver's key and is of a rank of the job.
//! - FZ-6: of sealed records only what was sealed is opened, and nothing behind the first that was changed.
//! - FZ-7: a manifest that is accepted holds each element of each tensor once, and is written and read as the same.
//! - FZ-8: the header of a file of tensors that is accepted means the same to the format's own library.

mod calls;
mod connections;
mod manifests;
mod messages;
mod raw;
mod targets;

pub use connections::{received_parts, records};
pub use manifests::{header, manifest};
pub use messages::message;
pub use targets::{CONSTANT, PER_BYTE, frame, handshake, message_damaged, stream, table, value};

/// A target: its name, and what it does with an input.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 10] = [
    ("frame", frame),
    ("value", value),
    ("message", message_damaged),
    ("stream", stream),
    ("handshake", handshake),
    ("table", table),
    ("parts", received_parts),
    ("records", records),
    ("manifest", manifest),
    ("header", header),
];
