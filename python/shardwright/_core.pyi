"""
Shardwright's Rust core.
"""

from os import PathLike
from typing import Any, Final, SupportsFloat, SupportsIndex, final

from _typeshed import SupportsGetItem

__all__ = [
    "__version__",
    "AloneRecorder",
    "CommOptions",
    "Config",
    "Description",
    "Event",
    "Node",
    "Place",
    "ReceivedBuffer",
    "Request",
    "Server",
    "Spec",
    "Task",
    "TensorParts",
    "Timeline",
    "Topology",
    "Usage",
    "choose_schedule",
    "command",
    "derive_seed",
    "flatten",
    "owned_tensors",
    "parameters_in_use",
    "partition",
    "partition_table",
    "read_program",
    "reference_program",
    "simulate",
    "splits_backward",
    "take_log",
]

__version__: Final[str]

@final
class AloneRecorder:
    """
    Keeps the microbatches' forward and backward times, where no execution server runs them.
    """
    def __new__(cls, /) -> AloneRecorder:
        """
        Begin with nothing.
        """
    def begin(self, step: SupportsIndex, /) -> None:
        """
        The first microbatch of a step starts.
        """
    def commit(self, /) -> None:
        """
        The step's gradients are finished: it has ended well.
        """
    def end(self, /) -> None:
        """
        The step's microbatches are over.
        """
    def keep_trace(self, on: bool, /) -> None:
        """
        Keep records from now on, or keep none.
        """
    def next_microbatch(self, /) -> None:
        """
        The microbatch is over, and the next one starts, if there is one.
        """
    def passed_backward(self, /) -> None:
        """
        What ran since the last call was backward work.
        """
    def passed_forward(self, /) -> None:
        """
        What ran since the last call was forward work.
        """
    def take_trace(self, rank: SupportsIndex, /) -> Timeline:
        """
        The records since the last call, as those of global rank `rank`.
        """
    def usage(self, /) -> tuple[Usage, Usage]:
        """
        Where the time went of all steps that ended well, and of the newest one.
        """

@final
class CommOptions:
    """
    How a rank moves tensors: what the configuration and the environment say about it.
    """
    def __new__(
        cls,
        /,
        *,
        transport: str,
        one_host: bool,
        encrypt: bool,
        spin_microseconds: SupportsIndex,
        ucx_library: str | None,
        ucx_packages: SupportsGetItem[int, str],
        device_to_device: bool,
        device_buffer_bytes: SupportsIndex,
        cuda_library: str | None = None,
    ) -> CommOptions: ...
    def __repr__(self, /) -> str: ...

@final
class Config:
    """
    The effective configuration of a job, checked.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __reduce__(self, /) -> tuple[Any, tuple[str]]: ...
    def __repr__(self, /) -> str: ...
    def check_world(self, /, world: SupportsIndex) -> Topology:
        """
        The topology of a job with this many ranks; refuses a number that does not fit.
        """
    @staticmethod
    def difference(own: str, other: str) -> list[str]:
        """
        The keys in which two fingerprints differ, each with both values.
        """
    def fingerprint(self, /) -> str:
        """
        What all ranks must agree on, as text.
        """
    @staticmethod
    def keys_table() -> list[list[str]]:
        """
        Every key: name, origin, allowed values, default, unit, meaning, and why only the default
        is allowed (empty where the feature is built).
        """
    @staticmethod
    def parse(json: str) -> Config:
        """
        Reads a JSON object of keys and values, and checks all of them.
        """
    def schedule(self, /) -> str:
        """
        The text form of the schedule that the job's steps run with; of `auto`, that of the first steps.
        """
    def to_json(self, /) -> str:
        """
        Every key with its effective value, as a JSON object in the documentation's order.
        """

@final
class Description:
    """
    What a value is but for its tensors' elements: its tree, and each tensor's dtype, shape, strides, device and
    whether it requires a gradient.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __len__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, spec: Spec, parts: TensorParts) -> Description:
        """
        Describe a value from its tree and tensors.
        """
    def meta(self, /, index: SupportsIndex) -> tuple[str, list[int], list[int], str, bool]:
        """
        `(dtype, shape, strides, device, requires_grad)` of a tensor.
        """
    @property
    def spec(self, /) -> Spec:
        """
        The tree.
        """

