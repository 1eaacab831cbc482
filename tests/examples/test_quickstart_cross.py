"""The quickstart across tokenizers from the command line, at full length."""

import json

import pytest

from tests.helpers.command import series
from tests.helpers.quickstart_contract import QuickstartContract, finish

pytestmark = pytest.mark.cli

STEPS = 600


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    return finish("quickstart-cross", tmp_path_factory.mktemp("cross"), STEPS, cluster)


class TestQuickstartAcrossTokenizers(QuickstartContract):
    def test_cross_tokenizer_chunks_are_covered_and_the_student_stops(self, finished):
        summary = finished.summary
        assert 0.33 < summary["one_to_one_share"] < 0.41
        assert summary["coverage"] == 1
        one_to_one = f"{summary['one_to_one_share']:.0%} are one token on either side"
        assert one_to_one in " ".join(finished.ended.out.split())
        assert {count for _, count in series(finished.run, "align/method/bytes")} == {32}
        assert {share for _, share in series(finished.run, "align/exact")} == {1}
        answers = (finished.run / "evals" / "student_after" / "exact_match.json").read_text()
        assert json.loads(answers)["truncated"] <= 6, "the student learns to end an answer, too"
