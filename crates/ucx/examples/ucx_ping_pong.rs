//! Latency and bandwidth of the UCX layer between two processes of this machine.
//!
//! `cargo run --release -p shardwright-ucx --example ucx_ping_pong -- LIBRARY [TRANSPORTS [PART]]`
//! where `LIBRARY` is a directory with `libucp.so.0`, and `PART` is `latency` or `bandwidth`. With
//! no arguments the variable `SHARDWRIGHT_UCX_LIBRARY` says where the library is.
#![expect(clippy::print_stdout, reason = "the figures are the output")]

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_ucx::{
    Armed, Candidates, EndpointId, EventHandle, Library, Options, Worker, WorkerEvent,
};
use shardwright_wire::Buffer;

type RequestStatus<T> = Result<T, Box<dyn Error>>;

/// Header bytes: echo the message, count it, acknowledge it, end.
const ECHO: u8 = 1;
const COUNT: u8 = 2;
const ACKNOWLEDGE: u8 = 3;
const END: u8 = 4;
/// Header byte: the payload says for how many microseconds to spin from now on.
const SPIN: u8 = 5;

/// Messages in flight while streaming: few enough to stay in a cache, as `ucx_perftest`'s one buffer does.
const WINDOW: usize = 4;

/// The longest sleep; an event that was missed would show as one.
const LONGEST_SLEEP: Duration = Duration::from_secs(5);

struct Side {
    worker: Worker,
    events: EventHandle,
    peer: EndpointId,
    spin: Duration,
}

impl Side {
    fn new(rank: u32, exchange: impl FnOnce(&str) -> RequestStatus<String>) -> RequestStatus<Self> {
        let mut arguments = std::env::args().skip(1);
        let configured = std::env::var_os("SHARDWRIGHT_UCX_LIBRARY").map(Into::into);
        let library = Library::find(&Candidates {
            configured: arguments.next().map(Into::into).or(configured),
            ..Candidates::default()
        })?;
        let mut options = Options::default();
        if let Some(transports) = arguments.next() {
            options.transports = transports;
        }
        options.spare_memory = 1 << 30;
        let mut worker = Worker::create(&library, Rank(rank), &options)?;
        let own: Vec<String> = worker.address()?.iter().map(u8::to_string).collect();
        let other = exchange(&own.join(" "))?;
        let address: Vec<u8> = other
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            peer: worker.connect(Rank(1 - rank), &address)?,
            events: worker.event_handle()?,
            worker,
            spin: Duration::ZERO,
        })
    }

    /// Waits until something has happened: spins for a while, then sleeps.
    fn events(&mut self) -> RequestStatus<Vec<WorkerEvent>> {
        let mut idle_since = Instant::now();
        loop {
            let progressed = self.worker.progress()?;
            let events = self.worker.take_events()?;
            if !events.is_empty() {
                return Ok(events);
            }
            if progressed {
                idle_since = Instant::now();
            } else if idle_since.elapsed() >= self.spin {
                match self.worker.arm()? {
                    Armed::Ready => {
                        assert!(self.events.wait(LONGEST_SLEEP)?, "nothing came");
                        idle_since = Instant::now();
                    }
                    Armed::Busy => std::thread::yield_now(),
                }
            }
        }
    }

    /// Sets for how long both sides spin before they sleep.
    fn set_spin(&mut self, microseconds: u32) -> RequestStatus<()> {
        self.spin = Duration::from_micros(microseconds.into());
        self.send(SPIN, vec![Buffer::copy_of(&microseconds.to_le_bytes())])
    }

    fn send(&mut self, kind: u8, payload: Vec<Buffer>) -> RequestStatus<()> {
        Ok(self.worker.send(self.peer, &[kind], payload, 0)?)
    }

    /// Waits for a message, and says how many were sent meanwhile.
    fn receive(&mut self) -> RequestStatus<()> {
        loop {
            for event in self.events()? {
                match event {
                    WorkerEvent::Received { payload, .. } => {
                        self.worker.give_back(payload)?;
                        return Ok(());
                    }
                    WorkerEvent::Sent { .. } => {}
                    other => return Err(format!("{other:?}").into()),
                }
            }
        }
    }

    /// The other side: does what the headers say.
    fn serve(&mut self) -> RequestStatus<()> {
        loop {
            for event in self.events()? {
                let WorkerEvent::Received {
                    header, payload, ..
                } = event
                else {
                    continue;
                };
                match header[0] {
                    ECHO => {
                        self.send(ECHO, vec![payload])?;
                        continue;
                    }
                    ACKNOWLEDGE => self.send(ACKNOWLEDGE, Vec::new())?,
                    SPIN => {
                        let microseconds = u32::from_le_bytes(payload.as_bytes().try_into()?);
                        self.spin = Duration::from_micros(microseconds.into());
                    }
                    END => return Ok(()),
                    _ => {}
                }
                self.worker.give_back(payload)?;
            }
        }
    }

    fn latency(&mut self, bytes: usize, rounds: u32) -> RequestStatus<f64> {
        let payload = Buffer::copy_of(&vec![1; bytes]);
        let start = Instant::now();
        for _ in 0..rounds {
            self.send(ECHO, vec![payload.clone()])?;
            self.receive()?;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds) / 2.0)
    }

    fn bandwidth(&mut self, bytes: u32, count: u32) -> RequestStatus<f64> {
        let payload = Buffer::copy_of(&vec![1; bytes as usize]);
        let start = Instant::now();
        let mut in_flight = 0;
        for _ in 0..count {
            self.send(COUNT, vec![payload.clone()])?;
            in_flight += 1;
            while in_flight >= WINDOW {
                let sent = |event: &&WorkerEvent| matches!(event, WorkerEvent::Sent { .. });
                in_flight -= self.events()?.iter().filter(sent).count().min(in_flight);
            }
        }
        self.send(ACKNOWLEDGE, vec![payload])?;
        self.receive()?;
        Ok(f64::from(count) * f64::from(bytes) / start.elapsed().as_secs_f64() / 1e9)
    }
}