@final
class Event:
    """
    Something for the main thread, from `Server.supervise`.
    """
    @property
    def body(self, /) -> tuple[Spec, TensorParts] | None:
        """
        What the step returned: the value and its tensors.
        """
    @property
    def kind(self, /) -> str:
        """
        `start_worker`, `control`, `step_end`, `root_done`, `stall_report` or `aborted_locally`.
        """
    @property
    def request(self, /) -> Request | None:
        """
        The control request to answer.
        """
    @property
    def text(self, /) -> str | None:
        """
        Who waits for whom.
        """
    @property
    def worker(self, /) -> int | None:
        """
        The worker to start.
        """

@final
class Node:
    """
    The connection to the job. In a forked child every method raises.
    """
    def barrier(
        self,
        /,
        group: SupportsGetItem[int, SupportsIndex],
        name: str,
        timeout: SupportsFloat | SupportsIndex | None = None,
    ) -> None:
        """
        Wait until every rank of `group` has called this with the same name.

        Raises `PeerLostError` or `RemoteError` on all of them when one cannot come.
        """
    def close(self, /, report: dict[str, str] | None = None) -> None:
        """
        Leave the job: the other ranks hear a goodbye, with `report` (kind, message, traceback)
        when an error is the reason. Takes a few seconds at most; further calls do nothing.
        """
    def comm_stats(self, /) -> dict[str, Any]:
        """
        What each route carried, why tensors took others than the best, and how each rank is reached.
        """
    @staticmethod
    def connect(
        *,
        rank: SupportsIndex,
        world: SupportsIndex,
        place: Place,
        fingerprint: str,
        version: str,
        connect_timeout: SupportsFloat | SupportsIndex,
        liveness_timeout: SupportsFloat | SupportsIndex,
        bind_address: str | None,
        host_name: str,
        options: CommOptions,
        buffer_bytes: SupportsIndex = 0,
        ucx: bool = True,
        lacks: str | None = None,
    ) -> Node:
        """
        Join the job, and return when every rank has.

        Raises `JobStartError` when ranks are missing, do not share the secret, or differ in
        version, number of ranks or configuration (`fingerprint`; of several lines, those that
        differ are named). Timeouts are in seconds. `buffer_bytes` is the size of the persistent
        buffer for tensors on their way to ranks of the same host; 0 for none. `ucx` says whether UCX may be used where
        the options allow it, and `lacks` what this rank has not: then no rank starts, and all raise that.
        """
    def fetch(self, /, source: SupportsIndex, key: SupportsIndex) -> str:
        """
        Ask for what a rank has published; it arrives as an object on the channel that this returns.
        """
    def host(self, /, rank: SupportsIndex) -> str:
        """
        The name of a rank's host.
        """
    @staticmethod
    def in_process(world: SupportsIndex) -> list[Node]:
        """
        Nodes of ranks that share this process.
        """
    def publish(self, /, spec: Spec, parts: TensorParts, peers: SupportsGetItem[int, SupportsIndex]) -> int:
        """
        Keep a value for `peers` to fetch; the key to ask for it by. Takes the tensors out of `parts`.
        """
    @property
    def rank(self, /) -> int:
        """
        This rank.
        """
    def recv_object(
        self, /, source: SupportsIndex, channel: str, timeout: SupportsFloat | SupportsIndex
    ) -> tuple[Spec, TensorParts] | None:
        """
        The next object that a rank sent on a channel; None when it did not come within `timeout` seconds.
        """
    def release(self, /, source: SupportsIndex, key: SupportsIndex) -> None:
        """
        Tell a rank that this one will not fetch what it has published.
        """
    def send_object(self, /, to: SupportsIndex, channel: str, spec: Spec, parts: TensorParts) -> None:
        """
        Send an object; does not wait for its receiver. Takes the tensors out of `parts`.
        """
    @staticmethod
    def single() -> Node:
        """
        The node of a job of one rank.
        """
    def stats(self, /) -> dict[str, int]:
        """
        Counters since the start of the connection.
        """
    def use_device(self, /, ordinal: SupportsIndex) -> None:
        """
        Begin to use a CUDA device, as the first tensor would: the ranks of this host try to open each other's device
        memory.
        """
    @property
    def world(self, /) -> int:
        """
        The number of ranks.
        """

