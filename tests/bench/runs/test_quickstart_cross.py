"""The recorded runs of the quickstart across tokenizers: what the README and docs/losses.md say of them."""

from __future__ import annotations

import json

from distill_rl.system.environment import ROOT

COLUMNS = ("student_after", "two_stops", "ce_only", "teacher", "half_rows")
RECORD = json.loads((ROOT / "docs/benchmarks/quickstart_cross.json").read_text())


def test_a_teacher_of_another_tokenizer_beats_no_teacher() -> None:
    assert [one["seed"] for one in RECORD["seeds"]] == [0, 1, 2]
    assert RECORD["environment"]["commit"]
    for one in RECORD["seeds"]:
        intervals = one["intervals"]
        assert intervals["student_after"][0] > intervals["ce_only"][1], "by more than the luck of the questions"
        assert one["one_to_one_share"] < 0.41
        assert one["teacher"] >= 0.97


def test_a_teacher_with_two_stop_tokens_teaches_as_many_answers_to_end() -> None:
    cut_off = {name: sum(one["truncated"][name] for one in RECORD["seeds"]) for name in RECORD["seeds"][0]["truncated"]}
    assert cut_off["two_stops"] <= cut_off["hybrid"]
    for one in RECORD["seeds"]:
        assert one["intervals"]["two_stops"][0] > one["intervals"]["ce_only"][1]


def test_the_pages_say_what_was_recorded() -> None:
    page = (ROOT / "docs/losses.md").read_text()
    for one in RECORD["seeds"]:
        cells = []
        for name in COLUMNS:
            low, high = one["intervals"][name]
            cells.append(f"{one[name]:.3f} ({low:.3f}–{high:.3f})")
        assert f"| {one['seed']} | " + " | ".join(cells) + " |" in page
