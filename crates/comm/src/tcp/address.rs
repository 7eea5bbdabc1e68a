//! Listening.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};

use socket2::{Domain, Socket, Type};

use crate::start_error::StartError;

/// Connections that may wait to be accepted: those of unknown peers before rank 0 begins to do so are no obstacle.
const BACKLOG: i32 = 1024;

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    // As std does it: connections of the job before, which linger in the system, are in nobody's way.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(TcpListener::from(socket))
}

/// Listens on the first address that can be had.
fn listen_on_first(candidates: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
    for candidate in candidates {
        outcome = listen(*candidate);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// A bound port on one interface.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(super) socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds a port; port 0 lets the system choose.
    pub(crate) fn bind(host: &str, port: u16) -> Result<Self, StartError> {
        let address = format!("{host}:{port}");
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => StartError::PortInUse {
                address: address.clone(),
            },
            _ => StartError::Bind {
                address: address.clone(),
                source,
            },
        };
        let candidates: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(failed)?.collect();
        let socket = listen_on_first(&candidates).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Self { socket, address })
    }

    pub(super) fn bind_ip(ip: IpAddr) -> Result<Self, StartError> {
        Self::bind(&ip.to_string(), 0)
    }

    /// The port.
    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// The interface and the port.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}
