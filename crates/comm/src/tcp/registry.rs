//! Rank 0's list of who has come, and of what is wrong with whom.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::Value;

use super::GRACE;
use super::acceptor_state::Arrival;
use super::connection::Connection;
use super::handshake::{Caller, HandshakeError, Purpose};
use super::stream::send_value;
use super::table::{Registration, Row};
use crate::start_error::{Agreement, StartError};

/// The list while ranks are still coming.
pub(super) struct Registry {
    world: u32,
    own: Registration,
    present: BTreeMap<Rank, (Connection, Row)>,
    /// Processes that cannot take part, and still have to hear why.
    turned_away: Vec<Connection>,
    /// What was wrong with those who said to be a rank and did not prove it.
    doubts: BTreeMap<Rank, HandshakeError>,
    fault: Option<StartError>,
}

impl Registry {
    pub(super) fn new(world: u32, own: Registration) -> Self {
        let fault = lacking(Rank(0), &own);
        Self {
            world,
            own,
            present: BTreeMap::new(),
            turned_away: Vec::new(),
            doubts: BTreeMap::new(),
            fault,
        }
    }

    /// Whether every rank has come.
    pub(super) fn is_settled(&self) -> bool {
        self.present.len() + 1 == self.world as usize
    }

    /// Whether the job cannot start any more.
    pub(super) fn has_failed(&self) -> bool {
        self.fault.is_some()
    }

    pub(super) fn enter(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Doubtful { rank, error } => {
                if (1..self.world).contains(&rank.0) && !self.present.contains_key(&rank) {
                    self.doubts.insert(rank, error);
                }
            }
            Arrival::Caller {
                caller:
                    Caller {
                        rank,
                        world,
                        purpose: Purpose::Register,
                    },
                connection,
                registration,
            } => {
                self.register(rank, world, connection, registration.as_ref());
            }
            Arrival::Differing { rank, encrypts } => {
                let of = |encrypts: bool| format!("encrypt={encrypts}");
                self.note(StartError::Mismatch {
                    what: Agreement::Configuration,
                    other: rank,
                    ours: of(!encrypts),
                    theirs: of(encrypts),
                });
            }
            Arrival::Caller { caller, .. } => {
                tracing::debug!(rank = %caller.rank, "a connection to rank 0 that joins nothing");
            }
        }
    }

    fn register(
        &mut self,
        rank: Rank,
        world: u32,
        stream: Connection,
        registration: Option<&Value>,
    ) {
        let Some(registration) = registration.and_then(Registration::from_value) else {
            let reason = "its registration cannot be read".to_owned();
            return self.turn_away(stream, StartError::Lost { rank, reason });
        };
        if let Some(error) = self.disagreement(rank, world, &registration) {
            self.note(error);
        }
        if let Some(error) = lacking(rank, &registration) {
            self.note(error);
        }
        if !(1..self.world).contains(&rank.0) {
            return self.turn_away(
                stream,
                StartError::NoSuchRank {
                    rank,
                    world: self.world,
                },
            );
        }
        if let Some((first, row)) = self.present.get(&rank)
            && !has_ended(first)
        {
            let name = |row: &Row| format!("process {} on host {}", row.peer.pid, row.peer.host);
            let error = StartError::Duplicate {
                rank,
                first: name(row),
                second: name(&registration.row),
            };
            return self.turn_away(stream, error);
        }
        self.doubts.remove(&rank);
        self.present.insert(rank, (stream, registration.row));
    }

    fn disagreement(&self, other: Rank, world: u32, theirs: &Registration) -> Option<StartError> {
        let pairs = [
            (
                Agreement::Version,
                self.own.version.clone(),
                theirs.version.clone(),
            ),
            (Agreement::World, self.world.to_string(), world.to_string()),
            (
                Agreement::Configuration,
                self.own.fingerprint.clone(),
                theirs.fingerprint.clone(),
            ),
        ];
        let (what, ours, theirs) = pairs.into_iter().find(|(_, ours, theirs)| ours != theirs)?;
        Some(StartError::Mismatch {
            what,
            other,
            ours,
            theirs,
        })
    }

    fn turn_away(&mut self, stream: Connection, error: StartError) {
        self.turned_away.push(stream);
        self.note(error);
    }

    /// The first fault is the one to report.
    fn note(&mut self, error: StartError) {
        self.fault.get_or_insert(error);
    }

    /// Ends the registry: who came, and what keeps the job from starting.
    pub(super) fn close(self, waited: Duration) -> (Present, Option<StartError>) {
        let missing: Vec<Rank> = (1..self.world)
            .map(Rank)
            .filter(|rank| !self.present.contains_key(rank))
            .collect();
        let error = self.fault.or_else(|| {
            // Whoever failed to prove itself may have been anybody: that explains, and condemns no rank.
            let mut doubts = String::new();
            for error in missing.iter().filter_map(|rank| self.doubts.get(rank)) {
                write!(doubts, "; a connection was dropped: {error}")
                    .expect("writing to a string cannot fail");
            }
            (!missing.is_empty()).then_some(StartError::Missing {
                doubts,
                ranks: missing,
                waited,
            })
        });
        (
            Present {
                ranks: self.present,
                turned_away: self.turned_away,
            },
            error,
        )
    }
}

