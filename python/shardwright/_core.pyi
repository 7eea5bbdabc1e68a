"""
Shardwright's Rust core.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Final, SupportsFloat, SupportsIndex, final

import torch
from _typeshed import SupportsGetItem

__all__ = [
    "DTYPES",
    "__version__",
    "AloneRecorder",
    "Answer",
    "ArgumentNotes",
    "BackwardCall",
    "BackwardLink",
    "CheckpointMemory",
    "CheckpointReader",
    "CheckpointWriter",
    "CommOptions",
    "Composite",
    "Config",
    "DeadlockDetector",
    "Description",
    "DynamicLossScale",
    "Event",
    "EventKind",
    "ForwardCall",
    "ForwardLink",
    "Getters",
    "GradMode",
    "HostMemory",
    "IncomingCopy",
    "IncomingPart",
    "LaunchInfo",
    "MappedFile",
    "MappedMemory",
    "MemoryCategories",
    "MemoryMeter",
    "Node",
    "Offload",
    "OffloadedCall",
    "PartInBackground",
    "Place",
    "Recipe",
    "Rendezvous",
    "Request",
    "ResultNotes",
    "Server",
    "Sites",
    "Spec",
    "Task",
    "TaskKind",
    "TensorParts",
    "TensorsBefore",
    "Timeline",
    "Topology",
    "TorchContext",
    "TorchSetting",
    "Usage",
    "View",
    "advance_twister",
    "choose_schedule",
    "collective_back_end",
    "command",
    "derive_seed",
    "detached",
    "end_with",
    "export_full_checkpoint",
    "flatten",
    "heap_bytes",
    "in_flight",
    "is_in_store",
    "is_schedule",
    "join_profile",
    "kept_by_others",
    "map_large_allocations",
    "means",
    "memory_ids",
    "memory_limit",
    "newest_checkpoint",
    "owned_tensors",
    "parameters_in_use",
    "partition",
    "process_memory",
    "read_program",
    "reference_program",
    "references_to_storage",
    "set_newest_checkpoint",
    "shard_parameters",
    "simulate",
    "splits_backward",
    "take_log",
    "tune_schedule",
    "weakness_of_secret",
    "write_profile_part",
]

DTYPES: Final[list[str]]
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
    def clock_ns(self, /) -> int:
        """
        The time, for `recomputed`.
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
    def recomputed(self, began_ns: SupportsIndex, /) -> None:
        """
        A checkpointed module was computed again since then.
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
class Answer:
    """
    The answer to a request: a forward's result, gradients, or a value.
    """
    def describe(self, /) -> Description:
        """
        What the answer is but for its tensors' elements.
        """
    @staticmethod
    def done() -> Answer:
        """
        Nothing: what was asked for is done.
        """
    @property
    def gradients(self, /) -> list[tuple[int, int]]:
        """
        For each gradient the number of its argument and of its tensor; none where the answer is something else.
        """
    @property
    def is_passed_on(self, /) -> bool:
        """
        Whether the forward's result went on to the next rank of a chain.
        """
    def meta(self, /, index: SupportsIndex) -> tuple[str, list[int], list[int], str, bool]:
        """
        `(dtype, shape, strides, device, requires_grad)` of a tensor.
        """
    def needs(self, /) -> list[bool]:
        """
        For each tensor whether it requires a gradient.
        """
    @property
    def notes(self, /) -> ResultNotes:
        """
        What is noted of a forward's result; raises `ValueError` for any other answer.
        """
    @staticmethod
    def of_gradients(
        gradients: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]], parts: TensorParts
    ) -> Answer:
        """
        The gradients of a forward's arguments: for each the number of the argument and of its tensor.
        """
    @property
    def parts(self, /) -> TensorParts:
        """
        The tensors.
        """
    @staticmethod
    def passed_on(notes: ResultNotes) -> Answer:
        """
        Nothing: the forward's result went on to the next rank of a chain.
        """
    @staticmethod
    def result(spec: Spec, parts: TensorParts, notes: ResultNotes) -> Answer:
        """
        A forward's result.
        """
    @property
    def spec(self, /) -> Spec:
        """
        The value without its tensors.
        """
    @staticmethod
    def stopped() -> Answer:
        """
        Nothing: the chain had ended before this forward.
        """
    @staticmethod
    def value(spec: Spec, parts: TensorParts) -> Answer:
        """
        A value.
        """

@final
class ArgumentNotes:
    """
    What the executing rank cannot see of a call's arguments. Tensors are numbered as those of the request.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        *,
        shared: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]] = ...,
        strides: SupportsGetItem[int, tuple[SupportsIndex, SupportsGetItem[int, SupportsIndex]]] = ...,
        overlapping: SupportsGetItem[int, SupportsIndex] = ...,
        relaid: SupportsGetItem[int, SupportsIndex] = ...,
        composites: SupportsGetItem[int, tuple[SupportsIndex, Composite]] = ...,
        hooked_views: SupportsGetItem[int, SupportsIndex] = ...,
        private: bool = False,
        kept: SupportsGetItem[int, SupportsIndex] = ...,
    ) -> ArgumentNotes:
        """
        Note what there is to note of arguments; by default nothing.
        """
    def __repr__(self, /) -> str: ...
    @property
    def composites(self, /) -> list[tuple[int, Composite]]:
        """
        Tensors that travel as several.
        """
    @property
    def hooked_views(self, /) -> list[int]:
        """
        Views that have hooks, on themselves or on views between them and their base.
        """
    @property
    def kept(self, /) -> list[int]:
        """
        Of those the ones whose memory that rank keeps.
        """
    @property
    def overlapping(self, /) -> list[int]:
        """
        Tensors with several elements at one place in memory.
        """
    @property
    def private(self, /) -> bool:
        """
        Whether the caller has no such tensors: another rank made them, and sent them here.
        """
    @property
    def relaid(self, /) -> list[int]:
        """
        Of those the ones that arrive in another layout.
        """
    @property
    def shared(self, /) -> list[list[int]]:
        """
        Groups of tensors that share memory at the caller.
        """
    @property
    def strides(self, /) -> list[tuple[int, list[int]]]:
        """
        The strides of tensors that are not dense, to be laid like that again.
        """

@final
class BackwardCall:
    """
    The backward of an earlier forward, or its end where no gradient reached it.
    """
    def __new__(
        cls,
        /,
        module: SupportsIndex,
        forward: SupportsIndex,
        *,
        gradients: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]],
        chain: SupportsGetItem[int, BackwardLink] = ...,
    ) -> BackwardCall:
        """
        `forward` is the forward request; `gradients` has for each gradient the number of its result and of its tensor;
        `chain` are the backwards that follow with the arguments' gradients.
        """
    @property
    def forward(self, /) -> int:
        """
        The forward request.
        """
    @property
    def gradients(self, /) -> list[tuple[int, int]]:
        """
        For each gradient the number of its result and of its tensor; none where it only ends the forward.
        """
    @property
    def is_followed(self, /) -> bool:
        """
        Whether a backward follows with the arguments' gradients.
        """
    @property
    def module(self, /) -> int:
        """
        The module that ran forward.
        """
    def next(
        self, /, gradients: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]]
    ) -> tuple[BackwardLink, BackwardCall] | None:
        """
        The next backward of the chain and its link, given the arguments' gradients of this one; None behind the last.

        Raises `ValueError` for a gradient of an argument that is no result of the call before.
        """

@final
class BackwardLink:
    """
    A backward that the rank of the one before in a chain asks for, in the name of the first caller.
    """
    def __new__(
        cls,
        /,
        *,
        rank: SupportsIndex,
        request: SupportsIndex,
        module: SupportsIndex,
        forward: SupportsIndex,
        number: SupportsIndex,
        results: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] | None,
    ) -> BackwardLink:
        """
        `results` has for arguments of the call before the results of this one; None where they have the same numbers.
        """
    @property
    def number(self, /) -> int:
        """
        The call's number in the first caller's frame.
        """
    @property
    def rank(self, /) -> int:
        """
        Whom to ask.
        """
    @property
    def request(self, /) -> int:
        """
        The request's id at the first caller, who gets the answer.
        """

@final
class CheckpointMemory:
    """
    Host memory for copies of what `CheckpointWriter.write_part_in_background` writes. It grows to what the parts that are
    written at the same time need, and is used again.
    """
    def __new__(cls, /) -> CheckpointMemory:
        """
        None is taken yet.
        """
    def free(self, /) -> None:
        """
        Give up what no part is written from now.
        """

