"""Requests to one or several servers of the same model, each repeated until some server answers it.

A request goes to the server that is up and has the fewest requests in flight. What a failure means:

    no connection, a time-out, a reset, a body that ends early, 408, 502, 503, 504    the server is down for a while
    429                                                     it is left alone as long as it asks for (Retry-After)
    500                                                     the same, but a request that gets it often is given up
    an answer that is no JSON (`Damaged`)                   likewise
    any other status                                        a repetition would not help: `Refused`

A server that is down gets one request after a growing pause, and counts as up again when it answers that. Before it gets
others, `verify` may look at it: another model may be behind the address now. While one server is down, the others do its
part; if all are, requests wait, each at most `retry_s` in all.

Threads: `post` may be called from many at a time. `close` makes all waiting calls end with `Closed`.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, LocationParseError, ReadTimeoutError

from distill_rl.errors import ConfigError, WorkerError, first_line
from distill_rl.system.redact import REDACTED, in_text

CONNECT_S = 10.0
"""Most seconds for a connection, TLS included."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0
"""Pause after the first failure in a row, which doubles, and its limit. Each is changed by up to half at random."""
_LONGEST_RETRY_AFTER_S = 60.0
_SERVER_ERRORS = 6
"""Answers with status 500, or that are damaged, after which a request is given up: it may be the request's fault."""
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_CHUNK = 1 << 16
_MESSAGE = 600
"""Most characters of a server's error text that are shown."""

_Read = TypeVar("_Read")

log = logging.getLogger(__name__)


class Closed(Exception):
    """The client was closed while a request waited."""


class Refused(WorkerError):
    """A server answered that it will not do what it was asked.

    Attributes:
        status: of HTTP.
        text: the server's own words.
    """

    def __init__(self, what: str, rule: str = "", value: object = None, remedy: str = ""):
        super().__init__(what, rule, value, remedy)
        self.status, self.text = 0, ""


class Down(Exception):
    """A server does not answer now.

    Args:
        counts: whether a request to which this happens often is given up before `retry_s` is over.
    """

    def __init__(self, reason: str, *, pause_s: float | None = None, counts: bool = False):
        super().__init__(reason)
        self.pause_s, self.counts = pause_s, counts


class Damaged(Down):
    """An answer that cannot be read, because a part of it is missing."""

    def __init__(self, reason: str):
        super().__init__(reason, counts=True)


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    url: str
    """Of the server, without user or password."""
    body: bytes


class _UntilDeadline(io.RawIOBase):
    """Reads a socket for as long as its time-out is now, in all, however small the parts are that arrive."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket):
        self._raw, self._socket = raw, sock
        self._deadline = time.monotonic() + (sock.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        super().close()
        self._raw.close()


class _Response(http.client.HTTPResponse):
    """Must be complete, with its headers, within the time-out that its socket has when it begins."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any):
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_UntilDeadline(self.fp.detach(), sock))


class _Connection(HTTPConnection):
    response_class = _Response


class _TlsConnection(HTTPSConnection):
    response_class = _Response


@dataclass(eq=False)
class Server:
    """One address, and how it does."""

    url: str
    pool: urllib3.HTTPConnectionPool
    prefix: str
    """Of the path."""
    shown: str
    """The address for messages."""
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    failure: str = ""
    """The last one, in words."""
    down_until: float = 0.0
    """On the clock of `time.monotonic`."""
    verified: bool = False
    """Whether `verify` has accepted it since it was last down."""


