"""A server of a small language model that answers like vLLM, SGLang and OpenAI, over real HTTP, with faults on request.

In this process (`StandIn`), or in one of its own that can be killed (`standing_in`). The model is a table: the logits of a
token follow from the two before it, so an answer depends on the prompt alone and has the same bits whoever asks when.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import environment, until

MODEL = "stand-in"
APIS = ("vllm", "sglang", "openai")


class Tables:
    """The model. `logprobs(prompt)` is fp32 [L, V]: row p is about the token after position p."""

    def __init__(self, vocabulary: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.last = rng.normal(size=(vocabulary, vocabulary)).astype(np.float32)
        self.before = rng.normal(size=(vocabulary, vocabulary)).astype(np.float32)

    def logprobs(self, prompt: Sequence[int]) -> np.ndarray:
        ids = np.asarray(prompt)
        logits = 2.0 * self.last[ids].astype(np.float64)
        logits[1:] += self.before[ids[:-1]]
        logits -= logits.max(1, keepdims=True)
        return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


@dataclass
class Settings:
    """What the server does; changed while it runs through `StandIn.settings` or POST /control."""

    vocabulary: int = 320
    model: str = MODEL
    seed: int = 0
    token: str = ""
    max_logprobs: int = 64
    max_length: int = 4096
    says_length: bool = True
    by_text: bool = False
    """Whether OpenAI's tokens are texts instead of `token_id:N`."""
    processed: bool = False
    """Whether the temperature acts on the log-probs of prompts."""
    raw_logits: bool = False
    log_mass: float = 0.0
    """Added to every log-prob: the logarithm of what the probabilities sum to."""
    delay_us: float = 0.0
    """Per token of a prompt."""
    fault: str = ""
    """What happens to the next `count` scoring requests: `status 503`, `stall`, `reset`, `truncate`, `garbage`, `nan`,
    `null`, `positive`, `other-ids`, `other-model`, `few`, `redirect`, `long`, `drip`."""
    count: int = 0
    spared: int = 0
    """Scoring requests that are answered before the faults begin."""
    retry_after: str = ""


