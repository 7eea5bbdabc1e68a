"""Every class of error, made as the library makes it; what it says is stored beside this file."""

from __future__ import annotations

import contextlib
import inspect
import re
import resource
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright import _core, errors
from shardwright.checkpoints.decoding import Decoder
from shardwright.checkpoints.encoding import Encoder
from shardwright.checkpoints.saving import check_same
from shardwright.config import load_config
from shardwright.frames import Frame, Leaves, in_frame
from shardwright.frames.watch import Watched
from shardwright.job.received import build
from shardwright.model.ownership import apply_ownership
from shardwright.model.updates import Updates, UpdateStatus
from shardwright.partition.decide import decide
from shardwright.partition.decision import Decision
from shardwright.rendezvous import given_secret
from shardwright.step.split import Splitter
from shardwright.values import ValueRegistry, registry
from shardwright.verify.report import Departure, Report, Row
from torch import nn

from tests.checkpoint.test_rotation import save as save_rotating
from tests.errors import stored
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.runtimes import make_runtime

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "errors.md"
SETTINGS = SimpleNamespace(auto_partition=True, default_partition=0, memory_weight=0.8, skip_tracing=True)


def model(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*(layers or (nn.Linear(2, 2), nn.Linear(2, 2))))


def decision(whole: nn.Module) -> Decision:
    return decide(whole, lambda: whole(torch.ones(1, 2)), SETTINGS, 2)


def train(model: Any, inputs: Any) -> None:
    """A step function's signature."""


def unknown_key() -> None:
    load_config({"microbatch": 4}, {}, {})


def value_not_allowed() -> None:
    load_config({"microbatches": 0}, {}, {})


def batch_that_does_not_divide() -> None:
    Splitter(train, (), {}).split((None, torch.ones(5, 2)), {}, 2)


def no_secret_on_several_hosts() -> None:
    launch: Any = SimpleNamespace(rank=3, single_host=False)
    given_secret(launch, SimpleNamespace(secret_file=None, encrypt=False, allow_insecure_hosts=False))


def another_model_on_another_rank() -> None:
    decision(model()).check_against(model(nn.Linear(2, 3), nn.Linear(3, 2)), rank=1)


def placed_beyond_the_last_rank() -> None:
    whole = model()
    smp.set_partition(whole[1], 2)
    decision(whole)


def value_of_an_unknown_type() -> None:
    _core.flatten((torch.ones(1), {"cache": object()}), registry, ["args", "kwargs"])


def object_of_a_class_that_was_not_registered_here() -> None:
    sender = ValueRegistry()
    sender.add(Exception, "script:Sample", str, Exception)
    spec, _ = _core.flatten(Exception(), sender)
    build(make_runtime(node=SimpleNamespace(host=lambda rank: f"node-{rank}")), 1, spec, [])


def write_to_a_tensor_that_a_module_kept() -> None:
    tensor = torch.ones(2)
    watched = Watched(tensor, "module 'layers.1' kept a tensor that it was given or returned")
    tensor.add_(1)
    watched.check(3)


def trained_tensor_outside_the_model() -> None:
    leaves, loss = Leaves(), nn.Linear(2, 1)
    leaves.begin_step([], 1, checks=True)
    leaves.check(loss.weight, "the step function", 0)


def computing_with_a_weight_elsewhere() -> None:
    whole = model()
    made = decision(whole)
    apply_ownership(whole, made, 1 - made.modules["0"])
    whole[0].weight + 1


def hook_on_a_parameter_elsewhere_in_a_step() -> None:
    whole = model()
    made = decision(whole)
    apply_ownership(whole, made, 1 - made.modules["0"])
    with in_frame(Frame(0)):
        whole[0].weight.register_hook(print)


def a_gradient_that_departs() -> None:
    departure = Departure(
        module="layers.5", phase="backward", what="the gradient of layers.5.weight", error=1e-3, rank=1
    )
    report = Report(
        rows=(Row(kind="gradient", name="layers.5.weight", rank=1, error=1e-3),),
        first_departure=departure,
        notes=(),
        dtype="float64",
        tolerance=1e-10,
        num_module_calls=7,
        requests=(2, 2),
        holding=(0, 1),
    )
    raise errors.VerificationError(str(report))


def weights_updated_on_some_ranks_only() -> None:
    updates = Updates(make_runtime(1, 2))
    updates.refuse("AdamW.step() failed on rank 1 on host 'node-1'")
    updates.check()


def signal_between_updates() -> None:
    Updates(SimpleNamespace()).compare(
        {0: UpdateStatus(True, False), 1: UpdateStatus(False, True), 2: UpdateStatus(None, False)}
    )  # type: ignore[arg-type]


def failure_elsewhere() -> None:
    raise errors.RemoteError(2, "node-1", "layers.5", 3, "backward", "ValueError", "not a number", "Traceback ...")


def module_that_gives_something_else() -> None:
    raise errors.DepartureError(
        *(1, "node-1", "layers.5", 3, "forward", "DepartureError"),
        "given arguments alike, it returned None with tensors [] where it had returned tensor 0 with tensors "
        "[float32[8, 512], requires grad] in the steps recorded for static mode",
    )


def microbatches_out_of_order() -> None:
    raise errors.StateOrderError(
        *(1, "node-1", "layers.5", 2, "forward", "StateOrderError"),
        "microbatch 2 came to the state of 'layers.5' after microbatch 3, which it goes before in one process",
    )


