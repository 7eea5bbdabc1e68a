//! A proved connection to a rank: a socket, and what seals the bytes on it where the job asks for encryption.
//!
//! Sealed, bytes travel in records: a length of two bytes, and a message of the Noise protocol
//! (`Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s`), whose pre-shared key comes from the job's secret and whose prologue is
//! the handshake before it. Records are numbered in each direction: one that is changed, missing, repeated or of
//! another connection is not opened.

use std::io::{self, IoSlice, Read};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use snow::{Builder, HandshakeState, StatelessTransportState};
use socket2::SockRef;

use crate::secret::Secret;

/// The protocol, in the Noise framework's own notation.
const PROTOCOL: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// A message of the key exchange: an ephemeral key and a tag.
pub(super) const EXCHANGE_BYTES: usize = 48;

/// The most bytes of a record behind its length; a limit of Noise.
const RECORD_BYTES: usize = 65_535;

/// What sealing adds to a record's content.
const TAG_BYTES: usize = 16;

/// The most content of a record.
const CONTENT_BYTES: usize = RECORD_BYTES - TAG_BYTES;

/// Not defined by std; a peer's death must not become a signal here.
const MSG_NOSIGNAL: i32 = 0x4000;

/// The system takes at most so many pieces at once.
const MOST_PIECES: usize = 1024;

/// A connection whose two ends have proved the job's secret.
pub(super) struct Connection {
    stream: TcpStream,
    cipher: Option<Box<Cipher>>,
}

/// What seals and opens records. One thread reads and one writes; each direction has its lock.
pub(super) struct Cipher {
    state: StatelessTransportState,
    writing: Mutex<Writing>,
    reading: Mutex<Reading>,
}

#[derive(Default)]
struct Writing {
    number: u64,
    content: Vec<u8>,
    record: Vec<u8>,
}

#[derive(Default)]
struct Reading {
    number: u64,
    record: Vec<u8>,
    /// What was opened, and how much of it was handed out.
    content: Vec<u8>,
    taken: usize,
}

/// The key exchange of one side, which has not got the other's message yet.
pub(super) struct KeyExchange(HandshakeState);

impl KeyExchange {
    /// Of the side that called; `transcript` is what both sides have said so far.
    pub(super) fn of_caller(secret: &Secret, transcript: &[&[u8]]) -> Result<Self, snow::Error> {
        let prologue = transcript.concat();
        let key = secret.noise_key();
        let builder = Builder::new(PROTOCOL.parse()?).psk(0, &key)?;
        Ok(Self(builder.prologue(&prologue)?.build_initiator()?))
    }

    /// The first message.
    pub(super) fn offer(&mut self) -> Result<[u8; EXCHANGE_BYTES], snow::Error> {
        let mut message = [0; EXCHANGE_BYTES];
        self.0.write_message(&[], &mut message)?;
        Ok(message)
    }

    /// Takes the other side's message.
    pub(super) fn finish(mut self, message: &[u8]) -> Result<Cipher, snow::Error> {
        self.0.read_message(message, &mut [])?;
        Cipher::of(self.0)
    }

    /// Both of the answering side: the message for the caller, and what seals from then on.
    pub(super) fn accept(
        secret: &Secret,
        transcript: &[&[u8]],
        offer: &[u8],
    ) -> Result<([u8; EXCHANGE_BYTES], Cipher), snow::Error> {
        let prologue = transcript.concat();
        let key = secret.noise_key();
        let builder = Builder::new(PROTOCOL.parse()?).psk(0, &key)?;
        let mut state = builder.prologue(&prologue)?.build_responder()?;
        state.read_message(offer, &mut [])?;
        let mut message = [0; EXCHANGE_BYTES];
        state.write_message(&[], &mut message)?;
        Ok((message, Cipher::of(state)?))
    }
}

impl Cipher {
    fn of(state: HandshakeState) -> Result<Self, snow::Error> {
        Ok(Self {
            state: state.into_stateless_transport_mode()?,
            writing: Mutex::default(),
            reading: Mutex::default(),
        })
    }

