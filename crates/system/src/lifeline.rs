//! Ends this process with the one that it serves: ranks do not outlive the notebook or the launcher that started them,
//! though that one was killed and could end nobody.
//!
//! The kernel's own parent-death signal is sent when the *thread* ends that forked, and kills one process only. A descriptor
//! of the process knows neither fault, and cannot be kept open by a copy in another process, as a pipe can.

use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, getpgid, getpid, kill_current_process_group, kill_process, pidfd_open,
    test_kill_process,
};

/// How often it is looked whether the process is there, where the system has no descriptors of processes.
const PAUSE: Duration = Duration::from_millis(500);

/// Ends this process by a signal as soon as another one has ended, with all of its process group if it leads that: what a
/// rank has started goes too. A thread waits for that, which takes no time of a processor.
///
/// # Errors
///
/// There is no such process, or no thread.
pub fn end_with(process: u32) -> io::Result<()> {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw);
    let process = process.ok_or(Errno::SRCH)?;
    let descriptor = match pidfd_open(process, PidfdFlags::empty()) {
        Ok(descriptor) => Some(descriptor),
        Err(Errno::SRCH) => return Err(Errno::SRCH.into()),
        Err(_) => {
            // There or not: whether it may be sent a signal does not matter.
            if test_kill_process(process) == Err(Errno::SRCH) {
                return Err(Errno::SRCH.into());
            }
            None
        }
    };
    thread::Builder::new()
        .name("sw-lifeline".to_owned())
        .spawn(move || {
            wait_for_end(process, descriptor.as_ref());
            end();
        })?;
    Ok(())
}

fn wait_for_end(process: Pid, descriptor: Option<&OwnedFd>) {
    if let Some(descriptor) = descriptor {
        let mut watched = [PollFd::new(descriptor, PollFlags::IN)];
        loop {
            match poll(&mut watched, None) {
                Ok(_) => return,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
    }
    while test_kill_process(process) != Err(Errno::SRCH) {
        thread::sleep(PAUSE);
    }
}

fn end() {
    let own = getpid();
    // No one may be left to hear that a signal was not sent.
    if getpgid(None) == Ok(own) {
        kill_current_process_group(Signal::KILL).ok();
    }
    kill_process(own, Signal::KILL).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        for none in [0, u32::MAX, i32::MAX as u32] {
            let error = end_with(none).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::SRCH.raw_os_error()));
        }
    }
}
