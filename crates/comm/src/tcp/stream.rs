//! Reading and writing whole frames.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::exchange::Exchange;
use shardwright_buffers::ImportError;
use shardwright_core::Rank;
use shardwright_wire::codec::{decode_control, decode_heartbeat, encode};
use shardwright_wire::{
    Body, CodecError, Frame, FrameKind, HEADER_BYTES, Header, Heartbeat, Limits, Message, NoMemory,
    ObjectMessage, Placed, Value,
};

use super::connection::Connection;

/// A control part grows as it arrives, by at most this much at a time.
const CHUNK: usize = 1 << 20;

/// A frame's content.
pub(super) enum Received {
    Message(Message),
    Heartbeat(Heartbeat),
}

/// Why no frame could be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Shared(#[from] ImportError),
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// Reads a peer's next frame, tensors straight into their buffers. A tensor's memory is asked for when all before it
/// has arrived, and the system hands it out as its bytes arrive.
pub(super) fn read_frame(
    from: &mut impl Read,
    peer: Rank,
    limits: &Limits,
    exchange: &Exchange,
) -> Result<Received, ReadError> {
    let mut header = [0; HEADER_BYTES];
    from.read_exact(&mut header)?;
    let header = Header::parse(&header, limits)?;
    let mut control = Vec::new();
    let control_bytes = header.control_bytes as usize;
    while control.len() < control_bytes {
        let begin = control.len();
        control.resize(control_bytes.min(begin + CHUNK), 0);
        from.read_exact(&mut control[begin..])?;
    }
    if header.kind == FrameKind::Heartbeat {
        return Ok(Received::Heartbeat(decode_heartbeat(&control)?));
    }
    let incoming = decode_control(&control, header.tensor_bytes, limits)?;
    let mut buffers = Vec::with_capacity(incoming.placed().len());
    for Placed { bytes, shared } in incoming.placed() {
        buffers.push(match shared {
            Some(place) => exchange.receive(peer, *place, *bytes)?,
            None => exchange.filled_by(*bytes, |into| {
                from.read_exact(into).map_err(ReadError::from)
            })?,
        });
    }
    Ok(Received::Message(incoming.complete(buffers)))
}

/// Writes one frame, all its parts gathered into as few calls as possible.
pub(super) fn write_frame(to: &Connection, frame: &Frame, written: &AtomicU64) -> io::Result<()> {
    let mut parts: Vec<IoSlice<'_>> = Vec::with_capacity(frame.tensors.len() + 1);
    parts.push(IoSlice::new(&frame.head));
    parts.extend(
        frame
            .tensors
            .iter()
            .map(|tensor| IoSlice::new(tensor.as_bytes())),
    );
    to.write_pieces(&mut parts, written)
}

/// Bytes of a frame that has begun which come within a liveness timeout at least: what a rank's heartbeats alone do
/// not reach, and any link does.
const LEAST_BYTES: u64 = 4096;

/// Fewer pieces do not trickle: this rank itself may have stood still.
const LEAST_PIECES: u32 = 3;

/// What a peer says, with a count of the bytes on the wire. A frame that has begun has to get on (TCP-2): bytes that
/// trickle would else keep its receiver waiting for ever.
pub(super) struct Counted<'a> {
    connection: &'a Connection,
    read: &'a AtomicU64,
    liveness: Duration,
    /// How the frame gets on; `None` between two frames.
    pace: Option<Pace>,
}

/// What has come of a frame lately.
#[derive(Default)]
struct Pace {
    waited: Duration,
    bytes: u64,
    pieces: u32,
}

impl<'a> Counted<'a> {
    pub(super) fn new(connection: &'a Connection, read: &'a AtomicU64, liveness: Duration) -> Self {
        Self {
            connection,
            read,
            liveness,
            pace: None,
        }
    }

    /// The next byte begins a frame.
    pub(super) fn begin_frame(&mut self) {
        self.pace = None;
    }
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Some(pace) = &mut self.pace
            && pace.waited > self.liveness
        {
            if pace.bytes < LEAST_BYTES && pace.pieces >= LEAST_PIECES {
                return Err(io::ErrorKind::TimedOut.into());
            }
            *pace = Pace::default();
        }
        let before = self.read.load(Ordering::Relaxed);
        let began = Instant::now();
        let mut raw = CountedSocket(self.connection.socket(), self.read);
        let count = self.connection.read(&mut raw, into)?;
        // How long it took until the frame began is no matter.
        if let Some(pace) = &mut self.pace {
            pace.waited += began.elapsed();
            pace.bytes += self.read.load(Ordering::Relaxed) - before;
            pace.pieces += 1;
        } else {
            self.pace = Some(Pace::default());
        }
        Ok(count)
    }
}

