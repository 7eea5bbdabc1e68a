"""A server between a client and another server, which refuses some requests."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Given the method and the target of a request, the status that it is refused with; None passes it on.
Refuses = Callable[[str, str], int | None]

_ANSWER = b"<Error><Code>Refused</Code><Message>refused by the test</Message></Error>"


class Between:
    """Passes requests on to a port of the loopback interface.

    Attributes:
        url: Where it listens.
        asked: The methods and targets of all requests so far.
    """

    def __init__(self, port: int, refuses: Refuses) -> None:
        """Start it; a thread for each connection."""
        asked: list[tuple[str, str]] = []
        self.asked = asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def handle_one(self) -> None:
                asked.append((self.command, self.path))
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status = refuses(self.command, self.path)
                if status is not None:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(_ANSWER)))
                    self.end_headers()
                    self.wfile.write(_ANSWER)
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", port)
                upstream.request(self.command, self.path, body, dict(self.headers))
                answer = upstream.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in {"content-length", "connection", "transfer-encoding", "date", "server"}:
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(content)
                upstream.close()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
