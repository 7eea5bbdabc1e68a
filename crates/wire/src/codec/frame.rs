//! Frames: the header, and the heartbeat, which has no tensors.

use super::reader::Reader;
use super::writer::{Writer, bounded};
use super::{CodecError, FORMAT_VERSION, Limits};
use crate::buffer::Buffer;
use crate::heartbeat::Heartbeat;

const MAGIC: [u8; 4] = *b"SHWD";

/// The size of a header.
pub const HEADER_BYTES: usize = 24;

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A message.
    Message,
    /// A heartbeat.
    Heartbeat,
}

/// The beginning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it carries.
    pub kind: FrameKind,
    /// Bytes of the control part.
    pub control_bytes: u64,
    /// Bytes of all tensors that follow in the frame.
    pub tensor_bytes: u64,
}

impl Header {
    /// Reads and checks a header.
    pub fn parse(bytes: &[u8; HEADER_BYTES], limits: &Limits) -> Result<Self, CodecError> {
        let mut reader = Reader::new(bytes);
        let found: [u8; 4] = reader.take(4)?.try_into().expect("four bytes were taken");
        if found != MAGIC {
            return Err(CodecError::Magic { found });
        }
        let found = reader.u16()?;
        if found != FORMAT_VERSION {
            return Err(CodecError::Version {
                found,
                supported: FORMAT_VERSION,
            });
        }
        let kind = match reader.u16()? {
            0 => FrameKind::Message,
            1 => FrameKind::Heartbeat,
            found => {
                return Err(CodecError::Tag {
                    what: "frame",
                    found: u64::from(found),
                });
            }
        };
        let control_bytes = reader.u64()?;
        let tensor_bytes = reader.u64()?;
        reader.finish()?;
        bounded("bytes of control", control_bytes, limits.control_bytes)?;
        bounded(
            "bytes of tensors",
            tensor_bytes,
            limits.tensor_bytes.saturating_mul(limits.tensors),
        )?;
        Ok(Self {
            kind,
            control_bytes,
            tensor_bytes,
        })
    }

    fn to_bytes(self) -> Vec<u8> {
        let mut writer = Writer {
            bytes: MAGIC.to_vec(),
        };
        writer.u16(FORMAT_VERSION);
        writer.u16(match self.kind {
            FrameKind::Message => 0,
            FrameKind::Heartbeat => 1,
        });
        writer.u64(self.control_bytes);
        writer.u64(self.tensor_bytes);
        writer.bytes
    }
}

/// An encoded message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The header and the control part.
    pub head: Vec<u8>,
    /// The bytes of the tensors that follow in the frame, in this order.
    pub tensors: Vec<Buffer>,
}

impl Frame {
    /// Its whole size.
    pub fn num_bytes(&self) -> u64 {
        self.head.len() as u64
            + self
                .tensors
                .iter()
                .map(|tensor| tensor.len() as u64)
                .sum::<u64>()
    }

    pub(super) fn begin() -> Writer {
        Writer {
            bytes: vec![0; HEADER_BYTES],
        }
    }

    pub(super) fn end(kind: FrameKind, writer: Writer, tensors: Vec<Buffer>) -> Self {
        let mut head = writer.bytes;
        let header = Header {
            kind,
            control_bytes: (head.len() - HEADER_BYTES) as u64,
            tensor_bytes: tensors.iter().map(|tensor| tensor.len() as u64).sum(),
        };
        head[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
        Self { head, tensors }
    }
}

/// A heartbeat as a frame.
pub fn heartbeat_frame(heartbeat: Heartbeat) -> Frame {
    let mut writer = Frame::begin();
    writer.u64(heartbeat.step);
    writer.bool(heartbeat.executing);
    writer.bool(heartbeat.sending);
    writer.u64(heartbeat.progress);
    Frame::end(FrameKind::Heartbeat, writer, Vec::new())
}

/// A heartbeat from a frame's control part.
pub fn decode_heartbeat(control: &[u8]) -> Result<Heartbeat, CodecError> {
    let mut reader = Reader::new(control);
    let heartbeat = Heartbeat {
        step: reader.u64()?,
        executing: reader.bool()?,
        sending: reader.bool()?,
        progress: reader.u64()?,
    };
    reader.finish()?;
    Ok(heartbeat)
}
