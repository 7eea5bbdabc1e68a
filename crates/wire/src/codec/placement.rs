//! Where a tensor's bytes are while its message travels.

use super::CodecError;
use super::reader::Reader;
use super::writer::Writer;

/// Which of the sender's persistent buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedMemory {
    /// The one in host memory.
    Host,
    /// The one in the memory of its device.
    Device,
}

/// A place in one of the sender's persistent buffers, which the receiver has mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPlace {
    /// In which of them.
    pub memory: SharedMemory,
    /// The slot by which the receiver gives the memory back.
    pub slot: u32,
    /// Where the bytes begin.
    pub offset: u64,
}

/// A tensor's number of bytes, and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// How many bytes.
    pub bytes: usize,
    /// In shared memory; `None` where they follow in the frame.
    pub shared: Option<SharedPlace>,
}

pub(super) fn write(writer: &mut Writer, place: Option<SharedPlace>) {
    let Some(place) = place else {
        writer.u8(0);
        return;
    };
    writer.u8(match place.memory {
        SharedMemory::Host => 1,
        SharedMemory::Device => 2,
    });
    writer.u32(place.slot);
    writer.u64(place.offset);
}

pub(super) fn read(reader: &mut Reader<'_>) -> Result<Option<SharedPlace>, CodecError> {
    let memory = match reader.u8()? {
        0 => return Ok(None),
        1 => SharedMemory::Host,
        2 => SharedMemory::Device,
        found => {
            return Err(CodecError::Tag {
                what: "memory",
                found: u64::from(found),
            });
        }
    };
    Ok(Some(SharedPlace {
        memory,
        slot: reader.u32()?,
        offset: reader.u64()?,
    }))
}
