//! Where the ranks of one host meet: a socket with a name of its own, at which rank 0 hands out a few bytes, such as its
//! port and the job's secret.
//!
//! The name lies in no file system, so that nothing of it outlives its process, and the kernel says whose process is at
//! the other end.
//!
//! - ME-1: only a process of this user is given the bytes, and they are taken from a process of this user only.
//! - ME-2: nobody at the local socket is waited for: the bytes fit into what the kernel keeps for a connection.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use sha2::{Digest, Sha256};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use crate::deadline::SLICE;
use crate::start_error::StartError;
use shardwright_system::Owner;

/// What is handed out at most: less than the kernel keeps for a connection that nobody reads from (ME-2).
pub(crate) const MOST_BYTES: usize = 4096;

/// Callers that may wait while the local socket's thread takes one in; a job on one host has fewer ranks.
const BACKLOG: i32 = 1024;

/// How long a name may be another process's: one that is about to end, of the job before.
const TAKEN_DEADLINE: Duration = Duration::from_secs(2);

/// How long to wait before looking again.
const PAUSE: Duration = Duration::from_millis(10);

/// Rank 0's local socket. Closed when dropped.
pub(crate) struct LocalRendezvous {
    listener: Mutex<Option<Arc<UnixListener>>>,
    closed: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
    owner: Owner,
}

impl LocalRendezvous {
    /// Opens the local socket of a job, which is known by `name`, and hands `content` to whoever may have it.
    pub(crate) fn open(
        name: &str,
        content: &[u8],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Self, StartError> {
        assert!(content.len() <= MOST_BYTES, "a few bytes (ME-2)");
        let began = Instant::now();
        let listener = loop {
            match listen(name) {
                Ok(listener) => break Arc::new(listener),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    if began.elapsed() > TAKEN_DEADLINE {
                        return Err(taken(name));
                    }
                }
                Err(error) => return Err(system(&error)),
            }
            if !go_on() {
                return Err(StartError::Cancelled);
            }
            std::thread::sleep(PAUSE);
        };
        let closed = Arc::new(AtomicBool::new(false));
        let content = content.to_vec();
        let (local, is_closed) = (Arc::clone(&listener), Arc::clone(&closed));
        let thread = std::thread::Builder::new()
            .name("sw-meeting".to_owned())
            .spawn(move || hand_out(&local, &is_closed, &content))
            .map_err(|error| system(&error))?;
        Ok(Self {
            listener: Mutex::new(Some(listener)),
            closed,
            thread: Mutex::new(Some(thread)),
            owner: Owner::this_process(),
        })
    }

    /// Closes the local socket. A second call does nothing.
    pub(crate) fn close(&self) {
        if !self.owner.is_here() || self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let listener = self.listener.lock();
        let listener = listener.unwrap_or_else(PoisonError::into_inner).take();
        // On Linux this wakes the thread in accept(); the name is free when its last descriptor is gone.
        if let Some(Err(error)) =
            listener.map(|listener| SockRef::from(&*listener).shutdown(Shutdown::Both))
        {
            tracing::debug!(%error, "the local socket was not open");
        }
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread at the local socket panicked");
        }
    }
}

impl Drop for LocalRendezvous {
    fn drop(&mut self) {
        self.close();
    }
}

/// What rank 0 of a job hands out; asks again and again until it is there.
pub(crate) fn ask(
    name: &str,
    limit: Duration,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Vec<u8>, StartError> {
    let began = Instant::now();
    let deadline = began + limit;
    loop {
        match ask_once(name, deadline, go_on) {
            Ok(content) if !content.is_empty() => return Ok(content),
            Ok(_) => {}
            Err(Unmet::Start(error)) => return Err(error),
            Err(Unmet::Io(error)) => tracing::trace!(%error, "rank 0 is not there yet"),
        }
        if !go_on() {
            return Err(StartError::Cancelled);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(StartError::NoLeader {
                waited: began.elapsed(),
            });
        }
        std::thread::sleep(PAUSE.min(left));
    }
}

enum Unmet {
    Io(io::Error),
    Start(StartError),
}

impl From<io::Error> for Unmet {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn ask_once(
    name: &str,
    deadline: Instant,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Vec<u8>, Unmet> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Else this would wait where many callers do.
    socket.set_nonblocking(true)?;
    socket.connect(&address(name)?)?;
    socket.set_nonblocking(false)?;
    let mut stream = UnixStream::from(OwnedFd::from(socket));
    let (user, own) = (user_of(&stream)?, geteuid().as_raw());
    if user != own {
        return Err(Unmet::Start(StartError::ForeignMeeting { user, own }));
    }
    stream.set_read_timeout(Some(SLICE))?;
    let mut content = Vec::new();
    let mut piece = [0; MOST_BYTES];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return Ok(content),
            Ok(count) => content.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if content.len() > MOST_BYTES || Instant::now() > deadline || !go_on() {
            return Err(Unmet::Io(io::ErrorKind::TimedOut.into()));
        }
    }
}

/// The thread at the local socket.
fn hand_out(listener: &UnixListener, closed: &AtomicBool, content: &[u8]) {
    loop {
        let accepted = listener.accept();
        if closed.load(Ordering::SeqCst) {
            return;
        }
        let outcome = accepted.and_then(|(stream, _)| {
            let user = user_of(&stream)?;
            if user != geteuid().as_raw() {
                tracing::debug!(
                    user,
                    "another user's process at the local socket of this job"
                );
                return Ok(());
            }
            stream.set_nonblocking(true)?;
            (&stream).write_all(content)
        });
        if let Err(error) = outcome {
            tracing::debug!(%error, "a caller at the local socket of this job was not served");
            std::thread::sleep(PAUSE);
        }
    }
}

fn listen(name: &str) -> io::Result<UnixListener> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&address(name)?)?;
    socket.listen(BACKLOG)?;
    Ok(UnixListener::from(OwnedFd::from(socket)))
}

