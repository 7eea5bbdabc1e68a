//! Laws of threads that meet, under thousands of orders each (`make check-concurrency`).

mod objects;
mod routing;

use shardwright_wire::{Body, ObjectMessage, Value};

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
