//! Memory that processes of one user share without a name in a file system.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create, statvfs};

use super::TIMEOUT;
use crate::report::Check;

/// Far below what UCX and data loaders ask for.
const LITTLE_ROOM: u64 = 256 << 20;

const CONTENT: &[u8] = b"shardwright doctor";

pub(super) fn examine() -> Vec<Check> {
    let mut checks = vec![match shared() {
        Ok(()) => Check::ok(
            "shared memory",
            "processes of this user reach each other's memory files",
        ),
        Err(problem) => Check::warn(
            "shared memory",
            problem,
            "allow memfd_create and /proc/<pid>/fd between the ranks of a host (one user, one PID namespace); until \
             then tensors travel over TCP within the host too",
        ),
    }];
    if let Ok(room) = statvfs("/dev/shm") {
        checks.push(judge_room(room.f_bavail.saturating_mul(room.f_frsize)));
    } else {
        checks.push(Check::warn(
            "/dev/shm",
            "not there",
            "mount a tmpfs at /dev/shm: UCX and torch's data loaders use it",
        ));
    }
    checks
}

fn judge_room(bytes: u64) -> Check {
    let found = format!("{} MiB free", bytes >> 20);
    if bytes < LITTLE_ROOM {
        Check::warn(
            "/dev/shm",
            found,
            "make it larger (in a container: --shm-size): UCX and torch's data loaders use it",
        )
    } else {
        Check::ok("/dev/shm", found)
    }
}

/// Whether another process can open a memory file of this one.
fn shared() -> Result<(), String> {
    let name = CString::new("shardwright-doctor").map_err(|error| error.to_string())?;
    let file = memfd_create(&name, MemfdFlags::CLOEXEC)
        .map_err(|error| format!("no memory file can be made (memfd_create: {error})"))?;
    let mut file = File::from(file);
    file.write_all(CONTENT)
        .map_err(|error| format!("a memory file cannot be written: {error}"))?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let read = read_elsewhere(&path)?;
    if read == CONTENT {
        Ok(())
    } else {
        Err(format!("another process finds something else in {path}"))
    }
}

/// What another process reads from a file.
fn read_elsewhere(path: &str) -> Result<Vec<u8>, String> {
    let mut child = Command::new("cat")
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("not known, since `cat` cannot be started: {error}"))?;
    let deadline = Instant::now() + TIMEOUT;
    let wait = loop {
        match child.try_wait() {
            Ok(Some(_)) => break Ok(()),
            Ok(None) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(None) => break Err(format!("another process hangs when it opens {path}")),
            Err(error) => break Err(error.to_string()),
        }
    };
    if wait.is_err() {
        child.kill().map_err(|error| error.to_string())?;
    }
    // The content is far below what a pipe holds: nobody waits for it to be read.
    let output = child
        .wait_with_output()
        .map_err(|error| error.to_string())?;
    wait?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(format!("another process cannot open {path}: {complaint}"))
    }
}

#[cfg(test)]
mod tests {
    use super::{judge_room, read_elsewhere};
    use crate::report::CheckStatus;

    #[test]
    fn another_process_reads_what_is_there_and_says_what_is_not() {
        assert!(!read_elsewhere("/proc/self/status").unwrap().is_empty());
        let problem = read_elsewhere("/proc/self/no-such-file").unwrap_err();
        assert!(
            problem.contains("cannot open /proc/self/no-such-file: "),
            "{problem}"
        );
    }

    #[test]
    fn little_room_is_a_warning() {
        assert_eq!(judge_room(64 << 20).status, CheckStatus::Warn);
        assert_eq!(judge_room(1 << 30).status, CheckStatus::Ok);
    }
}