@final
class CheckpointReader:
    """
    Reads a complete checkpoint.
    """
    def __new__(cls, /, path: str | PathLike[str], tag: str | None = None) -> CheckpointReader:
        """
        Open the checkpoint `tag` of the directory `path`, or the newest. Raises `ShardwrightError` that names what is missing
        or damaged; elements are verified where they are read.
        """
    def differences(
        self, wanted: SupportsGetItem[int, tuple[str, str, SupportsGetItem[int, SupportsIndex]]], /
    ) -> list[str]:
        """
        How these tensors (name, dtype, shape) differ from the checkpoint's, a line for each difference.
        """
    @property
    def manifest(self, /) -> str:
        """
        The manifest, as JSON.
        """
    def read(
        self,
        wanted: SupportsGetItem[
            int,
            tuple[
                str,
                Any,
                tuple[
                    SupportsGetItem[int, SupportsIndex],
                    SupportsGetItem[int, SupportsIndex],
                    tuple[SupportsIndex, SupportsIndex] | None,
                ],
            ],
        ],
        /,
    ) -> tuple[int, int, int]:
        """
        Read into contiguous tensors in host memory, while other Python threads run: how many files, chunks and bytes were
        touched.

        Each is a name, the tensor that takes the elements, and what is wanted: offset, size, and of that box the first
        element and the number of a run of them, or None. After an error the tensors hold anything.
        """
    def verify(self, /) -> list[str]:
        """
        Read all files: what is not as it was written, a line for each.
        """

@final
class CheckpointWriter:
    """
    Writes a checkpoint: every rank its part, then one rank the manifest.
    """
    def __new__(cls, /, path: str | PathLike[str], tag: str) -> CheckpointWriter:
        """
        For the checkpoint `tag` in the directory `path`, or at `s3://BUCKET/PREFIX`; nothing is written or asked yet.

        Raises `ShardwrightError` for a tag that no folder can be named after.
        """
    def abandon(self, /) -> None:
        """
        Remove what was written of a checkpoint that will not be completed.
        """
    def begin_part(
        self,
        /,
        name: str,
        pieces: SupportsGetItem[
            int,
            tuple[
                str,
                str,
                SupportsGetItem[int, SupportsIndex],
                tuple[
                    SupportsGetItem[int, SupportsIndex],
                    SupportsGetItem[int, SupportsIndex],
                    tuple[SupportsIndex, SupportsIndex] | None,
                ],
            ],
        ],
    ) -> IncomingPart:
        """
        Begin this rank's file, whose bytes come one after another, such as those of a device: name, dtype, shape of the whole
        tensor and part of each piece. Raises `ShardwrightError`, and leaves no file.
        """
    def begin_part_in_background(
        self,
        /,
        name: str,
        pieces: SupportsGetItem[
            int,
            tuple[
                str,
                str,
                SupportsGetItem[int, SupportsIndex],
                tuple[
                    SupportsGetItem[int, SupportsIndex],
                    SupportsGetItem[int, SupportsIndex],
                    tuple[SupportsIndex, SupportsIndex] | None,
                ],
            ],
        ],
        memory: CheckpointMemory,
    ) -> IncomingCopy:
        """
        What `write_part_in_background` does, for pieces whose bytes come one after another: those of `begin_part`.
        """
    def check(self, /) -> None:
        """
        Raise `ShardwrightError` if an object store does not answer, has no such bucket, or refuses who asks.
        """
    def commit(
        self, /, description: str, reports: SupportsGetItem[int, str], *, keep: SupportsIndex | None = None
    ) -> list[str]:
        """
        Complete the checkpoint out of all ranks' reports, in one step, and make it the newest: the tags of older ones that
        were removed to leave `keep`.

        `description` is a JSON object: `library_version`, `step`, `degrees`, `partition`, `aliases`, `user_content`.
        """
    def lock(self, /, seconds: SupportsFloat | SupportsIndex) -> None:
        """
        Keep other jobs from saving into this directory until `unlock`, or until this process ends. Waits for one that does.

        Raises `ShardwrightError` after so many seconds.
        """
    def unlock(self, /) -> None:
        """
        Let other jobs save into this directory.
        """
    def write_part(
        self,
        /,
        name: str,
        pieces: SupportsGetItem[
            int,
            tuple[
                str,
                Any,
                SupportsGetItem[int, SupportsIndex],
                tuple[
                    SupportsGetItem[int, SupportsIndex],
                    SupportsGetItem[int, SupportsIndex],
                    tuple[SupportsIndex, SupportsIndex] | None,
                ],
            ],
        ],
    ) -> str:
        """
        Write this rank's file, down to the disk, while other Python threads run: the report for `commit`.

        A piece is the tensor's global name, its contiguous elements in host memory, the shape of the whole tensor, and what
        the piece is of it: offset, size, and of that box the first element and the number of a run of them, or None. The
        elements must not change meanwhile. Raises `ShardwrightError`, and leaves no file.
        """
    def write_part_in_background(
        self,
        /,
        name: str,
        pieces: SupportsGetItem[
            int,
            tuple[
                str,
                Any,
                SupportsGetItem[int, SupportsIndex],
                tuple[
                    SupportsGetItem[int, SupportsIndex],
                    SupportsGetItem[int, SupportsIndex],
                    tuple[SupportsIndex, SupportsIndex] | None,
                ],
            ],
        ],
        memory: CheckpointMemory,
    ) -> PartInBackground:
        """
        Copy the pieces into `memory`, and let a thread do what `write_part` does. The elements can change once this has
        returned.

        Raises `ShardwrightError` for pieces that make no sense, and if an earlier part out of this memory could not be written
        and nobody has waited for it.
        """

@final
class CommOptions:
    """
    How a rank moves tensors: what the configuration and the environment say about it.
    """
    def __new__(
        cls,
        /,
        config: Config,
        environ: Any,
        local_size: SupportsIndex,
        ucx_packages: SupportsGetItem[int, str],
        *,
        one_host: bool,
        cuda_library: str | None = None,
    ) -> CommOptions:
        """
        What the configuration and the environment say, in which `SMP_DISABLE_D2D` and
        `SMP_D2D_GPU_BUFFER_SIZE_BYTES` are about copies from device to device; raises `ConfigError` where they make no
        sense. `local_size` ranks are on this host, or all where it is `one_host`.
        """
    def __repr__(self, /) -> str: ...

@final
class Composite:
    """
    What a tensor is that travels as several dense ones.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    @property
    def argument(self, /) -> int | None:
        """
        The argument that it is.
        """
    @property
    def nested(self, /) -> tuple[int, int, int] | None:
        """
        Of a nested tensor what `of_nested` was given.
        """
    @staticmethod
    def of_argument(argument: SupportsIndex) -> Composite:
        """
        An argument, which the caller has.
        """
    @staticmethod
    def of_nested(values: SupportsIndex, offsets: SupportsIndex, ragged_dimension: SupportsIndex) -> Composite:
        """
        A jagged tensor: the places of its values and offsets, and its ragged dimension.
        """
    @staticmethod
    def of_sparse(
        indices: SupportsIndex, values: SupportsIndex, shape: SupportsGetItem[int, SupportsIndex], coalesced: bool
    ) -> Composite:
        """
        A sparse tensor: the places of its indices and values, its sizes, and whether it is coalesced.
        """
    @property
    def parts(self, /) -> list[int]:
        """
        The places of the dense tensors that it travels as.
        """
    @property
    def sparse(self, /) -> tuple[int, int, list[int], bool] | None:
        """
        Of a sparse tensor what `of_sparse` was given.
        """

@final
class Config:
    """
    The effective configuration of a job, checked: every key is an attribute, its default where it was not given.
    """
    def __delattr__(self, name: str, /) -> None:
        """
        Refused, as a change is.
        """
    def __eq__(self, value: object, /) -> bool: ...
    def __getattr__(self, name: str, /) -> Any:
        """
        Only reached for what is no key.
        """
    def __hash__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __reduce__(self, /) -> tuple[Any, tuple[str]]: ...
    def __repr__(self, /) -> str: ...
    def __setattr__(self, name: str, value: Any, /) -> None:
        """
        Refused: the ranks have agreed on these values.
        """
    def check_world(self, /, world: SupportsIndex) -> Topology:
        """
        The topology of a job with this many ranks; refuses a number that does not fit.
        """
    def chooses_active_microbatches(self, /) -> bool:
        """
        Whether the number of microbatches in flight is chosen after the first steps.
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
    def parse(json: str, world: SupportsIndex | None = None) -> Config:
        """
        Reads a JSON object of keys and values, and checks all of them; with `world`, for a job of so many ranks, which
        `elastic_degrees` are lowered to.
        """
    def schedule(self, /) -> str:
        """
        The text form of the schedule that the job's steps run with; of `auto`, that of the first steps.
        """
    def to_dict(self, /) -> dict[str, Any]:
        """
        Every key with its effective value, in the order of the documentation.
        """
    def to_json(self, /) -> str:
        """
        Every key with its effective value, as a JSON object in the documentation's order.
        """
    @staticmethod
    def without_effect(json: str) -> list[tuple[str, str, str]]:
        """
        The keys of a JSON object that switch nothing on beside the others: name, value as JSON, and why.
        """

