//! Manifests of checkpoints.

use std::str;

use shardwright_checkpoint::{Manifest, Region, plan, seal};

/// Tensors up to this size are planned, which can need a read for each byte.
const MOST_PLANNED: u64 = 1 << 16;

/// A manifest that somebody has written, with its seal: what is accepted holds each element of each tensor once, in files
/// that have it, and has one form (FZ-7).
pub fn manifest(input: &[u8]) {
    assert!(
        Manifest::from_bytes(input).is_err() || input.starts_with(b"{\"blake3\":"),
        "a manifest without a seal was accepted"
    );
    let Ok(text) = str::from_utf8(input) else {
        return;
    };
    let Ok(manifest) = Manifest::from_bytes(&seal(text)) else {
        return;
    };
    let written = manifest.to_bytes();
    let back = Manifest::from_bytes(&written).expect("what was written can be read");
    assert_eq!(back, manifest);
    assert_eq!(back.to_bytes(), written);
    for tensor in &manifest.tensors {
        if tensor.num_bytes() > MOST_PLANNED {
            continue;
        }
        let reads = plan(tensor, &Region::whole(&tensor.shape));
        let mut reads = reads.expect("the pieces of a tensor hold all of it");
        reads.sort_by_key(|read| read.destination);
        let mut end = 0;
        for read in reads {
            assert_eq!(read.destination, end);
            end += read.bytes;
            let file = &manifest.files[read.file];
            assert!(file.data_begin + read.source + read.bytes <= file.bytes);
        }
        assert_eq!(end, tensor.num_bytes());
    }
}
