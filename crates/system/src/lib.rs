//! What this process is to the library: its forks, its threads, and the C libraries that it finds at run time.

mod lifeline;
mod means;
mod memory;
mod owner;
pub mod raw;
pub mod sync;

pub use lifeline::end_with;
pub use means::{Means, Plan, means};
pub use memory::{ProcessMemory, heap_bytes, map_large_allocations, memory_limit, process_memory};
pub use owner::{Forked, Owner};
