"""A tracker that is a TCP server, which may be down, slow or silent: `python -m tests.helpers.socket_tracker HOST PORT`."""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from distill_rl.observe.sinks import tracker_process

Behaviour = Literal["takes", "hangs", "closes"]


class Client:
    """Sends each record and waits for its answer, with no deadline at all."""

    def __init__(self, start: Mapping[str, Any]):
        self._connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        self._answers = self._connection.makefile()
        self._ask(start)

    def log(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self._ask({"step": step, "metrics": metrics})

    def close(self) -> None:
        self._ask({"closed": True})

    def _ask(self, message: Mapping[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")
        if self._answers.readline() != "ok\n":
            raise ConnectionError("no answer")


class Server:
    """What it was told, and where it listens."""

    def __init__(self, behaviour: Behaviour):
        self.messages: list[dict[str, Any]] = []
        self.done = threading.Event()
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for number, line in enumerate(self.rfile):
                    server.messages.append(json.loads(line))
                    if behaviour == "hangs":
                        server.done.wait()
                        return
                    if behaviour == "closes" and number:
                        return
                    self.wfile.write(b"ok\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    @contextmanager
    def serving(self) -> Iterator[Server]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self.done.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def command(port: int, host: str = "127.0.0.1") -> list[str]:
    return [sys.executable, "-m", __name__, host, str(port)]


if __name__ == "__main__":
    tracker_process.TRACKERS = {sys.argv[1]: Client}
    tracker_process.RETRY_S = 0.1
    tracker_process.CLOSE_S = 1.0
    tracker_process.main()