@final
class DeadlockDetector:
    """
    One rank's part in the proof that ranks wait for one another, and none can ever go on.
    """
    def __new__(cls, /, rank: SupportsIndex, others: SupportsGetItem[int, SupportsIndex]) -> DeadlockDetector: ...
    @property
    def proof(self, /) -> str | None:
        """
        What all ranks wait for, once it is proven that they do so for ever.
        """
    def receive(
        self,
        /,
        rank: SupportsIndex,
        announced: tuple[
            SupportsIndex,
            SupportsIndex,
            str,
            tuple[SupportsGetItem[int, SupportsIndex], SupportsIndex] | None,
            SupportsGetItem[int, tuple[SupportsGetItem[int, SupportsIndex], SupportsIndex]],
        ],
    ) -> None:
        """
        Another rank has announced what `update` gave it.
        """
    def reset(self, /, ended: SupportsIndex) -> None:
        """
        Forget the suspicion of that number, which has been proven here or on another rank.
        """
    @property
    def round(self, /) -> int:
        """
        The number of the suspicion; that of a proof is the same on all ranks.
        """
    def update(
        self,
        /,
        wait_id: tuple[str, SupportsIndex] | None,
        collective: tuple[SupportsGetItem[int, SupportsIndex], SupportsIndex] | None,
        begun: SupportsGetItem[int, tuple[SupportsGetItem[int, SupportsIndex], SupportsIndex]],
        last_checked: SupportsFloat | SupportsIndex,
        seconds: SupportsFloat | SupportsIndex,
        now: SupportsFloat | SupportsIndex,
        describe: Any,
    ) -> tuple[int, int, str, tuple[list[int], int] | None, list[tuple[list[int], int]]] | None:
        """
        Go on with the proof; called again and again. What this rank now announces to all others, in the words of
        `describe`; None where nothing.
        """
    @property
    def wait_id(self, /) -> tuple[str, int] | None:
        """
        The wait that is suspected here.
        """

