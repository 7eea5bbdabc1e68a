//! How a worker is configured.

/// Transports within a host, of which none has a socket of the Internet protocol: memory that the system lets only
/// processes of the same user open. `sysv` is not among them, because its segments outlive a killed process, nor
/// `cma`, whose copies through the kernel are slower than those through shared memory. Those of devices are not either:
/// UCX is given host memory only.
pub const WITHIN_HOST: &str = "self,posix";

/// The same, and TCP, at which UCX believes whoever calls.
pub const WITH_TCP: &str = "self,posix,tcp";

/// A worker's options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The transports to choose from (`UCX_TLS`).
    pub transports: String,
    /// The network interfaces to use, separated by commas (`UCX_NET_DEVICES`); all when empty.
    pub interfaces: String,
    /// How many peers there will be, as a hint.
    pub num_peers: usize,
    /// The longest payload that is received, in bytes.
    pub max_payload: usize,
    /// How much returned memory is kept for the next messages, in bytes.
    pub spare_memory: usize,
    /// Whether endpoints report that their peer is gone, and can be ended by force. The workers
    /// of a job have to agree: endpoints of different kinds never connect.
    pub report_errors: bool,
    /// Further settings, by UCX's names without `UCX_`; they win over this crate's own.
    pub settings: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            transports: WITHIN_HOST.to_owned(),
            interfaces: String::new(),
            num_peers: 1,
            max_payload: 1 << 40,
            spare_memory: 256 << 20,
            report_errors: true,
            settings: Vec::new(),
        }
    }
}

/// This crate's own choices. A user's own `UCX_...` variable of the same name wins.
///
/// What was tried for shared memory and left as UCX has it: smaller rings (`POSIX_FIFO_SIZE`) stay
/// in a core's cache and copy up to a third faster when both sides have a core to themselves, but
/// a sender whose peer does not run fills them at once, and then can neither sleep nor go on; and
/// announcing messages earlier (`RNDV_THRESH`) saves a copy of up to 580 kB for two more wake-ups.
const CHOSEN: &[(&str, &str)] = &[
    // A host that does not answer delays nobody but its own messages.
    ("TCP_CONN_NB", "y"),
    // UCX would leave TCP out of a job of more ranks than 256.
    ("TCP_MAX_NUM_EPS", "inf"),
    // Over the loopback half again to twice as fast as with UCX's 8 and 64 KiB.
    ("TCP_TX_SEG_SIZE", "256k"),
    ("TCP_RX_SEG_SIZE", "256k"),
];

impl Options {
    /// Settings that must be taken.
    pub(crate) fn required(&self) -> Vec<(&str, String)> {
        let mut settings = vec![("TLS", self.transports.clone())];
        if !self.interfaces.is_empty() {
            settings.push(("NET_DEVICES", self.interfaces.clone()));
        }
        let own = self.settings.iter();
        settings.extend(own.map(|(name, value)| (name.as_str(), value.clone())));
        settings
    }

    /// Settings that not every version knows.
    pub(crate) fn wanted(&self) -> Vec<(&'static str, String)> {
        let yes = |wanted| String::from(if wanted { "y" } else { "n" });
        let mut settings = vec![
            // Attached through /proc and unlinked at once: nothing outlives a killed process.
            ("POSIX_USE_PROC_LINK", yes(true)),
            ("POSIX_ERROR_HANDLING", yes(self.report_errors)),
            // Transports that this machine lacks are no mistake.
            ("WARN_INVALID_CONFIG", yes(false)),
        ];
        settings.extend(
            CHOSEN
                .iter()
                .filter(|(name, _)| std::env::var_os(format!("UCX_{name}")).is_none())
                .map(|(name, value)| (*name, String::from(*value))),
        );
        settings
    }
}
