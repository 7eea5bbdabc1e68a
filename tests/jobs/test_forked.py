"""A forked rank is what a process of its own would be; ports are handed out once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.jobs import ports
from tests.jobs.forked import Forked
from tests.jobs.group import Group
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import run_ranks

SECONDS = HANG_SECONDS


def ended(*command: str, **environment: str) -> tuple[int | None, str, str]:
    process = Forked(command, {**os.environ, **environment})
    return (process.wait(SECONDS), *process.communicate(SECONDS))


def test_exit_codes_and_signals_are_those_of_a_process() -> None:
    assert ended("-c", "pass")[0] == 0
    assert ended("-c", "raise SystemExit(7)")[0] == 7
    assert ended("-c", "import os; os._exit(3)")[0] == 3
    assert ended("-c", "import os; os.kill(os.getpid(), 9)")[0] == -signal.SIGKILL
    code, _, errors = ended("-c", "raise ValueError('no')")
    assert code == 1
    assert errors.endswith("ValueError: no\n")


def test_a_script_has_its_arguments_folder_environment_and_a_main_module(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, beside\n"
        "def here(): return __name__\n"
        "print(sys.argv[1:], beside.NAME, here(), sys.modules['__main__'].here is here, os.environ['WORD'])\n"
    )
    (rank,) = run_ranks(script, "a", "b", ranks=1, environment={"WORD": "said"})
    assert rank.out == "['a', 'b'] beside __main__ True said\n"


def test_a_module_is_run_with_its_package() -> None:
    code, out, _ = ended("-m", "json.tool", "--help")
    assert code == 0
    assert "json.tool" in out


def test_exit_handlers_run_while_the_script_s_objects_are_there() -> None:
    text = (
        "import atexit\nclass Kept:\n  def __del__(self): print('gone')\nkept = Kept()\natexit.register(print, 'end')"
    )
    assert ended("-c", text)[1] == "end\ngone\n"


def test_threads_are_waited_for_at_the_end() -> None:
    text = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()"
    assert ended("-c", text)[1] == "done\n"


def test_standard_input_is_a_pipe_that_ends() -> None:
    process = Forked(["-c", "import sys; print(sys.stdin.read())"], os.environ, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write("word")
    process.stdin.close()
    assert process.communicate(SECONDS)[0] == "word\n"


def test_an_interrupt_raises_in_the_script() -> None:
    # Short sleeps: a signal just before a sleep begins is handled when that sleep is over.
    text = (
        "import time\ntry:\n  print('here', flush=True)\n  while True: time.sleep(0.01)\n"
        "except KeyboardInterrupt: print('caught')"
    )
    process = Forked(["-c", text], os.environ)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(SECONDS)[0] == "caught\n"


def test_a_wait_that_is_too_short_says_so_and_many_may_wait_at_once() -> None:
    process = Forked(["-c", "import time; time.sleep(600)"], os.environ)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    with ThreadPoolExecutor(4) as threads:
        codes = [threads.submit(process.wait, SECONDS) for _ in range(4)]
        process.kill()
        assert [code.result() for code in codes] == [-signal.SIGKILL] * 4


def test_torch_is_there_and_no_thread_is() -> None:
    text = "import os, sys; print('torch' in sys.modules, len(os.listdir('/proc/self/task')))"
    assert ended("-c", text)[1] == "True 1\n"


def test_of_a_group_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(4)\ntime.sleep(600)"
    with (tmp_path / "log").open("w") as log:
        group = Group(["-c", text], 2, output=log)
        group.grace = 0.2
        assert group.wait(SECONDS) == 4


def test_ports_are_handed_out_once_and_only_free_ones(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: ports.next_port(counter), range(64)))
    assert len(set(found)) == 64
    assert min(found) >= ports.FIRST
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert not ports.is_free(other.getsockname()[1])
