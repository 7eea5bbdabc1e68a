//! How much memory this process has, and how much it may have.

mod raw;

use std::fs::read_to_string;

use rustix::process::{Resource, getrlimit};

pub use raw::{heap_bytes, map_large_allocations};

/// Bytes of this process, as the kernel counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// In memory now.
    pub resident: u64,
    /// The most that ever were.
    pub peak: u64,
    /// Of those in memory now, shared with other processes.
    pub shared: u64,
}

/// What the kernel counts; `None` where it does not tell.
pub fn process_memory() -> Option<ProcessMemory> {
    parse_status(&read_to_string("/proc/self/status").ok()?)
}

fn parse_status(status: &str) -> Option<ProcessMemory> {
    let kibibytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let number: u64 = line
            .trim_start_matches(':')
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse()
            .ok()?;
        Some(number * 1024)
    };
    Some(ProcessMemory {
        resident: kibibytes("VmRSS")?,
        peak: kibibytes("VmHWM")?,
        shared: kibibytes("RssShmem").unwrap_or(0),
    })
}

/// The least of the limits on this process's memory: of its control group, its address space and its data.
pub fn memory_limit() -> Option<u64> {
    let of_group = [
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ]
    .into_iter()
    .filter_map(|path| read_to_string(path).ok()?.trim().parse::<u64>().ok())
    // Version 1 says "none" by a number that no machine has.
    .filter(|&bytes| bytes < 1 << 60);
    let of_process = [Resource::As, Resource::Data]
        .into_iter()
        .filter_map(|resource| getrlimit(resource).current);
    of_group.chain(of_process).min()
}

#[cfg(test)]
mod tests {
    use super::{ProcessMemory, heap_bytes, map_large_allocations, parse_status, process_memory};

    #[test]
    fn the_kernel_s_lines_are_read() {
        let status =
            "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\nRssShmem:\t       4 kB\n";
        let expected = ProcessMemory {
            resident: 1 << 20,
            peak: 2 << 20,
            shared: 4096,
        };
        assert_eq!(parse_status(status), Some(expected));
        assert_eq!(parse_status("Name: python"), None);
    }

    #[test]
    fn what_is_allocated_is_counted_and_what_is_large_given_back() {
        let (Some(before), Some(memory)) = (heap_bytes(), process_memory()) else {
            return; // another C library, or another system
        };
        assert!(memory.resident <= memory.peak);
        let held = vec![1_u8; 64 << 20];
        let after = heap_bytes().expect("as before");
        assert!(
            after >= before + (60 << 20),
            "{before} {after} {}",
            held.len()
        );
        drop(held);
        if !map_large_allocations(1 << 20) {
            return;
        }
        let resident = || process_memory().expect("as before").resident;
        let held: Vec<_> = (0..8).map(|_| vec![1_u8; 16 << 20]).collect();
        let small = vec![1_u8; 100 << 10]; // above the others, if they are in the heap
        let full = resident();
        drop(held);
        assert!(resident() + (100 << 20) < full, "{} of {full}", resident());
        drop(small);
    }
}
