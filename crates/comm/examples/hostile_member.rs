//! A rank that holds the job's secret and means harm, over UCX: the attack test starts it beside genuine ranks.
//!
//! `hostile_member frames` prints frames with which a member may do harm over TCP, a name and hexadecimal digits each.
//! `hostile_member ATTACK RANK WORLD PORT SECRET VERSION FINGERPRINT LIBRARY`, the secret in hexadecimal digits. It joins
//! the job, does to rank 0 what the attack says, and says how many messages it has sent; then it waits to be killed, so
//! that what the ranks notice is the attack.
#![expect(clippy::print_stdout, reason = "the output is for the test")]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwright_comm::routing::Choice;
use shardwright_comm::ucx::{
    Candidates, EndpointId, Event, Library, Options, Worker, transports_of,
};
use shardwright_comm::{JobOptions, Pool, Router, Secret, connect};
use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};
use shardwright_wire::codec::{encode, encode_placed};
use shardwright_wire::{
    Abort, Body, Buffer, Delivery, ErrorReport, Fetch, ForwardOver, Frame, HeldTensor, Limits,
    Message, ObjectMessage, Outcome as WorkOutcome, Place, Request, Response, SharedMemory,
    SharedPlace, StepBegin, StepEnd, TaskContext, TaskEvent, TaskOrder, TensorMeta, TensorPart,
    Value, Work,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const KEY_BYTES: usize = 16;
const VICTIM: Rank = Rank(0);
/// How long the ranks may take to come, and this one stays.
const WAIT: Duration = Duration::from_secs(60);

/// A tensor of so many bytes in an object, which lies at a place in shared memory where one is given.
fn object(bytes: u64, place: Option<SharedPlace>) -> Frame {
    let meta = TensorMeta {
        dtype: "uint8".to_owned(),
        shape: vec![bytes],
        strides: vec![1],
        device: "cpu".to_owned(),
        requires_grad: false,
    };
    let data = Buffer::copy_of(&vec![0x5a; bytes as usize]);
    let body = Body {
        value: Value::Tensor(0),
        tensors: vec![TensorPart::new(meta, data)],
    };
    let channel = "hostile".to_owned();
    let message = Message::Object(Box::new(ObjectMessage { channel, body }));
    encode_placed(&message, &Limits::default(), &mut |_| place).expect("a small message")
}

/// Places that are none, in either memory.
fn places() -> Vec<(&'static str, SharedPlace)> {
    let (host, device) = (SharedMemory::Host, SharedMemory::Device);
    let place = |memory, slot, offset| SharedPlace {
        memory,
        slot,
        offset,
    };
    vec![
        ("a place in the buffer's head", place(host, 0, 0)),
        ("a place that is not lent", place(host, 9, 256 << 10)),
        (
            "a place that is not aligned",
            place(host, 9, (256 << 10) + 1),
        ),
        ("a place beyond the end", place(host, 9, 1 << 40)),
        ("a place that wraps around", place(host, 9, u64::MAX - 63)),
        ("a slot beyond the last", place(host, u32::MAX, 256 << 10)),
        ("a place in device memory", place(device, 9, 0)),
        ("a place beyond device memory", place(device, 9, u64::MAX)),
    ]
}

fn whole(frame: &Frame) -> Vec<u8> {
    let tensors = frame.tensors.iter().map(Buffer::as_bytes);
    std::iter::once(&frame.head[..])
        .chain(tensors)
        .collect::<Vec<_>>()
        .concat()
}

fn plain(message: &Message) -> Vec<u8> {
    whole(&encode(message, &Limits::default()).expect("a small message"))
}

/// Messages that name what nobody knows.
fn unknown_ids() -> Vec<(&'static str, Message)> {
    let (step, request) = (StepEpoch(u64::MAX), RequestId(u64::MAX));
    let body = || Body {
        value: Value::None,
        tensors: Vec::new(),
    };
    let far = Rank(u32::MAX);
    let report = ErrorReport {
        rank: far,
        host: "nowhere".to_owned(),
        module: None,
        microbatch: None,
        phase: None,
        kind: "Hostile".to_owned(),
        message: "an error that nobody made".to_owned(),
        traceback: String::new(),
    };
    let held = HeldTensor {
        holder: far,
        requester: far,
        request,
        index: u32::MAX,
    };
    let mut messages = Vec::new();
    for (name, step) in [
        ("of a step to come", step),
        ("of the first step", StepEpoch(1)),
    ] {
        let named = |what: &str| -> &'static str { format!("{what} {name}").leak() };
        messages.extend([
            (
                named("a response to nothing"),
                Message::Response(Box::new(Response {
                    id: request,
                    step,
                    responder: far,
                    outcome: WorkOutcome::Value(body()),
                })),
            ),
            (
                named("a failure of nothing"),
                Message::Response(Box::new(Response {
                    id: request,
                    step,
                    responder: far,
                    outcome: WorkOutcome::Failed(report.clone()),
                })),
            ),
            (
                named("a fetch of what nobody holds"),
                Message::Fetch(Fetch {
                    step,
                    tensor: held,
                    to: far,
                    requester: far,
                    request,
                    index: u32::MAX,
                }),
            ),
            (
                named("a delivery of what nobody wants"),
                Message::Delivery(Box::new(Delivery {
                    step,
                    requester: far,
                    request,
                    index: u32::MAX,
                    body: body(),
                })),
            ),
            (
                named("a beginning"),
                Message::StepBegin(StepBegin {
                    step,
                    function: "nothing".to_owned(),
                    num_microbatches: u32::MAX,
                    one_at_a_time: true,
                }),
            ),
            (
                named("an end"),
                Message::StepEnd(Box::new(StepEnd { step, body: body() })),
            ),
            (
                named("an abort"),
                Message::Abort(Box::new(Abort {
                    step,
                    error: report.clone(),
                })),
            ),
            (
                named("an order of tasks"),
                Message::TaskOrder(Box::new(TaskOrder {
                    step,
                    number: u64::MAX,
                    events: vec![TaskEvent::Enters("nothing".to_owned()); 1000],
                })),
            ),
            (
                named("forwards that are over"),
                Message::ForwardOver(ForwardOver {
                    step,
                    microbatch: MicrobatchId(u32::MAX),
                }),
            ),
            (
                named("a request of a module that is none"),
                Message::Request(Box::new(Request {
                    id: request,
                    step,
                    model: ModelId(u32::MAX),
                    work: Work::Forward {
                        module: ModuleId(u32::MAX),
                        range: None,
                    },
                    microbatch: MicrobatchId(u32::MAX),
                    requester: far,
                    place: Place {
                        parent: Some(request),
                        call: CallId(u32::MAX),
                    },
                    path: CallPath::default(),
                    context: TaskContext {
                        grad_mode: true,
                        inference_mode: false,
                        autocast: Vec::new(),
                        checkpointing: false,
                    },
                    hold: true,
                    released: vec![request; 100],
                    body: body(),
                })),
            ),
        ]);
    }
    messages
}

/// Prints what a member may put on a connection of TCP: a name, and the bytes in hexadecimal digits.
fn print_frames() {
    let good = whole(&object(8192, None));
    let damaged = |at: usize, bytes: &[u8]| {
        let mut copy = good.clone();
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        copy
    };
    let mut frames: Vec<(String, Vec<u8>)> = vec![
        ("garbage".to_owned(), vec![0xa5; 500]),
        ("another version".to_owned(), damaged(4, &[0xff, 0xff])),
        ("another kind of frame".to_owned(), damaged(6, &[9, 0])),
        (
            "a control part without end".to_owned(),
            damaged(8, &u64::MAX.to_le_bytes()),
        ),
        (
            "a control part that never comes".to_owned(),
            damaged(8, &(200_u64 << 20).to_le_bytes()),
        ),
        (
            "tensors without end".to_owned(),
            damaged(16, &u64::MAX.to_le_bytes()),
        ),
        (
            "other bytes of tensors".to_owned(),
            damaged(16, &7_u64.to_le_bytes()),
        ),
        ("a message of no kind".to_owned(), damaged(24, &[250])),
    ];
    for at in (25..good.len().min(120)).step_by(9) {
        frames.push((
            format!("byte {at} changed"),
            damaged(at, &[0xff, 0xff, 0xff]),
        ));
    }
    for (name, place) in places() {
        frames.push((name.to_owned(), whole(&object(8192, Some(place)))));
    }
    for (name, message) in unknown_ids() {
        frames.push((name.to_owned(), plain(&message)));
    }
    for (name, bytes) in frames {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("{name}\t{digits}");
    }
}

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
                if let Event::EndpointFailed { reason, .. } = event {
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
        print_frames();
        return Ok(());
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
    let worker_options = Options {
        transports: transports_of(Choice::Auto, true, false).to_owned(),
        ..Options::default()
    };
    let mut worker = Worker::create(&library, rank, &worker_options)?;
    let own_key = [7; KEY_BYTES];
    let ucx_address = [&own_key[..], &worker.address()?].concat();
    let host_name = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    let options = JobOptions {
        rank,
        world,
        host: "127.0.0.1".to_owned(),
        port: port.parse()?,
        listener: None,
        bind_address: None,
        host_name: host_name.trim().to_owned(),
        secret: Secret::new(secret),
        encrypt: false,
        version: version.clone(),
        fingerprint: fingerprint.clone(),
        connect_timeout: WAIT,
        liveness_timeout: WAIT,
        limits: Limits::default(),
        pool: Some(Pool::new(1 << 20)?),
        device: None,
        ucx_address,
        transport: Choice::Auto,
    };
    let job = connect(options, Arc::new(Router::default()), &mut || true)?;
    let place = job
        .ucx_addresses()
        .get(&VICTIM)
        .ok_or("rank 0 has no UCX")?;
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
