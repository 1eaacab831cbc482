"""`distill-rl try` that is killed or stopped leaves no process behind."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.command import leftovers, running, survivors, until
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.cli


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_tiny_model(root / "student", hidden=16)
    write_tiny_model(root / "teacher", hidden=32, seed=1)
    write_corpus(root / "corpus.jsonl", rows=400)
    return root / "student", root / "teacher", root / "corpus.jsonl", "--minutes", "30", "train.epochs=1000000"


@pytest.mark.parametrize(
    ("number", "moment", "code"),
    [
        (signal.SIGINT, "measure   ", 130),
        (signal.SIGTERM, "measure   ", 130),
        (signal.SIGKILL, "step 1/", -9),
        (signal.SIGINT, "step 1/", 130),
        (signal.SIGTERM, "step 1/", 85),
    ],
)
def test_no_process_is_left(arguments, tmp_path, number, moment, code):
    log = tmp_path / "log"
    with running("try", *arguments, "--out", tmp_path / "out", log=log) as process:
        until(lambda: moment in log.read_text() and leftovers(process.pid), moment)
        children = leftovers(process.pid)
        process.send_signal(number)
        assert process.wait(timeout=120) == code, log.read_text()
        assert survivors(children.values(), deadline_s=120) == []
        assert "Traceback" not in log.read_text()
        if number == signal.SIGKILL:  # the training heard SIGTERM
            assert "which is saved" in log.read_text()