    /// Seals some content as the next record, length included.
    fn seal(&self, writing: &mut Writing) -> io::Result<()> {
        let Writing {
            number,
            content,
            record,
        } = writing;
        record.resize(2 + content.len() + TAG_BYTES, 0);
        let count = self
            .state
            .write_message(*number, content, &mut record[2..])
            .map_err(io::Error::other)?;
        let length = u16::try_from(count).map_err(io::Error::other)?;
        record[..2].copy_from_slice(&length.to_le_bytes());
        record.truncate(2 + count);
        *number += 1;
        content.clear();
        Ok(())
    }

    /// The bytes of the next record, for the fuzz targets.
    #[cfg(feature = "fuzzing")]
    pub(super) fn sealed(&self, content: &[u8]) -> io::Result<Vec<u8>> {
        let mut writing = lock(&self.writing);
        writing.content = content.to_vec();
        self.seal(&mut writing)?;
        Ok(writing.record.clone())
    }

    pub(super) fn read(&self, from: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
        let mut reading = lock(&self.reading);
        let reading = &mut *reading;
        if reading.taken == reading.content.len() {
            let mut length = [0; 2];
            from.read_exact(&mut length)?;
            reading
                .record
                .resize(usize::from(u16::from_le_bytes(length)), 0);
            from.read_exact(&mut reading.record)?;
            let content = reading.record.len().saturating_sub(TAG_BYTES);
            // A large piece is opened where it stays.
            let direct = content > 0 && into.len() >= content;
            reading.content.resize(if direct { 0 } else { content }, 0);
            reading.taken = 0;
            let target = if direct {
                &mut into[..content]
            } else {
                &mut reading.content[..]
            };
            let opened = self
                .state
                .read_message(reading.number, &reading.record, target);
            if opened.is_err() || content == 0 {
                reading.content.clear();
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "bytes that the rank did not seal for this connection",
                ));
            }
            reading.number += 1;
            if direct {
                return Ok(content);
            }
        }
        let left = &reading.content[reading.taken..];
        let count = left.len().min(into.len());
        into[..count].copy_from_slice(&left[..count]);
        reading.taken += count;
        Ok(count)
    }
}

impl Connection {
    pub(super) fn new(stream: TcpStream, cipher: Option<Cipher>) -> Self {
        let cipher = cipher.map(Box::new);
        Self { stream, cipher }
    }

    /// The socket, for its settings and its end.
    pub(super) fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// Ends it in both directions.
    pub(super) fn shut(&self) {
        super::acceptor::shut(&self.stream);
    }