@final
class Place:
    """
    Where a rank meets the others, and the secret by which they know each other; for one connection.
    """
    @staticmethod
    def at(host: str, port: SupportsIndex, secret: bytes) -> Place:
        """
        Another rank's, which was told where rank 0 listens.
        """
    @staticmethod
    def find(name: str, host: str, secret: bytes | None, timeout: SupportsFloat | SupportsIndex) -> Place:
        """
        Another rank's among ranks of one host, as soon as rank 0's is there.

        Raises `JobStartError` when it is not within `timeout` seconds, or the process there is another user's.
        """
    @staticmethod
    def listen(host: str, secret: bytes) -> Place:
        """
        Rank 0's: it listens on an interface, at a port to be told to the others.
        """
    @property
    def note(self, /) -> int:
        """
        What rank 0 told beside it; 0 where it told nothing.
        """
    @staticmethod
    def open(name: str, host: str, secret: bytes | None, note: SupportsIndex = 0) -> Place:
        """
        Rank 0's among ranks of one host, which know the job by `name`. Without a secret it makes one up for all; `note`
        is a number that it tells them.

        Raises `JobStartError` where another process has that name.
        """
    @property
    def port(self, /) -> int:
        """
        Rank 0's port.
        """

@final
class ReceivedBuffer:
    """
    Received bytes, writable through the buffer protocol, given back with their last tensor.
    """
    def __len__(self, /) -> int: ...

@final
class Request:
    """
    A request of another rank (the paper, appendix B).
    """
    def __repr__(self, /) -> str: ...
    @property
    def autocast(self, /) -> list[tuple[str, str, bool]]:
        """
        Enabled autocast states: device type, dtype, cache enabled.
        """
    @property
    def call(self, /) -> int:
        """
        The call's number in that execution.
        """
    @property
    def checkpointing(self, /) -> bool:
        """
        Whether the work is to be checkpointed.
        """
    @property
    def control(self, /) -> str | None:
        """
        For a control request: what it is about.
        """
    @property
    def forward(self, /) -> int | None:
        """
        For a backward or close: the id of the forward request.
        """
    @property
    def grad_mode(self, /) -> bool:
        """
        Whether gradients are enabled.
        """
    @property
    def id(self, /) -> int:
        """
        Its id, unique at the requester.
        """
    @property
    def inference_mode(self, /) -> bool:
        """
        Whether inference mode is on.
        """
    @property
    def kind(self, /) -> str:
        """
        `forward`, `backward`, `close` or `control`.
        """
    @property
    def microbatch(self, /) -> int:
        """
        The microbatch.
        """
    @property
    def model(self, /) -> int:
        """
        The model.
        """
    @property
    def module(self, /) -> int | None:
        """
        The module; None for a control request.
        """
    @property
    def parent(self, /) -> int | None:
        """
        The request that the requester was executing; None in the step function itself.
        """
    @property
    def parts(self, /) -> TensorParts:
        """
        Their tensors.
        """
    @property
    def range(self, /) -> tuple[int, int] | None:
        """
        The children of an `nn.Sequential` to run, as `(start, end)`; None for the whole module.
        """
    @property
    def requester(self, /) -> int:
        """
        The global rank that asks.
        """
    @property
    def spec(self, /) -> Spec:
        """
        The arguments, or the gradients, without their tensors.
        """
    @property
    def step(self, /) -> int:
        """
        The step.
        """
    def text(self, /) -> str:
        """
        Every field, one a line.
        """

