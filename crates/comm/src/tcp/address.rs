//! Listening.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};

use crate::start_error::StartError;

/// A bound port on one interface.
#[derive(Debug)]
pub struct Listener {
    pub(super) socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds a port; port 0 lets the system choose.
    pub fn bind(host: &str, port: u16) -> Result<Self, StartError> {
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
        let socket = TcpListener::bind(candidates.as_slice()).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Self { socket, address })
    }

    pub(super) fn bind_ip(ip: IpAddr) -> Result<Self, StartError> {
        Self::bind(&ip.to_string(), 0)
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The interface and the port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
