"""A teacher that a server runs: prompts go out over HTTP, scores come back; what a server can do is found out before."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import DistillError, NumericsError, problem
from distill_rl.teacher.base import MASS_TOLERANCE, Scores
from distill_rl.teacher.endpoint_client import Client, Closed, Down, Refused, Reply, Server
from distill_rl.teacher.endpoint_dialects import DIALECTS, ModelCard, WrongAnswer, models_of

# The `PromptScorer` of a served teacher: each prompt is one request, and many are in flight at a time.

_ENTRY_BYTES, _HEAD_BYTES = 256, 1 << 20
"""Most bytes of an entry of an answer on average, and of all else: a longer answer is refused, not read."""
_END_S = 5.0
"""Most seconds that `close` waits for requests in flight."""


class EndpointScorer:
    """Scores prompts by one or several servers of the same model. `close` ends what waits.

    Args:
        teacher: with backend endpoint.
        token: of its servers.

    Raises:
        ConfigError: an address or the file of certificates cannot be used.
    """

    def __init__(self, teacher: TeacherConfig, token: str | None):
        endpoint = teacher.endpoint
        assert endpoint.api is not None
        self._teacher, self._dialect = teacher, DIALECTS[endpoint.api]()
        self.client = Client(
            teacher.name,
            [url.rstrip("/") for url in endpoint.url],
            token=token,
            ca_file=endpoint.ca_file,
            concurrency=endpoint.concurrency,
            timeout_s=endpoint.request_timeout_s,
            retry_s=endpoint.retry_s,
            verify=self.card,
        )
        self._tasks: queue.SimpleQueue[_PromptTask | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def score(self, prompts: Sequence[np.ndarray], k: int) -> Iterator[tuple[int, Scores]]:
        """As of `PromptScorer`; answers come in the order in which the servers give them.

        Raises:
            WorkerError: no server answers within `teachers[].endpoint.retry_s`, one refuses, or an answer is wrong.
            NumericsError: an answer has log-probs that are none.
        """
        self._start(len(prompts))
        if not self._dialect.names_model:  # another one may have been started since the last batch
            self.client.verify_again()
        done: queue.SimpleQueue[tuple[int, Scores | BaseException]] = queue.SimpleQueue()
        abandoned = threading.Event()
        for i, prompt in enumerate(prompts):
            self._tasks.put(_PromptTask(i, prompt, k, done, abandoned))
        try:
            for _ in prompts:
                i, result = done.get()  # a task ends within retry_s and a request's time
                if isinstance(result, BaseException):
                    raise result
                yield i, result
        finally:
            abandoned.set()

    def close(self) -> None:
        """Ends all requests and threads; does nothing the second time."""
        self.client.close()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _END_S
        for thread in self._threads:  # those that wait for a server end with their request, or with the process
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()

    def card(self, server: Server) -> ModelCard:
        """What a server says of the model that it should serve.

        Raises:
            Down: it does not answer.
            Refused: it will not say.
            WrongAnswer: it serves others.
        """
        try:
            body = self.client.exchange(server, "GET", "/v1/models", limit=_HEAD_BYTES).body
            cards = models_of(body)
            for card in cards:
                if card.id == self._teacher.model:
                    return card
            found = ", ".join(card.id for card in cards)
            rule = f"must serve {self._teacher.model} (teachers[].model)"
            raise WrongAnswer("the server", rule, found or "nothing", "name what it serves, or another url")
        except WrongAnswer as error:
            raise self._of(server.shown, error) from None

    def ask(self, server: Server, prompt: np.ndarray, k: int, **changes: object) -> Scores:
        """Scores a prompt by one server, once; for the probe.

        Args:
            changes: as of `Dialect.request`.

        Raises:
            Down: it does not answer.
            Refused, WorkerError, NumericsError: as for `score`.
        """
        body = self._dialect.request(self._teacher.model, prompt.tolist(), k, **changes)
        reply = self.client.exchange(server, "POST", self._dialect.path, body, limit=_limit(prompt, k))
        return self._read(reply, prompt, k)

    def _start(self, wanted: int) -> None:
        """Starts threads for so many prompts, up to the requests that may be in flight."""
        most = min(wanted, self._teacher.endpoint.concurrency * len(self._teacher.endpoint.url))
        while len(self._threads) < most:
            name = f"endpoint-{self._teacher.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        """Does tasks until there is None."""
        while (task := self._tasks.get()) is not None:
            if task.abandoned.is_set():
                continue
            try:
                task.done.put((task.index, self._scores(task.prompt, task.k)))
            except BaseException as error:
                task.done.put((task.index, error))

    def _scores(self, prompt: np.ndarray, k: int) -> Scores:
        body = self._dialect.request(self._teacher.model, prompt.tolist(), k)
        try:
            return self.client.post(
                self._dialect.path, body, lambda reply: self._read(reply, prompt, k), limit=_limit(prompt, k)
            )
        except Closed:
            raise DistillError(f"teacher {self._teacher.name}", "was closed while it was asked") from None

    def _read(self, reply: Reply, prompt: np.ndarray, k: int) -> Scores:
        try:
            return self._dialect.scores(reply.body, self._teacher.model, prompt, k)
        except DistillError as error:
            raise self._of(reply.url, error) from None

    def _of(self, url: str, error: DistillError) -> DistillError:
        return type(error)(f"teacher {self._teacher.name}, {url}", error.rule, error.value, error.remedy)


class _PromptTask:
    """A prompt that waits for its turn."""

    __slots__ = ("abandoned", "done", "index", "k", "prompt")

    def __init__(
        self, index: int, prompt: np.ndarray, k: int, done: queue.SimpleQueue, abandoned: threading.Event
    ) -> None:
        self.index, self.prompt, self.k, self.done, self.abandoned = index, prompt, k, done, abandoned


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
    limited = replace(
        teacher.endpoint,
        request_timeout_s=min(teacher.endpoint.request_timeout_s, _REQUEST_S),
        retry_s=min(teacher.endpoint.retry_s, _RETRY_S),
    )
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
    except NumericsError as error:
        yield problem(f"{key}.endpoint.url", f"{server.shown}: {error.rule}", error.value, error.remedy)
        return
    except DistillError as error:
        yield problem(f"{key}.endpoint.api", f"{server.shown}: {error.rule}", error.value, error.remedy)
        return
    change = float(np.abs(plain.next_logprobs - changed.next_logprobs).mean())
    if not change <= _CHANGED:
        rule = f"{server.shown} must give the model's own log-probs; with other sampling parameters they change"
        yield problem(
            f"{key}.endpoint.url", rule, f"by {change:.3g} nats", "use a server that gives raw log-probs of prompts"
        )
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