@final
class Description:
    """
    What a value or an answer is but for its tensors' elements: its tree, what is noted of it, and each tensor's dtype, shape, strides, device and
    whether it requires a gradient.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, spec: Spec, parts: TensorParts) -> Description:
        """
        Describe a value from its tree and tensors.
        """
    @property
    def is_passed_on(self, /) -> bool:
        """
        Whether it is an answer whose result went on to the next rank of a chain.
        """
    def meta(self, /, index: SupportsIndex) -> tuple[str, list[int], list[int], str, bool]:
        """
        `(dtype, shape, strides, device, requires_grad)` of a tensor.
        """
    def needs(self, /) -> list[bool]:
        """
        For each tensor whether it requires a gradient.
        """
    @property
    def notes(self, /) -> ResultNotes:
        """
        What is noted of a forward's result; raises `ValueError` for any other value.
        """
    @property
    def spec(self, /) -> Spec:
        """
        The tree.
        """

@final
class DynamicLossScale:
    """
    A loss scale that shrinks with overflows and grows without them.
    """
    def __new__(
        cls,
        /,
        *,
        init_scale: SupportsFloat | SupportsIndex,
        scale_factor: SupportsFloat | SupportsIndex,
        scale_window: SupportsIndex,
        min_scale: SupportsFloat | SupportsIndex,
        delayed_shift: SupportsIndex,
        consecutive_hysteresis: bool,
    ) -> DynamicLossScale:
        """
        A scale that has seen no step. Raises `ConfigError` that names the setting that is not allowed.
        """
    @staticmethod
    def from_json(json: str, /) -> DynamicLossScale:
        """
        The scale that `to_json` wrote. Raises `ConfigError` for any other text.
        """
    @property
    def scale(self, /) -> float:
        """
        What the next loss is multiplied by.
        """
    def to_json(self, /) -> str:
        """
        Its settings and state, as JSON.
        """
    def update(self, overflow: bool, /) -> None:
        """
        Takes note of a step, whose gradients may have overflowed.
        """

@final
class Event:
    """
    Something for the main thread, from `Server.supervise`.
    """
    @property
    def body(self, /) -> tuple[Spec, TensorParts] | None:
        """
        What the step returned, the value and its tensors; None for another event.
        """
    @property
    def kind(self, /) -> EventKind:
        """
        What it is about.
        """
    @property
    def request(self, /) -> Request | None:
        """
        The control request to answer; None for another event.
        """
    @property
    def text(self, /) -> str | None:
        """
        Who waits for whom.
        """
    @property
    def worker(self, /) -> int | None:
        """
        The worker to start; None for another event.
        """

@final
class EventKind:
    """
    What an event is about.
    """

    ABORTED_LOCALLY: Final[EventKind]
    CONTROL: Final[EventKind]
    ROOT_DONE: Final[EventKind]
    STALL_REPORT: Final[EventKind]
    START_WORKER: Final[EventKind]
    STEP_END: Final[EventKind]
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __int__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __repr__(self, /) -> str: ...

@final
class ForwardCall:
    """
    A module's forward on another rank, beside its arguments.
    """
    def __new__(
        cls,
        /,
        module: SupportsIndex,
        range: tuple[SupportsIndex, SupportsIndex] | None,
        *,
        seed: SupportsIndex,
        notes: ArgumentNotes,
        context: TorchContext,
        chain: SupportsGetItem[int, ForwardLink] = ...,
    ) -> ForwardCall:
        """
        `range` are the children to run of an `nn.Sequential`, as `(start, end)`, None for the whole module; `seed` is
        where its random numbers start; `chain` are the calls that follow with its result.
        """
    @property
    def chain(self, /) -> list[ForwardLink]:
        """
        The calls that follow with its result.
        """
    @property
    def context(self, /) -> TorchContext:
        """
        The torch state that it runs under.
        """
    @property
    def is_followed(self, /) -> bool:
        """
        Whether a call follows with its result.
        """
    @property
    def is_stopped(self, /) -> bool:
        """
        Whether the call before in a chain gave its result to the caller: nothing runs.
        """
    @property
    def module(self, /) -> int:
        """
        The module.
        """
    def next(self, /, notes: ArgumentNotes) -> tuple[ForwardLink, ForwardCall] | None:
        """
        The next call of the chain and its link; None behind the last.
        """
    def next_stopped(self, /) -> tuple[ForwardLink, ForwardCall] | None:
        """
        The next call of a chain that has ended, and its link; None behind the last.
        """
    @property
    def notes(self, /) -> ArgumentNotes:
        """
        What is noted of the arguments' tensors.
        """
    @property
    def range(self, /) -> tuple[int, int] | None:
        """
        The children of an `nn.Sequential` to run; None for the whole module.
        """
    @property
    def seed(self, /) -> int:
        """
        Where its random numbers start.
        """

@final
class ForwardLink:
    """
    A forward that the rank of the call before in a chain asks for, in the name of the first caller.
    """
    def __new__(
        cls,
        /,
        *,
        rank: SupportsIndex,
        request: SupportsIndex,
        module: SupportsIndex,
        range: tuple[SupportsIndex, SupportsIndex] | None,
        number: SupportsIndex,
        seed: SupportsIndex,
    ) -> ForwardLink:
        """
        `rank` is to be asked, by `request`, the id at the first caller; `number` is the call's in that one's frame.
        """
    @property
    def number(self, /) -> int:
        """
        The call's number in the first caller's frame.
        """
    @property
    def rank(self, /) -> int:
        """
        Whom to ask.
        """
    @property
    def request(self, /) -> int:
        """
        The request's id at the first caller, who gets the answer.
        """

@final
class Getters:
    """
    Functions without arguments that are called together.
    """
    def __call__(self, /) -> tuple[object, ...]:
        """
        What they give, in their order.
        """
    def __new__(cls, /, getters: Sequence[Callable[[], object]]) -> Getters:
        """
        Of these functions.
        """
    def give(self, /, values: tuple[object, ...]) -> bool:
        """
        Whether they give these values.
        """

@final
class GradMode:
    """
    Sets torch's grad mode for a block; one block for each object.
    """
    def __enter__(self, /) -> None:
        """
        Set it.
        """
    def __exit__(self, /, *_raised: object) -> None:
        """
        Restore the mode of before, also where the block has changed it.
        """
    def __new__(cls, /, mode: bool) -> GradMode:
        """
        For a block with this mode.
        """

@final
class HostMemory:
    """
    Locked host memory that is used again when nobody has it any more.
    """
    def bytes(self, /) -> object:
        """
        Its bytes as a capsule, for a device to write to.
        """

@final
class IncomingCopy:
    """
    The copy of a part for the background, while its bytes come.
    """
    def finish(self, /) -> PartInBackground:
        """
        Let a thread write the part. Raises `ShardwrightError`.
        """
    def write(self, elements: Any, /) -> None:
        """
        Copy the next elements, in the order of the pieces: those of a contiguous tensor in host memory.
        """

@final
class IncomingPart:
    """
    A rank's file of a checkpoint, while its bytes come. Nothing is left of it unless `finish` succeeds.
    """
    def finish(self, /) -> str:
        """
        Bring the file down to the disk: the report for `commit`. Raises `ShardwrightError`.
        """
    def order(self, /) -> list[int]:
        """
        The places of the pieces in the order in which their elements are wanted. Empty ones are not among them.
        """
    def write(self, elements: Any, /) -> None:
        """
        Hash and write the next elements, those of a contiguous tensor in host memory, while other Python threads run. Raises
        `ShardwrightError`.
        """

@final
class LaunchInfo:
    """
    This process's place among those that were started together.

    `launcher` is `torchrun`, `openmpi`, `srun`, `environment` (another one that sets the same
    variables as torchrun), `torch` (a process group that the script made), or `single`. `job_id` is
    the same text on all ranks, and another one for another job.
    """
    @staticmethod
    def beside_group(environ: Any, rank: SupportsIndex, world_size: SupportsIndex) -> LaunchInfo | None:
        """
        As `detect`, beside the process group that the script has made with torch, in which this process is
        `rank` of `world_size`; raises `JobStartError` where they contradict each other. `None` where only the group
        knows the place: then `of_group` makes it.
        """
    @staticmethod
    def detect(environ: Any) -> LaunchInfo:
        """
        Finds out how this process was started, from its environment; raises `JobStartError` where
        variables are missing, are no numbers or contradict each other, or ranks on several hosts do
        not know where to meet, and says what to set.
        """
    @property
    def job_id(self, /) -> str: ...
    @property
    def launcher(self, /) -> str: ...
    @property
    def local_rank(self, /) -> int: ...
    @property
    def local_size(self, /) -> int: ...
    @staticmethod
    def of_group(
        rank: SupportsIndex,
        hosts: SupportsGetItem[int, str],
        rendezvous_host: str,
        rendezvous_port: SupportsIndex,
        job_id: str,
    ) -> LaunchInfo:
        """
        The place of a rank of the process group that the script has made. `hosts` has a text for each rank, equal for
        ranks of one host; rank 0 is reached at the host and port; no other job has the same `job_id`.
        """
    @property
    def rank(self, /) -> int: ...
    @property
    def rendezvous_host(self, /) -> str | None: ...
    @property
    def rendezvous_port(self, /) -> int | None: ...
    @property
    def single_host(self, /) -> bool: ...
    @property
    def world_size(self, /) -> int: ...

@final
class MappedFile:
    """
    A file without a name in the place of memory, for what a rank keeps long and uses seldom.
    """
    def __new__(cls, /, *, rank: SupportsIndex, directory: str | PathLike[str]) -> MappedFile:
        """
        Make the file of a rank. Raises `OffloadError` where that is not possible.
        """
    def map(self, nbytes: SupportsIndex, /) -> MappedMemory:
        """
        A place for so many bytes, of any values. Raises `OffloadError` where the disk is full.
        """
    def stays_in_memory(self, /) -> bool:
        """
        Whether the directory is in memory, so that nothing is saved.
        """

@final
class MappedMemory:
    """
    A place in the file, mapped. It is there as long as this object, or a tensor of its bytes.
    """
    def bytes(self, /) -> object:
        """
        Its bytes as a capsule.
        """
    def load(self, offset: SupportsIndex, nbytes: SupportsIndex, /) -> None:
        """
        Bring bytes to memory, to be written. Raises `OffloadError` where they cannot be read.
        """
    def release(self, offset: SupportsIndex, nbytes: SupportsIndex, /) -> None:
        """
        Take bytes out of memory; they stay in the file.
        """

@final
class MemoryCategories:
    """
    Bytes of a rank by category; None where they are not known.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        *,
        parameters: SupportsIndex | None,
        gradients: SupportsIndex | None,
        optimizer_state: SupportsIndex | None,
        activations: SupportsIndex | None,
        buffers: SupportsIndex | None,
        communication: SupportsIndex | None,
    ) -> MemoryCategories:
        """
        What was measured, in bytes.
        """
    @property
    def activations(self, /) -> int | None: ...
    def advice(
        self,
        /,
        config: Config,
        *,
        in_flight: SupportsIndex,
        microbatches: SupportsIndex,
        replicas: SupportsIndex,
        checkpointed: tuple[SupportsIndex, SupportsIndex],
        offloadable: SupportsIndex,
        on_device: bool,
    ) -> list[tuple[str, int, str]]:
        """
        The settings that would save memory, the largest saving first: setting, bytes, what it costs.

        `checkpointed` has the most bytes that checkpointed calls kept in memory at once, and the number of these calls;
        `offloadable` the bytes of optimizer state that would leave the memory that the rank computes in, which is a device's
        with `on_device`.
        """
    @property
    def buffers(self, /) -> int | None: ...
    @property
    def communication(self, /) -> int | None: ...
    @staticmethod
    def expected(
        *,
        parameter_bytes: SupportsIndex,
        gradient_bytes: SupportsIndex,
        buffer_bytes: SupportsIndex,
        activation_bytes: SupportsIndex | None,
        in_flight: SupportsIndex,
        optimizer_bytes: SupportsIndex | None,
        master_bytes: SupportsIndex,
        optimizer_shards: SupportsIndex,
    ) -> MemoryCategories:
        """
        What is expected of a rank before it runs: with `activation_bytes` for each microbatch, of which `in_flight`
        are kept at most, and an optimizer that keeps `optimizer_bytes`, and master weights, over `optimizer_shards`
        ranks.
        """
    @property
    def gradients(self, /) -> int | None: ...
    @property
    def optimizer_state(self, /) -> int | None: ...
    @property
    def parameters(self, /) -> int | None: ...
    def total(self, /) -> int:
        """
        The sum of what is known.
        """

@final
class MemoryMeter:
    """
    The peak of the activations of one step, from samples of the bytes in use between its tasks.
    """
    def __new__(cls, /, in_use: SupportsIndex) -> MemoryMeter:
        """
        Begins with the bytes that are in use.
        """
    def activations(self, /, in_use: SupportsIndex) -> int:
        """
        The most bytes of activations, when the tasks have ended with `in_use`.
        """
    def sample(self, /, in_use: SupportsIndex, backward: bool) -> None:
        """
        Notes the bytes in use when a task of a forward or backward is about to begin.
        """

