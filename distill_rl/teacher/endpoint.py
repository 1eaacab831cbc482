"""A teacher that a server runs: prompts go out over HTTP, scores come back; what a server can do is found out before."""

from __future__ import annotations

import http.client
import io
import json
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing.pool import ThreadPool
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, LocationParseError, ReadTimeoutError

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import ConfigError, DistillError, NumericsError, WorkerError, first_line, problem
from distill_rl.system.redact import REDACTED, in_text
from distill_rl.teacher.base import MASS_TOLERANCE, Scores

log = logging.getLogger(__name__)

# Requests to one or several servers of the same model, each repeated until some server answers it.
#
# A request goes to the server that is up and has the fewest requests in flight. What a failure means:
#
#     no connection, a time-out, a reset, a body that ends early, 408, 502, 503, 504    the server is down for a while
#     429                                                     it is left alone as long as it asks for (Retry-After)
#     500                                                     the same, but a request that gets it often is given up
#     an answer that is no JSON                               likewise
#     any other status                                        a repetition would not help: `Refused`
#
# A server that is down gets one request after a growing pause, and counts as up again when it answers that. Before it gets
# others, `verify` may look at it: another model may be behind the address now. While one server is down, the others do its
# part; if all are, requests wait, each at most `retry_s` in all.
#
# Threads: `Client.post` may be called from many at a time. `close` makes all waiting calls end with `Closed`.

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


class Closed(Exception):
    """The client was closed while a request waited."""


class Refused(WorkerError):
    """A server answered that it will not do what it was asked.

    Attributes:
        status: of HTTP.
        text: the server's own words.
    """

    status, text = 0, ""


class Down(Exception):
    """A server does not answer now.

    Args:
        counts: whether a request to which this happens often is given up before `retry_s` is over.
    """

    def __init__(self, reason: str, *, pause_s: float | None = None, counts: bool = False):
        super().__init__(reason)
        self.pause_s, self.counts = pause_s, counts


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


