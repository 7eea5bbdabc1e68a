"""``shardwright run``: the ranks of this host, started by ``torch.distributed.run``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardwright.launch import LAUNCHER

MISUSE = 2
#: More than a host can run, and few enough that nobody waits for an error until memory has ended.
_MOST_RANKS = 1024
_MOST_HOSTS = 65_536
_MOST_PORT = 65_535
_MOST_SECONDS = 86_400
_MOST_SHOWN = 80
#: Options of torchrun that the help explains; it takes the others too.
_EXPLAINED = {
    "help": "show this help and exit",
    "nnodes": "number of hosts, or MIN:MAX of an elastic job (default: 1)",
    "node_rank": "which of the hosts this one is, with --master-addr",
    "master_addr": "host of rank 0",
    "master_port": "port on the host of rank 0",
    "rdzv_endpoint": "HOST:PORT where the hosts meet; the same on all, in place of --node-rank and --master-addr",
    "rdzv_id": "name of the job, where several meet at one endpoint",
    "max_restarts": "how often the ranks are started again after one fails (default: 0)",
    "module": "SCRIPT is the name of a module, as in python -m",
    "training_script": "Python script that each rank runs",
    "training_script_args": "arguments of the script",
}
#: Options that make the configuration of ``smp.init``, with the keys that they stand for.
_DEGREES = {"pp": "pipeline_parallel_degree", "tp": "tensor_parallel_degree", "microbatches": "microbatches"}
#: What runs a script whose trainers train over ranks.
_OF_TRAINERS = "shardwright.huggingface.script"
#: Where any of these is given, ranks meet as it says, and else at a free port of this host.
_MEETING = ("node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port")
#: What torch says where nobody answers.
_NOBODY_THERE = (
    "timed out",
    "connection refused",
    "failed to connect",
    "no route",
    "unreachable",
    "resolve",
    "not known",
)
_EPILOG = """
Every other option of torchrun is taken too, before the script; torchrun --help lists them.

Each of several ranks computes in one thread, unless OMP_NUM_THREADS is set. The exit status is that of the first rank
that fails (128 and the signal's number if a signal ended it). Ctrl-C and SIGTERM end all ranks.

  shardwright run --ranks 2 train.py --epochs 3
  shardwright run --ranks 4 --pp 2 --microbatches 4 --trainers -m trl.scripts.sft --config sft.yaml
  shardwright run --ranks 4 --nnodes 2 --rdzv-endpoint first-host:29400 train.py    (on both hosts)
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments: torchrun's, with ``--ranks``."""
    from torch.distributed.run import get_args_parser

    made = get_args_parser()
    made.prog, made.description, made.epilog = "shardwright run", "Run a script as the ranks of a job.", _EPILOG
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.error = _misused  # type: ignore[method-assign]
    for action in made._actions:
        action.type = _CHECKED.get(action.dest, action.type)
        action.help = _EXPLAINED.get(action.dest, argparse.SUPPRESS)
        if action.dest.startswith("training_script"):
            action.metavar = "SCRIPT" if action.dest == "training_script" else "ARGUMENTS"
    made.add_argument(
        "--ranks",
        dest="nproc_per_node",
        metavar="N",
        type=_number_of_ranks,
        default=argparse.SUPPRESS,
        help="ranks on this host: a number, or gpu for one on each GPU (default: 1)",
    )
    made.add_argument(
        "--trainers",
        action="store_true",
        help="train by the trainers of transformers, and those made of them, over the ranks; no line of SCRIPT changes",
    )
    for name, key in _DEGREES.items():
        made.add_argument(
            f"--{name}", dest=key, metavar="N", type=_whole(1, _MOST_RANKS), help=f"{key} of smp.init, with --trainers"
        )
    return made


def _number_of_ranks(text: str) -> str:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_RANKS))
    if text in ("auto", "cpu", "gpu") or (is_number and 0 < int(text) <= _MOST_RANKS):
        return text
    raise argparse.ArgumentTypeError(f"{_shown(text)} is not allowed; allowed: 1 to {_MOST_RANKS}, gpu, cpu or auto")


def _hosts(text: str) -> str:
    if re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6})?", text):
        fewest, _, most = text.partition(":")
        if 0 < int(fewest) <= int(most or fewest) <= _MOST_HOSTS:
            return text
    raise argparse.ArgumentTypeError(
        f"{_shown(text)} is not allowed; allowed: a number of hosts, or MIN:MAX, up to {_MOST_HOSTS}"
    )


def _whole(fewest: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if re.fullmatch(r"[0-9]{1,10}", text) and fewest <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not allowed; allowed: {fewest} to {most}")

    return whole


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _MOST_SECONDS:
            return float(text)
    raise argparse.ArgumentTypeError(f"{_shown(text)} is not allowed; allowed: seconds, up to {_MOST_SECONDS}")


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not text or (not colon and port) or (host and re.fullmatch(r"[0-9]{1,5}", port) and int(port) <= _MOST_PORT):
        return text
    raise argparse.ArgumentTypeError(
        f"{_shown(text)} is not allowed; allowed: HOST:PORT, with a port up to {_MOST_PORT}"
    )


def _settings(text: str) -> str:
    if not text or all(re.fullmatch(r"\s*[^=\s]+\s*=\s*[^=\s]+\s*", pair) for pair in text.split(",")):
        return text
    raise argparse.ArgumentTypeError(f"{_shown(text)} is not allowed; allowed: KEY=VALUE pairs with commas between")


def _signals(text: str) -> str:
    known = {each.name for each in signal.Signals} - {"SIGKILL", "SIGSTOP"}  # which nobody handles
    for name in text.split(","):
        if name.strip() not in known:
            raise argparse.ArgumentTypeError(
                f"{_shown(name)} is not allowed; allowed: names of signals with commas between, such as SIGTERM,SIGINT"
            )
    return text


def _shown(text: str) -> str:
    """Quote what was given, and not all of it if it is long."""
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}..."