@final
class Server:
    """
    A rank's execution server: hands out tasks, carries requests and answers, ends failed steps everywhere.
    """
    def announce_request(
        self,
        /,
        worker: SupportsIndex,
        *,
        to: SupportsIndex,
        kind: str,
        model: SupportsIndex,
        module: SupportsIndex,
        microbatch: SupportsIndex,
        range: tuple[SupportsIndex, SupportsIndex] | None = None,
        forward: SupportsIndex | None = None,
        expected: Description | None = None,
    ) -> int:
        """
        Make a request that another rank of the pipeline sends, with `send_request_for`; its id. The answer comes here.
        """
    @staticmethod
    def attach(
        node: Node | None,
        *,
        rank: SupportsIndex,
        host: str,
        pp_ranks: SupportsGetItem[int, SupportsIndex],
        tp_ranks: SupportsGetItem[int, SupportsIndex],
        stall_report_seconds: SupportsFloat | SupportsIndex,
        stall_timeout_seconds: SupportsFloat | SupportsIndex,
        trace_capacity: SupportsIndex,
    ) -> Server:
        """
        Make the server of a rank. `pp_ranks` are the global ranks of its pipeline, the root first; `tp_ranks` those of
        its tensor-parallel group, the one that decides the order of tasks first.
        """
    def await_backward(self, /, worker: SupportsIndex) -> None:
        """
        Wait in a root task until the schedule grants its backward.
        """
    def begin_alone(self, /, *, step: SupportsIndex, function: str) -> None:
        """
        Enter a step whose function the main thread runs itself, because the pipeline has one rank.

        The step is then only one that fails together with the job's other ranks: see `check_abort`.
        """
    def begin_backward_elsewhere(self, /, worker: SupportsIndex) -> bool:
        """
        Whether a root task may ask another rank for its backward at once, without `await_backward`.
        """
    def begin_step(
        self,
        /,
        *,
        step: SupportsIndex,
        function: str,
        num_microbatches: SupportsIndex,
        pipeline: str,
        active_microbatches: SupportsIndex,
        one_at_a_time: bool = False,
    ) -> None:
        """
        Enter a step with this rank's pipeline. The root tells its peers; they compare.

        `pipeline` is the text form of a schedule; `interleaved`, `looped` and `zero_bubble` may stand without brackets,
        and then have at most `active_microbatches` in flight.

        `one_at_a_time` starts a microbatch only when the one before it has ended, whatever the schedule.
        """
    def check_abort(self, /, step: SupportsIndex, needed: SupportsGetItem[int, SupportsIndex] = ...) -> None:
        """
        Raise a failure of the step elsewhere, while waiting for something other than the server.

        `needed` are ranks that take part in what is waited for: that one of them has left the
        job in good order is a failure too, if it stays unfinished for 2 s after.
        """
    def close(self, /) -> None:
        """
        End the server: idle workers get None as their next task. A second call does nothing.
        """
    def defer_weight_gradient(self, /, worker: SupportsIndex, token: SupportsIndex) -> None:
        """
        Leave the weight gradients of the backward that a worker runs for later: a task `weight` with this token.
        """
    def describe(self, /, rank: SupportsIndex | None = None) -> str:
        """
        What this rank does, or another was last heard to do: one line, for any thread.
        """
    def end_step(self, /, spec: Spec, parts: TensorParts) -> None:
        """
        End the step on the root's peers, which get this value.
        """
    def ends_with_forward(self, /, worker: SupportsIndex) -> None:
        """
        Say that no gradient will come back to the forward that a worker serves.
        """
    def enter_state(self, /, worker: SupportsIndex, model: SupportsIndex, state: SupportsIndex) -> None:
        """
        Wait until no other microbatch goes first, and enter.
        """
    def enters_collective(self, /, worker: SupportsIndex, name: str) -> None:
        """
        Say which collective of its tensor-parallel group a worker's task enters, before it does.
        """
    def fail(
        self,
        /,
        *,
        module: str | None,
        microbatch: SupportsIndex | None,
        phase: str | None,
        kind: str,
        message: str,
        traceback: str,
        step: SupportsIndex | None = None,
        origin: tuple[SupportsIndex, str] | None = None,
    ) -> None:
        """
        Report an exception of this rank: the step ends on every rank of the job. The first failure wins.

        `step` names a step that this rank may not have entered yet, but would have.

        `origin` is the rank that failed and its host, where that is another one.
        """
    def fetch(
        self, /, worker: SupportsIndex, holder: SupportsIndex, request: SupportsIndex, index: SupportsIndex
    ) -> int:
        """
        Have a tensor sent that another rank holds: one of its answer to a request of this rank. An id to wait for.
        """
    def idle_in_step(self, /) -> tuple[int, float] | None:
        """
        While a step runs in which this rank has nothing to do: when it made progress last, in nanoseconds of the
        server's clock, and for how many seconds it has made none. None at any other time.
        """
    def keep_in_order(
        self, /, model: SupportsIndex, state: SupportsIndex, *, name: str, stays: SupportsIndex | None
    ) -> None:
        """
        From now on, let microbatches come in their order to something that modules of a model keep.

        `stays` is how often a microbatch enters the modules that use it; None where that is not known.
        """
    def keep_trace(self, on: bool, /) -> None:
        """
        Keep records of what runs, waits and travels from now on, or keep none.
        """
    def leave_state(self, /, worker: SupportsIndex, model: SupportsIndex, state: SupportsIndex) -> None:
        """
        Leave a module that uses the state.
        """
    def leave_step(self, /) -> None:
        """
        The commit is done; this rank is between steps.
        """
    def name_modules(self, /, model: SupportsIndex, names: SupportsGetItem[int, str]) -> None:
        """
        Give the modules of a model their names, by id, for reports and timelines.
        """
    def next_task(self, /, worker: SupportsIndex) -> Task | None:
        """
        Give up the turn and wait for a task; None when the thread may end.
        """
    def quiet(self, /) -> float:
        """
        For how many seconds nothing in the job has made progress, as far as this rank knows.
        """
    def release(self, /, holder: SupportsIndex, requests: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        The tensors of a rank's answers to requests of this rank are needed no more.
        """
    def respond(self, /, request: Request, spec: Spec, parts: TensorParts) -> None:
        """
        Answer a request that this rank was given.
        """
    def run_microbatches_one_at_a_time(self, /) -> None:
        """
        From now on until the step ends, start a microbatch only when the one before it has ended.
        """
    def runs_one_at_a_time(self, /) -> bool:
        """
        Whether the microbatches of the step start one after another.
        """
    def send_request(
        self,
        /,
        worker: SupportsIndex | None,
        *,
        to: SupportsIndex,
        kind: str,
        model: SupportsIndex,
        module: SupportsIndex,
        range: tuple[SupportsIndex, SupportsIndex] | None,
        forward: SupportsIndex | None,
        control: str | None,
        microbatch: SupportsIndex,
        parent: SupportsIndex | None,
        call: SupportsIndex,
        grad_mode: bool,
        inference_mode: bool,
        autocast: SupportsGetItem[int, tuple[str, str, bool]],
        checkpointing: bool,
        spec: Spec,
        parts: TensorParts,
        hold: bool = False,
        expected: Description | None = None,
    ) -> int:
        """
        Make a request of a rank of the pipeline; its id.

        With `hold` the results' tensors stay there until they are fetched or passed on. `expected` is what the answer
        is taken to be meanwhile; another one fails the step.
        """
    def send_request_for(
        self,
        /,
        worker: SupportsIndex,
        like: Request,
        *,
        id: SupportsIndex,
        to: SupportsIndex,
        kind: str,
        module: SupportsIndex,
        call: SupportsIndex,
        spec: Spec,
        parts: TensorParts,
        range: tuple[SupportsIndex, SupportsIndex] | None = None,
        forward: SupportsIndex | None = None,
    ) -> None:
        """
        Send a request that `like`'s requester has announced: of the same model and microbatch, in the same context.
        """
    def stats(self, /) -> dict[str, Any]:
        """
        Counters: of the newest step (`step`), since the start (`total`), and of the present.
        """
    def stays(self, /) -> list[tuple[int, int, int | None]]:
        """
        How often each microbatch of the newest step entered the modules that use a state: model, state, and the number,
        None where it was not the same for all.
        """
    def supervise(self, /) -> Event:
        """
        Wait for the main thread's next event.

        Raises the step's failure (`RemoteError`, `PeerLostError`, `StallError`,
        `StepMismatchError`) once every worker is idle; a failure that this rank reported
        itself is the event `aborted_locally`.
        """
    def take_if_answered(
        self, /, requests: SupportsGetItem[int, SupportsIndex]
    ) -> list[tuple[Spec, TensorParts]] | None:
        """
        The answers to requests, in their order, if they are all there; else None.
        """
    def take_trace(self, /) -> Timeline:
        """
        The records of what ran, waited and travelled since the last call.

        Times are nanoseconds since the Unix epoch, so that ranks of one host share a clock.
        """
    def tell_forwards(self, /) -> None:
        """
        On the root: tell the peers from now on when all forwards of a microbatch have been executed.
        """
    def try_enter_state(self, /, worker: SupportsIndex, model: SupportsIndex, state: SupportsIndex) -> bool:
        """
        Enter a module that uses the state, if no other microbatch goes first; whether the task is in it now.
        """
    def unwind(self, /, timeout: SupportsFloat | SupportsIndex) -> bool:
        """
        Wait for at most `timeout` seconds until the stacks of a failed step are gone; whether they are.
        """
    def usage(self, /) -> tuple[Usage, Usage]:
        """
        Where the time went of all steps that ended well, and of the newest one. Steps that divided a model over ranks
        count as the newest only.
        """
    def wait(
        self, /, worker: SupportsIndex | None, requests: SupportsGetItem[int, SupportsIndex], phase: str
    ) -> list[tuple[Spec, TensorParts]]:
        """
        Wait for the answers to requests, in their order. A worker is PENDING meanwhile.

        `worker` is None on the main thread; `phase` is that of the task which waits.
        """
    def wait_outside(self, /, waits: bool) -> float:
        """
        Say that the main thread waits outside the server, or no longer does: a rank that waits is no progress.
        The seconds since the last progress anywhere in the job.
        """
    def worker_gone(self, /, worker: SupportsIndex) -> None:
        """
        Say that the thread of a worker is gone: the step ends on every rank.
        """

@final
class Spec:
    """
    A value without its tensors: what [`flatten`] makes and `build` turns back.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __repr__(self, /) -> str: ...
    def build(self, /, tensors: SupportsGetItem[int, Any], registry: Any) -> Any:
        """
        The value again, with `tensors` in the places of the tensors.
        """
    @staticmethod
    def join(specs: SupportsGetItem[int, Spec]) -> Spec:
        """
        The tuple of these values, which all refer to the same tensors; [`Spec::split`] undoes it.
        """
    def split(self, /) -> list[Spec]:
        """
        The elements of a tuple, each as a value of its own over the same tensors.
        """