class Client:
    """Sends the requests for a teacher to its servers.

    Args:
        teacher: with backend endpoint.
        token: sent as a bearer token; None: none.
        verify: called with a server before its first request after a start or a failure; raises what ends the request.
    """

    def __init__(
        self, teacher: TeacherConfig, token: str | None = None, verify: Callable[[Server], object] | None = None
    ):
        self.teacher, self.token, self.verify = teacher, token, verify
        self.servers = [self._server(url.rstrip("/")) for url in teacher.endpoint.url]
        self._free = threading.Condition()
        self._closed = False
        self._turn = 0
        self._random = random.Random()  # the process's own generator belongs to the run
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "distill_rl"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def _server(self, url: str) -> Server:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        kind = urllib3.HTTPSConnectionPool if secure else urllib3.HTTPConnectionPool
        # Neither proxies of the environment nor redirects are followed: the token goes to the named host only.
        options: dict[str, Any] = {"retries": urllib3.Retry(0, redirect=0, raise_on_redirect=False)}
        if secure:
            options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": self.teacher.endpoint.ca_file}
        try:
            pool = kind(parts.hostname or "", parts.port, maxsize=self.teacher.endpoint.concurrency, **options)
            pool.ConnectionCls = _TlsConnection if secure else _Connection
        except (LocationParseError, ValueError) as error:
            rule = "must have an address of a server"
            raise ConfigError(f"teacher {self.teacher.name}", rule, first_line(error)) from error
        return Server(url, pool, parts.path.rstrip("/"), in_text(url))

    def post(self, path: str, body: bytes, read: Callable[[Server, bytes], _Read], *, limit: int) -> _Read:
        """Sends a request to some server until one answers it, and returns what `read` makes of the answer.

        Args:
            body: JSON.
            read: is given the server and its answer; raises Down for one that is to be asked for again. Other errors end the
                request.
            limit: most bytes of the answer.

        Raises:
            Refused: a server will not do it.
            WorkerError: no server answered within `retry_s`, or an answer is longer than `limit`.
            Closed: `close` was called.
        """
        began = time.monotonic()
        errors, last = 0, ""
        while True:
            with self._taken(began + self.teacher.endpoint.retry_s, last) as server:
                try:
                    if self.verify is not None and not server.verified:
                        self.verify(server)
                        server.verified = True
                    result = read(server, self.exchange(server, "POST", path, body, limit=limit))
                    self._is_up(server)
                    return result
                except Down as failure:
                    last = f"{server.shown}: {failure}"
                    errors += failure.counts
                    self._is_down(server, failure)
                    if errors >= _SERVER_ERRORS:
                        raise self._no_answer(f"{last} ({errors} times)") from None

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
            if (server.in_flight < self.teacher.endpoint.concurrency if not server.failures else not server.in_flight)
            and server.down_until <= now
        ]
        return min(open_, key=lambda entry: entry[:2])[2] if open_ else None

    def _is_up(self, server: Server) -> None:
        with self._free:
            if server.failures:
                log.warning("teacher %s: %s answers again", self.teacher.name, server.shown)
                self._free.notify_all()
            server.failures = 0

    def _is_down(self, server: Server, failure: Down) -> None:
        with self._free:
            if not server.failures:
                log.warning("teacher %s: %s: %s; trying again", self.teacher.name, server.shown, failure)
            server.failures, server.failure = server.failures + 1, str(failure)
            server.verified = False
            pause = min(_FIRST_PAUSE_S * 2 ** min(server.failures - 1, 16), _LONGEST_PAUSE_S)
            if failure.pause_s is not None:
                pause = min(failure.pause_s, _LONGEST_RETRY_AFTER_S)
            server.down_until = time.monotonic() + pause * (0.5 + self._random.random())
            self._free.notify_all()

    def _no_answer(self, last: str) -> WorkerError:
        """What ends a request that no server answers."""
        rule = f"a server must answer within teachers[].endpoint.retry_s={self.teacher.endpoint.retry_s:g}"
        return WorkerError(f"teacher {self.teacher.name}", rule, self._clean(last), "see the server's log")

    def exchange(self, server: Server, method: str, path: str, body: bytes | None = None, *, limit: int) -> bytes:
        """Sends one request to a server, and reads the whole answer.

        Raises:
            Refused: the server will not do it.
            Down: the server does not answer now, or its answer is not complete after `request_timeout_s`.
            WorkerError: the answer is longer than `limit` bytes.
        """
        headers = self._headers if body is None else self._headers | {"Content-Type": "application/json"}
        most_s = self.teacher.endpoint.request_timeout_s
        timeout = urllib3.Timeout(total=most_s, connect=min(CONNECT_S, most_s))
        try:
            response = server.pool.urlopen(
                method, server.prefix + path, body, headers, redirect=False, timeout=timeout,
                preload_content=False, decode_content=False,
            )  # fmt: skip
            content = self._read(response, limit, server)
        except HTTPError as error:
            raise Down(self._reason(error)) from None
        if response.status == 200:
            return content
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
        what = f"teacher {self.teacher.name}, {server.shown}"
        refused = Refused(what, f"answers with status {response.status}", text, remedy)
        refused.status, refused.text = response.status, text
        raise refused

    def _read(self, response: urllib3.BaseHTTPResponse, limit: int, server: Server) -> bytes:
        """The body of an answer. A connection whose answer was not read to its end is not used again."""
        body = bytearray()
        try:
            while part := response.read1(_CHUNK):
                body += part
                if len(body) > limit:
                    what, rule = f"teacher {self.teacher.name}, {server.shown}", f"an answer may have {limit:,} bytes"
                    raise WorkerError(what, rule, "more", "see teachers[].endpoint.api")
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return bytes(body)

    def _reason(self, error: HTTPError) -> str:
        """A failure in words, without the repr of connections."""
        inner: BaseException = getattr(error, "reason", None) or error
        if isinstance(inner, ReadTimeoutError):
            return f"no complete answer within {self.teacher.endpoint.request_timeout_s:g} s (teachers[].endpoint.request_timeout_s)"
        return self._clean(first_line(inner).split("): ")[-1])

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


# What each kind of server is asked for the log-probs of a prompt, and how it answers.
#
# Answers are read by msgspec into the few fields that count, which checks their types on the way and skips the rest, such as
# the text of every token (docs/decisions/0035-served-teachers.md has the figures).

# From the entries of an answer to `Scores`: k per position, most likely first, none of them taken on trust.

ABSENT = -9999.0
"""What servers write for the log-prob of a token that is impossible, because JSON has no −inf."""
_TIE = 1e-3
"""How much less likely than a token that was left out the k-th may be: log-probs may have been rounded."""