#: Options of torchrun that it would fail over with a traceback, or with which it would never be done.
_CHECKED: dict[str, Callable[[str], Any]] = {
    "nproc_per_node": _number_of_ranks,
    "nnodes": _hosts,
    "node_rank": _whole(0, _MOST_HOSTS),
    "max_restarts": _whole(0, 1_000_000),
    "monitor_interval": _seconds,
    "master_port": _whole(0, _MOST_PORT),
    "rdzv_endpoint": _endpoint,
    "rdzv_conf": _settings,
    "signals_to_handle": _signals,
}


def main(arguments: Sequence[str]) -> int:
    """Run the ranks to their end, and return the exit status of the first that failed, or 0; 2 on misuse."""
    before = os.environ.get(LAUNCHER)
    os.environ[LAUNCHER] = str(os.getpid())  # with which the ranks end
    try:
        return _run(arguments)
    except SystemExit as ended:  # of the parser
        return ended.code if isinstance(ended.code, int) else MISUSE
    finally:
        if before is None:
            os.environ.pop(LAUNCHER, None)
        else:
            os.environ[LAUNCHER] = before


def _run(arguments: Sequence[str]) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import run

    made = parser()
    given = made.parse_args(arguments)  # exits with 2 on misuse
    _refuse_lists(made, given)
    is_file = not given.module and not given.no_python
    if is_file and not _is_file(given.training_script):
        return _refuse(f"there is no file {_shown(given.training_script)}")
    if not given.trainers and (degrees := [name for name, key in _DEGREES.items() if getattr(given, key)]):
        return _refuse(f"--{degrees[0]} without --trainers; scripts with a call of smp.init give it the degrees")
    if given.trainers and given.no_python:
        return _refuse("--trainers with --no-python; trainers are of a Python script")
    if given.trainers:
        _let_trainers_run(given)
    _choose_meeting(made, given)
    if given.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would, with a banner
    try:
        run(given)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _ended(rank, failure.exitcode)
    except SignalException as error:
        return _ended(None, -int(error.sigval))
    except (DistError, RendezvousError) as error:
        return _not_met(error, given)
    except KeyboardInterrupt:  # before the ranks were there
        return _ended(None, -2)
    except (
        ArithmeticError,
        AssertionError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        said = " ".join(str(error).split()) or "no more"
        return _refuse(f"torchrun failed with {type(error).__name__}: {_shown(said)}")
    return 0


def _let_trainers_run(given: argparse.Namespace) -> None:
    """Let what runs the script be started in its place."""
    config = {key: value for key in _DEGREES.values() if (value := getattr(given, key))}
    kind = "module" if given.module else "file"
    given.training_script_args = [json.dumps(config), kind, given.training_script, *given.training_script_args]
    given.training_script, given.module = _OF_TRAINERS, True


def _refuse_lists(made: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Exit where argparse has made an empty list of an option's value, as it does of ``--nnodes=--``."""
    for action in made._actions:
        value = getattr(given, action.dest, None)
        if action.nargs is None and action.option_strings and value == [] and value is not action.default:
            made.error(f"argument {action.option_strings[-1]}: '--' is not allowed")


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def _misused(message: str) -> NoReturn:
    """Say in one line what is wrong with the arguments, which argparse precedes by all that are allowed."""
    sys.stderr.write(f"shardwright run: {' '.join(message.split())}; --help says more\n")
    sys.exit(MISUSE)


def _refuse(why: str) -> int:
    sys.stderr.write(f"shardwright run: {why}\n")
    return MISUSE


def _choose_meeting(made: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Let the ranks of one host meet at a free port, and those of several at their endpoint."""

    def is_given(name: str) -> bool:
        value: Any = getattr(given, name)
        return value != made.get_default(name) or f"PET_{name.upper()}" in os.environ

    if given.nnodes in ("1", "1:1") and not any(map(is_given, _MEETING)):
        given.standalone = True
    elif given.rdzv_endpoint and not is_given("rdzv_backend") and not is_given("node_rank"):
        given.rdzv_backend = "c10d"  # torchrun's default takes every host without a node rank for the first


def _not_met(error: Exception, given: argparse.Namespace) -> int:
    """Say that the store at which ranks meet could not be made or reached, and return the exit status."""
    first_line = str(error).partition("\n")[0]
    where = given.rdzv_endpoint or f"{given.master_addr}:{given.master_port}"
    advice = ""
    if "EADDRINUSE" in first_line:
        advice = "; leave --master-port out, or give a free port"
    elif any(sign in first_line.lower() for sign in _NOBODY_THERE):
        advice = "; is its host there?"
    sys.stderr.write(f"shardwright run: the ranks cannot meet at {where}: {first_line}{advice}\n")
    return 1


def _ended(rank: int | None, code: int) -> int:
    """Say why the job ended early, and return the exit status."""
    who = "the job was" if rank is None else f"rank {rank} was"
    if code < 0:
        sys.stderr.write(f"shardwright run: {who} ended by signal {-code}\n")
        return 128 - code
    sys.stderr.write(f"shardwright run: rank {rank} ended with exit status {code}\n")
    return code
