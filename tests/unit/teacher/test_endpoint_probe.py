"""What a server cannot do is found before a run starts: every problem, each on one line with the setting."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from distill_rl.config.schema import TeacherConfig
from distill_rl.config.schema.backends import EndpointConfig
from distill_rl.teacher.base import MASS_TOLERANCE
from distill_rl.teacher.endpoint import Probed, probe, sample_of_ids
from tests.helpers.served import APIS, MODEL, StandIn, Tables

VOCABULARY, K, LENGTH = 320, 16, 200
DOCUMENTS = [np.arange(size, dtype=np.int32) for size in (40, 60)]


def probed(*urls: str, api: str = "vllm", token: str | None = None, k: int = K, **changes: Any) -> Probed:
    teacher = TeacherConfig(
        name="big", model=MODEL, backend="endpoint", endpoint=EndpointConfig(list(urls), api, retry_s=1.0)
    )
    for name, value in changes.items():
        setattr(teacher, name, value)
    ids = sample_of_ids(VOCABULARY, [1, 2], LENGTH)
    return probe("teachers.0", teacher, token, ids=ids, documents=DOCUMENTS, k=k, length=LENGTH)


@pytest.mark.parametrize("api", APIS)
def test_a_server_that_can_do_it_is_measured(api: str) -> None:
    with StandIn() as server:
        found = probed(server.url, api=api)
    assert found.problems == []
    assert found.context == 4096
    logprobs = np.concatenate([Tables(VOCABULARY).logprobs(document)[:-1] for document in DOCUMENTS]).astype(np.float64)
    mass = np.sort(np.exp(logprobs), axis=1)[:, -K:].sum(1).mean()
    assert found.mass == pytest.approx(mass, rel=1e-6)
    assert found.tokens_per_s is not None
    assert found.tokens_per_s > 0


def test_the_last_id_and_the_special_ones_are_tried() -> None:
    with StandIn() as server:
        assert probed(server.url).problems == []
        tried = set(server.seen.prompts[0])
    assert {0, 1, 2, VOCABULARY - 1} <= tried
    assert len(tried) >= 60


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_logprobs": 8}, "loss.top_k: {url} says: Requested prompt logprobs of 16, which is greater than max allowed: 8"),
        ({"model": "another"}, "teachers.0.model: {url}: must serve stand-in (teachers[].model); got another"),
        ({"vocabulary": 300}, "teachers.0.tokenizer: {url} does not know its ids: Token id 319 is out of vocabulary"),
        ({"max_length": 100}, "teachers.0.endpoint.url: {url} takes 100 tokens, one of which it generates; rows have 200"),
        ({"max_length": 100, "says_length": False}, "teachers.0.endpoint.url: {url} answers with status 400; got This model's maximum"),
        ({"processed": True}, "teachers.0.endpoint.url: {url} must give the model's own log-probs"),
        ({"raw_logits": True}, "teachers.0.endpoint.url: {url}: log-probs must not be positive"),
        ({"token": "s3cret-9"}, "teachers.0.endpoint.token_env: {url} answers with status 401; got Unauthorized"),
        ({"fault": "nan", "count": 1}, "teachers.0.endpoint.url: {url}: log-probs must be numbers; got NaN"),
        ({"fault": "other-ids", "count": 1}, "teachers.0.endpoint.api: {url}: must score the tokens that it was sent"),
        ({"fault": "status 503", "count": 99}, "teachers.0.endpoint.url: {url} must score prompts; got status 503"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_one_line(settings: dict[str, Any], words: str) -> None:
    with StandIn(**settings) as server:
        found = probed(server.url)
        expected = words.format(url=server.url)
    (line,) = found.problems
    assert line.startswith(expected), line
    assert found.mass is None


def test_texts_in_place_of_ids_are_a_problem() -> None:
    with StandIn(by_text=True) as server:
        (line,) = probed(server.url, api="openai").problems
    assert "token_id:N" in line


def test_a_server_of_another_interface_is_a_problem() -> None:
    with StandIn() as server:
        server.settings.fault, server.settings.count = "status 404", 1
        (line,) = probed(server.url, api="sglang").problems
    assert line.startswith(f"teachers.0.endpoint.url: {server.url} answers with status 404")


@pytest.mark.parametrize("fault", ["reset", "status 503"])
def test_a_question_without_an_answer_is_asked_again(fault: str) -> None:
    with StandIn(fault=fault, count=2) as server:
        assert probed(server.url).problems == []
        assert server.settings.count == 0


def test_every_server_is_asked() -> None:
    with socket.socket() as dead, StandIn() as good, StandIn(max_logprobs=8) as poor:
        dead.bind(("127.0.0.1", 0))  # nobody listens
        nobody = f"http://127.0.0.1:{dead.getsockname()[1]}"
        first, second = probed(nobody, good.url, poor.url).problems
    assert first.startswith(
        f"teachers.0.endpoint.url: {nobody} must answer; got Failed to establish a new connection: "
    )
    assert "refused" in first
    assert second.startswith(f"loss.top_k: {poor.url} says: ")


def test_without_a_tokenizer_the_rest_is_still_asked() -> None:
    teacher = TeacherConfig(name="big", model="other", backend="endpoint", endpoint=EndpointConfig(api="vllm"))
    with StandIn() as server:
        teacher.endpoint.url = [server.url]
        found = probe("teachers.0", teacher, None, ids=None, documents=[], k=K, length=LENGTH)
        assert server.seen.prompts == []
    (line,) = found.problems
    assert line.startswith("teachers.0.model: ")


@pytest.mark.parametrize(("size", "length"), [(320, 200), (2, 64), (10, 3), (150_000, 4096)])
def test_a_sample_of_ids_fits(size: int, length: int) -> None:
    ids = sample_of_ids(size, [0, 1, size, -1], length)
    assert ids.dtype == np.int32
    assert 2 <= len(ids) <= length
    assert ids.min() >= 0
    assert ids[0] == size - 1


@pytest.mark.parametrize(("excess", "refused"), [(0.0, False), (0.5, False), (-100.0, False), (3.0, True)])
def test_top_k_may_exceed_one_by_the_tolerance(excess: float, refused: bool) -> None:
    """Whole distributions, each probability scaled so that their sum is 1 + excess * MASS_TOLERANCE."""
    with StandIn(log_mass=float(np.log1p(excess * MASS_TOLERANCE)), max_logprobs=VOCABULARY) as server:
        lines = probed(server.url, k=VOCABULARY).problems
    if refused:
        assert len(lines) == 1
        assert "must not exceed 1 together" in lines[0]
    else:
        assert lines == []