class WrongAnswer(WorkerError):
    """An answer that is not about what was asked."""


def scores_of(
    prompt: np.ndarray,
    ids: np.ndarray,
    logprobs: np.ndarray,
    counts: np.ndarray,
    k: int,
    next_logprobs: np.ndarray | None,
) -> Scores:
    """Checks an answer and brings it into order.

    Servers differ in whether the token that follows is among the entries: vLLM always puts it there, as one more than k
    if it is not one of the k most likely. It is then left out.

    Args:
        prompt: int32 [L], what was sent.
        ids: int [M], the entries' ids, position after position.
        logprobs: fp64 [M]
        counts: int [L − 1], entries of each position: k, or k + 1.
        next_logprobs: fp64 [L − 1], of the token that follows, or None: it is one of the entries.

    Raises:
        WrongAnswer: entries are missing or of impossible ids, or the answer is about another prompt.
        NumericsError: a log-prob is NaN or positive.
    """
    rows, following = len(prompt) - 1, prompt[1:]
    if len(counts) != rows:
        raise WrongAnswer("the server", f"must answer for {rows} positions", len(counts))
    most = k if next_logprobs is not None else k + 1
    if (wrong := counts[(counts < k) | (counts > most)]).size:
        remedy = "see whether the server limits log-probs, or drops some"
        raise WrongAnswer("the server", f"must give {k} log-probs per token (loss.top_k)", int(wrong[0]), remedy)
    table, values = _table(ids, logprobs, counts, most)
    if next_logprobs is None:
        is_next = table == following[:, None]
        if (lacking := np.flatnonzero(~is_next.any(1))).size:
            raise _other_tokens(int(lacking[0]) + 1)
        next_logprobs = values[is_next]
        extra = is_next & (counts > k)[:, None]
        left_out = np.where(counts > k, next_logprobs, -np.inf)
        table[extra], values[extra] = -1, -np.inf
    else:
        _require_logprobs(next_logprobs)
        left_out = np.where((table == following[:, None]).any(1), -np.inf, next_logprobs)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    table, values = np.take_along_axis(table, order, 1), np.take_along_axis(values, order, 1)
    if (left_out > values[:, -1] + _TIE).any():
        raise WrongAnswer("the server", "must give the most likely tokens; one that it left out is more likely")
    absent = values <= ABSENT
    table[absent], values[absent] = -1, -np.inf
    logprobs, next_logprobs = (np.minimum(each, 0).astype(np.float32) for each in (values, next_logprobs))
    return Scores(table.astype(np.int32), logprobs, next_logprobs)


