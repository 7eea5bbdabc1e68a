//! What stands before a frame on a transport that lets messages overtake each
//! other, or that does not find damage by itself.

/// A message's number between its two ranks, and a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Envelope {
    /// The number: 0 for the first message of a pair.
    pub(super) sequence: u64,
    /// The CRC-32 of the number, the frame's head and the tensors given to [`Self::seal`].
    pub(super) checksum: u32,
}

/// A message whose content is not what its envelope says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the checksum of message {sequence} is {found:#010x} where its envelope says {stated:#010x}: it was damaged on its way"
)]
pub(super) struct Damaged {
    /// The number that the envelope states, which may itself be damaged.
    pub(super) sequence: u64,
    /// The checksum that it states.
    pub(super) stated: u32,
    /// The checksum of what arrived.
    pub(super) found: u32,
}

impl Envelope {
    /// The size in bytes.
    pub(super) const BYTES: usize = 12;

    /// The envelope of a message. Give no tensors where only the control part is to be covered.
    pub(super) fn seal<'a>(
        sequence: u64,
        head: &[u8],
        tensors: impl IntoIterator<Item = &'a [u8]>,
    ) -> Self {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&sequence.to_le_bytes());
        hasher.update(head);
        for tensor in tensors {
            hasher.update(tensor);
        }
        Self {
            sequence,
            checksum: hasher.finalize(),
        }
    }

    /// Its binary form.
    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// From its binary form.
    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let [s0, s1, s2, s3, s4, s5, s6, s7, c0, c1, c2, c3] = bytes;
        Self {
            sequence: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            checksum: u32::from_le_bytes([c0, c1, c2, c3]),
        }
    }

    /// Compares with what arrived; `tensors` as they were given to [`Self::seal`].
    pub(super) fn check<'a>(
        self,
        head: &[u8],
        tensors: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<(), Damaged> {
        let found = Self::seal(self.sequence, head, tensors).checksum;
        if found == self.checksum {
            return Ok(());
        }
        Err(Damaged {
            sequence: self.sequence,
            stated: self.checksum,
            found,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn one_or_two_changed_bits_anywhere_are_found(
            sequence in any::<u64>(),
            head in proptest::collection::vec(any::<u8>(), 1..300),
            tensor in proptest::collection::vec(any::<u8>(), 0..300),
            places in (any::<proptest::sample::Index>(), any::<proptest::sample::Index>()),
        ) {
            let envelope = Envelope::seal(sequence, &head, [&tensor[..]]);
            prop_assert_eq!(Envelope::from_bytes(envelope.to_bytes()), envelope);
            prop_assert_eq!(envelope.check(&head, [&tensor[..]]), Ok(()));
            let mut bytes = envelope.to_bytes().to_vec();
            bytes.extend(head.iter().chain(&tensor));
            let (first, second) = (places.0.index(bytes.len() * 8), places.1.index(bytes.len() * 8));
            bytes[first / 8] ^= 1 << (first % 8);
            if second != first {
                bytes[second / 8] ^= 1 << (second % 8);
            }
            let (damaged, content) = bytes.split_at(Envelope::BYTES);
            let damaged = Envelope::from_bytes(damaged.try_into().unwrap());
            let (damaged_head, damaged_tensor) = content.split_at(head.len());
            let found = damaged.check(damaged_head, [damaged_tensor]).unwrap_err();
            prop_assert_eq!((found.sequence, found.stated), (damaged.sequence, damaged.checksum));
        }
    }

    #[test]
    fn damage_is_described_with_the_message_and_both_checksums() {
        let envelope = Envelope::seal(17, b"head", []);
        let found = envelope.check(b"heat", []).unwrap_err();
        assert_eq!(
            found.to_string(),
            "the checksum of message 17 is 0x00000000 where its envelope says 0x00000001: it was damaged on its way"
                .replace("0x00000000", &format!("{:#010x}", found.found))
                .replace("0x00000001", &format!("{:#010x}", envelope.checksum))
        );
    }
}
