"""The quickstart with stored targets from the command line, at full length."""

import pytest

from distill_rl.store.maintain import verify
from distill_rl.store.store import Store
from tests.helpers.quickstart_contract import QuickstartContract, finish

pytestmark = pytest.mark.cli

STEPS = 600
TRAINING, HELD_OUT = 2000, 192


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    return finish("quickstart", tmp_path_factory.mktemp("stored"), STEPS, cluster, stored=True)


class TestQuickstartFromAStore(QuickstartContract):
    def test_every_document_is_stored_once(self, finished):
        store = Store(finished.runs / "quickstart-targets")
        _, problems = verify(store.folder)
        assert problems == []
        names = [piece.name for piece in store.pieces()]
        assert len(names) == len(set(names)) <= TRAINING + HELD_OUT, "rows that are equal have one name"

    def test_no_teacher_was_loaded(self, finished):
        log = (finished.run / "logs" / "latest" / "driver.log").read_text()
        assert "the teacher is on a CPU" in log
        assert "loading   the models" in log