/// Best and median of several measurements: other work on the machine disturbs some of them.
fn repeat(times: u32, mut measure: impl FnMut() -> RequestStatus<f64>) -> RequestStatus<Vec<f64>> {
    measure()?; // connects, and touches the memory
    let mut figures: Vec<f64> = (0..times)
        .map(|_| measure())
        .collect::<RequestStatus<_>>()?;
    figures.sort_by(f64::total_cmp);
    Ok(figures)
}

fn main() -> RequestStatus<()> {
    if std::env::var_os("UCX_PING_PONG_SERVES").is_some() {
        let mut side = Side::new(1, |own| {
            println!("{own}");
            let mut line = String::new();
            std::io::stdin().lock().read_line(&mut line)?;
            Ok(line)
        })?;
        side.serve()?;
        side.worker.close(Duration::from_secs(5));
        return Ok(());
    }
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args().skip(1))
        .env("UCX_PING_PONG_SERVES", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (mut input, output) = (child.stdin.take(), child.stdout.take());
    let mut side = Side::new(0, |own| {
        let mut line = String::new();
        BufReader::new(output.ok_or("no output")?).read_line(&mut line)?;
        writeln!(input.as_mut().ok_or("no input")?, "{own}")?;
        Ok(line)
    })?;
    let only = std::env::args().nth(3).unwrap_or_default();
    if only != "bandwidth" {
        for (spin, name, rounds) in [(1_000_000, "spinning", 1000), (0, "asleep", 200)] {
            side.set_spin(spin)?;
            for bytes in [64, 4096] {
                let figures = repeat(20, || side.latency(bytes, rounds))?;
                let (best, median) = (figures[0], figures[figures.len() / 2]);
                println!(
                    "{name:>9} {bytes:>9} B one way  best {best:7.2} us, median {median:7.2} us"
                );
            }
        }
    }
    println!(
        "          transports: {}",
        side.worker.transports(side.peer)?.join(" ")
    );
    if only != "latency" {
        side.set_spin(50)?;
        for (bytes, count) in [(256 << 10, 400), (4 << 20, 40), (64 << 20, 4)] {
            let figures = repeat(12, || side.bandwidth(bytes, count))?;
            let (best, median) = (figures[figures.len() - 1], figures[figures.len() / 2]);
            println!(
                "streaming {bytes:>9} B          best {best:5.2} GB/s, median {median:5.2} GB/s"
            );
        }
    }
    side.send(END, Vec::new())?;
    side.worker.close(Duration::from_secs(5));
    child.wait()?;
    Ok(())
}