def write_that_no_trace_saw() -> None:
    raise errors.StateWriteError(
        *(1, "node-1", "layers.5", 2, "backward", "StateWriteError"),
        "the buffer 'layers.5.scale' was changed in a backward: only microbatches that run one after another find it "
        "as in one process",
    )


def rank_that_is_gone() -> None:
    raise errors.PeerLostError(2, "node-1", None, None, None, "PeerLostError", "rank 2 died")


def servers(function: Callable[[Any, int], None]) -> None:
    """Two execution servers; what the second raises is raised here."""
    nodes = _core.Node.in_process(2)
    made = [
        _core.Server.attach(
            node,
            rank=rank,
            host=f"node-{rank}",
            pp_ranks=[0, 1],
            tp_ranks=[rank],
            stall_report_seconds=0.1,
            stall_timeout_seconds=60.0 if rank else 0.3,  # rank 0 is the one that notices
            trace_capacity=10,
        )
        for rank, node in enumerate(nodes)
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(function, server, rank) for rank, server in enumerate(made)][::-1]:
                future.result(HANG_SECONDS)
    finally:
        for server in made:
            server.close()
        for node in nodes:
            node.close()


def _step(server: Any, name: str) -> None:
    server.begin_step(step=1, function=name, num_microbatches=1, pipeline="simple", active_microbatches=1)
    while True:
        event = server.supervise()
        assert event.kind in (_core.EventKind.STALL_REPORT, _core.EventKind.START_WORKER), event.kind


def directory_that_is_not_there() -> None:
    _core.Offload(rank=1, horizon=4, directory="/no/such/disk", most_outgoing=0, timeout_seconds=1.0)


def disk_that_is_full() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = torch.ones(64 << 10, dtype=torch.uint8)
    offload = _core.Offload(rank=1, horizon=1, directory="/tmp", most_outgoing=0, timeout_seconds=20.0)
    calls = [offload.add_call(microbatch, "module 'layers.5' (a Linear)") for microbatch in range(3)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for call in calls:
            call.add(kept.data_ptr(), kept.numel())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        offload.close()


def nothing_moves() -> None:
    servers(lambda server, rank: _step(server, "script.train_step"))


def different_step_functions() -> None:
    servers(lambda server, rank: _step(server, ["script.train_step", "script.evaluate"][rank]))


def ranks_that_save_under_different_tags() -> None:
    check_same([["step10", None, False], ["step11", None, False]], "tag, num_kept_partial_checkpoints and asynchronous")


def file_that_is_not_there() -> None:
    smp.load("nowhere/weights", partial=False)


def checkpoint_that_another_job_removed() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        save_rotating(Path("run7"), "step1", 0)
        reader = _core.CheckpointReader("run7")
        shutil.rmtree("run7/step1_partial")
        reader.verify()


def something_that_was_left_out() -> None:
    encoder = Encoder(leave_out=True)
    content = encoder.encode({"model": nn.Linear(2, 2)}, "user_content")
    Decoder(encoder.tensors).decode(content)["model"]


MESSAGES: dict[type[Exception], tuple[Callable[[], None], ...]] = {
    errors.ConfigError: (unknown_key, value_not_allowed, batch_that_does_not_divide),
    errors.JobStartError: (no_secret_on_several_hosts,),
    errors.PartitionError: (another_model_on_another_rank, placed_beyond_the_last_rank),
    errors.UnsupportedValueError: (value_of_an_unknown_type, object_of_a_class_that_was_not_registered_here),
    errors.FrameError: (write_to_a_tensor_that_a_module_kept, trained_tensor_outside_the_model),
    errors.NotOwnedError: (computing_with_a_weight_elsewhere, hook_on_a_parameter_elsewhere_in_a_step),
    errors.OffloadError: (directory_that_is_not_there, disk_that_is_full),
    errors.StallError: (nothing_moves,),
    errors.StepMismatchError: (different_step_functions,),
    errors.PartialUpdateError: (weights_updated_on_some_ranks_only, signal_between_updates),
    errors.CheckpointError: (ranks_that_save_under_different_tags, file_that_is_not_there),
    errors.CheckpointGoneError: (checkpoint_that_another_job_removed,),
    errors.LeftOutError: (something_that_was_left_out,),
    errors.VerificationError: (a_gradient_that_departs,),
    errors.RemoteError: (failure_elsewhere,),
    errors.PeerLostError: (rank_that_is_gone,),
    errors.DepartureError: (module_that_gives_something_else,),
    errors.StateOrderError: (microbatches_out_of_order,),
    errors.StateWriteError: (write_that_no_trace_saw,),
}


def classes() -> set[type]:
    """What scripts may catch."""
    found = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}
    return found - {errors.ShardwrightError}


def test_what_errors_say_is_what_is_stored() -> None:
    found = {}
    for kind, makers in MESSAGES.items():
        for maker in makers:
            with pytest.raises(kind) as caught:
                maker()
            found[f"{kind.__name__}: {maker.__name__.replace('_', ' ')}"] = str(caught.value)
    stored.check("messages", found)


def test_every_class_has_a_stored_message() -> None:
    assert set(MESSAGES) == classes()


def test_every_class_is_on_the_guides_page_with_cause_and_cure() -> None:
    sections = re.split(r"^## `(\w+)`\n", PAGE.read_text(), flags=re.MULTILINE)
    documented = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert set(documented) == {kind.__name__ for kind in classes()} | {"ShardwrightError"}
    for name, text in documented.items():
        assert "**Cause.**" in text, name
        assert "**Solution.**" in text, name
