//! The handshake beside somebody who knows all of it but the secret, on either side of it.

use std::io;

use super::*;

const CALLER_NONCE: [u8; PROOF_BYTES] = [1; PROOF_BYTES];
const ANSWERER_NONCE: [u8; PROOF_BYTES] = [2; PROOF_BYTES];

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec()).unwrap()
}

fn identity(rank: u32, secret: &Secret, encrypt: bool) -> Identity<'_> {
    Identity {
        rank: Rank(rank),
        world: 4,
        secret,
        encrypt,
    }
}

/// A connection whose other end has said everything already.
struct Wire<'a> {
    incoming: &'a [u8],
    written: Vec<u8>,
}

impl Read for Wire<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.incoming.read(into)
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.written.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a rank that calls says to bytes of whoever answers, and what it takes that one for.
fn called(
    incoming: &[u8],
    nonce: [u8; PROOF_BYTES],
    encrypt: bool,
) -> (Vec<u8>, Result<Rank, HandshakeError>) {
    let secret = secret("the secret of the job");
    let me = identity(1, &secret, encrypt);
    let written = Vec::new();
    let mut wire = Wire { incoming, written };
    let outcome = call_over(&mut wire, &nonce, &me, Purpose::Mesh);
    (wire.written, outcome.map(|(rank, _)| rank))
}

/// What a rank that answers says to bytes of whoever calls, and what it takes that one for.
fn answered(
    incoming: &[u8],
    nonce: [u8; PROOF_BYTES],
    secret: &Secret,
    started: bool,
) -> (Vec<u8>, Option<Result<Caller, HandshakeError>>) {
    let me = identity(0, secret, false);
    let (mut answering, mut reply, mut rest) = (Answering::new(nonce), Vec::new(), incoming);
    loop {
        let (now, later) = rest.split_at(answering.wanted().min(rest.len()));
        rest = later;
        let outcome = answering.take(now, &me, started, &mut reply);
        if outcome.is_some() || now.is_empty() {
            return (reply, outcome.map(|outcome| outcome.map(|(who, _)| who)));
        }
    }
}

/// Both sides of a genuine handshake: what the caller says, and what the answerer says.
fn genuine(caller: u8, answerer: u8, started: bool) -> (Vec<u8>, Vec<u8>) {
    let (caller, answerer) = ([caller; PROOF_BYTES], [answerer; PROOF_BYTES]);
    let secret = secret("the secret of the job");
    let (hello, _) = called(&[], caller, false);
    let (challenge, _) = answered(&hello, answerer, &secret, started);
    let (said, _) = called(&challenge, caller, false);
    let (replied, _) = answered(&said, answerer, &secret, started);
    (said, replied)
}

#[test]
fn who_calls_without_a_proof_gets_no_byte_that_depends_on_the_secret() {
    let (said, _) = genuine(1, 2, false);
    let mut wrong = said.clone();
    wrong[HELLO_BYTES] ^= 1;
    for attempt in [&said[..HELLO_BYTES], &wrong, &[0; 200]] {
        for started in [false, true] {
            let replies = ["the secret of the job", "another secret than that"].map(|text| {
                let (reply, outcome) = answered(attempt, ANSWERER_NONCE, &secret(text), started);
                assert!(!matches!(outcome, Some(Ok(_))), "it was let in");
                reply
            });
            assert_eq!(replies[0], replies[1]);
        }
    }
}

#[test]
fn the_calling_side_proves_first_and_each_side_is_believed_for_its_own_proof_only() {
    let (said, replied) = genuine(1, 2, false);
    assert_eq!(said.len(), HELLO_BYTES + ANSWER_BYTES);
    assert_eq!(replied.len(), CHALLENGE_BYTES + VERDICT_BYTES);
    assert_eq!(called(&replied, CALLER_NONCE, false).1.unwrap(), Rank(0));
    // Bytes of the challenge or of the verdict, changed by whoever stands between.
    for place in 0..replied.len() {
        let mut changed = replied.clone();
        changed[place] ^= 1;
        assert!(called(&changed, CALLER_NONCE, false).1.is_err(), "{place}");
    }
    // The caller's own proof, played back to it, and the proof of another handshake.
    let mut reflected = replied.clone();
    reflected[CHALLENGE_BYTES + 1..].copy_from_slice(&said[HELLO_BYTES..]);
    let (_, other) = genuine(3, 2, false);
    for false_proof in [reflected, other] {
        let refused = called(&false_proof, CALLER_NONCE, false).1.unwrap_err();
        assert!(matches!(refused, HandshakeError::WrongSecret { .. }));
    }
    // What the caller has proved to one who accepts, taken to the rank itself or to it again.
    let secret = secret("the secret of the job");
    let fresh = answered(&said, [9; PROOF_BYTES], &secret, false).1;
    assert!(matches!(
        fresh,
        Some(Err(HandshakeError::WrongSecret { .. }))
    ));
    assert!(matches!(
        answered(&said, ANSWERER_NONCE, &secret, false).1,
        Some(Ok(_))
    ));
}

#[test]
fn who_accepts_without_the_secret_is_believed_nothing_not_even_why_it_refuses() {
    let (_, genuine_reply) = genuine(1, 2, false);
    for encrypt in [false, true] {
        for verdict in 0..=u8::MAX {
            for proof in [[0; PROOF_BYTES], [7; PROOF_BYTES]] {
                let challenge = &genuine_reply[..CHALLENGE_BYTES];
                let reply = [challenge, &[verdict], &proof, &[0; EXCHANGE_BYTES]].concat();
                let refused = called(&reply, CALLER_NONCE, encrypt).1.unwrap_err();
                assert!(matches!(refused, HandshakeError::WrongSecret { .. }));
            }
        }
    }
    let (_, started) = genuine(1, 2, true);
    let refused = called(&started, CALLER_NONCE, false).1.unwrap_err();
    assert!(matches!(refused, HandshakeError::AlreadyStarted));
}

#[test]
fn other_versions_are_named_on_both_sides() {
    let (said, _) = genuine(1, 2, false);
    let secret = secret("the secret of the job");
    for theirs in [1_u16, 2, HANDSHAKE_VERSION + 1] {
        let mut hello = said[..HELLO_BYTES].to_vec();
        hello[8..10].copy_from_slice(&theirs.to_le_bytes());
        let (reply, outcome) = answered(&hello, ANSWERER_NONCE, &secret, false);
        // Version 2 reads eighty bytes before it looks at the version.
        assert_eq!(reply.len(), OTHER_VERSION_BYTES);
        assert_eq!(reply[8..11], [3, 0, WRONG_VERSION]);
        assert!(matches!(
            outcome,
            Some(Err(HandshakeError::Version { theirs: found, .. })) if found == theirs
        ));
        let mut challenge = vec![0; OTHER_VERSION_BYTES];
        challenge[..8].copy_from_slice(&MAGIC);
        challenge[8..10].copy_from_slice(&theirs.to_le_bytes());
        let refused = called(&challenge, CALLER_NONCE, false).1.unwrap_err();
        assert!(
            matches!(refused, HandshakeError::Version { theirs: found, .. } if found == theirs)
        );
    }
}
