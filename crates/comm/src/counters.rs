//! What travelled by which route, and why not by a better one.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::routing::{Reason, Route, RouteDecision};

/// What one route has carried. A message's tensors are counted one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Tensors sent.
    pub tensors_sent: u64,
    /// Tensors received.
    pub tensors_received: u64,
    /// Their bytes, of those sent.
    pub bytes_sent: u64,
    /// Their bytes, of those received.
    pub bytes_received: u64,
}

/// What every route has carried, in the order of [`Route::ALL`].
pub(crate) type ByRoute = [Carried; Route::ALL.len()];

/// How often each reason gave a route, in the order of [`Reason::ALL`].
pub(crate) type ByReason = [u64; Reason::ALL.len()];

/// Counters that all threads of a transport share.
#[derive(Debug, Default)]
pub(crate) struct TransportCounters {
    routes: [RouteCounters; Route::ALL.len()],
    reasons: [AtomicU64; Reason::ALL.len()],
}

#[derive(Debug, Default)]
struct RouteCounters {
    tensors_sent: AtomicU64,
    tensors_received: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
}

impl TransportCounters {
    /// A tensor left by a route.
    pub(crate) fn sent(&self, route: Route, bytes: u64) {
        let counters = &self.routes[route as usize];
        counters.tensors_sent.fetch_add(1, Ordering::Relaxed);
        counters.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A tensor came by a route.
    pub(crate) fn received(&self, route: Route, bytes: u64) {
        let counters = &self.routes[route as usize];
        counters.tensors_received.fetch_add(1, Ordering::Relaxed);
        counters.bytes_received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The sender has decided a tensor's route.
    pub(crate) fn decided(&self, decision: RouteDecision) {
        self.reasons[decision.because as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// What the routes have carried.
    pub(crate) fn by_route(&self) -> ByRoute {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.routes.each_ref().map(|counters| Carried {
            tensors_sent: load(&counters.tensors_sent),
            tensors_received: load(&counters.tensors_received),
            bytes_sent: load(&counters.bytes_sent),
            bytes_received: load(&counters.bytes_received),
        })
    }

    /// How often each reason gave a route.
    pub(crate) fn by_reason(&self) -> ByReason {
        self.reasons
            .each_ref()
            .map(|counter| counter.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::{Carried, TransportCounters};
    use crate::routing::{Reason, Route, RouteDecision};

    #[test]
    fn each_route_and_each_reason_is_counted_by_itself() {
        let counters = TransportCounters::default();
        counters.sent(Route::Tcp, 10);
        counters.sent(Route::Tcp, 5);
        counters.received(Route::SharedMemory, 7);
        counters.decided(RouteDecision {
            route: Route::Tcp,
            because: Reason::NoUcx,
        });
        let by_route = counters.by_route();
        let tcp = Carried {
            tensors_sent: 2,
            bytes_sent: 15,
            ..Carried::default()
        };
        let shared = Carried {
            tensors_received: 1,
            bytes_received: 7,
            ..Carried::default()
        };
        assert_eq!(by_route[Route::Tcp as usize], tcp);
        assert_eq!(by_route[Route::SharedMemory as usize], shared);
        assert_eq!(by_route[Route::InMessage as usize], Carried::default());
        let by_reason = counters.by_reason();
        assert_eq!(by_reason[Reason::NoUcx as usize], 1);
        assert_eq!(by_reason.iter().sum::<u64>(), 1);
    }
}