/// Why a job does not start with a rank that has not what it needs.
fn lacking(rank: Rank, registration: &Registration) -> Option<StartError> {
    let lacks = registration.lacks.clone();
    (!lacks.is_empty()).then(|| StartError::Lacking {
        rank,
        host: registration.row.peer.host.clone(),
        lacks,
    })
}

/// Whether the other side has gone away meanwhile.
fn has_ended(stream: &Connection) -> bool {
    let stream = stream.socket();
    let probe = || {
        stream.set_nonblocking(true)?;
        let seen = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        seen
    };
    match probe() {
        Ok(count) => count == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

/// The ranks that have come.
pub(super) struct Present {
    ranks: BTreeMap<Rank, (Connection, Row)>,
    turned_away: Vec<Connection>,
}

impl Present {
    pub(super) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.ranks.values().map(|(_, row)| row)
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = (Rank, &Connection)> {
        self.ranks.iter().map(|(rank, (stream, _))| (*rank, stream))
    }

    pub(super) fn send_all(&self, name: &str, value: &Value) -> Result<(), StartError> {
        for (rank, stream) in self.streams() {
            send_value(stream, GRACE, name, value.clone()).map_err(|error| StartError::Lost {
                rank,
                reason: error.to_string(),
            })?;
        }
        Ok(())
    }

    /// Tells everybody why the job does not start.
    pub(super) fn tell_all(&self, error: &StartError) {
        let streams = self
            .ranks
            .values()
            .map(|(stream, _)| stream)
            .chain(&self.turned_away);
        for stream in streams {
            if let Err(lost) = send_value(stream, GRACE, "refused", Value::Str(error.to_string())) {
                tracing::debug!(%lost, "a rank was gone before it heard why the job does not start");
            }
        }
    }

    pub(super) fn into_table(self, own: Row) -> (Vec<Row>, BTreeMap<Rank, Connection>) {
        let mut table = vec![own];
        let mut streams = BTreeMap::new();
        for (rank, (stream, row)) in self.ranks {
            table.push(row);
            streams.insert(rank, stream);
        }
        (table, streams)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::PeerInfo;

    /// What rank 0 says of itself.
    fn first(lacks: &str) -> Registration {
        Registration {
            version: "0.1.0".to_owned(),
            fingerprint: String::new(),
            lacks: lacks.to_owned(),
            row: Row {
                peer: PeerInfo {
                    rank: Rank(0),
                    host: "host".to_owned(),
                    pid: 1,
                },
                address: "127.0.0.1:1".parse().unwrap(),
                offer: None,
                addresses: BTreeMap::new(),
            },
        }
    }

    #[test]
    fn what_unknown_peers_say_explains_and_condemns_nobody() {
        let mut registry = Registry::new(3, first(""));
        for rank in [1, 2, 3, u32::MAX].map(Rank) {
            let error = HandshakeError::WrongSecret { rank };
            registry.enter(Arrival::Doubtful { rank, error });
            assert!(!registry.has_failed());
        }
        let (_, error) = registry.close(Duration::from_mins(1));
        let text = error.unwrap().to_string();
        assert_eq!(
            text,
            "ranks 1, 2 did not join the job within 60 s; a connection was dropped: it presented a wrong secret as rank 1; a connection was dropped: it presented a wrong secret as rank 2"
        );
    }

    #[test]
    fn a_rank_that_lacks_something_keeps_all_from_starting() {
        let registry = Registry::new(2, first("may open 30 file descriptors, and needs 60"));
        assert!(registry.has_failed());
        let (_, error) = registry.close(Duration::from_secs(1));
        assert_eq!(
            error.unwrap().to_string(),
            "rank 0 on host \"host\" may open 30 file descriptors, and needs 60"
        );
    }
}
