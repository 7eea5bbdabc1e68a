//! What this process is to the library: its forks, its threads, and the C libraries that it finds at run time.

mod means;
mod owner;
pub mod raw;
pub mod sync;

pub use means::{Means, Plan, means};
pub use owner::{Forked, Owner};
