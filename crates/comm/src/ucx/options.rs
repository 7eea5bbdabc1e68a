//! How a worker is configured.

/// Transports that are chosen from by default, where they are there. `sysv` is not among them,
/// because its segments outlive a killed process, nor `cma`, whose copies through the kernel are
/// slower than those through shared memory.
pub const DEFAULT_TRANSPORTS: &str = "self,posix,tcp,rc,dc,ud,cuda";

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
            transports: DEFAULT_TRANSPORTS.to_owned(),
            interfaces: String::new(),
            num_peers: 1,
            max_payload: 1 << 40,
            spare_memory: 256 << 20,
            report_errors: true,
            settings: Vec::new(),
        }
    }
}

/// Settings that made transfers faster where they were measured. A user's own `UCX_...` variable
/// of the same name wins.
///
/// With `posix` every payload is copied twice: into segments of the receiver's ring, and out.
const TUNED: &[(&str, &str)] = &[
    // Longer eager messages are put together by UCX before they are copied again to where they
    // belong; announced ones are copied from the ring to their place. UCX would begin at 580 kB.
    ("RNDV_THRESH", "intra:64k,inter:auto"),
    // A ring of 64 segments of 8 KiB stays in a core's second-level cache together with what is
    // copied; the default of 256 does not.
    ("POSIX_FIFO_SIZE", "64"),
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
            TUNED
                .iter()
                .filter(|(name, _)| std::env::var_os(format!("UCX_{name}")).is_none())
                .map(|(name, value)| (*name, String::from(*value))),
        );
        settings
    }
}
