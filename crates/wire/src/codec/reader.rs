//! Taking the format's primitives from a byte slice, never past its end.

use super::CodecError;
use super::writer::bounded;

/// The bytes that are left.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(super) fn take(&mut self, count: u64) -> Result<&'a [u8], CodecError> {
        let left = self.bytes.len() as u64;
        if count > left {
            return Err(CodecError::Truncated {
                missing: count - left,
            });
        }
        let (taken, rest) = self.bytes.split_at(count as usize);
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        let taken = self.take(N as u64)?;
        Ok(taken
            .try_into()
            .expect("take returns as many bytes as it was asked for"))
    }

    pub(super) fn u8(&mut self) -> Result<u8, CodecError> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn bool(&mut self) -> Result<bool, CodecError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(CodecError::Tag {
                what: "truth value",
                found: u64::from(found),
            }),
        }
    }

    pub(super) fn u16(&mut self) -> Result<u16, CodecError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, CodecError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, CodecError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn i64(&mut self) -> Result<i64, CodecError> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    pub(super) fn f64(&mut self) -> Result<f64, CodecError> {
        Ok(f64::from_bits(self.u64()?))
    }

    /// A number of items of which each takes at least one more byte, so that no
    /// announced number can reserve more than what has arrived (WI-1).
    pub(super) fn count(&mut self, what: &'static str, allowed: u64) -> Result<usize, CodecError> {
        let found = self.u64()?;
        bounded(what, found, allowed)?;
        let left = self.bytes.len() as u64;
        if found > left {
            return Err(CodecError::Truncated {
                missing: found - left,
            });
        }
        Ok(found as usize)
    }

    pub(super) fn blob(&mut self) -> Result<&'a [u8], CodecError> {
        let count = self.u64()?;
        self.take(count)
    }

    pub(super) fn text(&mut self) -> Result<String, CodecError> {
        let bytes = self.blob()?;
        let text = std::str::from_utf8(bytes).map_err(|_| CodecError::Text)?;
        Ok(text.to_owned())
    }

    pub(super) fn option<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, CodecError>,
    ) -> Result<Option<T>, CodecError> {
        if self.bool()? {
            read(self).map(Some)
        } else {
            Ok(None)
        }
    }

    /// A list of at most so many items, of which each takes at least one byte.
    pub(super) fn list<T>(
        &mut self,
        what: &'static str,
        allowed: u64,
        mut read: impl FnMut(&mut Self) -> Result<T, CodecError>,
    ) -> Result<Vec<T>, CodecError> {
        let count = self.count(what, allowed)?;
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(read(self)?);
        }
        Ok(items)
    }

    pub(super) fn finish(self) -> Result<(), CodecError> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        Err(CodecError::Trailing {
            extra: self.bytes.len() as u64,
        })
    }
}
