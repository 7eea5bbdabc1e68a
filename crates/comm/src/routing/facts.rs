//! What a route depends on.

/// Whose memory a tensor is in, or is wanted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MemoryKind {
    /// The host's.
    Host,
    /// A CUDA device's.
    Cuda,
}

/// One end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Where the tensor is, or is wanted.
    pub memory: MemoryKind,
    /// The most bytes that one tensor can have now in this end's persistent host buffer.
    pub host_room: u64,
    /// The same of its persistent device buffer.
    pub device_room: u64,
    /// Whether this end can lend one more block to ranks of its host: their number is bounded.
    pub can_lend: bool,
}

/// How two devices of one host stand to each other. Of no meaning unless both ends are devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Devices {
    /// One device, which both processes use.
    Same,
    /// Each can access the other's memory.
    Peers,
    /// Neither can.
    Apart,
}

/// What lies between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Between {
    /// They are processes of one host.
    SameHost {
        /// Their devices.
        devices: Devices,
        /// Whether the destination has mapped the source's persistent host buffer.
        shared_memory: bool,
    },
    /// A network.
    Network,
}

/// What the configuration's `transport` allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// The best that there is.
    #[default]
    Auto,
    /// TCP alone, for tensors of devices too.
    Tcp,
    /// The same, and no job without UCX.
    Ucx,
    /// Nothing of UCX.
    SharedMemory,
}

impl TransportChoice {
    /// All choices.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Tcp, Self::Ucx, Self::SharedMemory];

    /// Its word in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
            Self::SharedMemory => "shared_memory",
        }
    }
}

/// All that a route depends on; the same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// The sender.
    pub source: End,
    /// The receiver.
    pub destination: End,
    /// What lies between them.
    pub between: Between,
    /// Whether UCX is loaded in both.
    pub ucx_loaded: bool,
    /// Whether `SMP_DISABLE_D2D` is set in either.
    pub device_to_device_disabled: bool,
    /// What the configuration allows.
    pub choice: TransportChoice,
    /// The tensor's bytes.
    pub bytes: u64,
    /// A tensor with fewer bytes than this travels inside its message.
    pub in_message_below: u64,
}