@final
class Task:
    """
    What a worker is to run, from `Server.next_task`.
    """
    @property
    def kind(self, /) -> str:
        """
        `root`, `forward`, `backward`, `close` or `weight`.
        """
    @property
    def microbatch(self, /) -> int:
        """
        The microbatch.
        """
    @property
    def request(self, /) -> Request | None:
        """
        The request; None for a root task and for weight gradients.
        """
    @property
    def token(self, /) -> int | None:
        """
        What `defer_weight_gradient` was given; None for other tasks.
        """

@final
class TensorParts:
    """
    The tensors of one body, copied out of torch's memory or received.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /) -> TensorParts: ...
    def append(
        self,
        /,
        address: SupportsIndex,
        nbytes: SupportsIndex,
        dtype: str,
        shape: SupportsGetItem[int, SupportsIndex],
        strides: SupportsGetItem[int, SupportsIndex],
        device: str,
        requires_grad: bool,
    ) -> None:
        """
        Add a tensor by copying `nbytes` bytes from `address`, where its storage order begins.

        The caller keeps the memory alive and unchanged during the call.
        """
    def append_device(
        self,
        /,
        address: SupportsIndex,
        nbytes: SupportsIndex,
        dtype: str,
        shape: SupportsGetItem[int, SupportsIndex],
        strides: SupportsGetItem[int, SupportsIndex],
        requires_grad: bool,
        *,
        ordinal: SupportsIndex,
        stream: SupportsIndex,
    ) -> bool:
        """
        Add a tensor in the memory of CUDA device `ordinal`, behind what `stream` has been given so far; does not wait.
        False, and nothing is added, where there is no way or no room for it.

        The memory stays the tensor's, and unchanged, as the stream sees it.
        """
    def append_held(
        self,
        /,
        dtype: str,
        shape: SupportsGetItem[int, SupportsIndex],
        strides: SupportsGetItem[int, SupportsIndex],
        device: str,
        requires_grad: bool,
        *,
        holder: SupportsIndex,
        requester: SupportsIndex,
        request: SupportsIndex,
        index: SupportsIndex,
    ) -> None:
        """
        Add a tensor of an answer to a request of `requester`, which `holder` holds: it goes from there to where this
        body goes.
        """
    def held(self, /, index: SupportsIndex) -> tuple[int, int, int, int] | None:
        """
        `(holder, requester, request, index)` of a tensor that a rank holds; None for another one.
        """
    def is_here(self, /, index: SupportsIndex) -> bool:
        """
        Whether a tensor's bytes are here, and not only with the rank that holds it.
        """
    def is_of_device(self, /, index: SupportsIndex) -> bool:
        """
        Whether a tensor was in the memory of a CUDA device at its sender.
        """
    def meta(self, /, index: SupportsIndex) -> tuple[str, list[int], list[int], str, bool]:
        """
        `(dtype, shape, strides, device, requires_grad)` of a tensor.
        """
    def take_into_device(
        self, /, index: SupportsIndex, address: SupportsIndex, *, ordinal: SupportsIndex, stream: SupportsIndex
    ) -> bool:
        """
        Take a tensor's bytes into the memory of CUDA device `ordinal`, behind what `stream` has been given so far; does
        not wait. False, and nothing is taken, where there is no way.

        The memory stays the tensor's, and unused, as the stream sees it.
        """
    def take_tensor(self, /, index: SupportsIndex) -> tuple[ReceivedBuffer, str, list[int], list[int], str]:
        """
        `(buffer, dtype, shape, strides, device)` of a tensor: its bytes are a writable buffer that owns them, and
        can be taken once.
        """

@final
class Timeline:
    """
    What ranks did when: records on one clock. Made by the execution server, or from JSON.
    """
    @staticmethod
    def from_json(text: str, /) -> Timeline:
        """
        What `to_json` made, or records from elsewhere: `{"records": [...], "lost": 0}`.
        """
    @staticmethod
    def join(parts: SupportsGetItem[int, str], /) -> Timeline:
        """
        One timeline of the parts of several ranks, each as `to_json` made it.
        """
    @property
    def lost(self, /) -> int:
        """
        How many records were overwritten before they were taken.
        """
    @staticmethod
    def read(path: str | PathLike[str], /) -> Timeline:
        """
        The timeline of a `trace.json`. Raises `ValueError` for one of a newer format or of another program.
        """
    def records(self, /) -> list[dict[str, Any]]:
        """
        The records, by start: dicts of rank, step, kind, `start_ns` and `end_ns` on a clock that all ranks share, and where
        known phase, worker, module, microbatch, peer, request and bytes.
        """
    def steps(self, /) -> list[int]:
        """
        The steps that have records.
        """
    def summary(self, /, step: SupportsIndex | None = None) -> dict[str, Any]:
        """
        The time of each rank by activity, idle time and bytes; of a step, or of all.
        """
    def svg(self, /, step: SupportsIndex | None = None) -> str:
        """
        A step, or the newest, as an SVG picture.
        """
    def to_json(self, /) -> str:
        """
        All of it as JSON.
        """
    def write(self, folder: str | PathLike[str], /) -> None:
        """
        Write `trace.json`, for Perfetto, and `timeline.html`, for any browser, into a folder.
        """

@final
class Topology:
    """
    How the ranks of a job are arranged.

    Groups are named `WORLD`, `MP_GROUP`, `DP_GROUP`, `PP_GROUP`, `TP_GROUP`, `RDP_GROUP`; their
    members are in ascending order of global rank.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls, /, world: SupportsIndex, pipeline: SupportsIndex, tensor: SupportsIndex = 1, placement: str = "cluster"
    ) -> Topology: ...
    def __repr__(self, /) -> str: ...
    def coordinates(self, /, rank: SupportsIndex) -> tuple[int, int, int]:
        """
        `(pp_rank, tp_rank, rdp_rank)` of a global rank.
        """
    def global_rank(self, /, group: str, rank: SupportsIndex, number: SupportsIndex) -> int:
        """
        The global rank of the member with this number in a rank's group.
        """
    def group(self, /, group: str, rank: SupportsIndex) -> list[int]:
        """
        The global ranks of a rank's group.
        """
    def groups(self, /, group: str) -> list[list[int]]:
        """
        All groups of this kind, ordered by their first member.
        """
    @property
    def placement(self, /) -> str:
        """
        The order of axes: letters from the slowest to the fastest varying one.
        """
    def rank_at(self, /, pp_rank: SupportsIndex, tp_rank: SupportsIndex, rdp_rank: SupportsIndex) -> int:
        """
        The global rank at a place.
        """
    def rank_in(self, /, group: str, rank: SupportsIndex) -> int:
        """
        A global rank's number in its group of this kind.
        """
    def size(self, /, group: str) -> int:
        """
        Ranks in each group of this kind.
        """
    @property
    def world_size(self, /) -> int:
        """
        Ranks in the job.
        """

