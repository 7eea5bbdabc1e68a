//! Messages as bytes with an envelope, as they go through faulty connections.

use shardwright_wire::codec::decode_control;
use shardwright_wire::{Buffer, CodecError, Frame, HEADER_BYTES, Header, Limits, Message, Placed};

use super::envelope::{Damaged, Envelope};

/// Bytes that are no message.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("{found} bytes, where the shortest message has {least}")]
    Short { found: usize, least: usize },
    #[error("a tensor in shared memory, which these ranks have none of")]
    Elsewhere,
    #[error(transparent)]
    Damaged(#[from] Damaged),
    #[error(transparent)]
    Codec(#[from] CodecError),
}

/// A frame in its envelope, whose checksum covers the tensors too.
pub(super) fn pack(number: u64, frame: &Frame) -> Vec<u8> {
    let tensors = || frame.tensors.iter().map(Buffer::as_bytes);
    let envelope = Envelope::seal(number, &frame.head, tensors());
    let mut bytes = Vec::with_capacity(Envelope::BYTES + frame.num_bytes() as usize);
    bytes.extend(envelope.to_bytes());
    bytes.extend(&frame.head);
    tensors().for_each(|tensor| bytes.extend(tensor));
    bytes
}

/// The message and its number. Nothing is believed before the checksum is found right.
pub(super) fn unpack(bytes: &[u8], limits: &Limits) -> Result<(u64, Message), Unreadable> {
    let short = || Unreadable::Short {
        found: bytes.len(),
        least: Envelope::BYTES + HEADER_BYTES,
    };
    let (envelope, frame) = bytes
        .split_first_chunk::<{ Envelope::BYTES }>()
        .ok_or_else(short)?;
    let (header, rest) = frame
        .split_first_chunk::<HEADER_BYTES>()
        .ok_or_else(short)?;
    let envelope = Envelope::from_bytes(*envelope);
    envelope.check(frame, [])?;
    let header = Header::parse(header, limits)?;
    let truncated = |missing: u64| CodecError::Truncated { missing };
    let control_bytes = header.control_bytes as usize;
    let (control, mut rest) = rest
        .split_at_checked(control_bytes)
        .ok_or_else(|| truncated((control_bytes - rest.len()) as u64))?;
    let incoming = decode_control(control, header.tensor_bytes, limits)?;
    let mut buffers = Vec::with_capacity(incoming.placed().len());
    for Placed { bytes, shared } in incoming.placed() {
        if shared.is_some() {
            return Err(Unreadable::Elsewhere);
        }
        let (tensor, after) = rest
            .split_at_checked(*bytes)
            .ok_or_else(|| truncated((bytes - rest.len()) as u64))?;
        buffers.push(Buffer::copy_of(tensor));
        rest = after;
    }
    if !rest.is_empty() {
        let extra = rest.len() as u64;
        return Err(CodecError::Trailing { extra }.into());
    }
    Ok((envelope.sequence, incoming.complete(buffers)))
}
