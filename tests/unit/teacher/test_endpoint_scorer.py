"""Over real HTTP: the scores have the same bits whatever the order, the servers and the faults on the way."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from distill_rl.config.schema import TeacherConfig
from distill_rl.config.schema.backends import EndpointConfig
from distill_rl.errors import ConfigError, DistillError, NumericsError, WorkerError
from distill_rl.teacher.base import Scores, token_of
from distill_rl.teacher.endpoint import Client, Down, EndpointScorer, Refused, WrongAnswer
from tests.helpers.served import APIS, ENDLESS, MODEL, StandIn, Tables, endless, self_signed

VOCABULARY, K = 320, 12


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCABULARY, size).astype(np.int32) for size in (2, 3, 40, 7, 120, 25, 60, 11)]


@pytest.fixture(scope="module")
def expected(prompts: list[np.ndarray]) -> list[Scores]:
    """Straight from the stand-in's model."""
    model, found = Tables(VOCABULARY), []
    for prompt in prompts:
        logprobs = model.logprobs(prompt)[:-1]
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :K]
        following = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
        found.append(Scores(ids.astype(np.int32), np.take_along_axis(logprobs, ids, 1), following))
    return found


Asking = Callable[..., EndpointScorer]


@pytest.fixture
def asking() -> Iterator[Asking]:
    """Makes scorers of stand-ins, and closes them."""
    with ExitStack() as stack:

        def make(*urls: str, api: str = "vllm", token: str | None = None, **settings: object) -> EndpointScorer:
            teacher = TeacherConfig(
                name="big", model=MODEL, backend="endpoint", endpoint=EndpointConfig(list(urls), api)
            )
            for name, value in settings.items():
                setattr(teacher.endpoint, name, value)
            scorer = EndpointScorer(teacher, token)
            stack.callback(scorer.close)
            return scorer

        yield make


def assert_equal(scorer: EndpointScorer, prompts: Sequence[np.ndarray], expected: Sequence[Scores]) -> None:
    found = dict(scorer.score(prompts, K))
    assert sorted(found) == list(range(len(prompts)))
    for i, scores in found.items():
        for name in ("ids", "logprobs", "next_logprobs"):
            ours, theirs = getattr(scores, name), getattr(expected[i], name)
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs), (i, name)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_scores_are_those_of_the_model(asking, prompts, expected, api, concurrency):
    with StandIn() as server:
        scorer = asking(server.url, api=api, concurrency=concurrency)
        assert_equal(scorer, prompts, expected)
        assert_equal(scorer, prompts, expected)  # over the same connections
        assert server.seen.most_at_once <= concurrency
        assert sorted(map(len, server.seen.prompts)) == sorted(2 * [*map(len, prompts)])


def test_several_servers_share_the_work(asking, prompts, expected):
    with StandIn(delay_us=300) as one, StandIn(delay_us=300) as other:
        assert_equal(asking(one.url, other.url, concurrency=2), prompts, expected)
        assert len(one.seen.prompts) + len(other.seen.prompts) == len(prompts)
        assert min(len(one.seen.prompts), len(other.seen.prompts)) > 0