/// An address that is the same for all who know the job's name, which may be of any length.
fn address(name: &str) -> io::Result<SockAddr> {
    let mut path = "\0shardwright/".to_owned();
    for byte in Sha256::digest(name.as_bytes()) {
        write!(path, "{byte:02x}").map_err(io::Error::other)?;
    }
    SockAddr::unix(Path::new(&path))
}

fn user_of(stream: &UnixStream) -> io::Result<u32> {
    Ok(socket_peercred(stream)?.uid.as_raw())
}

/// The name is another process's, for longer than one needs to end.
fn taken(name: &str) -> StartError {
    let holder = || -> io::Result<(i32, u32)> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&address(name)?)?;
        let holder = socket_peercred(&socket)?;
        Ok((holder.pid.as_raw_nonzero().get(), holder.uid.as_raw()))
    };
    match holder() {
        Ok((process, user)) => StartError::MeetingTaken { process, user },
        Err(error) => system(&error),
    }
}

fn system(error: &io::Error) -> StartError {
    StartError::System {
        what: "cannot meet the ranks of this host",
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WATCHDOG: Duration = Duration::from_mins(5);

    fn unique(what: &str) -> String {
        format!("{what} of the tests of process {}", std::process::id())
    }

    fn open(name: &str, content: &[u8]) -> Result<LocalRendezvous, StartError> {
        LocalRendezvous::open(name, content, &mut || true)
    }

    #[test]
    fn who_comes_early_late_or_twice_gets_the_bytes() {
        let name = unique("a job");
        let early = {
            let name = name.clone();
            let thread = std::thread::Builder::new().name("early".to_owned());
            thread
                .spawn(move || ask(&name, WATCHDOG, &mut || true))
                .unwrap()
        };
        let content = vec![7; MOST_BYTES];
        let meeting = open(&name, &content).unwrap();
        assert_eq!(early.join().unwrap().unwrap(), content);
        for _ in 0..2 {
            assert_eq!(ask(&name, WATCHDOG, &mut || true).unwrap(), content);
        }
        meeting.close();
        meeting.close();
        let gone = ask(&name, Duration::from_millis(50), &mut || true).unwrap_err();
        assert!(
            gone.to_string().contains("rank 0, which did not start"),
            "{gone}"
        );
        drop(open(&name, b"again").unwrap());
    }

    #[test]
    fn callers_that_read_nothing_keep_nobody_out() {
        let name = unique("idle callers");
        let meeting = open(&name, b"the secret").unwrap();
        let idle: Vec<Socket> = (0..300)
            .map(|_| {
                let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
                socket.connect(&address(&name).unwrap()).unwrap();
                socket
            })
            .collect();
        assert_eq!(ask(&name, WATCHDOG, &mut || true).unwrap(), b"the secret");
        drop((idle, meeting));
    }

    #[test]
    fn a_name_that_is_taken_is_refused_with_its_holder() {
        let name = unique("a name");
        let _first = open(&name, b"first").unwrap();
        let Err(error) = open(&name, b"second") else {
            panic!("two local sockets of one name");
        };
        let holder = format!("process {}", std::process::id());
        assert!(error.to_string().contains(&holder), "{error}");
    }

    #[test]
    fn waiting_for_rank_0_can_be_cancelled() {
        let mut asked = 0;
        let outcome = ask(&unique("nobody"), WATCHDOG, &mut || {
            asked += 1;
            asked < 3
        });
        assert!(matches!(outcome, Err(StartError::Cancelled)));
    }
}
