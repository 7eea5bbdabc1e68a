//! Processes of this host.

use std::path::Path;

/// Whether a process of this host has ended.
pub(super) fn has_ended(pid: u32) -> bool {
    let status = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    // A zombie has given back what it had.
    status.map_or(true, |status| {
        status
            .rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with('Z'))
    })
}
