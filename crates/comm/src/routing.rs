//! By which route a tensor travels: a pure function of what both ends know.
//!
//! The routes, from the best to the worst. A tensor takes the first that
//! nothing forbids:
//!
//! 1. [`Route::InMessage`]: a small tensor costs less inside its message than
//!    anything that must first be agreed on, wherever its memory is.
//! 2. [`Route::PeerCopy`]: one copy between devices of one host (or within
//!    one), out of the source's device buffer, which the destination has opened.
//!    The driver's own memory handles do it; UCX is not needed.
//! 3. [`Route::SharedMemory`]: the source writes into its own persistent host
//!    buffer, which the destination has mapped: one copy, and nothing to ask
//!    for. Tensors of devices are staged there too, with one copy less than UCX
//!    between host memories would need.
//! 4. [`Route::HostStaged`]: UCX from host memory to host memory, by the transport that it chooses.
//! 5. [`Route::Tcp`]: the link that every pair of ranks has, and needs nothing.
//!
//! - RO-1: both ends decide the same, since the facts name source and
//!   destination, not here and there, and nothing else is looked at.
//! - RO-2: no device route when those are disabled, when either end's memory is
//!   the host's, or without room in the device buffers that it needs.
//! - RO-3: a better fact (more room, one capability more) never gives a worse route.

mod facts;

use std::fmt;

pub use facts::TransportChoice;
pub(crate) use facts::{Between, Devices, End, Facts, MemoryKind};

/// A way for a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// In the message itself.
    InMessage,
    /// From device to device within a host.
    PeerCopy,
    /// Through host memory that both processes have mapped.
    SharedMemory,
    /// From host memory to host memory, by UCX.
    HostStaged,
    /// Over TCP.
    Tcp,
}

impl Route {
    /// All routes, the best first.
    pub const ALL: [Self; 5] = [
        Self::InMessage,
        Self::PeerCopy,
        Self::SharedMemory,
        Self::HostStaged,
        Self::Tcp,
    ];

    /// Its name in counters and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InMessage => "in_message",
            Self::PeerCopy => "peer_copy",
            Self::SharedMemory => "shared_memory",
            Self::HostStaged => "host_staged",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Why a route was taken, or a better one was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The tensor is small.
    Small,
    /// Nothing better exists between two such places.
    Best,
    /// The configuration's `transport` excludes it.
    Configured,
    /// `SMP_DISABLE_D2D`.
    DeviceToDeviceDisabled,
    /// Two devices of one host that cannot access each other.
    NoPeerAccess,
    /// No room in the source's device buffer.
    SourceDeviceFull,
    /// No room in the source's host buffer.
    SourceHostFull,
    /// The source has lent as many blocks as it can.
    SourceLoansFull,
    /// One host, but no memory that both processes have mapped.
    NoSharedMemory,
    /// UCX is missing in one of the two.
    NoUcx,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::Small,
        Self::Best,
        Self::Configured,
        Self::DeviceToDeviceDisabled,
        Self::NoPeerAccess,
        Self::SourceDeviceFull,
        Self::SourceHostFull,
        Self::SourceLoansFull,
        Self::NoSharedMemory,
        Self::NoUcx,
    ];

    /// Its name in counters and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Best => "best",
            Self::Configured => "configured",
            Self::DeviceToDeviceDisabled => "device_to_device_disabled",
            Self::NoPeerAccess => "no_peer_access",
            Self::SourceDeviceFull => "source_device_full",
            Self::SourceHostFull => "source_host_full",
            Self::SourceLoansFull => "source_loans_full",
            Self::NoSharedMemory => "no_shared_memory",
            Self::NoUcx => "no_ucx",
        }
    }

    /// Whether something better was passed over.
    pub const fn is_fallback(self) -> bool {
        !matches!(self, Self::Small | Self::Best)
    }

    /// Whether the next tensor may find it otherwise.
    const fn passes(self) -> bool {
        matches!(
            self,
            Self::SourceDeviceFull | Self::SourceHostFull | Self::SourceLoansFull
        )
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Small => "the tensor is small enough for its message",
            Self::Best => "nothing better exists between two such places",
            Self::Configured => "the configuration's transport excludes what is better",
            Self::DeviceToDeviceDisabled => "SMP_DISABLE_D2D is set",
            Self::NoPeerAccess => "the two devices cannot access each other's memory",
            Self::SourceDeviceFull => "no free space in the source's device buffer",
            Self::SourceHostFull => "no free space in the source's host buffer",
            Self::SourceLoansFull => "the source has lent as many blocks as it can",
            Self::NoSharedMemory => "the two processes share no memory",
            Self::NoUcx => "UCX is not loaded in both processes",
        })
    }
}

