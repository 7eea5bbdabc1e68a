//! Jobs whose ranks are processes of one host.

use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::Limits;

use super::rendezvous::JobOptions;
use crate::routing::Choice;
use crate::secret::Secret;

impl JobOptions {
    /// Those of a rank on this host that has no memory to share.
    pub fn on_this_host(rank: Rank, world: u32, port: u16, secret: Secret) -> Self {
        Self {
            rank,
            world,
            host: "127.0.0.1".to_owned(),
            port,
            listener: None,
            bind_address: None,
            host_name: "localhost".to_owned(),
            secret,
            encrypt: false,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint: String::new(),
            connect_timeout: Duration::from_mins(1),
            liveness_timeout: Duration::from_secs(15),
            limits: Limits::default(),
            pool: None,
            device: None,
            ucx_address: Vec::new(),
            transport: Choice::Auto,
            lacks: None,
        }
    }
}
