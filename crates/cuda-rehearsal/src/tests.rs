use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::machine::Machine;
use crate::memory::Memory;
use crate::{
    ALREADY_REGISTERED, INVALID_HANDLE, INVALID_VALUE, LAUNCH_FAILED, NOT_READY, NOT_REGISTERED,
    OUT_OF_MEMORY,
};

const WATCHDOG: Duration = Duration::from_mins(1);

fn reached(machine: &Machine, event: u64) {
    let begin = Instant::now();
    while machine.query(event) == Err(NOT_READY) {
        assert!(begin.elapsed() < WATCHDOG, "the event is never reached");
        std::thread::yield_now();
    }
    assert_eq!(machine.query(event), Ok(()));
}

#[test]
fn a_stream_runs_late_and_in_order() {
    let machine = Arc::new(Machine::new(Duration::from_millis(100), None));
    let stream = machine.create_stream();
    let (done, copies) = channel();
    let running = Arc::clone(&machine);
    let thread = std::thread::Builder::new().spawn(move || {
        running.run(stream, |to, from, bytes| {
            done.send((to, from, bytes)).unwrap();
        });
    });
    let [first, second] = [(); 2].map(|()| machine.create_event());
    machine.copy(1, 2, 3, stream).unwrap();
    machine.record(first, stream).unwrap();
    machine.copy(4, 5, 6, stream).unwrap();
    machine.record(second, stream).unwrap();
    assert_eq!(machine.query(first), Err(NOT_READY));
    reached(&machine, first);
    assert_eq!(copies.recv_timeout(WATCHDOG), Ok((1, 2, 3)));
    reached(&machine, second);
    assert_eq!(copies.recv_timeout(WATCHDOG), Ok((4, 5, 6)));
    machine.destroy_stream(stream).unwrap();
    thread.unwrap().join().unwrap();
    assert_eq!(machine.copy(1, 2, 3, stream), Err(INVALID_HANDLE));
    machine.destroy_event(first).unwrap();
    assert_eq!(machine.query(first), Err(INVALID_HANDLE));
}

#[test]
fn a_failed_device_says_so_from_then_on() {
    let machine = Machine::new(Duration::ZERO, Some(1));
    let stream = machine.create_stream();
    let event = machine.create_event();
    assert_eq!(machine.query(event), Ok(()));
    machine.copy(1, 2, 3, stream).unwrap();
    assert_eq!(machine.copy(1, 2, 3, stream), Err(LAUNCH_FAILED));
    assert_eq!(machine.query(event), Err(LAUNCH_FAILED));
}

#[test]
fn memory_is_bounded_and_opened_at_another_address() {
    let mut memory = Memory::new(8192);
    let first = memory.allocate(4096).unwrap();
    assert_eq!(memory.allocate(8192), Err(OUT_OF_MEMORY));
    let handle = memory.share(first).unwrap();
    let opened = memory.open(&handle).unwrap();
    assert_ne!(opened, first);
    memory.close(opened).unwrap();
    assert_eq!(memory.close(opened), Err(INVALID_VALUE));
    assert_eq!(memory.open(&[7; 64]), Err(INVALID_VALUE));
    memory.free(first).unwrap();
    assert_eq!(memory.free(first), Err(INVALID_VALUE));
    assert_eq!(memory.share(first), Err(INVALID_VALUE));
    memory.register(first).unwrap();
    assert_eq!(memory.register(first), Err(ALREADY_REGISTERED));
    memory.unregister(first).unwrap();
    assert_eq!(memory.unregister(first), Err(NOT_REGISTERED));
}