@final
class Node:
    """
    The connection to the job. In a forked child every method raises, except for who is in the job, and `close`, which does
    nothing.
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
        Leave the job: the other ranks hear a shutdown notice, with `report` (kind, message, traceback)
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
        place: Rendezvous,
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
class Offload:
    """
    The offloaded activations of a rank, in a file or in a pool of host memory, and the thread that moves them.
    """
    def __new__(
        cls,
        /,
        *,
        rank: SupportsIndex,
        horizon: SupportsIndex,
        directory: str | PathLike[str] | None,
        most_outgoing: SupportsIndex,
        timeout_seconds: SupportsFloat | SupportsIndex,
    ) -> Offload:
        """
        Make the storage of a rank: a file in `directory`, or with None a pool of host memory.

        `most_outgoing` bytes may be on their way out at once. Raises `OffloadError` where no file can be made.
        """
    def add_call(self, /, microbatch: SupportsIndex, module: str) -> OffloadedCall:
        """
        A checkpointed call begins; `module` names in errors and timelines what was called.
        """
    def arrived(self, tensor: SupportsIndex, memory: HostMemory, /) -> None:
        """
        A tensor of a device that had to leave is in host memory, which must not be written to any more.
        """
    def begin_step(
        self,
        /,
        *,
        step: SupportsIndex,
        schedule: str,
        ranks: SupportsIndex,
        pp_rank: SupportsIndex,
        microbatches: SupportsIndex,
        one_at_a_time: bool,
    ) -> None:
        """
        A step begins under a schedule, given as text, on a pipeline of `ranks`, of which this one is `pp_rank`.

        With `one_at_a_time` microbatches run one after another, whatever the schedule.
        """
    def begin_task(self, /, microbatch: SupportsIndex, *, backward: bool) -> None:
        """
        The rank begins a task of a microbatch, or goes on with it.
        """
    def bytes_of(self, tensor: SupportsIndex, /) -> object | None:
        """
        The bytes of a tensor of a device, as a capsule; None where they are not in host memory.
        """
    def changes(self, /) -> tuple[list[int], list[int], set[int]]:
        """
        What has to be done with tensors of devices, since the last call: those that have to come to host memory, those that
        nobody keeps any more, and all that are needed within the horizon.
        """
    def close(self, /) -> None:
        """
        End the thread. What is kept is lost.
        """
    def counts(self, /) -> dict[str, int]:
        """
        What has been moved since the start: tensors and bytes out and back, calls that had to wait, and the most bytes that
        were out at once.
        """
    def keep_trace(self, on: bool, /) -> None:
        """
        Keep records of transfers from now on, or keep none.
        """
    def lease(self, nbytes: SupportsIndex, /) -> HostMemory | None:
        """
        Locked host memory for so many bytes, which has been used before; None where all is in use.
        """
    def lease_new(
        self, owner: Any, address: SupportsIndex, size: SupportsIndex, nbytes: SupportsIndex, /
    ) -> HostMemory:
        """
        New host memory for `nbytes`, of `size` bytes that `owner` has locked at an address and that nobody else uses; it is
        used again later.
        """
    def stays_in_memory(self, /) -> bool:
        """
        Whether what goes out stays in memory, so that nothing is saved.
        """
    def take_trace(self, /) -> Timeline:
        """
        The records since the last call.
        """

@final
class OffloadedCall:
    """
    What one checkpointed call keeps. It is given up with this object.
    """
    def add(self, address: SupportsIndex, nbytes: SupportsIndex, /) -> int:
        """
        Keep a copy of the bytes of a dense tensor in host memory, and return its number.
        """
    def add_on_device(self, nbytes: SupportsIndex, /) -> int:
        """
        Keep a tensor of a device, which the caller has until it has to leave, and return its number.
        """
    def share(self, tensor: SupportsIndex, /) -> bool:
        """
        Keep a tensor that other calls keep; false where none does any more.
        """
    def take(self, /) -> list[tuple[int, object | None]]:
        """
        The tensors by number, as capsules of bytes that must not be written to. Waits for those that are not back. Those of
        devices that are not in host memory are None.
        """

@final
class PartInBackground:
    """
    A part of a checkpoint that a thread writes.
    """
    @property
    def is_done(self, /) -> bool:
        """
        Whether it has been written, or could not be.
        """
    def wait(self, /) -> str:
        """
        Wait until it has been written, while other Python threads run: the report for `commit`. Raises `ShardwrightError` if
        it could not be. It can be called again.
        """

@final
class Place:
    """
    Where a request is made: of which model, for which microbatch, and as which call.
    """
    def __new__(
        cls,
        /,
        *,
        model: SupportsIndex,
        microbatch: SupportsIndex,
        parent: SupportsIndex | None = None,
        number: SupportsIndex = 0,
    ) -> Place:
        """
        `parent` is the request that the requester executes, None in the step function itself; `number` is the call's in
        that execution.
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
    def number(self, /) -> int:
        """
        The call's number in that execution.
        """
    @property
    def parent(self, /) -> int | None:
        """
        The request that the requester executes; None in the step function itself.
        """

@final
class Recipe:
    """
    How the caller finds a result: it is an argument, or a view of an argument or of another tensor of the answer.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        *,
        argument: SupportsIndex | None = None,
        result: SupportsIndex | None = None,
        view: View | None = None,
        requires_grad: bool,
    ) -> Recipe:
        """
        Without `view`, the result is the argument. Raises `ValueError` unless it is an argument, or a view of one base.
        """
    def __repr__(self, /) -> str: ...
    @property
    def argument(self, /) -> int | None:
        """
        The argument that it is, or is a view of.
        """
    @property
    def requires_grad(self, /) -> bool:
        """
        Whether it requires a gradient.
        """
    @property
    def result(self, /) -> int | None:
        """
        The tensor of the answer that it is a view of.
        """
    @property
    def view(self, /) -> View | None:
        """
        How it lies in its base; None where it is the argument itself.
        """

@final
class Rendezvous:
    """
    Where a rank meets the others, and the secret by which they know each other; for one connection.
    """
    @staticmethod
    def at(host: str, port: SupportsIndex, secret: bytes | None) -> Rendezvous:
        """
        Another rank's, which was told where rank 0 listens.
        """
    @staticmethod
    def find(name: str, host: str, secret: bytes | None, timeout: SupportsFloat | SupportsIndex) -> Rendezvous:
        """
        Another rank's among ranks of one host, as soon as rank 0's is there.

        Raises `JobStartError` when it is not within `timeout` seconds, or the process there is another user's.
        """
    @staticmethod
    def listen(host: str, secret: bytes | None) -> Rendezvous:
        """
        Rank 0's: it listens on an interface, at a port to be told to the others. Without a secret it trusts everybody.

        Raises `JobStartError` where the secret is too weak to be one, or nothing can listen there.
        """
    @property
    def note(self, /) -> int:
        """
        What rank 0 told beside it; 0 where it told nothing.
        """
    @staticmethod
    def open(name: str, host: str, secret: bytes | None, note: SupportsIndex = 0) -> Rendezvous:
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
class Request:
    """
    A request of another rank (the paper, appendix B).
    """
    def __repr__(self, /) -> str: ...
    @property
    def backward(self, /) -> BackwardCall:
        """
        What a backward request asks for, or one that ends a forward; raises `ValueError` for any other request.
        """
    @property
    def control(self, /) -> str | None:
        """
        For a control request: what it is about.
        """
    @property
    def forward(self, /) -> ForwardCall:
        """
        What a forward request asks for; raises `ValueError` for any other request.
        """
    @property
    def id(self, /) -> int:
        """
        Its id, unique at the requester.
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
    def module(self, /) -> int:
        """
        The module; raises `ValueError` for a control request.
        """
    @property
    def parts(self, /) -> TensorParts:
        """
        The tensors of the arguments or of the gradients.
        """
    @property
    def requester(self, /) -> int:
        """
        The global rank that asks.
        """
    @property
    def spec(self, /) -> Spec:
        """
        The arguments, or a control request's value, without their tensors.
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
class ResultNotes:
    """
    How an answer's tensors relate to the arguments and to each other, and what the execution left behind.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        *,
        recipes: SupportsGetItem[int, tuple[SupportsIndex, Recipe]] = ...,
        strides: SupportsGetItem[int, tuple[SupportsIndex, SupportsGetItem[int, SupportsIndex]]] = ...,
        watch: SupportsGetItem[int, SupportsIndex] = ...,
        watch_arguments: SupportsGetItem[int, SupportsIndex] = ...,
        written: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] = ...,
        dropped: SupportsGetItem[int, SupportsIndex] = ...,
        composites: SupportsGetItem[int, tuple[SupportsIndex, Composite]] = ...,
        kept_arguments: SupportsGetItem[int, SupportsIndex] = ...,
        kept_results: SupportsGetItem[int, SupportsIndex] = ...,
        collected: Spec | None = None,
        open: bool = False,
        hooked: bool = False,
        ordered: bool = False,
    ) -> ResultNotes:
        """
        Note what there is to note of results; by default nothing.
        """
    def __repr__(self, /) -> str: ...
    @property
    def collected(self, /) -> Spec | None:
        """
        What was collected beside the result, over the answer's tensors; None where nothing was to be.
        """
    @property
    def composites(self, /) -> list[tuple[int, Composite]]:
        """
        Tensors that travel as several.
        """
    @property
    def dropped(self, /) -> list[int]:
        """
        Views made under `no_grad` that require a gradient, which torch drops.
        """
    @property
    def hooked(self, /) -> bool:
        """
        Whether it has put hooks on tensors of its own.
        """
    @property
    def is_plain(self, /) -> bool:
        """
        Whether nothing is said but whether a gradient may come back.
        """
    @property
    def kept_arguments(self, /) -> list[int]:
        """
        Arguments whose memory something keeps after the call.
        """
    @property
    def kept_results(self, /) -> list[int]:
        """
        Results whose memory something keeps after the call.
        """
    @property
    def may_stay(self, /) -> bool:
        """
        Whether the tensors may stay where they are: nothing is said of memory that they share with others.
        """
    @property
    def open(self, /) -> bool:
        """
        Whether a gradient may come back to the execution.
        """
    @property
    def ordered(self, /) -> bool:
        """
        Whether it has changed what a module keeps.
        """
    @property
    def recipes(self, /) -> list[tuple[int, Recipe]]:
        """
        How the caller finds results among what it has, by place.
        """
    @property
    def strides(self, /) -> list[tuple[int, list[int]]]:
        """
        The strides of tensors that are not dense.
        """
    @property
    def watch(self, /) -> list[int]:
        """
        Results that share memory in a way that no view makes again.
        """
    @property
    def watch_arguments(self, /) -> list[int]:
        """
        Arguments that such results share memory with.
        """
    @property
    def written(self, /) -> list[tuple[int, int]]:
        """
        Arguments that were written to, each with the number of the tensor that has its new values.
        """

