//! Every combination of facts, against the laws; and the paper's rules as a table.

use std::collections::BTreeSet;

use super::{
    Between, Devices, End, Facts, MemoryKind, Reason, Route, RouteDecision, TransportChoice,
    passed_over, route,
};

const IN_MESSAGE_BELOW: u64 = 1000;
const BYTES: [u64; 4] = [0, 999, 1000, 1 << 40];

fn betweens() -> Vec<Between> {
    let hosts = [Devices::Apart, Devices::Peers, Devices::Same]
        .into_iter()
        .flat_map(|devices| {
            [false, true].map(|shared_memory| Between::SameHost {
                devices,
                shared_memory,
            })
        });
    hosts.chain([Between::Network]).collect()
}

fn ends(bytes: u64) -> Vec<End> {
    let rooms = [0, bytes.saturating_sub(1), bytes, u64::MAX];
    let mut ends = Vec::new();
    for memory in [MemoryKind::Host, MemoryKind::Cuda] {
        for host_room in rooms {
            for device_room in rooms {
                ends.push(End {
                    memory,
                    host_room,
                    device_room,
                    can_lend: true,
                });
            }
        }
    }
    ends
}

/// Calls `check` with every combination, and says how many there were.
fn every(mut check: impl FnMut(Facts)) -> usize {
    let mut count = 0;
    for bytes in BYTES {
        for source in ends(bytes) {
            for destination in ends(bytes) {
                for between in betweens() {
                    for choice in TransportChoice::ALL {
                        for switches in 0..8 {
                            count += 1;
                            let can_lend = switches > 3;
                            check(Facts {
                                source: End { can_lend, ..source },
                                destination,
                                between,
                                ucx_loaded: switches & 1 != 0,
                                device_to_device_disabled: switches & 2 != 0,
                                choice,
                                bytes,
                                in_message_below: IN_MESSAGE_BELOW,
                            });
                        }
                    }
                }
            }
        }
    }
    count
}

fn same_host(facts: &Facts) -> bool {
    matches!(facts.between, Between::SameHost { .. })
}

#[test]
fn every_combination_has_a_route_that_may_be_taken() {
    let count = every(|facts| {
        let RouteDecision { route: taken, .. } = route(&facts);
        let Facts {
            source,
            destination,
            bytes,
            ..
        } = facts;
        let both_devices =
            source.memory == MemoryKind::Cuda && destination.memory == MemoryKind::Cuda;
        assert_eq!(taken == Route::InMessage, bytes < 1000, "{facts:?}");
        if taken == Route::PeerCopy {
            assert!(
                both_devices && !facts.device_to_device_disabled,
                "RO-2: {facts:?}"
            );
            assert!(source.device_room >= bytes, "RO-2: {facts:?}");
        }
        match taken {
            Route::InMessage | Route::Tcp => {}
            _ => assert_ne!(facts.choice, TransportChoice::Tcp, "{facts:?}"),
        }
        match taken {
            Route::InMessage | Route::Tcp => {}
            Route::PeerCopy => assert!(same_host(&facts) && source.can_lend, "{facts:?}"),
            Route::SharedMemory => {
                assert!(same_host(&facts) && source.can_lend, "{facts:?}");
                assert!(source.host_room >= bytes, "{facts:?}");
            }
            Route::HostStaged => {
                assert!(facts.ucx_loaded, "{facts:?}");
                assert_ne!(facts.choice, TransportChoice::SharedMemory, "{facts:?}");
            }
        }
    });
    assert_eq!(count, 4 * 32 * 32 * 7 * 4 * 8);
}

#[test]
fn the_decision_depends_on_room_only_by_whether_the_tensor_fits() {
    every(|facts| {
        let mut fits = facts;
        for end in [&mut fits.source, &mut fits.destination] {
            for room in [&mut end.host_room, &mut end.device_room] {
                *room = if *room >= facts.bytes { u64::MAX } else { 0 };
            }
        }
        assert_eq!(route(&facts), route(&fits), "RO-1: {facts:?}");
    });
}

/// Every way to make one of the facts better.
fn better(facts: Facts) -> Vec<Facts> {
    let with = |change: &dyn Fn(&mut Facts)| {
        let mut facts = facts;
        change(&mut facts);
        facts
    };
    vec![
        with(&|facts| facts.source.host_room = u64::MAX),
        with(&|facts| facts.source.device_room = u64::MAX),
        with(&|facts| facts.destination.host_room = u64::MAX),
        with(&|facts| facts.destination.device_room = u64::MAX),
        with(&|facts| facts.source.can_lend = true),
        with(&|facts| facts.ucx_loaded = true),
        with(&|facts| facts.device_to_device_disabled = false),
        with(&|facts| facts.choice = TransportChoice::Auto),
        with(&|facts| match &mut facts.between {
            Between::SameHost { shared_memory, .. } => *shared_memory = true,
            Between::Network => {}
        }),
        with(&|facts| match &mut facts.between {
            Between::SameHost { devices, .. } => *devices = Devices::Peers,
            Between::Network => {}
        }),
    ]
}

#[test]
fn a_better_fact_never_gives_a_worse_route() {
    every(|facts| {
        for better in better(facts) {
            assert!(
                route(&better).route <= route(&facts).route,
                "RO-3: {facts:?} and {better:?}"
            );
        }
    });
}

