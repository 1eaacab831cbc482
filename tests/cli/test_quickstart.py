"""The quickstart from the command line, with one tokenizer and half as long as a user's."""

import pytest

from tests.helpers.quickstart_contract import QuickstartContract, finish

pytestmark = pytest.mark.cli

STEPS = 300
"""The quickstart itself takes 600 steps. After 300 the gap between the two students is as wide: 0.75 against 0.47."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish("quickstart", tmp_path_factory.mktemp("quickstart"), STEPS)


class TestQuickstart(QuickstartContract):
    def test_the_summary_names_no_chunks(self, finished):
        assert "one_to_one_share" not in finished.summary