    /// Nothing more is written.
    pub(super) fn end_writing(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    /// Reads what was said, out of the socket's own bytes.
    pub(super) fn read(&self, from: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
        match &self.cipher {
            None => from.read(into),
            Some(_) if into.is_empty() => Ok(0),
            Some(cipher) => cipher.read(from, into),
        }
    }

    /// Writes pieces one after another; counts the bytes on the wire.
    pub(super) fn write_pieces(
        &self,
        pieces: &mut [IoSlice<'_>],
        written: &AtomicU64,
    ) -> io::Result<()> {
        let Some(cipher) = &self.cipher else {
            return self.send(pieces, written);
        };
        let mut writing = lock(&cipher.writing);
        let writing = &mut *writing;
        for piece in pieces.iter() {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let room = CONTENT_BYTES - writing.content.len();
                let (now, later) = rest.split_at(room.min(rest.len()));
                writing.content.extend_from_slice(now);
                rest = later;
                if writing.content.len() == CONTENT_BYTES {
                    cipher.seal(writing)?;
                    self.send(&mut [IoSlice::new(&writing.record)], written)?;
                }
            }
        }
        if !writing.content.is_empty() {
            cipher.seal(writing)?;
            self.send(&mut [IoSlice::new(&writing.record)], written)?;
        }
        Ok(())
    }

    fn send(&self, mut pieces: &mut [IoSlice<'_>], written: &AtomicU64) -> io::Result<()> {
        IoSlice::advance_slices(&mut pieces, 0);
        let socket = SockRef::from(&self.stream);
        while !pieces.is_empty() {
            let batch = &pieces[..pieces.len().min(MOST_PIECES)];
            match socket.send_vectored_with_flags(batch, MSG_NOSIGNAL) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    written.fetch_add(count as u64, Ordering::Relaxed);
                    IoSlice::advance_slices(&mut pieces, count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Two ends of a sealed connection.
    fn sealed() -> (Connection, Connection) {
        let secret = Secret::new(b"the secret of the tests".to_vec()).unwrap();
        let transcript: [&[u8]; 2] = [b"hello", b"challenge"];
        let mut caller = KeyExchange::of_caller(&secret, &transcript).unwrap();
        let offer = caller.offer().unwrap();
        let (answer, answering) = KeyExchange::accept(&secret, &transcript, &offer).unwrap();
        let calling = caller.finish(&answer).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        (
            Connection::new(stream, Some(calling)),
            Connection::new(other, Some(answering)),
        )
    }

    fn write(connection: &Connection, pieces: &[&[u8]]) -> u64 {
        let mut pieces: Vec<IoSlice<'_>> = pieces.iter().copied().map(IoSlice::new).collect();
        let written = AtomicU64::new(0);
        connection.write_pieces(&mut pieces, &written).unwrap();
        written.into_inner()
    }

    fn read_exact(connection: &Connection, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let count = connection.read(&mut connection.socket(), into)?;
            into = &mut into[count..];
        }
        Ok(())
    }

    #[test]
    fn bytes_come_as_they_were_written_in_any_pieces() {
        let (one, other) = sealed();
        let large: Vec<u8> = (0..300_000_u32).map(|place| (place % 251) as u8).collect();
        let written = write(&one, &[b"head", b"", &large]);
        assert_eq!(written, 4 + 300_000 + 5 * 18);
        let mut head = [0; 3];
        read_exact(&other, &mut head).unwrap();
        assert_eq!(&head, b"hea");
        let mut rest = vec![0; 1 + 300_000];
        read_exact(&other, &mut rest).unwrap();
        assert_eq!((rest[0], &rest[1..]), (b'd', &large[..]));
        write(&other, &[b"back"]);
        let mut back = [0; 4];
        read_exact(&one, &mut back).unwrap();
        assert_eq!(&back, b"back");
    }

    #[test]
    fn a_changed_repeated_or_foreign_record_is_not_opened() {
        let damages: [fn(&mut Vec<u8>); 4] = [
            |bytes| bytes[10] ^= 1,
            |bytes| drop(bytes.drain(..bytes.len() / 2)),
            |bytes| bytes.splice(0..0, [3, 0, 1, 2, 3]).for_each(drop),
            |bytes| *bytes = vec![0; 100],
        ];
        for damage in damages {
            let (one, other) = sealed();
            write(&one, &[b"first"]);
            write(&one, &[b"other"]);
            let mut bytes = vec![0; 2 * (2 + 5 + TAG_BYTES)];
            other.socket().read_exact(&mut bytes).unwrap();
            damage(&mut bytes);
            let mut content = [0; 10];
            let error = other.read(&mut &bytes[..], &mut content).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let (one, other) = sealed();
        write(&one, &[b"first"]);
        let mut record = vec![0; 2 + 5 + TAG_BYTES];
        other.socket().read_exact(&mut record).unwrap();
        let twice = [&record[..], &record].concat();
        let (mut from, mut content) = (&twice[..], [0; 10]);
        assert_eq!(other.read(&mut from, &mut content).unwrap(), 5);
        assert!(
            other.read(&mut from, &mut content).is_err(),
            "it was replayed"
        );
        let (_, foreign) = sealed();
        assert!(foreign.read(&mut &record[..], &mut content).is_err());
    }

    #[test]
    fn another_secret_or_another_handshake_before_it_gives_no_keys() {
        let secret = Secret::new(b"the right secret".to_vec()).unwrap();
        let offer = KeyExchange::of_caller(&secret, &[b"a"])
            .unwrap()
            .offer()
            .unwrap();
        assert!(KeyExchange::accept(&secret, &[b"a"], &offer).is_ok());
        assert!(KeyExchange::accept(&secret, &[b"b"], &offer).is_err());
        let wrong = Secret::new(b"the wrong secret".to_vec()).unwrap();
        assert!(KeyExchange::accept(&wrong, &[b"a"], &offer).is_err());
    }
}
