//! The thread's inbox: whatever is given to it is moved, and who waits for it is woken.

use std::sync::Arc;
use std::time::Duration;

use shardwright_core::{MicrobatchId, Phase, StepEpoch};
use shardwright_system::sync::{explore, on_threads, with};
use shardwright_wire::Buffer;

use crate::error::OffloadError;
use crate::plan::{CallId, Task, TensorId};
use crate::shell::{Offload, Options};

const BYTES: usize = 64;

fn storage() -> Arc<Offload> {
    let options = Options {
        rank: 0,
        horizon: 1,
        directory: None,
        most_outgoing: 0,
        timeout: Duration::from_hours(1),
    };
    Arc::new(Offload::start(options).unwrap())
}

fn filled(fill: u64) -> Buffer {
    Buffer::copy_of(&[fill as u8; BYTES])
}

/// Says that all those have arrived that had to leave, and drops the frontend's knowledge of what is gone.
fn obey(offload: &Offload) {
    for tensor in offload.changes().unwrap().leaving {
        offload.arrived(tensor, filled(tensor.0)).unwrap();
    }
}

/// A microbatch of three calls, each with a tensor of the host and one of a device.
fn train(offload: &Offload, microbatch: u32) {
    let microbatch = MicrobatchId(microbatch);
    let begin = |phase| offload.begin_task(Task { phase, microbatch }).unwrap();
    begin(Phase::Forward);
    let calls: Vec<(CallId, TensorId, TensorId)> = (0..3)
        .map(|fill| {
            let call = offload.add_call(microbatch, "layers.1").unwrap();
            let host = offload.add_tensor(call, filled(fill)).unwrap();
            let device = offload.add_device_tensor(call, BYTES as u64).unwrap();
            obey(offload);
            (call, host, device)
        })
        .collect();
    begin(Phase::Backward);
    for (fill, (call, host, device)) in calls.into_iter().enumerate().rev() {
        obey(offload);
        for (tensor, bytes) in offload.take(call).unwrap() {
            if tensor == host {
                assert_eq!(bytes, Some(filled(fill as u64)));
            } else {
                assert_eq!(tensor, device);
                assert!(bytes.is_none_or(|bytes| bytes == filled(device.0)));
            }
        }
        offload.remove_call(call);
    }
}

#[test]
fn what_is_given_to_the_thread_is_moved_and_comes_back_as_it_was() {
    explore(2000, || {
        let offload = storage();
        offload.begin_step(StepEpoch(1), []).unwrap();
        on_threads([
            with(&offload, |offload| train(offload, 0)),
            with(&offload, |offload| train(offload, 1)),
        ]);
        obey(&offload);
        offload.close();
        assert_eq!(offload.counts(), Err(OffloadError::Closed));
    });
}

#[test]
fn an_end_wakes_who_waits_for_room_or_for_a_tensor() {
    explore(2000, || {
        let offload = storage();
        let fill = |offload: &Offload| {
            let mut calls = Vec::new();
            while let Ok(call) = offload.add_call(MicrobatchId(0), "layers.1") {
                calls.push(call);
                if offload.add_tensor(call, filled(1)).is_err() || calls.len() == 4 {
                    break;
                }
            }
            for call in calls {
                drop(offload.take(call));
            }
        };
        on_threads([with(&offload, fill), with(&offload, Offload::close)]);
    });
}
