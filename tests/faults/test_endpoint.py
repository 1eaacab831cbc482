"""A server of a teacher that dies, stalls, refuses or lies: the run keeps every bit, or ends with one line and goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Disturbed, assert_resumes, assert_same_student
from tests.helpers.command import distill_rl, until
from tests.helpers.served import MODEL, Standing, standing_in

pytestmark = pytest.mark.cli

STEPS = 60
LENGTH = (
    f"train.steps={STEPS}",
    f"schedule.steps={STEPS}",
    "evaluate.every=30",
    "checkpoint.every=5",
    "prefetch.depth=1",
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Standing]:
    with standing_in(tmp_path / "server.log") as standing:
        yield standing


def served_by(material, *servers: Standing, **settings: object) -> tuple[str, ...]:
    """Overrides with which the teacher is behind these servers."""
    entry = {
        "name": "big",
        "backend": "endpoint",
        "model": MODEL,
        "api": "vllm",
        "tokenizer": f"{material.root}/teacher",
    }
    entry |= {"url": f"[{', '.join(server.url for server in servers)}]"} | settings
    return (f"teachers=[{{{', '.join(f'{key}: {value}' for key, value in entry.items())}}}]", *LENGTH)


@pytest.fixture(scope="module")
def expected(material, tmp_path_factory) -> Path:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with standing_in(folder / "server.log") as standing:
        ended = distill_rl("train", "-c", material.config(folder), *served_by(material, standing))
    assert ended.code == 0, ended.err
    return folder / "runs" / "tiny"


def wait_for_requests(server: Standing, run: Disturbed, more: int = 30) -> None:
    before = server.control()
    until(lambda: server.control() > before + more or run.process.poll() is not None, "further requests")


def test_a_server_killed_and_started_again_leaves_no_trace(disturb, expected, server, material):
    with disturb(*served_by(material, server)) as run:
        for _ in range(2):
            wait_for_requests(server, run)
            server.kill()
            server.start()
        assert run.end() == 0, run.text
        assert "Traceback" not in run.text
    assert_same_student(run.run, expected)


@pytest.mark.parametrize("fault", ["status 503", "status 429", "status 500", "reset", "truncate", "stall"])
def test_faults_that_pass_leave_no_trace(disturb, expected, server, material, fault):
    with disturb(*served_by(material, server, request_timeout_s=3)) as run:
        for _ in range(3):
            wait_for_requests(server, run)
            server.control(fault=fault, count=4, retry_after="0.1" if "429" in fault else "")
        assert run.end() == 0, run.text
    assert_same_student(run.run, expected)


def test_one_server_of_two_may_die_for_good(disturb, expected, server, material, tmp_path):
    with standing_in(tmp_path / "other.log") as other, disturb(*served_by(material, server, other)) as run:
        wait_for_requests(server, run)
        server.kill()
        assert run.end() == 0, run.text
    assert_same_student(run.run, expected)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("status 503", r"a server must answer within teachers\[\]\.endpoint\.retry_s=2; got .*status 503"),
        ("status 404", r"answers with status 404; got the stand-in was told to fail"),
        ("nan", r"log-probs must be numbers; got NaN"),
        ("other-ids", r"must score the tokens that it was sent"),
        ("other-model", rf"must serve {MODEL} \(teachers\[\]\.model\); got another"),
    ],
)
def test_what_lasts_or_is_wrong_ends_in_one_line_and_the_run_goes_on(disturb, expected, server, material, fault, words):
    settings = served_by(material, server, retry_s=2)
    with disturb(*settings) as run:
        run.wait_for_checkpoint()
        server.control(fault=fault, count=10**6)
        assert run.end() == 1, run.text
        (line,) = run.errors
        assert re.search(words, line), line
        assert "teacher big" in line
        assert run.steps < STEPS
    server.control(fault="", count=0)
    assert_resumes(run, *settings)
    assert_same_student(run.run, expected)


def test_another_model_at_the_address_after_a_restart_is_one_line(disturb, server, material):
    with disturb(*served_by(material, server, retry_s=60)) as run:
        wait_for_requests(server, run)
        server.kill()
        server.settings.model = "another"
        server.start()
        assert run.end() == 1, run.text
        (line,) = run.errors
        assert f"must serve {MODEL} (teachers[].model); got another" in line