/// What [`route`] decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RouteDecision {
    /// The route.
    pub route: Route,
    /// Why: of the better routes between two such places, the first that only
    /// lacked room (that changes from tensor to tensor), else the first.
    pub because: Reason,
}

/// The best route that nothing forbids.
pub(crate) fn route(facts: &Facts) -> RouteDecision {
    let route = routes(facts)
        .find(|route| obstacle(facts, *route).is_none())
        .unwrap_or(Route::Tcp);
    let mut reasons = passed_over(facts).map(|(_, reason)| reason);
    let because = match (route, reasons.next()) {
        (Route::InMessage, _) => Reason::Small,
        (_, None) => Reason::Best,
        (_, Some(first)) if first.passes() => first,
        (_, Some(first)) => reasons.find(|reason| reason.passes()).unwrap_or(first),
    };
    RouteDecision { route, because }
}

/// Each route better than the one taken, and why it was not taken; for traces.
pub(crate) fn passed_over(facts: &Facts) -> impl Iterator<Item = (Route, Reason)> {
    routes(facts)
        .map_while(|route| Some((route, obstacle(facts, route)?)))
        .fuse()
}

fn routes(facts: &Facts) -> impl Iterator<Item = Route> {
    Route::ALL.into_iter().filter(|route| exists(facts, *route))
}

/// Whether a route makes sense between two such places for such a tensor,
/// whatever is installed, disabled or full.
fn exists(facts: &Facts, route: Route) -> bool {
    let both_devices =
        facts.source.memory == MemoryKind::Cuda && facts.destination.memory == MemoryKind::Cuda;
    let same_host = matches!(facts.between, Between::SameHost { .. });
    match route {
        // A tensor of no bytes has nothing that could travel otherwise.
        Route::InMessage => facts.bytes == 0 || facts.bytes < facts.in_message_below,
        Route::PeerCopy => both_devices && same_host,
        Route::SharedMemory => same_host,
        Route::HostStaged | Route::Tcp => true,
    }
}

/// What forbids a route that exists; what lasts comes before what passes.
fn obstacle(facts: &Facts, route: Route) -> Option<Reason> {
    let room = |room: u64, reason: Reason| (room < facts.bytes).then_some(reason);
    let loan = || (!facts.source.can_lend).then_some(Reason::SourceLoansFull);
    match route {
        Route::InMessage | Route::Tcp => None,
        _ if facts.choice == TransportChoice::Tcp => Some(Reason::Configured),
        Route::PeerCopy if facts.device_to_device_disabled => Some(Reason::DeviceToDeviceDisabled),
        Route::PeerCopy => no_peer_access(facts.between)
            .or_else(|| room(facts.source.device_room, Reason::SourceDeviceFull))
            .or_else(loan),
        Route::SharedMemory => no_shared_memory(facts)
            .or_else(|| room(facts.source.host_room, Reason::SourceHostFull))
            .or_else(loan),
        Route::HostStaged => no_ucx(facts),
    }
}

fn no_peer_access(between: Between) -> Option<Reason> {
    match between {
        Between::SameHost {
            devices: Devices::Same | Devices::Peers,
            ..
        } => None,
        _ => Some(Reason::NoPeerAccess),
    }
}

fn no_shared_memory(facts: &Facts) -> Option<Reason> {
    match facts.between {
        Between::SameHost {
            shared_memory: true,
            ..
        } => None,
        _ => Some(Reason::NoSharedMemory),
    }
}

fn no_ucx(facts: &Facts) -> Option<Reason> {
    if facts.choice == TransportChoice::SharedMemory {
        Some(Reason::Configured)
    } else {
        (!facts.ucx_loaded).then_some(Reason::NoUcx)
    }
}

#[cfg(test)]
mod tests;
