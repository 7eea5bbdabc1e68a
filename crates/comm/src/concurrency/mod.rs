//! Laws of threads that meet, under thousands of orders each (`make check-concurrency`).

mod buffers;
mod objects;
mod routing;

use std::sync::Arc;

use shardwright_wire::{Body, ObjectMessage, Value};

use crate::sync::thread;

/// Runs functions on threads of their own until all have ended.
pub(crate) fn on_threads(each: impl IntoIterator<Item = Box<dyn FnOnce() + Send>>) {
    let threads: Vec<_> = each.into_iter().map(thread::spawn).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// A function of a thread that shares something.
pub(crate) fn with<T: Send + Sync + 'static>(
    shared: &Arc<T>,
    run: impl FnOnce(&T) + Send + 'static,
) -> Box<dyn FnOnce() + Send> {
    let shared = Arc::clone(shared);
    Box::new(move || run(&shared))
}

pub(crate) fn body(number: i64) -> Body {
    Body {
        value: Value::Int(number),
        tensors: Vec::new(),
    }
}

pub(crate) fn object(channel: &str, number: i64) -> ObjectMessage {
    ObjectMessage {
        channel: channel.to_owned(),
        body: body(number),
    }
}
