//! Where a tensor's bytes are while its message travels.

use super::CodecError;
use super::reader::Reader;
use super::writer::Writer;

/// A place in the sender's persistent buffer, which the receiver has mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPlace {
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
    writer.option(place, |writer, place| {
        writer.u32(place.slot);
        writer.u64(place.offset);
    });
}

pub(super) fn read(reader: &mut Reader<'_>) -> Result<Option<SharedPlace>, CodecError> {
    reader.option(|reader| {
        Ok(SharedPlace {
            slot: reader.u32()?,
            offset: reader.u64()?,
        })
    })
}