@dataclass(eq=False)
class Client:
    """See the top of this module.

    Args:
        name: of the teacher, for messages.
        urls: of the servers, without a slash at the end.
        token: sent as a bearer token; None: none.
        ca_file: certificates of authorities that are trusted; None: those of the machine.
        concurrency: most requests in flight per server.
        timeout_s: most seconds of one request.
        retry_s: most seconds for which a request is repeated.
        verify: called with a server before its first request after a start or a failure; raises what ends the request.
    """

    name: str
    urls: Sequence[str]
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    concurrency: int = 16
    timeout_s: float = 120.0
    retry_s: float = 300.0
    verify: Callable[[Server], object] | None = None

    def __post_init__(self) -> None:
        self.servers = [self._server(url) for url in self.urls]
        self._free = threading.Condition()
        self._closed = False
        self._turn = 0
        self._random = random.Random()  # the process's own generator belongs to the run
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "distill_rl"}
        if self.token is not None:
            self._headers["Authorization"] = f"Bearer {self.token}"

    def _server(self, url: str) -> Server:
        parts = urlsplit(url)
        # Neither proxies of the environment nor redirects are followed: the token goes to the named host only.
        retries = urllib3.Retry(0, redirect=0, raise_on_redirect=False)
        try:
            if parts.scheme == "https":
                pool: urllib3.HTTPConnectionPool = urllib3.HTTPSConnectionPool(
                    parts.hostname or "",
                    parts.port,
                    maxsize=self.concurrency,
                    retries=retries,
                    cert_reqs="CERT_REQUIRED",
                    ca_certs=self.ca_file,
                )
                pool.ConnectionCls = _TlsConnection
            else:
                pool = urllib3.HTTPConnectionPool(
                    parts.hostname or "", parts.port, maxsize=self.concurrency, retries=retries
                )
                pool.ConnectionCls = _Connection
        except (LocationParseError, ValueError) as error:
            raise ConfigError(f"teacher {self.name}", "must have an address of a server", first_line(error)) from error
        return Server(url, pool, parts.path.rstrip("/"), in_text(url))

    def post(self, path: str, body: bytes, read: Callable[[Reply], _Read], *, limit: int) -> _Read:
        """Sends a request to some server until one answers it, and returns what `read` makes of the answer.

        Args:
            body: JSON.
            read: raises Damaged for an answer that is to be asked for again; other errors end the request.
            limit: most bytes of the answer.

        Raises:
            Refused: a server will not do it.
            WorkerError: no server answered within `retry_s`, or an answer is longer than `limit`.
            Closed: `close` was called.
        """
        began = time.monotonic()
        errors, last = 0, ""
        while True:
            with self._taken(began + self.retry_s, last) as server:
                try:
                    if self.verify is not None and not server.verified:
                        self.verify(server)
                        server.verified = True
                    result = read(self.exchange(server, "POST", path, body, limit=limit))
                    self._is_up(server)
                    return result
                except Down as failure:
                    last = f"{server.shown}: {failure}"
                    errors += failure.counts
                    self._is_down(server, failure)
                    if errors >= _SERVER_ERRORS:
                        raise self._no_answer(f"{last} ({errors} times)") from None

    def verify_again(self) -> None:
        """Makes `verify` look at every server before its next request."""
        for server in self.servers:
            server.verified = False

    def close(self) -> None:
        """Ends all waiting, and closes the connections that are not in use; does nothing the second time."""
        with self._free:
            self._closed = True
            self._free.notify_all()
        for server in self.servers:
            server.pool.close()

    @contextmanager
    def _taken(self, deadline: float, last: str) -> Iterator[Server]:
        """Waits for a server that is up and has room, and counts a request in flight there during the block."""
        with self._free:
            while (server := self._best()) is None:
                now = time.monotonic()
                if now >= deadline and all(each.failures for each in self.servers):
                    raise self._no_answer(last or "; ".join(f"{each.shown}: {each.failure}" for each in self.servers))
                wakes = [each.down_until for each in self.servers if each.down_until > now]
                self._free.wait(min([*wakes, now + 1.0]) - now)
            if time.monotonic() >= deadline and last:
                raise self._no_answer(last)
            server.in_flight += 1
        try:
            yield server
        finally:
            with self._free:
                server.in_flight -= 1
                self._free.notify()

    def _best(self) -> Server | None:
        """The server for the next request, in turn among those that have the fewest in flight; None if all are busy."""
        # Only with the lock held.
        if self._closed:
            raise Closed
        now = time.monotonic()
        self._turn += 1
        count = len(self.servers)
        # A server that was down gets a single request, which shows whether it is up.
        open_ = [
            (server.in_flight, (i - self._turn) % count, server)
            for i, server in enumerate(self.servers)
            if (server.in_flight < self.concurrency if not server.failures else not server.in_flight)
            and server.down_until <= now
        ]
        return min(open_, key=lambda entry: entry[:2])[2] if open_ else None

    def _is_up(self, server: Server) -> None:
        with self._free:
            if server.failures:
                log.warning("teacher %s: %s answers again", self.name, server.shown)
                self._free.notify_all()
            server.failures = 0

    def _is_down(self, server: Server, failure: Down) -> None:
        with self._free:
            if not server.failures:
                log.warning("teacher %s: %s: %s; trying again", self.name, server.shown, failure)
            server.failures, server.failure = server.failures + 1, str(failure)
            server.verified = False
            pause = min(_FIRST_PAUSE_S * 2 ** min(server.failures - 1, 16), _LONGEST_PAUSE_S)
            if failure.pause_s is not None:
                pause = min(failure.pause_s, _LONGEST_RETRY_AFTER_S)
            server.down_until = time.monotonic() + pause * (0.5 + self._random.random())
            self._free.notify_all()

    def _no_answer(self, last: str) -> WorkerError:
        """What ends a request that no server answers."""
        rule = f"a server must answer within teachers[].endpoint.retry_s={self.retry_s:g}"
        return WorkerError(f"teacher {self.name}", rule, self._clean(last), "see the server's log")

    def exchange(self, server: Server, method: str, path: str, body: bytes | None = None, *, limit: int) -> Reply:
        """Sends one request to a server, and reads the whole answer.

        Raises:
            Refused: the server will not do it.
            Down: the server does not answer now, or its answer is not complete after `timeout_s`.
            WorkerError: the answer is longer than `limit` bytes.
        """
        headers = self._headers if body is None else self._headers | {"Content-Type": "application/json"}
        timeout = urllib3.Timeout(total=self.timeout_s, connect=min(CONNECT_S, self.timeout_s))
        try:
            response = server.pool.urlopen(
                method, server.prefix + path, body, headers, redirect=False, timeout=timeout,
                preload_content=False, decode_content=False,
            )  # fmt: skip
        except HTTPError as error:
            raise Down(self._reason(error)) from None
        whole = False
        try:
            content = self._read(response, limit, server)
            whole = True
        except HTTPError as error:
            raise Down(self._reason(error)) from None
        finally:
            if whole:
                response.release_conn()
            else:
                response.close()
        if response.status == 200:
            return Reply(server.shown, content)
        text = self._clean(_error_text(content))
        if response.status in _AGAIN:
            pause_s = _seconds(response.headers.get("Retry-After"))
            raise Down(f"status {response.status}: {text}", pause_s=pause_s, counts=response.status == 500)
        remedy = ""
        if 300 <= response.status < 400:
            text, remedy = "a redirect, which is not followed", "name the address that it leads to"
        elif response.status in (401, 403):
            remedy = "name the variable with its token in teachers[].endpoint.token_env"
        elif response.status == 404:
            remedy = "see teachers[].model, url and api"
        refused = Refused(
            f"teacher {self.name}, {server.shown}", f"answers with status {response.status}", text, remedy
        )
        refused.status, refused.text = response.status, text
        raise refused

    def _read(self, response: urllib3.BaseHTTPResponse, limit: int, server: Server) -> bytes:
        """The body of an answer."""
        parts, size = list[bytes](), 0
        while part := response.read1(_CHUNK):
            parts.append(part)
            size += len(part)
            if size > limit:
                rule = f"an answer may have {limit:,} bytes"
                raise WorkerError(f"teacher {self.name}, {server.shown}", rule, "more", "see teachers[].endpoint.api")
        return b"".join(parts)

    def _reason(self, error: HTTPError) -> str:
        """A failure in words, without the repr of connections."""
        inner: BaseException = getattr(error, "reason", None) or error
        if isinstance(inner, ReadTimeoutError):
            return f"no complete answer within {self.timeout_s:g} s (teachers[].endpoint.request_timeout_s)"
        text = first_line(inner) if isinstance(inner, BaseException) else str(inner)
        return self._clean(text.split("): ")[-1] if "object at 0x" in text else text)

    def _clean(self, text: str) -> str:
        """A text from outside on one line, without the token."""
        text = " ".join(text.split())
        if self.token:
            text = text.replace(self.token, REDACTED)
        return in_text(text)[:_MESSAGE]


def _error_text(content: bytes) -> str:
    """What a server says of an error: the message in its JSON, or the beginning of the body."""
    try:
        value = json.loads(content)
        for _ in range(2):
            value = value.get("error", value) if isinstance(value, dict) else value
        if isinstance(value, dict):
            value = value.get("message") or value.get("detail") or value
        return value if isinstance(value, str) else json.dumps(value)
    except (ValueError, RecursionError):
        return content[:_MESSAGE].decode("utf-8", "replace").strip() or "no text"


def _seconds(text: str | None) -> float | None:
    """The seconds of a Retry-After; None for a date, or nothing."""
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None