@final
class Usage:
    """
    What a rank's time inside steps was used for: of all steps that ended well, and of the newest one.
    """
    def __str__(self, /) -> str:
        """
        One line.
        """
    def figures(self, /) -> dict[str, Any]:
        """
        Seconds by use, bytes of tensors, and shares: `bubble` of the tasks' time, the others of all time.
        """

def choose_schedule(
    *,
    forward_ns: list[int],
    backward_ns: list[int],
    visits: list[int],
    microbatches: SupportsIndex,
    active_microbatches: SupportsIndex,
) -> tuple[str, list[tuple[str, int]]]:
    """
    The fastest schedule with at most `active_microbatches` in flight, from each rank's nanoseconds of forward and
    backward work for a microbatch, and how many forward requests it serves for one; the root comes first.

    Returns its text, and the simulated nanoseconds of a step under every candidate.
    """

def command(
    arguments: SupportsGetItem[int, str], facts: str, ucx_packages: SupportsGetItem[int, str]
) -> tuple[int, str, str]:
    """
    Run the command: its exit status, what to write to the standard output, and what to the standard error.

    `facts` is a JSON object of what only Python knows about itself, `ucx_packages` the directories of
    Python packages that hold UCX.
    """

def derive_seed(seed: SupportsIndex, number: SupportsIndex, /) -> int:
    """
    A seed for the `number`-th part of what `seed` stands for; well mixed, and the same everywhere.
    """

