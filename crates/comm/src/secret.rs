//! The job's secret, and how two processes prove to each other that they know it.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The size of a nonce and of a proof.
pub(crate) const PROOF_BYTES: usize = 32;

/// The secret that all ranks of a job share. It shows nothing of itself.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret from its bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The answer to a challenge; `label` says which side answers, so that no
    /// side's answer can be played back to it.
    pub(crate) fn prove(&self, label: &[u8], transcript: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.mac(label, transcript).finalize().into_bytes().into()
    }

    /// Whether an answer is right, in constant time.
    pub(crate) fn verify(&self, label: &[u8], transcript: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(label, transcript).verify_slice(proof).is_ok()
    }

    /// The pre-shared key of the connections that are encrypted.
    pub(crate) fn noise_key(&self) -> [u8; PROOF_BYTES] {
        self.prove(b"shardwright noise", &[])
    }

    fn mac(&self, label: &[u8], transcript: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(label);
        for part in transcript {
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Bytes that nobody can foretell.
pub(crate) fn nonce() -> Result<[u8; PROOF_BYTES], getrandom::Error> {
    let mut bytes = [0; PROOF_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_secret_side_and_transcript_only() {
        let secret = Secret::new(b"right".to_vec());
        let proof = secret.prove(b"server", &[b"a", b"b"]);
        assert!(secret.verify(b"server", &[b"a", b"b"], &proof));
        assert!(!secret.verify(b"client", &[b"a", b"b"], &proof));
        assert!(!secret.verify(b"server", &[b"a", b"c"], &proof));
        assert!(!Secret::new(b"wrong".to_vec()).verify(b"server", &[b"a", b"b"], &proof));
    }

    #[test]
    fn a_secret_shows_nothing_of_itself() {
        assert_eq!(format!("{:?}", Secret::new(b"hush".to_vec())), "Secret(..)");
    }
}
