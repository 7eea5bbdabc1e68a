//! Shared memory that killed processes left behind.
//!
//! This library's own buffers have no name and end with their processes; UCX's
//! have one.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::getuid;

use crate::report::Check;

/// How the names begin of what UCX keeps in `/dev/shm`.
const PREFIXES: [&str; 2] = ["ucx_shm_posix_", "ucx_posix_"];

pub(super) fn examine() -> Check {
    let user = getuid().as_raw();
    let in_use = mapped_files();
    let mut stale: Vec<String> = named(Path::new("/dev/shm"), user)
        .into_iter()
        .filter(|path| !in_use.contains(path))
        .map(|path| format!("rm {path}"))
        .collect();
    let table = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let alive = |process: u32| Path::new(&format!("/proc/{process}")).exists();
    let system = abandoned(&table, user, alive);
    stale.extend(system.into_iter().map(|id| format!("ipcrm -m {id}")));
    judge(&stale)
}

fn judge(remedies: &[String]) -> Check {
    if remedies.is_empty() {
        return Check::ok("stale segments", "none");
    }
    let shown: Vec<&str> = remedies.iter().take(8).map(String::as_str).collect();
    let rest = match remedies.len() - shown.len() {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    Check::warn(
        "stale segments",
        format!("{} of shared memory, which no process uses", remedies.len()),
        format!("if no job is running: {}{rest}", shown.join("; ")),
    )
}

/// UCX's files of a user in a folder.
fn named(folder: &Path, user: u32) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<String> = entries
        .flatten()
        .filter(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        })
        .filter(|entry| entry.metadata().is_ok_and(|data| data.uid() == user))
        .map(|entry| entry.path().to_string_lossy().into_owned())
        .collect();
    paths.sort();
    paths
}

/// Every file that a process maps whose maps may be read: those of this user.
fn mapped_files() -> BTreeSet<String> {
    let Ok(processes) = fs::read_dir("/proc") else {
        return BTreeSet::new();
    };
    processes
        .flatten()
        .filter_map(|process| fs::read_to_string(process.path().join("maps")).ok())
        .flat_map(|maps| paths_of(&maps))
        .collect()
}

/// The paths in a process's list of mappings.
fn paths_of(maps: &str) -> Vec<String> {
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    paths.map(str::to_owned).collect()
}

/// The System V segments of a user that nobody has attached and whose maker is gone.
fn abandoned(table: &str, user: u32, alive: impl Fn(u32) -> bool) -> Vec<u32> {
    let mut lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let names = lines.next().unwrap_or_default();
    let column = |name: &str| names.iter().position(|found| *found == name);
    let (Some(id), Some(maker), Some(attached), Some(owner)) = (
        column("shmid"),
        column("cpid"),
        column("nattch"),
        column("uid"),
    ) else {
        return Vec::new();
    };
    lines
        .filter_map(|fields| {
            let number = |at: usize| fields.get(at)?.parse::<u32>().ok();
            let stale = number(attached)? == 0 && number(owner)? == user && !alive(number(maker)?);
            stale.then(|| number(id)).flatten()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{abandoned, judge, paths_of};
    use crate::report::CheckStatus;

    const TABLE: &str = "\
       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid
         0          3   600               4194304    77    77      0  1000  1000  1000
         0          4   600               4194304    77    77      2  1000  1000  1000
         0          5   600               4194304    77    77      0     0     0     0
         0          6   600               4194304    78    78      0  1000  1000  1000
";

    #[test]
    fn a_segment_is_stale_when_it_is_ours_unused_and_its_maker_is_gone() {
        assert_eq!(abandoned(TABLE, 1000, |process| process == 78), [3]);
        assert_eq!(abandoned(TABLE, 0, |_| false), [5]);
        assert!(abandoned("", 1000, |_| false).is_empty());
        assert!(abandoned("another table\n1 2", 1000, |_| false).is_empty());
    }

    #[test]
    fn mapped_files_are_found_with_blanks_in_their_names() {
        let maps = "7f00-7f01 rw-s 00000000 00:1a 5   /dev/shm/ucx_shm_posix_1 (deleted)\n7f02-7f03 rw-p 00:00 0\n";
        assert_eq!(paths_of(maps), ["/dev/shm/ucx_shm_posix_1 (deleted)"]);
    }

    #[test]
    fn stale_segments_are_a_warning_with_the_commands_that_remove_them() {
        assert_eq!(judge(&[]).status, CheckStatus::Ok);
        let remedies: Vec<String> = (0..10).map(|id| format!("ipcrm -m {id}")).collect();
        let check = judge(&remedies);
        assert_eq!((check.status, check.required), (CheckStatus::Warn, false));
        let advice = check.advice.unwrap();
        assert!(advice.contains("ipcrm -m 7, and 2 more"), "{advice}");
    }
}
