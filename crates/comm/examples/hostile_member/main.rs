//! A rank that holds the job's secret and means harm, over UCX: the attack test starts it beside genuine ranks.
//!
//! `hostile_member frames` prints frames with which a member may do harm over TCP, a name and hexadecimal digits each.
//! `hostile_member ATTACK RANK WORLD PORT SECRET VERSION FINGERPRINT LIBRARY`, the secret in hexadecimal digits. It joins
//! the job, does to rank 0 what the attack says, and says how many messages it has sent; then it waits to be killed, so
//! that what the ranks notice is the attack.
#![expect(clippy::print_stdout, reason = "the output is for the test")]

mod frames;

use std::error::Error;
use std::time::{Duration, Instant};

use shardwright_comm::{CommOptions, JobOptions, Rendezvous, Secret, hostile};
use shardwright_core::Rank;
use shardwright_ucx::{Candidates, EndpointId, Library, Options, Worker, WorkerEvent};
use shardwright_wire::{Buffer, Limits};

use frames::{object, places, print_frames};

type Outcome<T> = Result<T, Box<dyn Error>>;

const KEY_BYTES: usize = 16;
const VICTIM: Rank = Rank(0);
/// How long the ranks may take to come, and this one stays.
const WAIT: Duration = Duration::from_mins(1);

struct Attacker {
    worker: Worker,
    victim: EndpointId,
    key: Vec<u8>,
    sent: u64,
}

impl Attacker {
    /// Sends a message with any header; a failure of it is the victim's defence.
    fn send(&mut self, header: &[u8], payload: Buffer) -> Outcome<()> {
        self.sent += 1;
        self.worker
            .send(self.victim, header, vec![payload], self.sent)?;
        self.settle(Duration::from_millis(2))
    }

    /// Sends a part by its name.
    fn part(&mut self, message: u64, part: u32, payload: Buffer) -> Outcome<()> {
        let name = [&message.to_le_bytes()[..], &part.to_le_bytes()].concat();
        let header = [&self.key[..], &name].concat();
        self.send(&header, payload)
    }

    fn settle(&mut self, limit: Duration) -> Outcome<()> {
        let began = Instant::now();
        while began.elapsed() < limit {
            self.worker.progress()?;
            for event in self.worker.take_events()? {
                if let WorkerEvent::EndpointFailed { reason, .. } = event {
                    return Err(reason.into());
                }
            }
        }
        Ok(())
    }

    fn attack(&mut self, name: &str) -> Outcome<()> {
        let noise = |length: usize| Buffer::copy_of(&vec![0xa5; length]);
        match name {
            // Nobody's word: the job goes on, until the one message that is this rank's own.
            "without the key" => {
                for round in 0..200_usize {
                    let mut key = self.key.clone();
                    key[round % KEY_BYTES] ^= 1 << (round % 8);
                    let header = [&key[..], &[0; 12]].concat();
                    let cut = round % (header.len() + 1);
                    let bytes = if round % 2 == 0 {
                        &header[..]
                    } else {
                        &header[..cut.min(KEY_BYTES - 1)]
                    };
                    self.send(bytes, noise(round * 997))?;
                }
                self.part(0, 0, noise(100))
            }
            "no name" => {
                let header = [&self.key[..], &[0; 11]].concat();
                self.send(&header, noise(100))
            }
            "no frame" => self.part(0, 0, noise(100)),
            "a frame of another kind" => self.part(0, 0, Buffer::copy_of(b"SWM\x01")),
            "a late message" => self.part(1 << 40, 0, noise(100)),
            "the last message" => self.part(u64::MAX, u32::MAX, noise(8192)),
            "a small early part" => self.part(0, 3, noise(10)),
            "early parts twice" => {
                self.part(0, 3, noise(8192))?;
                self.part(0, 3, noise(8192))
            }
            "many early parts" => {
                for part in 1..400 {
                    self.part(0, part, noise(8192))?;
                }
                self.part(0, 1, noise(8192))
            }
            "many messages begun" => {
                for message in 1..400 {
                    self.part(message, 1, noise(8192))?;
                }
                self.part(1 << 16, 1, noise(8192))
            }
            other => {
                let found = places().into_iter().find(|(name, _)| *name == other);
                let (_, place) = found.ok_or_else(|| format!("no attack is called {other}"))?;
                let frame = object(8192, Some(place));
                self.part(0, 0, Buffer::copy_of(&frame.head))
            }
        }
    }
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments == ["frames"] {
        return print_frames().map_err(Into::into);
    }
    let [
        attack,
        rank,
        world,
        port,
        secret,
        version,
        fingerprint,
        library,
    ] = &arguments[..]
    else {
        return Err("ATTACK RANK WORLD PORT SECRET VERSION FINGERPRINT LIBRARY".into());
    };
    let (rank, world) = (Rank(rank.parse()?), world.parse()?);
    let secret: Vec<u8> = (0..secret.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&secret[at..at + 2], 16))
        .collect::<Result<_, _>>()?;
    let library = Library::find(&Candidates {
        configured: Some(library.into()),
        ..Candidates::default()
    })?;
    let mut worker = Worker::create(&library, rank, &Options::default())?;
    let own_key = [7; KEY_BYTES];
    let ucx_address = [&own_key[..], &worker.address()?].concat();
    let host_name = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    let options = JobOptions {
        rank,
        world,
        place: Rendezvous::at("127.0.0.1".to_owned(), port.parse()?, Secret::new(secret)?),
        bind_address: None,
        host_name: host_name.trim().to_owned(),
        version: version.clone(),
        fingerprint: fingerprint.clone(),
        connect_timeout: WAIT,
        liveness_timeout: WAIT,
        limits: Limits::default(),
        comm: CommOptions::default(),
        buffer_bytes: 1 << 20,
        ucx: true,
        lacks: None,
    };
    let (job, addresses) = hostile::join(options, "ucx", ucx_address)?;
    let place = addresses.get(&VICTIM).ok_or("rank 0 has no UCX")?;
    let (key, address) = place.split_at(KEY_BYTES);
    let key = key.to_vec();
    let victim = worker.connect(VICTIM, address)?;
    let mut attacker = Attacker {
        worker,
        victim,
        key,
        sent: 0,
    };
    let outcome = attacker.attack(attack);
    println!("sent {} {outcome:?}", attacker.sent);
    // Until the test kills it.
    let began = Instant::now();
    while began.elapsed() < WAIT && attacker.settle(Duration::from_millis(50)).is_ok() {}
    std::thread::sleep(WAIT.saturating_sub(began.elapsed()));
    drop(job);
    Ok(())
}
