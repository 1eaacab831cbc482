"""The quickstart from the command line, with one tokenizer and shorter than a user's. With a Ray of its own for each run: tests/examples."""

import pytest

from tests.helpers.quickstart_contract import QuickstartContract, finish

pytestmark = pytest.mark.cli

STEPS = 240
"""The quickstart itself takes 600 steps. After 240 the intervals of the two students are clearly apart."""


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    return finish("quickstart", tmp_path_factory.mktemp("quickstart"), STEPS, cluster)


class TestQuickstart(QuickstartContract):
    def test_the_summary_names_no_chunks(self, finished):
        assert "one_to_one_share" not in finished.summary