def _table(ids: np.ndarray, logprobs: np.ndarray, counts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs by position, int64 and fp64 [L − 1, most]; −1 and −inf behind the entries of a position."""
    _require_logprobs(logprobs)
    if (impossible := ids[(ids < 0) | (ids > np.iinfo(np.int32).max)]).size:
        raise WrongAnswer("the server", "must give ids of tokens", int(impossible[0]))
    there = np.arange(most) < counts[:, None]
    table = np.full((len(counts), most), -1, np.int64)
    values = np.full((len(counts), most), -np.inf)
    table[there], values[there] = ids, logprobs
    in_order = np.sort(table, axis=1)
    if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any():
        raise WrongAnswer("the server", "must give each token once per position", "a token twice")
    return table, values


def require_prompt(prompt: np.ndarray, echoed: np.ndarray) -> None:
    """Compares the ids that a server says it has scored with those that were sent.

    Raises:
        WrongAnswer: they differ.
    """
    if len(echoed) != len(prompt):
        raise WrongAnswer("the server", f"must score the {len(prompt)} tokens that it was sent", len(echoed))
    if (differs := np.flatnonzero(echoed != prompt)).size:
        raise _other_tokens(int(differs[0]))


def _other_tokens(position: int) -> WrongAnswer:
    rule, remedy = "must score the tokens that it was sent", "see teachers[].endpoint.api and tokenizer"
    return WrongAnswer("the server", rule, f"another one at position {position}", remedy)


def _require_logprobs(values: np.ndarray) -> None:
    """Raises NumericsError for what is no logarithm of a probability."""
    if np.isnan(values).any():
        raise NumericsError("the server", "log-probs must not be NaN", "NaN", "see the server's log and weights")
    if (values > MASS_TOLERANCE).any():
        remedy = "the server may give logits (vLLM: --logprobs-mode raw_logprobs)"
        raise NumericsError("the server", "log-probs must not be positive", f"{values.max():.4g}", remedy)


_NO_NUMBER = re.compile(rb"[\[:,]\s*(-?Infinity|NaN)\b")
_TOKEN_ID = "token_id:"
# Whatever the model's generation_config.json says, which some servers apply to requests that leave these out.
_PLAIN = {"temperature": 0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Dialect(Protocol):
    """One kind of server."""

    path: str
    """Of scoring requests."""
    names_model: bool
    """Whether every answer names its model."""

    def request(self, model: str, prompt: Sequence[int], k: int, **changes: Any) -> bytes:
        """The body of a request for the log-probs of a prompt's tokens and of the k most likely ones at each position.

        Args:
            changes: sampling parameters, which must not change log-probs; for the probe.
        """

    def scores(self, body: bytes, model: str, prompt: np.ndarray, k: int) -> Scores:
        """Reads an answer.

        Raises:
            Down: it is no JSON.
            WrongAnswer: it is not about this prompt and model, or has another form.
            NumericsError: it has log-probs that are none.
        """


_Choice = TypeVar("_Choice")


class _Completion(msgspec.Struct, Generic[_Choice]):
    """An answer of /v1/completions."""

    model: str
    choices: list[_Choice]


class _VllmEntry(msgspec.Struct):
    logprob: float


class _VllmChoice(msgspec.Struct):
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, _VllmEntry] | None]


class Vllm:
    """`vllm serve`: /v1/completions with its parameter `prompt_logprobs`.

    The log-probs are the model's own, at temperature 1: sampling parameters do not act on prompts.
    """

    path, names_model = "/v1/completions", True

    def request(self, model: str, prompt: Sequence[int], k: int, **changes: Any) -> bytes:
        asked = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": k, "return_token_ids": True}
        return msgspec.json.encode(asked | _PLAIN | changes)

    def scores(self, body: bytes, model: str, prompt: np.ndarray, k: int) -> Scores:
        choice = _choice(_decoded(_Completion[_VllmChoice], body), model)
        require_prompt(prompt, np.array(choice.prompt_token_ids))
        positions = _after_first(choice.prompt_logprobs)
        counts, total = _counts(positions)
        ids = np.fromiter(chain.from_iterable(positions), np.int64, total)
        entries = [entry.logprob for position in positions for entry in position.values()]
        return scores_of(prompt, ids, np.array(entries, np.float64), counts, k, None)


class _SglangEntry(msgspec.Struct, array_like=True):
    logprob: float | None
    id: int


class _SglangMeta(msgspec.Struct):
    input_token_logprobs: list[_SglangEntry]
    input_top_logprobs: list[list[_SglangEntry] | None]


class _SglangAnswer(msgspec.Struct):
    meta_info: _SglangMeta


class Sglang:
    """SGLang's own interface, /generate. Its answers do not name the model, so that /v1/models is asked before every batch."""

    path, names_model = "/generate", False

    def request(self, model: str, prompt: Sequence[int], k: int, **changes: Any) -> bytes:
        asked = {
            "input_ids": prompt,
            "sampling_params": _PLAIN | {"max_new_tokens": 1} | changes,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
            "return_text_in_logprobs": False,
        }
        return msgspec.json.encode(asked)

    def scores(self, body: bytes, model: str, prompt: np.ndarray, k: int) -> Scores:
        meta = _decoded(_SglangAnswer, body).meta_info
        require_prompt(prompt, np.array([entry.id for entry in meta.input_token_logprobs]))
        following = _numbers([entry.logprob for entry in meta.input_token_logprobs[1:]])
        positions = _after_first(meta.input_top_logprobs)
        counts, total = _counts(positions)
        ids = np.fromiter((entry.id for position in positions for entry in position), np.int64, total)
        logprobs = _numbers([entry.logprob for position in positions for entry in position])
        return scores_of(prompt, ids, logprobs, counts, k, following)


class _OpenAiLogprobs(msgspec.Struct):
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class _OpenAiChoice(msgspec.Struct):
    logprobs: _OpenAiLogprobs


class OpenAi:
    """OpenAI's /v1/completions with `echo`, as far as a server gives tokens as `token_id:N`: texts are ambiguous.

    One token is generated, because many servers refuse to generate none; its log-probs are ignored.
    """

    path, names_model = "/v1/completions", True

    def request(self, model: str, prompt: Sequence[int], k: int, **changes: Any) -> bytes:
        asked = {"model": model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": k}
        return msgspec.json.encode(asked | {"return_tokens_as_token_ids": True} | _PLAIN | changes)

    def scores(self, body: bytes, model: str, prompt: np.ndarray, k: int) -> Scores:
        logprobs, length = _choice(_decoded(_Completion[_OpenAiChoice], body), model).logprobs, len(prompt)
        if not length <= len(logprobs.tokens) <= length + 1:
            rule = f"must give log-probs of the prompt's {length} tokens (echo)"
            raise WrongAnswer("the server", rule, len(logprobs.tokens), "use api: vllm or sglang for such a server")
        require_prompt(prompt, _ids(logprobs.tokens[:length]))
        positions = _after_first(logprobs.top_logprobs[:length])
        counts, total = _counts(positions)
        ids = _ids([token for position in positions for token in position])
        values = np.fromiter(chain.from_iterable(position.values() for position in positions), np.float64, total)
        return scores_of(prompt, ids, values, counts, k, None)


DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang(), "openai": OpenAi()}
"""By `teachers[].endpoint.api`."""


class ModelCard(msgspec.Struct):
    """An entry of /v1/models."""

    id: str
    max_model_len: int | None = None
    """Most tokens of a request, generated ones included; None: the server does not say."""


class _Models(msgspec.Struct):
    data: list[ModelCard]


def models_of(body: bytes) -> list[ModelCard]:
    """Reads an answer of /v1/models.

    Raises:
        WrongAnswer: it is none.
    """
    try:
        return msgspec.json.decode(body, type=_Models).data
    except msgspec.MsgspecError as error:
        remedy = "see teachers[].endpoint.url"
        raise WrongAnswer("/v1/models", "must list the server's models", str(error), remedy) from None


def _decoded(kind: Any, body: bytes) -> Any:
    """An answer as a struct of `kind`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        if "logprob" in text and "got `null`" in text and "Expected `float`" in text:
            raise _not_a_number("null") from None
        remedy = "see teachers[].endpoint.api; an older server may lack what is needed"
        raise WrongAnswer("the server", "answers in another form", text, remedy) from None
    except msgspec.MsgspecError as error:
        if found := _NO_NUMBER.search(body):
            raise _not_a_number(found[1].decode()) from None
        raise Down(f"an answer of {len(body):,} bytes that is no JSON: {error}", counts=True) from None


def _not_a_number(found: str) -> NumericsError:
    return NumericsError("the server", "log-probs must be numbers", found, "see the server's log and weights")


def _choice(answer: _Completion[Any], model: str) -> Any:
    """The one choice of an answer, which must be of this model."""
    if answer.model != model:
        rule = f"must serve {model} (teachers[].model)"
        raise WrongAnswer("the server", rule, answer.model, "another model may have been started at this address")
    if len(answer.choices) != 1:
        raise WrongAnswer("the server", "must answer with one choice", len(answer.choices))
    return answer.choices[0]


def _after_first(positions: Sequence[Any]) -> list[Any]:
    """The entries of all positions but the first, which nothing precedes."""
    rest = list(positions[1:])
    if None in rest:
        raise WrongAnswer("the server", "must give log-probs of every token of the prompt", "none of some")
    return rest


def _counts(positions: Sequence[Any]) -> tuple[np.ndarray, int]:
    """Entries of each position, and of all."""
    counts = np.fromiter(map(len, positions), np.int64, len(positions))
    return counts, int(counts.sum())


def _numbers(values: list[float | None]) -> np.ndarray:
    """fp64 of values that must not be null."""
    if None in values:
        raise _not_a_number("null")
    return np.array(values, np.float64)


def _ids(tokens: Sequence[str]) -> np.ndarray:
    """int64 ids of tokens that are written `token_id:N`."""
    start = len(_TOKEN_ID)
    try:
        if not all(token.startswith(_TOKEN_ID) for token in tokens):
            raise ValueError
        return np.fromiter((int(token[start:]) for token in tokens), np.int64, len(tokens))
    except ValueError:
        found = next((token for token in tokens if not token[start:].isdecimal()), "")
        rule = "must give tokens by their ids (token_id:N), because texts are ambiguous"
        remedy = "start vLLM with --return-tokens-as-token-ids, or use api: vllm or sglang"
        raise WrongAnswer("the server", rule, repr(found[:40]), remedy) from None


# The `PromptScorer` of a served teacher: each prompt is one request, and many are in flight at a time.

_ENTRY_BYTES, _HEAD_BYTES = 256, 1 << 20
"""Most bytes of an entry of an answer on average, and of all else: a longer answer is refused, not read."""


class EndpointScorer:
    """Scores prompts by one or several servers of the same model. `close` ends what waits.

    Args:
        teacher: with backend endpoint.
        token: of its servers.

    Raises:
        ConfigError: an address or the file of certificates cannot be used.
    """

    def __init__(self, teacher: TeacherConfig, token: str | None):
        assert teacher.endpoint.api is not None
        self._teacher, self._dialect = teacher, DIALECTS[teacher.endpoint.api]
        self.client = Client(teacher, token, verify=self.card)
        self._pool: ThreadPool | None = None

    def score(self, prompts: Sequence[np.ndarray], k: int) -> Iterator[tuple[int, Scores]]:
        """As of `PromptScorer`; answers come in the order in which the servers give them.

        Raises:
            WorkerError: no server answers within `teachers[].endpoint.retry_s`, one refuses, or an answer is wrong.
            NumericsError: an answer has log-probs that are none.
        """
        for server in () if self._dialect.names_model else self.client.servers:
            server.verified = False  # another model may have been started since the last batch
        if self._pool is None:
            self._pool = ThreadPool(self._teacher.endpoint.concurrency * len(self._teacher.endpoint.url))
        abandoned = threading.Event()

        def ask(index: int) -> tuple[int, Scores]:
            if abandoned.is_set():
                raise Closed
            return index, self._scores(prompts[index], k)

        try:  # a call ends within retry_s and a request's time
            yield from self._pool.imap_unordered(ask, range(len(prompts)))
        finally:
            abandoned.set()

    def close(self) -> None:
        """Ends all waiting; does nothing the second time. Threads end with their requests, or with the process."""
        self.client.close()
        if self._pool is not None:
            self._pool.close()

    def card(self, server: Server) -> ModelCard:
        """What a server says of the model that it should serve.

        Raises:
            Down: it does not answer.
            Refused: it will not say.
            WrongAnswer: it serves others.
        """
        try:
            cards = models_of(self.client.exchange(server, "GET", "/v1/models", limit=_HEAD_BYTES))
            for card in cards:
                if card.id == self._teacher.model:
                    return card
            found = ", ".join(card.id for card in cards)
            rule = f"must serve {self._teacher.model} (teachers[].model)"
            raise WrongAnswer("the server", rule, found or "nothing", "name what it serves, or another url")
        except WrongAnswer as error:
            raise self._of(server, error) from None

    def ask(self, server: Server, prompt: np.ndarray, k: int, **changes: object) -> Scores:
        """Scores a prompt by one server, once; for the probe.

        Args:
            changes: as of `Dialect.request`.

        Raises:
            Down: it does not answer.
            Refused, WorkerError, NumericsError: as for `score`.
        """
        body = self._dialect.request(self._teacher.model, prompt.tolist(), k, **changes)
        answer = self.client.exchange(server, "POST", self._dialect.path, body, limit=_limit(prompt, k))
        return self._read(prompt, k, server, answer)

    def _scores(self, prompt: np.ndarray, k: int) -> Scores:
        body = self._dialect.request(self._teacher.model, prompt.tolist(), k)
        try:
            read = partial(self._read, prompt, k)
            return self.client.post(self._dialect.path, body, read, limit=_limit(prompt, k))
        except Closed:
            raise DistillError(f"teacher {self._teacher.name}", "was closed while it was asked") from None

    def _read(self, prompt: np.ndarray, k: int, server: Server, answer: bytes) -> Scores:
        try:
            return self._dialect.scores(answer, self._teacher.model, prompt, k)
        except DistillError as error:
            raise self._of(server, error) from None

    def _of(self, server: Server, error: DistillError) -> DistillError:
        return type(error)(f"teacher {self._teacher.name}, {server.shown}", error.rule, error.value, error.remedy)


def _limit(prompt: np.ndarray, k: int) -> int:
    return _HEAD_BYTES + len(prompt) * (k + 2) * _ENTRY_BYTES


# What a served teacher can do, found out before a run starts: every server of it is asked a few questions.
#
# 1. Does it answer, and does it serve the model?
# 2. Does it take every id of the tokenizer, and score the ids that it is sent? A sample of ids is sent, the last and the
#    special ones among them.
# 3. Does it give as many log-probs as loss.top_k?
# 4. Are they the model's own? The same prompt is scored with other sampling parameters, which must change nothing.
# 5. Does it take prompts as long as a row?
#
# A question that gets no answer is asked twice more, since a server that is busy may drop a connection.
# Then a sample of documents is scored by all servers together, which shows the probability in the top k and the speed.

_REQUEST_S, _RETRY_S = 60.0, 20.0
_OTHER_SAMPLING = {"temperature": 2.0, "presence_penalty": 1.0}
_CHANGED = 0.05
"""Mean change of log-probs, in nats, from which sampling parameters act on them. Noise of half precision is below it."""
_IDS = 64
_PAUSES_S = (0.25, 1.0)
"""Before a question is asked again."""

_Answer = TypeVar("_Answer")


@dataclass
class Probed:
    """What was found of one teacher."""

    problems: list[str] = field(default_factory=list)
    """One line each, which begins with the setting."""
    mass: float | None = None
    """Mean probability of the top k over the sample; None: it was not scored."""
    tokens_per_s: float | None = None
    context: int | None = None
    """Most tokens of a request, of the server with the fewest; None: they do not say."""


def probe(
    key: str,
    teacher: TeacherConfig,
    token: str | None,
    *,
    ids: np.ndarray | None,
    documents: Sequence[np.ndarray],
    k: int,
    length: int,
) -> Probed:
    """Asks all servers of a teacher. Raises nothing for what a server says or does not say.

    Args:
        key: `teachers.0`, for messages.
        ids: int32, a prompt of ids from everywhere in the vocabulary (`sample_of_ids`); None: the tokenizer is not known.
        documents: int32 [L] each, prompts to measure with; may be none.
        k: loss.top_k.
        length: most tokens of a prompt of the run.
    """
    request_s, retry_s = min(teacher.endpoint.request_timeout_s, _REQUEST_S), min(teacher.endpoint.retry_s, _RETRY_S)
    limited = replace(teacher.endpoint, request_timeout_s=request_s, retry_s=retry_s)
    probed = Probed()
    scorer = EndpointScorer(replace(teacher, endpoint=limited), token)
    try:
        for server in scorer.client.servers:
            card = _attempt(key, server, probed, lambda server=server: _repeated(lambda: scorer.card(server)))  # type: ignore[misc]
            if card is not None and ids is not None:
                probed.problems += _server_problems(key, scorer, server, card, ids, k, length)
                probed.context = min(filter(None, [probed.context, card.max_model_len]), default=None)
        if not probed.problems and documents:
            _attempt(key, scorer.client.servers[0], probed, lambda: _measure(scorer, documents, k, probed))
    finally:
        scorer.close()
    return probed


def sample_of_ids(vocabulary_size: int, special: Sequence[int], length: int) -> np.ndarray:
    """int32 [≤ length] ids from everywhere in the vocabulary, the last and the special ones first among them."""
    spread = np.linspace(0, vocabulary_size - 1, min(_IDS, vocabulary_size)).astype(np.int32)
    ids = np.array([vocabulary_size - 1, *(token for token in special if 0 <= token < vocabulary_size)], np.int32)
    _, first = np.unique(ids, return_index=True)
    return np.concatenate([ids[np.sort(first)], spread])[: max(2, length)].astype(np.int32)


def _attempt(key: str, server: Server, probed: Probed, ask):  # type: ignore[no-untyped-def]
    """What `ask` returns; None with a line in `probed` if the server does not give it."""
    try:
        return ask()
    except Down as error:
        remedy = "start the server, or correct the address"
        probed.problems.append(problem(f"{key}.endpoint.url", f"{server.shown} must answer", str(error), remedy))
    except Refused as error:
        what = {401: "endpoint.token_env", 403: "endpoint.token_env", 404: "model"}.get(error.status, "endpoint.url")
        rule = f"{server.shown} answers with status {error.status}"
        probed.problems.append(problem(f"{key}.{what}", rule, error.text, error.remedy))
    except DistillError as error:
        what = "model" if "teachers[].model" in error.rule else "api"
        rule = f"{server.shown}: {error.rule}"
        probed.problems.append(problem(f"{key}.{what}", rule, error.value, error.remedy))
    return None


def _repeated(ask: Callable[[], _Answer]) -> _Answer:
    """What `ask` returns, which is called again after each of `_PAUSES_S` while the server is down."""
    for pause_s in _PAUSES_S:
        try:
            return ask()
        except Down as failure:
            time.sleep(min(failure.pause_s or pause_s, _RETRY_S))
    return ask()


def _server_problems(
    key: str, scorer: EndpointScorer, server: Server, card: ModelCard, ids: np.ndarray, k: int, length: int
) -> Iterator[str]:
    """Yields what a server that serves the model cannot do, one line each."""
    if card.max_model_len is not None and card.max_model_len < length + 1:
        rule = f"{server.shown} takes {card.max_model_len:,} tokens, one of which it generates; rows have {length:,}"
        remedy = "lower data.max_length (or teachers[].max_length), or start the server with a longer context"
        yield problem(f"{key}.endpoint.url", rule, None, remedy)
        ids = ids[: max(2, card.max_model_len - 1)]
    try:
        plain = _repeated(lambda: scorer.ask(server, ids, k))
        changed = _repeated(lambda: scorer.ask(server, ids, k, **_OTHER_SAMPLING))
        if card.max_model_len is None and length > len(ids):
            _repeated(lambda: scorer.ask(server, np.resize(ids, length), k))
    except Refused as error:
        yield _refusal(key, server, error, k)
        return
    except Down as error:
        yield problem(f"{key}.endpoint.url", f"{server.shown} must score prompts", str(error), "see the server's log")
        return
    except DistillError as error:
        what = "url" if isinstance(error, NumericsError) else "api"
        yield problem(f"{key}.endpoint.{what}", f"{server.shown}: {error.rule}", error.value, error.remedy)
        return
    change = float(np.abs(plain.next_logprobs - changed.next_logprobs).mean())
    if not change <= _CHANGED:
        rule = f"{server.shown} must give the model's own log-probs; with other sampling parameters they change"
        remedy = "use a server that gives raw log-probs of prompts"
        yield problem(f"{key}.endpoint.url", rule, f"by {change:.3g} nats", remedy)
    mass = np.exp(plain.logprobs.astype(np.float64)).sum(1)
    if (mass > 1 + MASS_TOLERANCE).any():
        rule = f"{server.shown}: the probabilities of the top k must not exceed 1 together"
        yield problem(f"{key}.endpoint.url", rule, f"{mass.max():.4f}", "the server may give logits")


def _refusal(key: str, server: Server, error: Refused, k: int) -> str:
    """The line of a scoring request that a server will not do, in the server's own words."""
    text = error.text.lower()
    if "logprob" in text and error.status in (400, 422):
        remedy = "lower it, or start the server with a higher limit (vLLM: --max-logprobs)"
        return problem("loss.top_k", f"{server.shown} says: {error.text}", k, remedy)
    if "vocab" in text:
        remedy = "name the tokenizer of the served model"
        return problem(f"{key}.tokenizer", f"{server.shown} does not know its ids: {error.text}", None, remedy)
    what = "endpoint.token_env" if error.status in (401, 403) else "endpoint.url"
    return problem(f"{key}.{what}", f"{server.shown} answers with status {error.status}", error.text, error.remedy)


def _measure(scorer: EndpointScorer, documents: Sequence[np.ndarray], k: int, probed: Probed) -> None:
    """Sets the retained probability and the speed over a sample of documents."""
    began = time.monotonic()
    masses = [np.exp(scores.logprobs.astype(np.float64)).sum(1) for _, scores in scorer.score(documents, k)]
    seconds = time.monotonic() - began
    probed.mass = float(np.concatenate(masses).mean())
    probed.tokens_per_s = sum(map(len, documents)) / max(seconds, 1e-6)