@final
class Server:
    """
    A rank's execution server: hands out tasks, carries requests and answers, ends failed steps everywhere.

    In a forked child every method raises `ShardwrightError`, except those that tidy up, which do nothing.
    """
    def announce_backward(
        self,
        /,
        worker: SupportsIndex,
        *,
        to: SupportsIndex,
        model: SupportsIndex,
        module: SupportsIndex,
        microbatch: SupportsIndex,
        forward: SupportsIndex,
        closes: bool,
    ) -> int:
        """
        Announce a backward that another rank asks for, with `send_backward_for`; its id. The answer comes here.

        `forward` is the forward request; `closes` tells that no gradients are expected to reach it.
        """
    def announce_forward(
        self,
        /,
        worker: SupportsIndex,
        *,
        to: SupportsIndex,
        model: SupportsIndex,
        module: SupportsIndex,
        microbatch: SupportsIndex,
        expected: Description | None = None,
    ) -> int:
        """
        Announce a forward that another rank asks for, with `send_forward_for`; its id. The answer comes here.
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

        `pipeline` is the text form of a schedule, or the name of one that has at most `active_microbatches` in flight.

        `one_at_a_time` starts a microbatch only when the one before it has ended, whatever the schedule; what the root
        gives holds for its peers.
        """
    def check_abort(self, /, step: SupportsIndex, needed: SupportsGetItem[int, SupportsIndex] = ...) -> None:
        """
        Raise a failure of the step elsewhere, while waiting for something other than the server.

        `needed` are ranks that take part in what is waited for: that one of them has left the
        job in good order is a failure too, if it stays unfinished for 2 s after.
        """
    def check_run_again(self, /, step: SupportsIndex, departures: bool) -> None:
        """
        Raise the reason of another rank that ends such a step there, once it is known.
        """
    def clock_ns(self, /) -> int:
        """
        The time, for `recomputed`.
        """
    def close(self, /) -> None:
        """
        End the server: idle workers get None as their next task. A second call does nothing.
        """
    def defer_weight_gradient(self, /, worker: SupportsIndex) -> int:
        """
        Leave the weight gradients of the backward that a worker runs for later: a task `WEIGHT_GRADIENT` with the token
        that is returned.
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
    def keeps_one_at_a_time(self, /) -> bool:
        """
        Whether they do so whatever the schedule, because the root has said so or the model that was divided needs it.
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
    def recomputed(self, worker: SupportsIndex, began_ns: SupportsIndex, /) -> None:
        """
        Record that a worker has computed a checkpointed module again since then.
        """
    def release(self, /, holder: SupportsIndex, requests: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        The tensors of a rank's answers to requests of this rank are needed no more.
        """
    def respond(self, /, request: Request, answer: Answer) -> None:
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
    def send_backward(
        self, /, worker: SupportsIndex | None, to: SupportsIndex, place: Place, call: BackwardCall, parts: TensorParts
    ) -> int:
        """
        Ask for the backward of an earlier forward, or for its end where there are no gradients; the request's id.
        """
    def send_backward_for(
        self, /, worker: SupportsIndex, like: Request, link: BackwardLink, call: BackwardCall, parts: TensorParts
    ) -> None:
        """
        Ask for the next backward of a chain, in the name of `like`'s requester, who has announced it.
        """
    def send_control(
        self,
        /,
        worker: SupportsIndex | None,
        to: SupportsIndex,
        place: Place,
        name: str,
        spec: Spec,
        parts: TensorParts,
    ) -> int:
        """
        Ask for something that a rank's main thread does outside any microbatch; the request's id.
        """
    def send_forward(
        self,
        /,
        worker: SupportsIndex | None,
        to: SupportsIndex,
        place: Place,
        call: ForwardCall,
        spec: Spec,
        parts: TensorParts,
        *,
        hold: bool = False,
        expected: Description | None = None,
    ) -> int:
        """
        Ask a rank of the pipeline to run a module forward; the request's id.

        With `hold` the results' tensors stay there until they are fetched or passed on. `expected` is what the answer
        is taken to be meanwhile; another one fails the step.
        """
    def send_forward_for(
        self,
        /,
        worker: SupportsIndex,
        like: Request,
        link: ForwardLink,
        call: ForwardCall,
        spec: Spec,
        parts: TensorParts,
    ) -> None:
        """
        Ask for the next forward of a chain, in the name of `like`'s requester, who has announced it.
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
        itself is the event `ABORTED_LOCALLY`.
        """
    def take_if_answered(self, /, requests: SupportsGetItem[int, SupportsIndex]) -> list[Answer] | None:
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
    ) -> list[Answer]:
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
    def would_run_again(self, /, step: SupportsIndex, departures: bool) -> bool:
        """
        Whether a step that has failed would be run again for this rank's own reason: the order of microbatches or, with
        `departures`, that modules departed from what was predicted.
        """

@final
class Sites:
    """
    What is known of a job's calls, and how far that is relied on (static mode). A call, alike for all microbatches and
    steps, has a number.
    """
    def __new__(
        cls, /, *, tensor_handles: bool, fast_mode: bool, static_mode: bool, static_steps: SupportsIndex
    ) -> Sites:
        """
        Know nothing yet, of a job with these settings.
        """
    def begin_step(self, /, step: SupportsIndex, function: str, *, predicts: bool) -> None:
        """
        A step begins; in one that is run again after a departure nothing is predicted.
        """
    def learn(self, /, site: SupportsIndex, given: Description, answers: SupportsGetItem[int, Description]) -> None:
        """
        Remember what a call has given.
        """
    @property
    def learns(self, /) -> bool:
        """
        Whether calls are remembered, and predicted.
        """
    def predict(
        self, /, site: SupportsIndex, given: Description | None, *, observed: bool
    ) -> tuple[list[Description] | None, bool]:
        """
        What each request of a call with these arguments will be answered with, once that has been the same for some
        steps, else None; and whether the results' tensors stay where they are made.

        `given` is None where the arguments are not to be remembered; `observed` tells that somebody wants to see the
        results.
        """
    @property
    def predicts(self, /) -> bool:
        """
        Whether callers may go on before answers are there.
        """
    def restart(self, /) -> bool:
        """
        The ranks of a tensor-parallel group have come to know calls at different times: all that is known counts as seen in
        this step for the first time. Returns whether anything is predicted after that, which is not where they part again
        and again.
        """
    def set_ordered(self, /, site: SupportsIndex) -> None:
        """
        The call has changed what a module keeps: from now on its caller waits for it.
        """
    def site(
        self,
        /,
        caller: str | None,
        number: SupportsIndex,
        model: SupportsIndex,
        asked: SupportsGetItem[int, tuple[SupportsIndex, tuple[SupportsIndex, SupportsIndex] | None]],
        context: TorchContext,
    ) -> int:
        """
        A call of the step function that runs: the module that makes it (None for the step function), its number there,
        the model, the modules that it asks for one after another, with their children to run, and its torch state.
        """
    def wants(self, /, site: SupportsIndex) -> None:
        """
        The caller uses the values of a result that is elsewhere.
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
    @property
    def holds_containers(self, /) -> bool:
        """
        Whether something in the value of a call's `(args, kwargs)` can be changed in place, besides tensors and these two.
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
    def kind(self, /) -> TaskKind:
        """
        What it is.
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
        What `defer_weight_gradient` returned; None for other tasks.
        """

@final
class TaskKind:
    """
    What a task is.
    """

    BACKWARD: Final[TaskKind]
    CLOSE: Final[TaskKind]
    FORWARD: Final[TaskKind]
    ROOT: Final[TaskKind]
    WEIGHT_GRADIENT: Final[TaskKind]
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __int__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __repr__(self, /) -> str: ...

@final
class TensorParts:
    """
    The tensors of one body, copied out of torch's memory or received.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /) -> TensorParts: ...
    def append(self, /, tensor: torch.Tensor, dtype: str, device: str, requires_grad: bool) -> None:
        """
        Add a copy of a dense tensor in host memory; `device` is where its receiver shall put it.

        Raises `ValueError` for one that is not dense.
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
    def meta(self, /, index: SupportsIndex) -> tuple[str, list[int], list[int], str, bool]:
        """
        `(dtype, shape, strides, device, requires_grad)` of a tensor.
        """
    def needs(self, /) -> list[bool]:
        """
        For each tensor whether it requires a gradient at its receiver.
        """
    @staticmethod
    def of_plain(tensors: list[torch.Tensor], needs: SupportsGetItem[int, bool]) -> TensorParts | None:
        """
        Copies of a list of tensors, if each is of torch's own class, dense and in host memory; else None. `needs` tells
        which shall require a gradient at the receiver.
        """
    def take_into_device(
        self, /, index: SupportsIndex, address: SupportsIndex, *, ordinal: SupportsIndex, stream: SupportsIndex
    ) -> bool:
        """
        Take a tensor's bytes into the memory of CUDA device `ordinal`, behind what `stream` has been given so far; does
        not wait. False, and nothing is taken, where there is no way.

        The memory stays the tensor's, and unused, as the stream sees it.
        """
    def take_tensor(self, /, index: SupportsIndex) -> torch.Tensor:
        """
        A tensor in host memory, which owns its bytes: it can be taken once.
        """
    def take_tensors(self, /) -> list[torch.Tensor]:
        """
        All tensors, in host memory; each can be taken once.
        """

@final
class TensorsBefore:
    """
    Tensors as they were, to see afterwards which were written to.
    """
    def __new__(cls, /, tensors: list[torch.Tensor]) -> TensorsBefore:
        """
        Remember versions and histories of the tensors of a list.
        """
    def are_reattached(self, /) -> bool:
        """
        Whether any of them requires a gradient now, or none any more, though no write has changed its history.
        """
    def are_unrelated_to(self, /, results: list[torch.Tensor]) -> bool:
        """
        Whether nothing was done to the tensors, and results are one dense tensor that is no view and shares no memory with
        them.
        """
    def rewritten(self, /, number: SupportsIndex) -> torch.autograd.graph.Node | None:
        """
        The new history of a tensor that was written to in grad mode; None where only values changed.
        """
    def written(self, /) -> list[int]:
        """
        The numbers of those that were written to.
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
class TorchContext:
    """
    The torch state that a module runs under.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        *,
        grad_mode: bool,
        inference_mode: bool = False,
        autocast: SupportsGetItem[int, tuple[str, str, bool]] = ...,
        checkpointing: tuple[bool, bool, SupportsIndex] | None = None,
        hooks: bool = True,
        device: str | None = None,
        settings: SupportsGetItem[int, tuple[TorchSetting, bool | str]] = ...,
        collector: SupportsGetItem[int, tuple[str, SupportsIndex | Spec]] | None = None,
    ) -> TorchContext:
        """
        `autocast` has for each device type under autocast its name, the dtype's and whether casts are cached; `hooks`
        is False where only the module's `forward` runs; `device` and `settings` are what the task has changed of the
        script's; `collector` is what `transformers` collects: for lists how long they are, else the value.
        `checkpointing` is as its attribute has it.

        Raises `ValueError` for a setting whose value is of another kind.
        """
    @property
    def autocast(self, /) -> list[tuple[str, str, bool]]:
        """
        Enabled autocast states: device type, dtype, cache enabled.
        """
    @property
    def checkpointing(self, /) -> tuple[bool, bool, int] | None:
        """
        How the work is to be checkpointed: whether state changes once, whether random numbers are drawn again, and
        how many children of an `nn.Sequential` are one checkpoint (0 for all); None where it is not.
        """
    @property
    def collector(self, /) -> list[tuple[str, int | Spec]] | None:
        """
        What `transformers` collects, by name; None where nothing is collected.
        """
    @property
    def device(self, /) -> str | None:
        """
        The default device, where the task has set another one than the script.
        """
    @property
    def grad_mode(self, /) -> bool:
        """
        Whether gradients are enabled.
        """
    @property
    def hooks(self, /) -> bool:
        """
        Whether the module's hooks run.
        """
    @property
    def inference_mode(self, /) -> bool:
        """
        Whether inference mode is on.
        """
    @property
    def is_plain(self, /) -> bool:
        """
        Whether it says nothing but whether gradients are enabled.
        """
    @property
    def settings(self, /) -> list[tuple[TorchSetting, bool | str]]:
        """
        The settings that the task has changed.
        """

@final
class TorchSetting:
    """
    A setting that torch has once for the whole process, or for each thread.
    """

    ANOMALY: Final[TorchSetting]
    ANOMALY_CHECK_NAN: Final[TorchSetting]
    AUTOCAST_CACHE: Final[TorchSetting]
    BACKWARD_THREADS: Final[TorchSetting]
    CUDNN: Final[TorchSetting]
    CUDNN_ATTENTION: Final[TorchSetting]
    CUDNN_BENCHMARK: Final[TorchSetting]
    CUDNN_DETERMINISTIC: Final[TorchSetting]
    DEFAULT_DTYPE: Final[TorchSetting]
    """
    A dtype's name without `torch.`.
    """
    DETERMINISTIC: Final[TorchSetting]
    DETERMINISTIC_WARN_ONLY: Final[TorchSetting]
    ENCODER_FAST_PATH: Final[TorchSetting]
    FILL_UNINITIALIZED: Final[TorchSetting]
    FLASH_ATTENTION: Final[TorchSetting]
    MATH_ATTENTION: Final[TorchSetting]
    MEMORY_EFFICIENT_ATTENTION: Final[TorchSetting]
    ONEDNN: Final[TorchSetting]
    OVERWRITE_CONVERTED: Final[TorchSetting]
    PRECISION: Final[TorchSetting]
    """
    The precisions under all names that torch has for them, as one text.
    """
    SPARSE_INVARIANTS: Final[TorchSetting]
    SWAP_CONVERTED: Final[TorchSetting]
    VIEW_REPLAY: Final[TorchSetting]
    WARN_ALWAYS: Final[TorchSetting]
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __int__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __repr__(self, /) -> str: ...

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

@final
class View:
    """
    How a view lies in its base.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(
        cls,
        /,
        shape: SupportsGetItem[int, SupportsIndex],
        strides: SupportsGetItem[int, SupportsIndex],
        offset: SupportsIndex,
        *,
        conjugated: bool,
        negated: bool,
        grad_mode: bool,
    ) -> View:
        """
        `offset` counts from where the base begins; `conjugated` and `negated` tell whether it is read so where the base
        is not, or the other way round.
        """
    @property
    def conjugated(self, /) -> bool:
        """
        Whether it is conjugated where its base is not, or the other way round.
        """
    @property
    def grad_mode(self, /) -> bool:
        """
        Whether it was made with gradients enabled.
        """
    @property
    def negated(self, /) -> bool:
        """
        Whether it is negated where its base is not, or the other way round.
        """
    @property
    def offset(self, /) -> int:
        """
        Where it begins, from where its base begins.
        """
    @property
    def shape(self, /) -> list[int]:
        """
        The sizes.
        """
    @property
    def strides(self, /) -> list[int]:
        """
        The strides.
        """

def advance_twister(state: bytes, words: SupportsIndex, /) -> bytes:
    """
    The state of torch's generator of the CPU after it has drawn so many words of 32 bits, as ``get_state`` gives it.

    Numbers that it keeps for later (the second of two of a normal distribution) stay.
    """

def choose_schedule(
    ranks: SupportsGetItem[
        int,
        SupportsGetItem[
            int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, SupportsFloat | SupportsIndex, SupportsIndex]
        ],
    ],
    *,
    microbatches: SupportsIndex,
    active_microbatches: SupportsIndex,
    control: str,
) -> tuple[str, list[int], float, list[tuple[str, float]]] | None:
    """
    The fastest schedule with at most `active_microbatches` in flight, from what every rank of the pipeline did in its
    first steps, the root's first; None while these are not enough. `control` is how it goes from rank to rank, as for
    `simulate`.
    """

