use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::capture::Mode;
use crate::device_streams::DeviceStreams;
use crate::memory::ProcessMemory;
use crate::{
    ALREADY_REGISTERED, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, CallFailure, INVALID_HANDLE,
    INVALID_VALUE, LAUNCH_FAILED, NOT_READY, NOT_REGISTERED, OUT_OF_MEMORY, Undefined,
};

const WATCHDOG: Duration = Duration::from_mins(5);

fn reached(machine: &DeviceStreams, event: u64) {
    let begin = Instant::now();
    while machine.query(event) == Err(NOT_READY) {
        assert!(begin.elapsed() < WATCHDOG, "the event is never reached");
        std::thread::yield_now();
    }
    assert_eq!(machine.query(event), Ok(()));
}

#[test]
fn a_stream_runs_late_and_in_order() {
    let machine = Arc::new(DeviceStreams::new(Duration::from_millis(100), None));
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
    let machine = DeviceStreams::new(Duration::ZERO, Some(1));
    let stream = machine.create_stream();
    let event = machine.create_event();
    assert_eq!(machine.query(event), Ok(()));
    machine.copy(1, 2, 3, stream).unwrap();
    assert_eq!(machine.copy(1, 2, 3, stream), Err(LAUNCH_FAILED));
    assert_eq!(machine.query(event), Err(LAUNCH_FAILED));
}

#[test]
fn memory_is_bounded_and_opened_at_another_address() {
    let mut memory = ProcessMemory::new(8192);
    let first = memory.allocate(4096).unwrap();
    assert_eq!(memory.allocate(8192), Err(OUT_OF_MEMORY));
    let handle = memory.share(first).unwrap();
    let opened = memory.open(&handle).unwrap();
    assert_ne!(opened, first);
    let refused = CallFailure::Undefined(Undefined::FreedWhileOpen);
    assert_eq!(memory.free(first), Err(refused));
    memory.close(opened).unwrap();
    assert_eq!(memory.close(opened), Err(INVALID_VALUE));
    assert_eq!(memory.open(&[7; 64]), Err(INVALID_VALUE));
    memory.free(first).unwrap();
    assert_eq!(memory.free(first), Err(CallFailure::Code(INVALID_VALUE)));
    assert_eq!(memory.share(first), Err(INVALID_VALUE));
    memory.register(first, 4096).unwrap();
    for inside in [first, first + 4000] {
        assert_eq!(memory.register(inside, 4096), Err(ALREADY_REGISTERED));
    }
    memory.register(first + 4096, 1).unwrap();
    assert_eq!(memory.registered_bytes(), 4097);
    memory.unregister(first + 4096).unwrap();
    memory.unregister(first).unwrap();
    assert_eq!(memory.unregister(first), Err(NOT_REGISTERED));
}

#[test]
fn memory_that_a_copy_uses_does_not_go() {
    let machine = DeviceStreams::new(Duration::ZERO, None);
    let stream = machine.create_stream();
    machine.copy(1000, 5000, 100, stream).unwrap();
    let refused = CallFailure::Undefined(Undefined::GoneUnderACopy);
    for (start, bytes) in [(1099, 1), (4096, 4096), (900, 101)] {
        assert_eq!(machine.goes(start, bytes), Err(refused));
    }
    for (start, bytes) in [(1100, 100), (900, 100)] {
        assert_eq!(machine.goes(start, bytes), Ok(()));
    }
}

#[test]
fn a_call_that_could_spoil_a_capture_does_so_unless_its_thread_is_held_to_less() {
    let machine = DeviceStreams::new(Duration::ZERO, None);
    let stream = machine.create_stream();
    let from_another = |mode| {
        let call = || machine.unsafe_call(mode);
        std::thread::scope(|scope| scope.spawn(call).join().unwrap())
    };
    machine.begin_capture(stream, Mode::Global).unwrap();
    assert_eq!(from_another(Mode::Relaxed), Ok(()));
    assert_eq!(from_another(Mode::ThreadLocal), Ok(()));
    assert_eq!(machine.unsafe_call(Mode::Relaxed), Ok(()));
    assert_eq!(machine.end_capture(stream), Ok(()));
    machine.begin_capture(stream, Mode::Global).unwrap();
    assert_eq!(from_another(Mode::Global), Err(CAPTURE_UNSUPPORTED));
    assert_eq!(machine.end_capture(stream), Err(CAPTURE_INVALIDATED));
    machine.begin_capture(stream, Mode::ThreadLocal).unwrap();
    assert_eq!(from_another(Mode::Global), Ok(()));
    assert_eq!(
        machine.unsafe_call(Mode::ThreadLocal),
        Err(CAPTURE_UNSUPPORTED)
    );
    assert_eq!(machine.end_capture(stream), Err(CAPTURE_INVALIDATED));
}
