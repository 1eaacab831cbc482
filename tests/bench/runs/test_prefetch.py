"""The benchmark of looking ahead: its workload is what it says, its figures are read right, the record keeps the promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill_rl.system.environment import ROOT
from tests.bench.runs import prefetch
from distill_rl.config.load import load_config
from distill_rl.config.rules.validate import problems

RECORD = ROOT / "docs/benchmarks/prefetch.json"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prefetch")
    prefetch.write_material(root, rows=8, words_per_row=400, length=64)
    return root


def figures(at_0: float, at_1: float, same: bool = True) -> dict[str, Any]:
    shares = {"0": at_0, "1": at_1}
    return {"depths": {depth: {"wait_aligner_share_median": shares[depth]} for depth in shares}, "same_losses": same}


def test_documents_are_several_times_longer_than_a_row_on_both_sides(material: Path) -> None:
    from transformers import AutoTokenizer

    texts = [json.loads(line)["text"] for line in (material / "text.jsonl").read_text().splitlines()]
    sides = [AutoTokenizer.from_pretrained(material / name) for name in ("student", "teacher")]
    assert sides[0].get_vocab() != sides[1].get_vocab()
    assert len(set(texts)) == 8
    for text in texts:
        lengths = [len(side(text)["input_ids"]) for side in sides]
        assert min(lengths) > 4 * 64
        assert lengths[0] != lengths[1]


@pytest.mark.parametrize("depth", prefetch.DEPTHS)
def test_the_configuration_is_one_that_could_run(material: Path, depth: int) -> None:
    config = load_config(prefetch.configuration(material, depth, steps=3, batch=4, length=64))
    assert problems(config) == []
    assert (config.prefetch.depth, config.aligner.workers) == (depth, 1)


def test_the_number_of_aligners_is_that_of_the_case(material: Path) -> None:
    configs = [load_config(prefetch.configuration(material, 0, n, steps=3, batch=4, length=64)) for n in (1, 4)]
    assert [config.aligner.workers for config in configs] == [1, 4]
    assert configs[0].run.name != configs[1].run.name


def test_waits_are_medians_after_the_warm_up_and_shares_of_their_own_step(tmp_path: Path) -> None:
    rest = {"timing/wait_teachers": 0.1, "timing/student": 0.2, "timing/aligner/align": 0.05, "train/loss": 1.0}
    steps = [(9.0, 9.0)] * prefetch.WARM_UP + [(1.0, 0.25), (2.0, 0.25), (1.0, 0.75)]
    records = [
        {"step": step, "timing/step": total, "timing/wait_aligner": waited, **rest}
        for step, (total, waited) in enumerate(steps, start=1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"step": 8, "validation/loss": 1.0}]))
    found = prefetch.waits(path)
    assert (found["steps"], found["wait_aligner_share_median"], found["wait_aligner_share_max"]) == (3, 0.25, 0.75)
    assert found["seconds_median"]["wait_aligner"] == 0.25
    assert found["seconds_median"]["step"] == 1.0


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        (figures(0.19, 0.0), "at least 20%"),
        (figures(0.3, 0.02), "below 2%"),
        (figures(0.3, 0.0, same=False), "depend on"),
    ],
)
def test_a_broken_promise_is_told(figures: dict[str, Any], word: str) -> None:
    (problem,) = prefetch.verdict(figures)
    assert word in problem


def test_the_recorded_run_keeps_the_promise() -> None:
    record = json.loads(RECORD.read_text())
    assert prefetch.verdict(record) == []
    assert record["environment"]["commit"]
    assert all(record["depths"][str(depth)]["steps"] >= 30 for depth in prefetch.DEPTHS)