def collective_back_end(asked: str, facts: SupportsGetItem[int, str]) -> str:
    """
    The name of the back end of `torch.distributed` for a job's collectives, found alike on all ranks.

    `asked` is the configuration key `ddp_dist_backend`. `facts` has a JSON object for each rank: `host`; `device`, the
    UUID of its CUDA device, and `gpu`, the address of its GPU, or null; `has_gloo` and `has_nccl`, whether its torch
    was built with them; `group`, the back ends of a process group that its script has made, or null. Raises
    `ConfigError` where what is asked for cannot work.
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

def detached(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """
    Tensors with the memory and the versions of those of a list, and without histories.
    """

def end_with(process: SupportsIndex) -> None:
    """
    Ends this process by a signal as soon as another one has ended, with all of its process group if it leads that.

    Raises `OSError` where there is no such process, or no thread to wait for its end.
    """

def export_full_checkpoint(
    path: str | PathLike[str], tag: str, out: str | PathLike[str], max_shard_bytes: SupportsIndex
) -> list[str]:
    """
    Write the model of the checkpoint `tag` in the directory `path` into the new folder `out`, as `shardwright checkpoint
    export --full` does, while other Python threads run: the names of the files with tensors.

    Tensors are streamed. Raises `ShardwrightError`, and leaves nothing of the folder.
    """

def flatten(value: Any, registry: Any, names: SupportsGetItem[int, str] = ...) -> tuple[Spec, list[Any]]:
    """
    Split a value into its tree and its tensors, each tensor once.

    `registry` has `encoders` (type to name and function to fields), `decoders` (name to
    function from fields) and `fallback(type)`. Raises `UnsupportedValueError`, which names
    the path, for a type that cannot cross ranks; `names` are what the elements of an
    outermost tuple are called there.
    """

def heap_bytes() -> int | None:
    """
    Bytes that the C library's heaps have given out; None where it does not tell.
    """

def in_flight(schedule: str, *, ranks: SupportsIndex, microbatches: SupportsIndex) -> list[int]:
    """
    The most microbatches in flight on each rank of a pipeline, under a schedule that is given as text.

    Raises `ConfigError` for a schedule that cannot be run.
    """

def is_in_store(path: str | PathLike[str]) -> bool:
    """
    Whether a path is an address in an object store, such as `s3://BUCKET/PREFIX`. Raises `ShardwrightError` for addresses of
    other kinds, and for an empty path.
    """

def is_schedule(text: str) -> bool:
    """
    Whether a text is the name of a schedule, or a program itself, and not the path of one.
    """

def join_profile(
    parts: SupportsGetItem[int, str | PathLike[str]], path: str | PathLike[str], /, *, origin_ns: SupportsIndex
) -> None:
    """
    Put the parts of all ranks together into one trace for Perfetto.
    """

def kept_by_others(aliases: list[torch.Tensor], count_uses: Callable[[int], int], own: SupportsIndex) -> list[int]:
    """
    Of a list of tensors, to which nothing else refers, those whose memory something else refers to: their numbers.

    `count_uses` is torch's function that tells how many tensors and Python objects have the memory of a `_cdata`;
    `own` is how many references to its Python object there are where only this function has one.
    """

def map_large_allocations(bytes: SupportsIndex) -> bool:
    """
    Has the C library keep allocations of so many bytes or more out of its heaps, and give them back to the system when
    they are freed; returns whether it does.
    """

def means(config: Config, world: SupportsIndex, local_size: SupportsIndex) -> tuple[int, bool, str | None]:
    """
    What this rank can do with the limits of its process, of which that of descriptors is raised as far as it may be:
    the size of its persistent buffer, whether UCX, and what is missing for any job.
    """

def memory_ids(tensors: list[torch.Tensor]) -> list[int]:
    """
    For each tensor of a list what identifies the memory behind it, while that lives.
    """

def memory_limit() -> int | None:
    """
    The least of the limits on this process's memory, in bytes: of its control group, its address space and its data.
    """

def newest_checkpoint(path: str | PathLike[str]) -> str | None:
    """
    The tag of the checkpoint that was completed last in a directory; None if there is none. Raises `ShardwrightError` if the
    file that says so was changed.
    """

def owned_tensors(
    module: torch.nn.Module, stand_ins: frozenset[type], /
) -> tuple[list[torch.nn.Parameter], list[tuple[torch.nn.Module, str]]]:
    """
    The parameters in a module tree, each once and in the model's order, and the module and name of each
    buffer; without what stands in for another rank's, by its exact type.

    This runs in every step, so it reads the modules' own dictionaries and asks torch for nothing.
    """

def parameters_in_use(parameters: list[torch.nn.Parameter], /) -> list[torch.nn.Parameter]:
    """
    Those of the parameters that have a gradient, or hooks of any kind.
    """

def partition(request_json: str) -> str:
    """
    Divides a model over the stages of a pipeline: a request as JSON in, a decision as JSON out.
    """

def process_memory() -> tuple[int, int, int] | None:
    """
    Bytes of this process that are in memory, the most that ever were, and those shared with other processes; None where
    the system does not tell.
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

