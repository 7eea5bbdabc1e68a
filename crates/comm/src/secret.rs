//! The job's secret, and how two processes prove to each other that they know it.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The size of a nonce and of a proof.
pub(crate) const PROOF_BYTES: usize = 32;

/// The fewest bytes of a secret that is given, blanks around it left out. Every shorter one can be found by trying.
pub const FEWEST_SECRET_BYTES: usize = 16;

/// Why bytes are no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeakSecret {
    /// Nothing, or white space.
    #[error(
        "is blank; a secret has {FEWEST_SECRET_BYTES} or more bytes: `openssl rand -hex 32` makes one"
    )]
    Blank,
    /// Too few bytes.
    #[error(
        "has {0} bytes; a secret has {FEWEST_SECRET_BYTES} or more: `openssl rand -hex 32` makes one"
    )]
    Short(usize),
}

/// The secret that all ranks of a job share. It shows nothing of itself.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret that somebody has chosen.
    pub fn new(bytes: Vec<u8>) -> Result<Self, WeakSecret> {
        match bytes.trim_ascii().len() {
            0 => Err(WeakSecret::Blank),
            count @ 1..FEWEST_SECRET_BYTES => Err(WeakSecret::Short(count)),
            _ => Ok(Self(bytes)),
        }
    }

    /// What ranks have that trust everybody who reaches their ports.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// What rank 0 has made up, or has told; nothing where another rank was given one.
    pub(crate) fn told(bytes: Vec<u8>) -> Self {
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

    fn secret(text: &str) -> Secret {
        Secret::new(text.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn a_proof_holds_for_its_secret_side_and_transcript_only() {
        let right = secret("the right secret");
        let proof = right.prove(b"server", &[b"a", b"b"]);
        assert!(right.verify(b"server", &[b"a", b"b"], &proof));
        assert!(!right.verify(b"client", &[b"a", b"b"], &proof));
        assert!(!right.verify(b"server", &[b"a", b"c"], &proof));
        assert!(!secret("the wrong secret").verify(b"server", &[b"a", b"b"], &proof));
    }

    #[test]
    fn a_secret_shows_nothing_of_itself() {
        assert_eq!(format!("{:?}", secret("hush, hush, hush")), "Secret(..)");
    }

    #[test]
    fn what_is_blank_or_short_is_no_secret() {
        let refused = |bytes: &[u8]| Secret::new(bytes.to_vec()).err();
        for blank in [&b""[..], b" ", b"\n", &[b' '; 40], b"\t\r\n \x0c"] {
            assert_eq!(refused(blank), Some(WeakSecret::Blank));
        }
        for count in 1..FEWEST_SECRET_BYTES {
            let short = vec![b'x'; count];
            let padded = [b"  ", &short[..], &[b'\n'; 40]].concat();
            assert_eq!(refused(&short), Some(WeakSecret::Short(count)));
            assert_eq!(refused(&padded), Some(WeakSecret::Short(count)));
        }
        assert_eq!(refused(&[b'x'; FEWEST_SECRET_BYTES]), None);
        assert_eq!(refused(&[0xff; 4096]), None);
    }
}
