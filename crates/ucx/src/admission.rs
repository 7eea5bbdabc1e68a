//! Whose messages are taken, and how much of one sender may be under way; decided before anything is set aside.

use std::collections::BTreeMap;

use shardwright_core::Rank;

use super::error::ReceiveRefusal;

/// The size of a key.
pub const KEY_BYTES: usize = 16;

/// What a message must carry to be taken: UCX itself lets anybody connect. The receiver makes it,
/// and the ranks of the job learn it over connections that have proved the job's secret.
pub type AdmissionKey = [u8; KEY_BYTES];

/// Parts that one sender may have announced at a time: twice as many as a message has at most.
const MOST_ANNOUNCED: usize = 1 << 17;

/// Bytes that one sender may have announced at a time: more than a host's memory holds, and little enough that no
/// sender can use up the address space.
const MOST_ANNOUNCED_BYTES: usize = 1 << 40;

/// Who is let in, and what is under way from whom.
#[derive(Debug, Default)]
pub struct Admission {
    /// The key, and the number of ranks; without it everybody is let in.
    required: Option<(AdmissionKey, u32)>,
    announced: BTreeMap<Rank, Announced>,
    unknown_peers: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Announced {
    parts: usize,
    bytes: usize,
}

impl Admission {
    /// Lets in only ranks below `world` that know the key.
    pub fn require(&mut self, key: AdmissionKey, world: u32) {
        self.required = Some((key, world));
    }

    /// What a sender's header holds behind the key; `None` for an unknown peer, who is counted.
    pub fn admit<'a>(&mut self, from: Rank, header: &'a [u8]) -> Option<&'a [u8]> {
        let admitted = match &self.required {
            None => Some(header),
            Some((key, world)) => header
                .split_first_chunk::<KEY_BYTES>()
                .filter(|(found, _)| from.0 < *world && is_equal(found, key))
                .map(|(_, rest)| rest),
        };
        if admitted.is_none() {
            self.count_unknown_peer();
        }
        admitted
    }

    /// Counts a message that nobody of the job has sent.
    pub fn count_unknown_peer(&mut self) {
        self.unknown_peers += 1;
    }

    /// How many messages were dropped for want of the key.
    pub fn unknown_peers(&self) -> u64 {
        self.unknown_peers
    }

    /// A part was announced, and is fetched unless this says why not.
    pub fn announce(&mut self, from: Rank, bytes: usize) -> Result<(), ReceiveRefusal> {
        let announced = self.announced.entry(from).or_default();
        let total = announced.bytes.saturating_add(bytes);
        if announced.parts >= MOST_ANNOUNCED || total > MOST_ANNOUNCED_BYTES {
            return Err(ReceiveRefusal::TooMuch {
                parts: announced.parts,
                bytes: total,
            });
        }
        *announced = Announced {
            parts: announced.parts + 1,
            bytes: total,
        };
        Ok(())
    }

    /// An announced part has come, or failed.
    pub fn arrived(&mut self, from: Rank, bytes: usize) {
        if let Some(announced) = self.announced.get_mut(&from) {
            announced.parts = announced.parts.saturating_sub(1);
            announced.bytes = announced.bytes.saturating_sub(bytes);
        }
    }
}

/// Whether two keys are equal; takes as long for every wrong one.
fn is_equal(found: &AdmissionKey, key: &AdmissionKey) -> bool {
    let differing = found.iter().zip(key).fold(0, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(differing) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: AdmissionKey = [7; KEY_BYTES];

    fn guarded() -> Admission {
        let mut admission = Admission::default();
        admission.require(KEY, 4);
        admission
    }

    #[test]
    fn only_a_rank_of_the_job_with_the_key_is_let_in() {
        let mut admission = guarded();
        let message = [&KEY[..], b"name"].concat();
        assert_eq!(admission.admit(Rank(3), &message), Some(&b"name"[..]));
        let mut wrong = message.clone();
        wrong[15] ^= 1;
        for (from, header) in [
            (Rank(4), &message[..]),
            (Rank(u32::MAX), &message),
            (Rank(3), &wrong),
            (Rank(3), &KEY[..15]),
            (Rank(3), &[]),
        ] {
            assert_eq!(admission.admit(from, header), None);
        }
        assert_eq!(admission.unknown_peers(), 5);
    }

    #[test]
    fn what_one_sender_announces_is_bounded_and_another_is_not_held_up_by_it() {
        let mut admission = guarded();
        for _ in 0..MOST_ANNOUNCED {
            admission.announce(Rank(1), 6144).unwrap();
        }
        let refusal = admission.announce(Rank(1), 1).unwrap_err();
        let parts = MOST_ANNOUNCED;
        let bytes = parts * 6144 + 1;
        assert_eq!(refusal, ReceiveRefusal::TooMuch { parts, bytes });
        admission.announce(Rank(2), 64 << 30).unwrap();
        admission.arrived(Rank(1), 6144);
        admission.announce(Rank(1), 6144).unwrap();
        assert!(admission.announce(Rank(2), 1 << 40).is_err());
        assert!(admission.announce(Rank(2), usize::MAX).is_err());
    }
}