#[test]
fn the_reason_names_what_would_have_to_change() {
    every(|facts| {
        let RouteDecision {
            route: taken,
            because,
        } = route(&facts);
        let passed: Vec<_> = passed_over(&facts).collect();
        assert_eq!(because.is_fallback(), !passed.is_empty(), "{facts:?}");
        assert!(
            passed.iter().all(|(better, _)| *better < taken),
            "{facts:?}"
        );
        let roomy = Facts {
            source: end(facts.source.memory),
            destination: end(facts.destination.memory),
            ..facts
        };
        let full = matches!(
            because,
            Reason::SourceDeviceFull | Reason::SourceHostFull | Reason::SourceLoansFull
        );
        assert_eq!(full, route(&roomy).route < taken, "{facts:?}");
        match because {
            Reason::Small => assert_eq!(taken, Route::InMessage),
            Reason::Best => assert_ne!(taken, Route::Tcp, "UCX would be better"),
            Reason::Configured => assert_ne!(facts.choice, TransportChoice::Auto),
            Reason::DeviceToDeviceDisabled => assert!(facts.device_to_device_disabled),
            Reason::NoUcx => assert!(!facts.ucx_loaded),
            _ => {}
        }
    });
}

#[test]
fn the_order_of_routes_is_the_order_of_preference_and_names_differ() {
    assert!(Route::ALL.is_sorted());
    assert!(Reason::ALL.is_sorted());
    for (index, route) in Route::ALL.into_iter().enumerate() {
        assert_eq!(route as usize, index);
    }
    for (index, reason) in Reason::ALL.into_iter().enumerate() {
        assert_eq!(reason as usize, index);
    }
    let names = BTreeSet::from(Reason::ALL.map(Reason::name));
    assert_eq!(names.len(), Reason::ALL.len());
}

fn end(memory: MemoryKind) -> End {
    End {
        memory,
        host_room: u64::MAX,
        device_room: u64::MAX,
        can_lend: true,
    }
}

fn facts(source: MemoryKind, destination: MemoryKind, between: Between) -> Facts {
    Facts {
        source: end(source),
        destination: end(destination),
        between,
        ucx_loaded: true,
        device_to_device_disabled: false,
        choice: TransportChoice::Auto,
        bytes: 1 << 20,
        in_message_below: IN_MESSAGE_BELOW,
    }
}

const NEIGHBOURS: Between = Between::SameHost {
    devices: Devices::Peers,
    shared_memory: true,
};
const UNKNOWN_PEERS: Between = Between::SameHost {
    devices: Devices::Apart,
    shared_memory: true,
};
const CONTAINERS: Between = Between::SameHost {
    devices: Devices::Apart,
    shared_memory: false,
};

/// Appendix G.1: the host's route if the tensor is the host's, if devices of one
/// host are not linked, between hosts, or if a buffer is full.
#[test]
fn the_rules_of_the_paper_hold() {
    use MemoryKind::{Cuda, Host};
    let rows = [
        (Cuda, Cuda, NEIGHBOURS, Route::PeerCopy, Reason::Best),
        (Host, Cuda, NEIGHBOURS, Route::SharedMemory, Reason::Best),
        (Cuda, Host, NEIGHBOURS, Route::SharedMemory, Reason::Best),
        (Host, Host, NEIGHBOURS, Route::SharedMemory, Reason::Best),
        (
            Host,
            Host,
            CONTAINERS,
            Route::HostStaged,
            Reason::NoSharedMemory,
        ),
        (
            Host,
            Host,
            Between::Network,
            Route::HostStaged,
            Reason::Best,
        ),
        (
            Cuda,
            Cuda,
            UNKNOWN_PEERS,
            Route::SharedMemory,
            Reason::NoPeerAccess,
        ),
        (
            Cuda,
            Cuda,
            CONTAINERS,
            Route::HostStaged,
            Reason::NoPeerAccess,
        ),
        (
            Cuda,
            Cuda,
            Between::Network,
            Route::HostStaged,
            Reason::Best,
        ),
    ];
    for (source, destination, between, expected, because) in rows {
        let facts = facts(source, destination, between);
        let decision = RouteDecision {
            route: expected,
            because,
        };
        assert_eq!(route(&facts), decision, "{facts:?}");
    }
}

#[test]
fn a_full_buffer_gives_the_next_route_and_says_so() {
    use MemoryKind::{Cuda, Host};
    let full = |mut facts: Facts, host: bool, source: bool| {
        let end = if source {
            &mut facts.source
        } else {
            &mut facts.destination
        };
        let room = if host {
            &mut end.host_room
        } else {
            &mut end.device_room
        };
        *room = facts.bytes - 1;
        let RouteDecision { route, because } = route(&facts);
        (route, because)
    };
    let neighbours = facts(Cuda, Cuda, NEIGHBOURS);
    assert_eq!(
        full(neighbours, false, true),
        (Route::SharedMemory, Reason::SourceDeviceFull)
    );
    assert_eq!(
        full(neighbours, false, false),
        (Route::PeerCopy, Reason::Best)
    );
    let host = facts(Host, Host, NEIGHBOURS);
    assert_eq!(
        full(host, true, true),
        (Route::HostStaged, Reason::SourceHostFull)
    );
    assert_eq!(full(host, true, false), (Route::SharedMemory, Reason::Best));
    let mut lent_out = host;
    lent_out.source.can_lend = false;
    assert_eq!(route(&lent_out).because, Reason::SourceLoansFull);
    let far = facts(Host, Host, Between::Network);
    for source in [false, true] {
        let needs_no_room = (Route::HostStaged, Reason::Best);
        assert_eq!(full(far, true, source), needs_no_room);
    }
}

#[test]
fn a_decision_reads_as_a_sentence() {
    let mut facts = facts(MemoryKind::Cuda, MemoryKind::Cuda, NEIGHBOURS);
    facts.device_to_device_disabled = true;
    let RouteDecision { route, because } = route(&facts);
    assert_eq!(
        format!("{route}: {because}"),
        "shared_memory: SMP_DISABLE_D2D is set"
    );
}
