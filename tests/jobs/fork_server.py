"""A process without threads that has imported what ranks need, and forks one process after another from itself.

A rank that starts as a process of its own imports torch for seconds before it does anything. Forked here it runs at
once, and is otherwise what ``python script.py`` or ``python -m module`` would be: its own ``__main__``, ``sys.argv``,
environment, standard streams, exit code and exit handlers. Only the end of the interpreter is cut short: taking apart
all that was imported costs a rank half a second, and is left to the tests that start processes of their own.

Run as ``python -m tests.jobs.fork_server PATH``: it listens at that path until its standard input ends. A connection
is a process: the request comes over it with three descriptors, and the process id and the exit code go back.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import selectors
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

#: A request's largest size: an environment and a command line.
REQUEST_BYTES = 1 << 17
#: Standard input, output and error.
STREAMS = 3
_PRELOADED = "tests.jobs.preloaded"


class ForkServer:
    """Forks on request, and tells of each child its process id and, once it has ended, how.

    Attributes:
        children: By process id, the connection over which a child's end is told.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.children: dict[int, socket.socket] = {}
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> dict[str, Any] | None:
        """Serve until standard input ends: None. In a forked child: what it is to run."""
        with selectors.DefaultSelector() as selector:
            for each in (self.listener, self._woken, sys.stdin):
                selector.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is sys.stdin:
                        return None
                    if key.fileobj is self._woken:
                        self._woken.recv(1 << 12)
                        self._reap()
                    elif (request := self._answer()) is not None:
                        selector.close()
                        return request

    def _answer(self) -> dict[str, Any] | None:
        """Fork what somebody asks for; in the child, the request: it has its streams and nothing of the server."""
        connection, _ = self.listener.accept()
        message, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, STREAMS)
        if not message:
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for end in (self.listener, self._wake, self._woken, connection, *self.children.values()):
                end.close()
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
        for descriptor in streams:
            os.close(descriptor)
        if pid == 0:
            return dict(json.loads(message))
        self.children[pid] = connection
        _tell(connection, {"pid": pid})
        return None

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self.children.pop(pid) as connection:
                _tell(connection, {"code": os.waitstatus_to_exitcode(status)})


def _tell(connection: socket.socket, news: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        connection.send(json.dumps(news).encode())


def run(request: dict[str, Any]) -> None:
    """Be ``python`` with the request's command line.

    Args:
        request: ``command`` (a script, ``-m`` and a module or ``-c`` and its text, then arguments), ``environment``,
            ``folder`` and ``session`` (whether to lead a session of its own).
    """
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    added = [path for path in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    os.environ.clear()
    os.environ.update(request["environment"])
    program, *arguments = request["command"]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main  # its objects live until the interpreter ends, after the exit handlers
    if program == "-c":
        sys.path[:0] = [request["folder"], *added]
        sys.argv = ["-c", *arguments[1:]]
        code = compile(arguments[0], "<string>", "exec")
    else:
        if program == "-m":
            sys.path[:0] = [request["folder"], *added]
            main.__spec__ = _specification(arguments.pop(0))
            main.__package__, main.__file__ = main.__spec__.parent, str(main.__spec__.origin)
        else:
            sys.path[:0] = [str(Path(program).resolve().parent), *added]
            main.__file__ = program
        sys.argv = [main.__file__, *arguments]
        code = compile(Path(main.__file__).read_bytes(), main.__file__, "exec")
    try:
        exec(code, main.__dict__)
    except BaseException as error:
        _Ending.code = _code_of(error)
        raise


class _Ending:
    """How a process ends: a child early, with this exit code or signal."""

    early = False
    code = 0


def _code_of(error: BaseException) -> int:
    """The exit code that the interpreter gives for what a script raised; negative for a signal."""
    match error:
        case SystemExit(code=None):
            return 0
        case SystemExit(code=int(code)):
            return code & 0xFF
        case KeyboardInterrupt():
            return -signal.SIGINT
        case _:
            return 1


def _end() -> None:
    """The last exit handler, registered before all others: threads are through, and only modules are left."""
    if not _Ending.early:
        return
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if _Ending.code < 0:
        signal.signal(-_Ending.code, signal.SIG_DFL)
        os.kill(os.getpid(), -_Ending.code)
    os._exit(_Ending.code)


def _specification(module: str) -> importlib.machinery.ModuleSpec:
    found = importlib.util.find_spec(module)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{module}.__main__")
    if found is None:
        sys.exit(f"there is no module {module!r} to run")
    return found


def main() -> None:
    """Import, serve, and in a child run what it was asked to."""
    atexit.register(_end)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{sys.argv[1]}.new")
        listener.listen(1 << 10)  # whoever asks while everything is being imported, waits
        os.rename(f"{sys.argv[1]}.new", sys.argv[1])
        importlib.import_module(_PRELOADED)
        tasks = os.listdir("/proc/self/task")
        if len(tasks) > 1 or threading.active_count() > 1:
            sys.exit(f"importing {_PRELOADED} started threads: {tasks}")
        sys.path.pop(0)  # the folder in which the server was started: each child has its own
        gc.collect()
        gc.freeze()  # collections in a child leave the pages of what was imported shared
        request = ForkServer(listener).serve()
    if request is not None:
        _Ending.early = True
        run(request)


if __name__ == "__main__":
    main()
