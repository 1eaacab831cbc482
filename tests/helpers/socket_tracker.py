"""A tracker that sends to a TCP server, which may fail or hang: `python -m tests.helpers.socket_tracker HOST PORT`."""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from distill_rl.observe import trackers

Behaviour = Literal["takes", "hangs", "closes"]


class Client:
    """The tracker: sends each record and waits for the reply, without a deadline."""

    def __init__(self, start: Mapping[str, Any]):
        self._connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        self._replies = self._connection.makefile()
        self._send(start)

    def log(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self._send({"step": step, "metrics": metrics})

    def close(self) -> None:
        self._send({"closed": True})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")
        if self._replies.readline() != "ok\n":
            raise ConnectionError("no reply")


class Server:
    """Records the messages it receives, and replies according to its behaviour."""

    def __init__(self, behaviour: Behaviour):
        self.messages: list[dict[str, Any]] = []
        self.done = threading.Event()
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for i, line in enumerate(self.rfile):
                    server.messages.append(json.loads(line))
                    if behaviour == "hangs":
                        server.done.wait()
                        return
                    if behaviour == "closes" and i:
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
    trackers.TRACKERS = {sys.argv[1]: Client}
    trackers.RETRY_S = 0.1
    trackers.CLOSE_S = 1.0
    trackers.main()
