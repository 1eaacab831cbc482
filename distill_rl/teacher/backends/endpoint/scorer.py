"""The `PromptScorer` of a served teacher: each prompt is one request, and many are in flight at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import DistillError
from distill_rl.teacher.backends.endpoint.answers import WrongAnswer
from distill_rl.teacher.backends.endpoint.client import Client, Closed, Reply, Server
from distill_rl.teacher.backends.endpoint.dialects import DIALECTS, ModelCard, models_of
from distill_rl.teacher.backends.scores import Scores

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
        assert teacher.api is not None
        self._teacher, self._dialect = teacher, DIALECTS[teacher.api]()
        self.client = Client(
            teacher.name,
            [url.rstrip("/") for url in teacher.url],
            token=token,
            ca_file=teacher.ca_file,
            concurrency=teacher.concurrency,
            timeout_s=teacher.request_timeout_s,
            retry_s=teacher.retry_s,
            verify=self.card,
        )
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def score(self, prompts: Sequence[np.ndarray], k: int) -> Iterator[tuple[int, Scores]]:
        """As of `PromptScorer`; answers come in the order in which the servers give them.

        Raises:
            WorkerError: no server answers within `teachers[].retry_s`, one refuses, or an answer is wrong.
            NumericsError: an answer has log-probs that are none.
        """
        self._start(len(prompts))
        if not self._dialect.names_model:  # another one may have been started since the last batch
            self.client.verify_again()
        done: queue.SimpleQueue[tuple[int, Scores | BaseException]] = queue.SimpleQueue()
        abandoned = threading.Event()
        for i, prompt in enumerate(prompts):
            self._tasks.put(_Task(i, prompt, k, done, abandoned))
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
        most = min(wanted, self._teacher.concurrency * len(self._teacher.url))
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
        """An error about `the server` with the teacher and the address."""
        return type(error)(f"teacher {self._teacher.name}, {url}", error.rule, error.value, error.remedy)


class _Task:
    """A prompt that waits for its turn."""

    __slots__ = ("abandoned", "done", "index", "k", "prompt")

    def __init__(
        self, index: int, prompt: np.ndarray, k: int, done: queue.SimpleQueue, abandoned: threading.Event
    ) -> None:
        self.index, self.prompt, self.k, self.done, self.abandoned = index, prompt, k, done, abandoned


def _limit(prompt: np.ndarray, k: int) -> int:
    """Most bytes of an answer about a prompt."""
    return _HEAD_BYTES + len(prompt) * (k + 2) * _ENTRY_BYTES