def flatten(value: Any, registry: Any, names: SupportsGetItem[int, str] = ...) -> tuple[Spec, list[Any]]:
    """
    Split a value into its tree and its tensors, each tensor once.

    `registry` has `encoders` (type to name and function to fields), `decoders` (name to
    function from fields) and `fallback(type)`. Raises `UnsupportedValueError`, which names
    the path, for a type that cannot cross ranks; `names` are what the elements of an
    outermost tuple are called there.
    """

def owned_tensors(module: Any, stand_ins: frozenset[type], /) -> tuple[list[Any], list[tuple[Any, str]]]:
    """
    The parameters in a module tree, each once and in the model's order, and the module and name of each
    buffer; without what stands in for another rank's, by its exact type.

    This runs in every step, so it reads the modules' own dictionaries and asks torch for nothing.
    """

def parameters_in_use(parameters: list[Any], /) -> list[Any]:
    """
    Those of the parameters that have a gradient, or hooks of any kind.
    """

def partition(request_json: str) -> str:
    """
    Divides a model over the stages of a pipeline: a request as JSON in, a decision as JSON out.
    """

def partition_table(decision_json: str) -> str:
    """
    A decision, as `partition` returns it, as a table for people.
    """

def read_program(text: str) -> str:
    """
    The text form of a program, from that or from the compute-only CSV of `torch.distributed.pipelining`.

    Raises `ConfigError` for a text that is neither, with row, cell and value.
    """

