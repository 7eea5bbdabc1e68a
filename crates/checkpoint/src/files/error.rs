//! Why a store did not do what was asked.

use std::error::Error;
use std::io;
use std::time::Duration;

use shardwright_core::one_line_to;

use super::store::{MOST_LISTED, MOST_LISTED_BYTES};

/// Why an object store did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The address cannot be used.
    #[error("addresses of object stores are s3://BUCKET/PREFIX: {0}")]
    Address(&'static str),
    /// What the store answered, or why it could not be asked.
    #[error("{}", told(.0))]
    Answer(object_store::Error),
    /// It took too long.
    #[error("there was no answer within {} seconds", .0.as_secs())]
    Deadline(Duration),
    /// The object has fewer bytes than are read.
    #[error("the object ended after {0} of the bytes that were asked for")]
    Short(usize),
    /// The object has more bytes than are read.
    #[error("it has more than the {0} bytes that are allowed")]
    Large(u64),
    /// The folder has more in it than is looked at, or the list does not end.
    #[error(
        "its list has more than {MOST_LISTED} entries, or {MOST_LISTED_BYTES} bytes of names: give checkpoints a prefix of \
         their own"
    )]
    LongList,
    /// The list does not end.
    #[error("its list has the same page again and again")]
    SamePage,
    /// The thread that speaks to the store cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The thread that speaks to the store is not in this process, or is stuck.
    #[error("the thread that speaks to the store does not answer; forked processes do not have it")]
    NoThread,
    /// Other readers need it in a folder.
    #[error("this is written to a folder on a disk only")]
    OnlyOnDisk,
    /// No random numbers, without which names are not unique.
    #[error("there are no random numbers: {0}")]
    Random(getrandom::Error),
}

impl StoreError {
    /// Whether there is no such object. A bucket that is not there is an error instead.
    pub(super) fn is_absent(&self) -> bool {
        match self {
            Self::Answer(error @ object_store::Error::NotFound { .. }) => {
                !error.to_string().contains("NoSuchBucket")
            }
            _ => false,
        }
    }
}

/// The most characters of what is told of a store's answer.
const MOST_CHARACTERS: usize = 1000;

/// An error with all its causes, of which the client tells only the first ones: not that a connection was refused. On one
/// line and not too long, whatever the store has answered.
fn told(error: &object_store::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let further = error.to_string();
        if !text.contains(&further) {
            text = format!("{text}: {further}");
        }
        cause = error.source();
    }
    one_line_to(&text, MOST_CHARACTERS)
}