struct CountedSocket<'a>(&'a TcpStream, &'a AtomicU64);

impl Read for CountedSocket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(into)?;
        self.1.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// A stream all of whose reads and writes together end by a deadline.
pub(super) struct Hurried<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> Hurried<'a> {
    pub(super) fn new(stream: &'a TcpStream, limit: Duration) -> Self {
        Self {
            stream,
            deadline: Instant::now() + limit,
        }
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            Ok(left)
        }
    }
}

/// What a rank says, in a hurry.
struct HurriedConnection<'a> {
    connection: &'a Connection,
    raw: Hurried<'a>,
}

impl Read for HurriedConnection<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.connection.read(&mut self.raw, into)
    }
}

/// Linux calls a timeout of a socket "would block".
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock {
        return io::Error::new(io::ErrorKind::TimedOut, "no answer in time");
    }
    error
}

impl Read for Hurried<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(into).map_err(timed_out)
    }
}

impl Write for Hurried<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// While a job starts, ranks exchange small values and nothing else.
const START_LIMITS: Limits = Limits {
    control_bytes: 16 << 20,
    tensor_bytes: 0,
    tensors: 0,
    depth: 8,
    nodes: 1 << 20,
    dimensions: 0,
};

/// Sends a small value under a name.
pub(super) fn send_value(
    to: &Connection,
    limit: Duration,
    name: &str,
    value: Value,
) -> io::Result<()> {
    let body = Body {
        value,
        tensors: Vec::new(),
    };
    let message = Message::Object(Box::new(ObjectMessage {
        channel: name.to_owned(),
        body,
    }));
    let frame = encode(&message, &START_LIMITS).map_err(io::Error::other)?;
    // Small enough for a socket whose other end is there; who reads nothing is given up.
    to.socket().set_write_timeout(Some(limit))?;
    write_frame(to, &frame, &AtomicU64::new(0)).map_err(timed_out)
}

/// Receives a small value and its name.
pub(super) fn receive_value(
    connection: &Connection,
    limit: Duration,
) -> Result<(String, Value), ReadError> {
    let raw = Hurried::new(connection.socket(), limit);
    let mut from = HurriedConnection { connection, raw };
    // Without tensors it does not matter from whom they would come.
    match read_frame(&mut from, Rank(0), &START_LIMITS, &Exchange::default())? {
        Received::Message(Message::Object(object)) => Ok((object.channel, object.body.value)),
        Received::Message(_) | Received::Heartbeat(_) => {
            Err(ReadError::Io(io::ErrorKind::InvalidData.into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::heavy;

    /// Hands the head of a frame out, looks at the process's memory when the tensor is due, and ends.
    struct Announcement {
        head: io::Cursor<Vec<u8>>,
        resident_pages: Option<u64>,
    }

    fn resident_pages() -> u64 {
        let numbers = std::fs::read_to_string("/proc/self/statm").unwrap();
        numbers.split(' ').nth(1).unwrap().parse().unwrap()
    }

    impl Read for Announcement {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let count = self.head.read(into)?;
            if count == 0 {
                self.resident_pages = Some(resident_pages());
            }
            Ok(count)
        }
    }

    #[test]
    fn an_announced_tensor_takes_memory_only_as_its_bytes_arrive() {
        const BYTES: usize = 256 << 20;
        let frame = encode(&heavy(BYTES, 0), &Limits::default()).unwrap();
        let mut from = Announcement {
            head: io::Cursor::new(frame.head),
            resident_pages: None,
        };
        drop(frame.tensors);
        let before = resident_pages();
        assert!(matches!(
            read_frame(&mut from, Rank(1), &Limits::default(), &Exchange::default()),
            Err(ReadError::Io(_))
        ));
        let grown = from.resident_pages.unwrap().saturating_sub(before) * 4096;
        assert!(grown < BYTES as u64 / 4, "{grown} bytes");
    }
}