def references_to_storage(tensor: torch.Tensor) -> int:
    """
    How many references to a storage's Python object [`kept_by_others`] finds, less its own, where nothing else has one.
    """

def set_newest_checkpoint(path: str | PathLike[str], tag: str) -> None:
    """
    Make a checkpoint of a directory the newest.
    """

def shard_parameters(
    parameters: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, bool]],
    loads: SupportsGetItem[int, SupportsIndex],
    /,
) -> list[tuple[int, int, int, int]]:
    """
    Divides parameters over ranks that all hold them: for each, its number of elements, the bytes of one, and whether it
    may be split. `loads` are the bytes that each rank has already. Returns `(parameter, start, stop, rank)` of each shard.
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

def tune_schedule(
    ranks: SupportsGetItem[
        int,
        SupportsGetItem[
            int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex]
        ],
    ],
    memory: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex | None]],
    *,
    microbatches: SupportsIndex,
    active_microbatches: SupportsIndex,
    may_split: bool,
    control: str,
) -> tuple[
    int,
    tuple[
        list[int],
        float,
        tuple[str, list[int], float, list[int], bool],
        tuple[str, list[int], float, list[int], bool],
        tuple[str, list[int], float, list[int], bool] | None,
    ]
    | None,
]:
    """
    How many microbatches are in flight, and which backwards are in two parts, from what every rank of the pipeline did in
    its first steps, the root's first, and by rank the bytes that a microbatch keeps and that all together may keep.
    Returns the number of steps that count, and the choice; None while these are not enough. `control` is how it goes from
    rank to rank, as for `simulate`.
    """

def weakness_of_secret(secret: bytes) -> str | None:
    """
    Why bytes are no secret of a job, as the rest of a sentence; `None` where they are one.
    """

def write_profile_part(
    trace: str | PathLike[str],
    part: str | PathLike[str],
    /,
    *,
    rank: SupportsIndex,
    name: str,
    pid: SupportsIndex,
    threads: dict[SupportsIndex, str],
    timeline: Timeline,
    origin_ns: SupportsIndex,
) -> None:
    """
    Write what a rank adds to the trace of all: the events of a trace of `torch.profiler`, and those of a timeline.

    `threads` names threads of the process `pid` by their native ids. `origin_ns` is where the clock of the whole trace
    begins. Raises `ValueError` if the trace is not one of the profiler.
    """