@dataclass
class Seen:
    """What the server was asked."""

    prompts: list[list[int]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0


class StandIn:
    """Serves in threads of this process while it is entered."""

    def __init__(self, port: int = 0, tls: tuple[Path, Path] | None = None, **settings: Any):
        self.settings, self.seen = Settings(**settings), Seen()
        self._tables = Tables(self.settings.vocabulary, self.settings.seed)
        self._lock, self._at_once = threading.Lock(), 0
        self.stopping = threading.Event()
        stand_in = self

        class Handler(_Handler):
            owner = stand_in

        self._server = _Server(("127.0.0.1", port), Handler)
        scheme = "http"
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.port = self._server.server_address[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> StandIn:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.end_connections()
        self._server.server_close()
        self._thread.join(10)

    @contextlib.contextmanager
    def request(self, headers: dict[str, str], path: str, prompt: list[int]) -> Iterator[str]:
        """Notes a scoring request, and yields the fault that it meets."""
        with self._lock:
            self.seen.prompts.append(prompt)
            self.seen.headers.append(headers)
            self.seen.paths.append(path)
            self._at_once += 1
            self.seen.most_at_once = max(self.seen.most_at_once, self._at_once)
            fault = self.settings.fault if self.settings.count > 0 and not self.settings.spared else ""
            self.settings.count -= bool(fault)
            self.settings.spared = max(0, self.settings.spared - 1)
        try:
            yield fault
        finally:
            with self._lock:
                self._at_once -= 1

    def table(self, prompt: list[int], temperature: float) -> np.ndarray:
        logprobs = self._tables.logprobs(prompt) + np.float32(self.settings.log_mass)
        if self.settings.raw_logits:
            return logprobs + np.float32(20)
        if self.settings.processed and temperature not in (0, 1):
            scaled = logprobs.astype(np.float64) / temperature
            return (scaled - np.log(np.exp(scaled).sum(1, keepdims=True))).astype(np.float32)
        return logprobs


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._open = set[socket.socket]()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """As the end of a process does; their threads would go on answering."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Says nothing: clients that end their connections are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    owner: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        settings = self.owner.settings
        if self.path == "/health":
            self._send(200, b"")
            return
        if not self._admitted():
            return
        if self.path != "/v1/models":
            self._error(404, "Not Found")
            return
        card: dict[str, Any] = {"id": settings.model, "object": "model", "root": "/models/x"}
        if settings.says_length:
            card["max_model_len"] = settings.max_length
        self._send(200, json.dumps({"object": "list", "data": [card]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/control":
            for name, value in asked.items():
                setattr(self.owner.settings, name, value)
            self._send(200, json.dumps({"scored": len(self.owner.seen.prompts)}).encode())
            return
        if not self._admitted():
            return
        prompt = asked.get("input_ids") or asked.get("prompt")
        with self.owner.request(dict(self.headers), self.path, prompt) as fault:
            self._score(asked, prompt, fault)

    def _admitted(self) -> bool:
        token = self.owner.settings.token
        if token and self.headers.get("Authorization") != f"Bearer {token}":
            self._send(401, json.dumps({"error": "Unauthorized"}).encode())
            return False
        return True

    def _score(self, asked: dict[str, Any], prompt: list[int], fault: str) -> None:
        settings = self.owner.settings
        time.sleep(settings.delay_us * 1e-6 * len(prompt))
        if fault.startswith("status"):
            extra = {"Retry-After": settings.retry_after} if settings.retry_after else {}
            self._error(int(fault.split()[1]), "the stand-in was told to fail", extra)
            return
        if fault == "redirect":
            self._send(307, b"", {"Location": "http://127.0.0.1:9/v1/completions"})
            return
        if fault == "stall":
            self.owner.stopping.wait(60)
            self.close_connection = True
            return
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
            self.close_connection = True
            return
        if self.path == "/generate":
            k, sampling = asked["top_logprobs_num"], asked["sampling_params"]
        else:
            k, sampling = asked.get("prompt_logprobs", asked.get("logprobs")), asked
            if asked["model"] != settings.model:
                self._error(404, f"The model `{asked['model']}` does not exist.")
                return
        if k > settings.max_logprobs:
            text = f"Requested prompt logprobs of {k}, which is greater than max allowed: {settings.max_logprobs}"
            self._error(400, text)
            return
        if max(prompt) >= settings.vocabulary:
            self._error(400, f"Token id {max(prompt)} is out of vocabulary")
            return
        if len(prompt) + 1 > settings.max_length:
            text = (
                f"This model's maximum context length is {settings.max_length} tokens. Your request has {len(prompt)}."
            )
            self._error(400, text)
            return
        logprobs = self.owner.table(prompt, sampling.get("temperature", 1.0))
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
        if fault == "few":
            order = order[:, : k - 1]
        echoed = [*prompt[:-1], (prompt[-1] + 1) % settings.vocabulary] if fault == "other-ids" else prompt
        model = "another" if fault == "other-model" else settings.model
        answer = self._answer(prompt, echoed, model, logprobs, order, by_prompt_logprobs="prompt_logprobs" in asked)
        body = json.dumps(answer, separators=(",", ":")).encode()
        if fault in ("nan", "null", "positive"):
            wrong = {"nan": math.nan, "null": None, "positive": 1.5}[fault]
            first = float(logprobs[0, order[0, 0]])
            body = body.replace(json.dumps(first).encode(), json.dumps(wrong).encode())
        if fault == "garbage":
            body = b"<html>no</html>"
        if fault == "long":
            body = b" " * (64 << 20) + body
        if fault == "truncate":
            self._send(200, body, cut=len(body) // 2)
        elif fault == "drip":
            self._send(200, body, drip=True)
        else:
            self._send(200, body)

    def _answer(
        self,
        prompt: list[int],
        echoed: list[int],
        model: str,
        logprobs: np.ndarray,
        order: np.ndarray,
        *,
        by_prompt_logprobs: bool,
    ) -> dict[str, Any]:
        """As the server of the path answers."""
        after = range(1, len(prompt))
        following = [float(logprobs[p - 1, prompt[p]]) for p in after]
        tops = [[(int(i), float(logprobs[p - 1, i])) for i in order[p - 1]] for p in after]
        if self.path == "/generate":
            pairs = [[None, echoed[0], None], *([value, token, None] for value, token in zip(following, echoed[1:]))]
            top = [None, *([[value, token, None] for token, value in entries] for entries in tops)]
            meta = {"id": "x", "prompt_tokens": len(prompt), "input_token_logprobs": pairs, "input_top_logprobs": top}
            return {"text": "a", "output_ids": [1], "meta_info": meta}
        # The token that follows comes first, and once.
        entries = [
            {token: value, **{i: v for i, v in top if i != token}}
            for token, value, top in zip(prompt[1:], following, tops)
        ]
        if by_prompt_logprobs:
            listed = [
                {str(i): {"logprob": value, "rank": rank + 1, "decoded_token": f'"{i}\\'} for rank, (i, value) in enumerate(entry.items())}
                for entry in entries
            ]  # fmt: skip
            choice: dict[str, Any] = {
                "index": 0, "text": "a", "logprobs": None, "finish_reason": "length", "stop_reason": None,
                "token_ids": [1], "prompt_logprobs": [None, *listed], "prompt_token_ids": echoed,
            }  # fmt: skip
        else:
            written = (lambda i: f"<{i % 7}>") if self.owner.settings.by_text else (lambda i: f"token_id:{i}")
            tops_by_name = [{written(i): value for i, value in entry.items()} for entry in entries]
            tokens = [*map(written, echoed), written(1)]
            values = [None, *following, -0.5]
            named = {
                "tokens": tokens,
                "token_logprobs": values,
                "top_logprobs": [None, *tops_by_name, {written(1): -0.5}],
            }
            choice = {"index": 0, "text": "a", "logprobs": named | {"text_offset": [0] * len(tokens)}}
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": model, "choices": [choice]}

    def _error(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        error = {"error": {"message": text, "type": "Error", "param": None, "code": status}}
        self._send(status, json.dumps(error).encode(), headers)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        cut: int | None = None,
        drip: bool = False,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            if drip:
                for i in range(len(body)):
                    self.wfile.write(body[i : i + 1])
                    if self.owner.stopping.wait(0.05):
                        break
                self.close_connection = True
            else:
                self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@dataclass
class Standing:
    """A stand-in in a process of its own, which keeps its port when it is started again."""

    settings: Settings
    log: Path
    port: int = 0
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        command = [sys.executable, "-m", __name__, str(self.port), json.dumps(asdict(self.settings))]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment(), cwd=Path(__file__).parents[2]
            )
        until(lambda: self.answers(), f"the stand-in at {self.url}")

    def answers(self) -> bool:
        try:
            self.control()
        except OSError:
            return False
        return True

    def control(self, **changes: Any) -> int:
        """Changes its settings; returns the number of scoring requests that it has seen."""
        body = json.dumps(changes).encode()
        request = urllib.request.Request(f"{self.url}/control", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["scored"]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None


@contextlib.contextmanager
def standing_in(log: Path, **settings: Any) -> Iterator[Standing]:
    """Starts a stand-in in a process of its own, and kills it at the end of the block."""
    standing = Standing(Settings(**settings), log)
    standing.start()
    try:
        yield standing
    finally:
        standing.kill()


_OK = b"HTTP/1.1 200 OK\r\n"
_IN_CHUNKS = _OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "status": (b"HTTP/1.1 200 ", b"O"),
    "announcement": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "header": (_OK + b"X: ", b"a"),
    "body": (_OK + b"\r\n", b" "),
    "last body": (_OK + b"Connection: close\r\nContent-Length: 9999\r\n\r\n", b" "),
    "size": (_IN_CHUNKS, b"0"),
    "extension": (_IN_CHUNKS + b"2;", b"x"),
    "chunks": (_IN_CHUNKS, b"1\r\n \r\n"),
    "trailer": (_IN_CHUNKS + b"0\r\n", b"X: a\r\n"),
}
"""What an answer begins with, and what then comes again and again."""


@contextlib.contextmanager
def endless(begin: bytes, again: bytes, *, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server whose answers never end although bytes keep coming."""
    stopping = threading.Event()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if tls is not None:
                connection = tls.wrap_socket(connection, server_side=True)
            connection.recv(1 << 16)
            connection.sendall(begin)
            while not stopping.wait(0.05):
                connection.sendall(again)

    def serve() -> None:
        while not stopping.is_set():
            connection, _ = listener.accept()
            threads.append(threading.Thread(target=answer, args=(connection,)))
            threads[-1].start()

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=serve))
        threads[0].start()
        port = listener.getsockname()[1]
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        finally:
            stopping.set()
            socket.create_connection(("127.0.0.1", port)).close()
            for thread in threads:
                thread.join(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    with StandIn(arguments.port, **arguments.settings):
        threading.Event().wait()


if __name__ == "__main__":
    main()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Writes a certificate of 127.0.0.1 that signs itself, and its key; skips the test without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    paths = folder / "certificate.pem", folder / "key.pem"
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=stand-in"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(["openssl", "req", *kind.split(), *names], check=True, capture_output=True, timeout=120)
    return paths
