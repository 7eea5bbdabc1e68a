//! Manifests of checkpoints.

use std::str;

use safetensors::SafeTensors;
use shardwright_checkpoint::{Manifest, Region, check_header, plan, seal};

/// Tensors up to this size are planned, which can need a read for each byte.
const MOST_PLANNED: u64 = 1 << 16;

/// Files with more data than this are not made.
const MOST_DATA: u64 = 1 << 16;

/// The header of a file of tensors that somebody has written (FZ-8).
pub fn header(input: &[u8]) {
    let Ok(data) = check_header(input) else {
        return;
    };
    if data > MOST_DATA {
        return;
    }
    let mut file = (input.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(input);
    let all = file.len() + usize::try_from(data).expect("it is small");
    file.resize(all, 0);
    let tensors = SafeTensors::deserialize(&file).expect("it was accepted");
    let found: usize = tensors.iter().map(|(_, view)| view.data().len()).sum();
    assert_eq!(found as u64, data);
}

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
