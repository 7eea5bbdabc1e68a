//! How ranks find each other: all register at rank 0, get the table of
//! addresses, connect to each other (the higher rank calls), and start together.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver as Outlet, RecvTimeoutError, bounded};
use shardwright_core::Rank;
use shardwright_wire::Value;

use super::GRACE;
use super::acceptor::Acceptor;
use super::acceptor_state::Arrival;
use super::address::Listener;
use super::connection::Connection;
use super::dial::{Cancel, reach, reach_peer};
use super::handshake::Purpose;
use super::registry::Registry;
use super::stream::{receive_value, send_value};
use super::table::{Registration, Row};
use super::transport::{Connected, Tcp};
use crate::deadline::SLICE;
use crate::exchange::{Exchange, Reach};
use crate::job::{Brought, JobOptions};
use crate::start_error::StartError;
use crate::transport::{PeerInfo, Receiver};

/// Joins the job, and returns when all ranks have; asks `go_on` many times a second.
pub(crate) fn connect(
    options: JobOptions,
    brought: Brought,
    receiver: Arc<dyn Receiver>,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Arc<Tcp>, StartError> {
    let cancel = Arc::new(Cancel::default());
    let (done, outcome) = bounded(1);
    let thread_cancel = Arc::clone(&cancel);
    let thread = std::thread::Builder::new()
        .name("sw-start".to_owned())
        .spawn(move || {
            let connected = start(options, &brought, &thread_cancel);
            if done.send(connected).is_err() {
                tracing::debug!("the start was cancelled");
            }
        });
    let thread = thread.map_err(|error| system("cannot start a thread", &error))?;
    let connected = loop {
        match outcome.recv_timeout(SLICE) {
            Ok(connected) => break connected,
            Err(RecvTimeoutError::Timeout) if go_on() => {}
            Err(RecvTimeoutError::Timeout) => {
                cancel.set();
                break Err(StartError::Cancelled);
            }
            Err(RecvTimeoutError::Disconnected) => {
                break Err(system("the starting thread panicked", "see its message"));
            }
        }
    };
    if !matches!(connected, Err(StartError::Cancelled)) && thread.join().is_err() {
        tracing::error!("the starting thread panicked");
    }
    let job = Tcp::run(connected?, receiver)
        .map_err(|error| system("cannot start a connection's threads", &error))?;
    Ok(Arc::new(job))
}

fn system(what: &'static str, reason: &(impl ToString + ?Sized)) -> StartError {
    StartError::System {
        what,
        reason: reason.to_string(),
    }
}

pub(super) fn start(
    options: JobOptions,
    brought: &Brought,
    cancel: &Cancel,
) -> Result<Connected, StartError> {
    if options.rank.0 >= options.world {
        return Err(StartError::NoSuchRank {
            rank: options.rank,
            world: options.world,
        });
    }
    if options.rank == Rank(0) {
        lead(options, brought, cancel)
    } else {
        follow(&options, brought, cancel)
    }
}

fn registration(options: &JobOptions, brought: &Brought, address: SocketAddr) -> Registration {
    let peer = PeerInfo {
        rank: options.rank,
        host: options.host_name.clone(),
        pid: std::process::id(),
    };
    Registration {
        version: options.version.clone(),
        fingerprint: options.fingerprint.clone(),
        lacks: options.lacks.clone().unwrap_or_default(),
        row: Row {
            peer,
            address,
            offer: brought.memory.pool.as_ref().map(|pool| pool.offer()),
            addresses: brought.addresses.clone(),
        },
    }
}

fn connected(
    options: &JobOptions,
    brought: &Brought,
    acceptor: Acceptor,
    table: Vec<Row>,
    streams: BTreeMap<Rank, Connection>,
) -> Result<Connected, StartError> {
    for connection in streams.values() {
        connection
            .socket()
            .set_nodelay(true)
            .map_err(|error| system("cannot set a connection's options", &error))?;
    }
    acceptor.job_started();
    let neighbours = table.iter().filter(|row| {
        row.peer.rank != options.rank
            && row.peer.host == options.host_name
            && brought.memory.pool.is_some()
    });
    let offers = neighbours
        .filter_map(|row| Some((row.peer.rank, row.offer.clone()?)))
        .collect();
    let same_host = table
        .iter()
        .filter(|row| row.peer.host == options.host_name);
    let reach = Reach {
        neighbours: same_host.map(|row| row.peer.rank).collect(),
        choice: options.comm.transport,
        device: brought.memory.device.clone(),
    };
    let pool = brought.memory.pool.clone();
    let exchange = Exchange::new(pool, options.rank, &offers, reach);
    Ok(Connected {
        rank: options.rank,
        addresses: table
            .iter()
            .map(|row| (row.peer.rank, row.addresses.clone()))
            .collect(),
        peers: table.into_iter().map(|row| row.peer).collect(),
        connections: streams,
        acceptor,
        limits: options.limits,
        exchange,
        liveness: options.liveness_timeout,
        encrypted: options.comm.encrypt,
    })
}

/// Rank 0's part.
fn lead(
    mut options: JobOptions,
    brought: &Brought,
    cancel: &Cancel,
) -> Result<Connected, StartError> {
    let listener = match options.place.listener.take() {
        Some(listener) => listener,
        None => Listener::bind(&options.place.host, options.place.port)?,
    };
    let own = registration(&options, brought, listener.address());
    let (acceptor, arrivals) = Acceptor::start(
        listener,
        options.rank,
        options.world,
        options.place.secret.clone(),
        options.comm.encrypt,
    )
    .map_err(|error| system("cannot start a thread", &error))?;
    let began = Instant::now();
    let deadline = began + options.connect_timeout;
    let mut failed_since = None;
    let mut registry = Registry::new(options.world, own.clone());
    while !registry.is_settled() {
        cancel.check()?;
        let now = Instant::now();
        failed_since = registry.has_failed().then(|| failed_since.unwrap_or(now));
        let deadline = failed_since.map_or(deadline, |since| deadline.min(since + GRACE));
        let left = deadline.saturating_duration_since(now);
        if left.is_zero() {
            break;
        }
        if let Ok(arrival) = arrivals.recv_timeout(left.min(SLICE)) {
            registry.enter(arrival);
        }
    }
    let (mut streams, error) = registry.close(began.elapsed());
    let Err(error) = error
        .map_or(Ok(()), Err)
        .and_then(|()| launch(&options, &own, &mut streams))
    else {
        let (table, streams) = streams.into_table(own.row);
        return connected(&options, brought, acceptor, table, streams);
    };
    streams.tell_all(&error);
    Err(error)
}

/// Gives the table out, and lets everybody start once all are connected.
fn launch(
    options: &JobOptions,
    own: &Registration,
    present: &mut super::registry::Present,
) -> Result<(), StartError> {
    let rows = std::iter::once(own.row.to_value())
        .chain(present.rows().map(Row::to_value))
        .collect();
    present.send_all("table", &Value::List(rows))?;
    for (rank, stream) in present.streams() {
        let lost = |reason: String| StartError::Lost { rank, reason };
        match receive_value(stream, options.connect_timeout) {
            Ok((name, _)) if name == "ready" => {}
            Ok((_, Value::Str(message))) => return Err(StartError::Refused { message }),
            Ok((name, _)) => return Err(lost(format!("it sent {name:?} where \"ready\" was due"))),
            Err(error) => return Err(lost(error.to_string())),
        }
    }
    present.send_all("go", &Value::None)
}

/// The part of all others.
fn follow(
    options: &JobOptions,
    brought: &Brought,
    cancel: &Cancel,
) -> Result<Connected, StartError> {
    let leader = reach(options, cancel)?;
    cancel.watch(leader.socket());
    let local = leader
        .socket()
        .local_addr()
        .map_err(|error| system("rank 0's connection has no address", &error))?;
    let listener = Listener::bind_ip(options.bind_address.unwrap_or(local.ip()))?;
    let own = registration(options, brought, listener.address());
    let (acceptor, arrivals) = Acceptor::start(
        listener,
        options.rank,
        options.world,
        options.place.secret.clone(),
        options.comm.encrypt,
    )
    .map_err(|error| system("cannot start a thread", &error))?;
    let timeout = options.connect_timeout + 2 * GRACE;
    tell(&leader, "register", own.to_value())?;
    let table = receive(&leader, "table", timeout)?;
    let table = Row::table_from_value(&table, options.world)
        .ok_or_else(|| lost_leader("its table of ranks cannot be read"))?;
    let mut streams = match mesh(options, &table, &arrivals, cancel) {
        Ok(streams) => streams,
        Err(error) => {
            tell(&leader, "refused", Value::Str(error.to_string()))?;
            return Err(error);
        }
    };
    tell(&leader, "ready", Value::None)?;
    receive(&leader, "go", timeout)?;
    cancel.check()?;
    streams.insert(Rank(0), leader);
    connected(options, brought, acceptor, table, streams)
}

fn lost_leader(reason: &(impl ToString + ?Sized)) -> StartError {
    StartError::Lost {
        rank: Rank(0),
        reason: reason.to_string(),
    }
}

fn tell(leader: &Connection, name: &str, value: Value) -> Result<(), StartError> {
    send_value(leader, GRACE, name, value).map_err(|error| lost_leader(&error))
}

fn receive(leader: &Connection, expected: &str, limit: Duration) -> Result<Value, StartError> {
    match receive_value(leader, limit) {
        Ok((name, value)) if name == expected => Ok(value),
        Ok((_, Value::Str(message))) => Err(StartError::Refused { message }),
        Ok((name, _)) => Err(lost_leader(&format!(
            "it sent {name:?} where {expected:?} was due"
        ))),
        Err(error) => Err(lost_leader(&error)),
    }
}

/// Connects to the ranks below this one, and waits for those above.
fn mesh(
    options: &JobOptions,
    table: &[Row],
    arrivals: &Outlet<Arrival>,
    cancel: &Cancel,
) -> Result<BTreeMap<Rank, Connection>, StartError> {
    let deadline = Instant::now() + options.connect_timeout;
    let own = options.rank;
    let mut streams = BTreeMap::new();
    for Row { peer, address, .. } in table
        .iter()
        .filter(|row| (1..own.0).contains(&row.peer.rank.0))
    {
        let stream = reach_peer(options, *address, peer.rank, cancel)?;
        streams.insert(peer.rank, stream);
    }
    let expected = options.world as usize - 2;
    while streams.len() < expected {
        cancel.check()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let ranks = (own.0 + 1..options.world)
                .map(Rank)
                .filter(|rank| !streams.contains_key(rank))
                .collect();
            return Err(StartError::Missing {
                ranks,
                waited: options.connect_timeout,
                doubts: String::new(),
            });
        }
        match arrivals.recv_timeout(left.min(SLICE)) {
            Ok(Arrival::Caller {
                caller, connection, ..
            }) if caller.purpose == Purpose::Mesh
                && (own.0 + 1..options.world).contains(&caller.rank.0) =>
            {
                streams.insert(caller.rank, connection);
            }
            Ok(_) | Err(_) => {}
        }
    }
    Ok(streams)
}