FAULTS = ["status 503", "status 500", "status 429", "status 502", "reset", "truncate", "garbage"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_changes_no_bit(asking, prompts, expected, fault):
    with StandIn(fault=fault, count=3, retry_after="0.05" if "429" in fault else "") as server:
        assert_equal(asking(server.url, concurrency=3), prompts, expected)
        assert len(server.seen.prompts) == len(prompts) + 3


@pytest.mark.parametrize("fault", ["stall", "drip"])
def test_a_request_without_an_end_is_sent_again(asking, prompts, expected, fault):
    with StandIn(fault=fault, count=2) as server:
        assert_equal(asking(server.url, concurrency=8, request_timeout_s=2.0), prompts, expected)
        assert len(server.seen.prompts) >= len(prompts) + 2  # a busy machine may need more


def outcome(action: Callable[[], object]) -> BaseException | None:
    """What an action raises, which must end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised[0] if raised else None


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_answer_without_an_end_is_given_up(kind):
    with endless(*ENDLESS[kind]) as url:
        client = Client(TeacherConfig(name="big", endpoint=EndpointConfig(url=[url], request_timeout_s=1.0)))
        error = outcome(lambda: client.exchange(client.servers[0], "GET", "/v1/models", limit=1 << 20))
        assert isinstance(error, Down)
        assert "no complete answer within 1 s (teachers[].endpoint.request_timeout_s)" in str(error)
        client.close()


def test_a_dead_server_is_left_out_while_another_lives(asking, prompts, expected, caplog):
    with StandIn() as lives, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # nobody listens
        nobody = f"http://127.0.0.1:{dead.getsockname()[1]}"
        with caplog.at_level(logging.WARNING):
            assert_equal(asking(nobody, lives.url, concurrency=2), prompts, expected)
        assert len(lives.seen.prompts) == len(prompts)
        assert f"{nobody}: " in caplog.text


def test_a_server_that_starts_late_is_waited_for(asking, prompts, expected):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scorer = asking(f"http://127.0.0.1:{port}", retry_s=60)
    answers = iter(scorer.score(prompts, K))
    found: list[tuple[int, Scores]] = []
    waiting = threading.Thread(target=lambda: found.extend(answers))
    waiting.start()
    while not scorer.client.servers[0].failures:
        assert waiting.is_alive()
        time.sleep(0.01)
    with StandIn(port):
        waiting.join(60)
    assert len(found) == len(prompts)
    for i, scores in found:
        assert np.array_equal(scores.logprobs, expected[i].logprobs)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("status 400", Refused, "answers with status 400; got the stand-in was told to fail"),
        ("status 401", Refused, r"status 401; .*token_env"),
        ("status 404", Refused, r"status 404; .*teachers\[\]\.model"),
        ("redirect", Refused, "a redirect, which is not followed"),
        ("nan", NumericsError, "log-probs must be numbers; got NaN"),
        ("null", NumericsError, "log-probs must be numbers; got null"),
        ("positive", NumericsError, "log-probs must not be positive"),
        ("other-ids", WrongAnswer, "must score the tokens that it was sent"),
        ("other-model", WrongAnswer, f"must serve {MODEL}"),
        ("few", WrongAnswer, f"must give {K} log-probs per token"),
        ("long", WorkerError, "an answer may have"),
    ],
)
def test_a_wrong_answer_ends_the_request_at_once(asking, prompts, fault, kind, words):
    with StandIn(fault=fault, count=1) as server:
        with pytest.raises(DistillError, match=words) as caught:
            list(asking(server.url, concurrency=1).score(prompts[4:5], K))
        assert type(caught.value) is kind
        assert f"teacher big, {server.url}" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(server.seen.prompts) == 1


@pytest.mark.parametrize("fault", ["status 503", "status 500", "truncate", "reset", "garbage"])
def test_a_fault_that_lasts_ends_in_one_line(asking, prompts, fault):
    with StandIn(fault=fault, count=10**6) as server, pytest.raises(WorkerError) as caught:
        list(asking(server.url, concurrency=4, retry_s=0.5).score(prompts, K))
    text = str(caught.value)
    assert "teacher big: a server must answer within teachers[].endpoint.retry_s=0.5; got http://127.0.0.1:" in text
    assert text.endswith("; see the server's log")
    assert caught.value.exit_code == 1


def test_a_request_that_breaks_the_server_is_given_up_early(asking, prompts):
    with StandIn(fault="status 500", count=10**6) as server, pytest.raises(WorkerError, match=r"\(6 times\)"):
        list(asking(server.url, concurrency=1, retry_s=299).score(prompts[:1], K))


def test_another_model_after_a_restart_is_found_before_it_is_asked(asking, prompts, expected):
    """SGLang's answers do not name the model, so its list is read after a failure."""
    with StandIn() as server:
        scorer = asking(server.url, api="sglang", concurrency=1)
        assert_equal(scorer, prompts, expected)
        port = server.port
    with StandIn(port, model="another", seed=1) as server:
        with pytest.raises(WrongAnswer, match=rf"must serve {MODEL} \(teachers\[\]\.model\); got another"):
            list(scorer.score(prompts, K))
        assert server.seen.prompts == []


def test_whoever_stops_listening_costs_no_further_requests(asking, prompts):
    with StandIn(delay_us=2000) as server:
        scorer = asking(server.url, concurrency=1)
        answers = scorer.score(prompts, K)
        next(answers)
        answers.close()
        scorer.close()
        assert len(server.seen.prompts) <= 3


def test_close_ends_what_waits_and_can_be_repeated(asking, prompts):
    scorer = asking("http://127.0.0.1:9", retry_s=299)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            list(scorer.score(prompts, K))
        except DistillError as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not scorer.client.servers[0].failures:
        time.sleep(0.01)
    scorer.close()
    scorer.close()
    thread.join(30)
    assert "was closed while it was asked" in str(failed[0])


class TestToken:
    def test_it_is_sent(self, asking, prompts, expected):
        with StandIn(token="s3cret-9") as server:
            assert_equal(asking(server.url, token="s3cret-9"), prompts, expected)

    def test_it_is_nowhere_in_messages(self, asking, prompts, caplog):
        with StandIn(token="another") as server, pytest.raises(Refused) as caught:
            list(asking(server.url, token="s3cret-9").score(prompts, K))
        assert "s3cret-9" not in f"{caught.value}{caught.value!r}{caplog.text}"
        assert "s3cret-9" not in repr(asking("http://127.0.0.1:9", token="s3cret-9").client)

    def test_a_server_that_repeats_it_is_redacted(self, asking, prompts):
        client = Client(TeacherConfig(name="big", endpoint=EndpointConfig(url=["http://127.0.0.1:9"])), "s3cret-9")
        assert client._clean("you sent Bearer s3cret-9") == "you sent Bearer <redacted>"

    def test_it_comes_from_the_named_variable(self, monkeypatch):
        teacher = TeacherConfig(name="big", endpoint=EndpointConfig(token_env="DISTILL_RL_TOKEN"))
        monkeypatch.delenv("DISTILL_RL_TOKEN", raising=False)
        with pytest.raises(ConfigError, match="DISTILL_RL_TOKEN"):
            token_of(teacher)
        monkeypatch.setenv("DISTILL_RL_TOKEN", "s3cret-9\n")
        assert token_of(teacher) == "s3cret-9"
        monkeypatch.setenv("DISTILL_RL_TOKEN", "s3cret 9")
        with pytest.raises(ConfigError) as caught:
            token_of(teacher)
        assert "s3cret" not in str(caught.value)
        assert token_of(TeacherConfig(name="big")) is None


def test_proxies_of_the_environment_are_not_used(asking, prompts, expected, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with StandIn() as server:
        assert_equal(asking(server.url), prompts, expected)


def test_a_path_in_front_of_the_interface_is_kept(asking, prompts):
    with StandIn() as server, pytest.raises(Refused, match="status 404"):
        list(asking(f"{server.url}/gateway").score(prompts, K))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


class TestTls:
    @pytest.mark.parametrize("kind", ["header", "extension"])
    def test_an_answer_without_an_end_is_given_up(self, certificate, kind):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        with endless(*ENDLESS[kind], tls=context) as url:
            settings = EndpointConfig(url=[url], ca_file=str(certificate[0]), request_timeout_s=1.0)
            client = Client(TeacherConfig(name="big", endpoint=settings))
            error = outcome(lambda: client.exchange(client.servers[0], "GET", "/v1/models", limit=1 << 20))
            assert isinstance(error, Down)
            assert "no complete answer within 1 s" in str(error)
            client.close()

    def test_a_private_authority_is_trusted_if_it_is_named(self, asking, prompts, expected, certificate):
        with StandIn(tls=certificate) as server:
            assert_equal(asking(server.url, ca_file=str(certificate[0])), prompts, expected)

    def test_otherwise_no_request_is_sent(self, asking, prompts, certificate):
        with StandIn(tls=certificate) as server:
            with pytest.raises(WorkerError, match="certificate verify failed"):
                list(asking(server.url, retry_s=0.2).score(prompts, K))
            assert server.seen.prompts == []
