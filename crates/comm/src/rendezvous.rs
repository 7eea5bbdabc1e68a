//! Where the ranks of a job meet, and the secret by which they know each other.
//!
//! Rank 0 listens. On one host the others learn its port, and the secret that it makes up, at a local socket that is known by a
//! name ([`crate::local_rendezvous`]); over several hosts somebody tells them.

use std::fmt;
use std::time::Duration;

use crate::local_rendezvous::{LocalRendezvous, MOST_BYTES, ask};
use crate::secret::Secret;
use crate::start_error::StartError;
use crate::tcp::Listener;

/// The size of a secret that rank 0 makes up.
const SECRET_BYTES: usize = 32;

/// What stands before the secret at the local socket: the port and the note.
const HEAD_BYTES: usize = 4;

/// Where a rank meets the others.
pub struct Rendezvous {
    /// Rank 0's host; on rank 0 the interface it listens on.
    pub(crate) host: String,
    /// Rank 0's port.
    pub(crate) port: u16,
    pub(crate) secret: Secret,
    /// Rank 0's.
    pub(crate) listener: Option<Listener>,
    /// Rank 0's on one host; open as long as its node, to tell ranks that come late.
    pub(crate) local: Option<LocalRendezvous>,
    note: u16,
}

impl Rendezvous {
    /// Rank 0's: it listens on one interface, at a port that the system chooses and the caller tells the others.
    pub fn listen(host: String, secret: Secret) -> Result<Self, StartError> {
        let listener = Listener::bind(&host, 0)?;
        Ok(Self {
            port: listener.port(),
            listener: Some(listener),
            ..Self::at(host, 0, secret)
        })
    }

    /// Another rank's, which was told where rank 0 listens.
    pub fn at(host: String, port: u16, secret: Secret) -> Self {
        Self {
            host,
            port,
            secret,
            listener: None,
            local: None,
            note: 0,
        }
    }

    /// Rank 0's among ranks of one host, which know the job by `name`. Where no secret is given, it makes one up and
    /// tells the others, and it tells them `note` (a port, say).
    pub fn open(
        name: &str,
        host: String,
        given: Option<Secret>,
        note: u16,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Self, StartError> {
        let mut made = Vec::new();
        if given.is_none() {
            made.resize(SECRET_BYTES, 0);
            getrandom::fill(&mut made).map_err(|error| StartError::System {
                what: "cannot make a secret",
                reason: error.to_string(),
            })?;
        }
        // No secret where one was given: a rank that was given none then fails the proof at once.
        let secret = given.unwrap_or_else(|| Secret::told(made.clone()));
        let mut place = Self::listen(host, secret)?;
        let content = [&place.port.to_le_bytes()[..], &note.to_le_bytes(), &made].concat();
        place.local = Some(LocalRendezvous::open(name, &content, go_on)?);
        Ok(place)
    }

    /// Another rank's among ranks of one host; waits for rank 0's.
    pub fn find(
        name: &str,
        host: String,
        given: Option<Secret>,
        limit: Duration,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Self, StartError> {
        let content = ask(name, limit, go_on)?;
        let Some((head, secret)) = content.split_first_chunk::<HEAD_BYTES>() else {
            return Err(StartError::System {
                what: "cannot meet the ranks of this host",
                reason: format!("rank 0 told {} bytes; {HEAD_BYTES} are due", content.len()),
            });
        };
        let [p0, p1, n0, n1] = *head;
        let secret = given.unwrap_or_else(|| Secret::told(secret.to_vec()));
        Ok(Self {
            note: u16::from_le_bytes([n0, n1]),
            ..Self::at(host, u16::from_le_bytes([p0, p1]), secret)
        })
    }

    /// Rank 0's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What rank 0 told beside it; 0 where it told nothing.
    pub fn note(&self) -> u16 {
        self.note
    }
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Rendezvous({}:{})", self.host, self.port)
    }
}

const _: () = assert!(HEAD_BYTES + SECRET_BYTES <= MOST_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_host_learn_port_note_and_a_secret_unless_one_is_given() {
        let name = |what| format!("{what} of process {}", std::process::id());
        let host = || "127.0.0.1".to_owned();
        let limit = Duration::from_secs(30);
        let proof = |place: &Rendezvous| place.secret.prove(b"label", &[]);
        let given = || Secret::new(b"a secret that is given".to_vec()).ok();
        for (what, first, second, agree) in [
            ("no secret", None, None, true),
            ("a secret", given(), given(), true),
            ("a secret for one", given(), None, false),
        ] {
            let name = name(what);
            let opened = Rendezvous::open(&name, host(), first, 77, &mut || true).unwrap();
            let found = Rendezvous::find(&name, host(), second, limit, &mut || true).unwrap();
            assert_eq!((found.port(), found.note()), (opened.port(), 77));
            assert_eq!(proof(&opened) == proof(&found), agree, "{what}");
        }
        let first = Rendezvous::open(&name("one"), host(), None, 0, &mut || true).unwrap();
        let other = Rendezvous::open(&name("another"), host(), None, 0, &mut || true).unwrap();
        assert_ne!(proof(&first), proof(&other));
    }
}