def reference_program(
    schedule: str, *, ranks: SupportsIndex, microbatches: SupportsIndex, stages_per_rank: SupportsIndex = 1
) -> str:
    """
    The textbook form of the schedule `simple`, `interleaved` or `zero_bubble`, as the text of a program.
    """

def simulate(
    *,
    forward_ns: list[int],
    backward_ns: list[int],
    weight_gradient_ns: list[int] | None = None,
    program: str | None = None,
    schedule: str | None = None,
    segments: list[int] | None = None,
    microbatches: SupportsIndex | None = None,
    latency_ns: SupportsIndex = 0,
    control: str = "star",
    root_turn_ns: SupportsIndex = 0,
    root_backward_ns: SupportsIndex = 0,
) -> dict[str, Any]:
    """
    Simulate a step of a pipeline, from costs of each stage in nanoseconds.

    Either `program` is given, a text of ours or the compute-only CSV of `torch.distributed.pipelining`;
    or `schedule`, such as `interleaved(active=4)` or `looped(active=4)`, which is then followed as the execution
    server does, with the model as a chain of `segments`: the ranks of its parts in the order of the forward. Stages of
    the costs are then those segments. `weight_gradient_ns` is the part of `backward_ns` that waits where
    a backward is split; half of it if not given. `control` says how it goes from one rank to another:
    `star`, by way of the root, `direct`, or `predicted`, where the root also asks for the backward before
    the forward is over (static mode with the loss on another rank); `root_turn_ns` is how long the root has
    the turn when it only hands control on, `root_backward_ns` how long between the last forward and the first backward.

    Returns `makespan_ns`, for each of the `ranks` its `busy_ns` and `idle_ns`, and the `tasks`, each with
    `rank`, `stage`, `kind`, `microbatch`, `start_ns` and `end_ns`.

    Raises `ConfigError` for a bad argument, and for a program that is incomplete or in which ranks wait
    for each other.
    """

def splits_backward(schedule: str) -> bool:
    """
    Whether a schedule, given as text, runs backwards in two parts.
    """

def take_log() -> list[tuple[int, str]]:
    """
    Take the warnings of Rust's threads since the last call: `logging`'s level, and the text.
    """
