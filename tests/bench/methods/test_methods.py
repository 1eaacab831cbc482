"""The tables of methods: rates, best settings, comparisons, the page, and how missing rows are trained."""

from __future__ import annotations

import json
import os
import re
from dataclasses import astuple
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.bench.methods.methods import COMMITTED, PAGE, main
from tests.bench.methods.page import write_page
from tests.bench.methods.rows import Row
from tests.bench.methods.run import ENVIRONMENT, complete, read_rows, rows_file
from tests.bench.methods.settings import PEERS, RATES, SAME_TOKENIZER, SEEDS, is_trl
from tests.bench.methods.tables import BESIDE, NOISY, TABLES, Rows, compare, findings
from tests.bench.methods.tasks.text import DOMAINS, pieces, texts
from tests.helpers.command import told


def record(
    task: str, setting: str, rate: float, seed: int, score: float, *, measure: str = "exact match", items: int = 200
):
    """Of a student of which a share `score` of the answers is right, or that needs so many bits for each byte."""
    draw = np.random.default_rng([seed, 7])
    if measure == "exact match":
        right = (draw.random(items) < score).astype(int)
        test = {"score": float(right.mean()), "items": "".join(map(str, right))}
    else:
        bits = score * draw.integers(50, 150, items)
        test = {"score": score, "items": bits.tolist()}
    scores = {"bits_per_byte": 1.0, "kl": 0.5}
    return {
        "task": task, "setting": setting, "rate": rate, "seed": seed, "measure": measure, "seconds": 2.0, "labels": 100, "peak_mib": 400.0,
        "selection": {"score": score, **scores}, "test": {**test, **scores},
    }  # fmt: skip


def add_all(rows: Rows, task: str, setting: str, score: float, **kinds) -> None:
    """All rows of a setting; the middle rate is the best one, or any that comes as well off."""
    worse = 0.1 if kinds.get("measure") == "bits per byte" else -0.1
    for rate in RATES:
        rows.add(record(task, setting, rate, SEEDS[0], score + (0 if rate == RATES[1] else worse), **kinds))
    for seed in SEEDS[1:]:
        rows.add(record(task, setting, RATES[1], seed, score, **kinds))


def test_other_seeds_wait_for_the_best_rate():
    rows, one = Rows(), {"CE": SAME_TOKENIZER["CE"]}
    assert rows.missing(NOISY, one) == [Row(NOISY, "CE", rate, SEEDS[0]) for rate in RATES]
    for rate, score in zip(RATES, (0.4, 0.5, 0.3)):
        assert rows.rates(NOISY, "CE") == []
        rows.add(record(NOISY, "CE", rate, SEEDS[0], score))
    assert rows.rates(NOISY, "CE") == [RATES[1]]
    assert rows.best_rate(NOISY, "CE") is None
    assert rows.missing(NOISY, one) == [Row(NOISY, "CE", RATES[1], seed) for seed in SEEDS[1:]]
    assert rows.of(NOISY, "CE") == []
    for seed in SEEDS[1:]:
        rows.add(record(NOISY, "CE", RATES[1], seed, 0.5))
    assert rows.missing(NOISY, one) == []
    assert rows.best_rate(NOISY, "CE") == RATES[1]
    assert [one["seed"] for one in rows.of(NOISY, "CE")] == list(SEEDS)


def test_a_training_that_diverged_is_never_the_best():
    rows = Rows()
    for rate in RATES[:2]:
        rows.add({"task": NOISY, "setting": "CE", "rate": rate, "seed": 0, "failed": "the loss is NaN"})
    rows.add(record(NOISY, "CE", RATES[2], 0, 0.1))
    assert rows.rates(NOISY, "CE") == [RATES[2]]
    rows.add({"task": NOISY, "setting": "CE", "rate": RATES[2], "seed": 0, "failed": "the loss is NaN"})
    assert rows.rates(NOISY, "CE") == []
    assert rows.missing(NOISY, {"CE": ()}) == []
    assert findings(rows, NOISY, {"CE": ()}) == []


def test_a_seed_without_a_student_leaves_a_setting_out():
    rows = Rows()
    for name in ("CE", "TVD"):
        add_all(rows, NOISY, name, 0.5)
    rows.add({"task": NOISY, "setting": "TVD", "rate": RATES[1], "seed": 2, "failed": "the loss is NaN"})
    assert list(rows.best(NOISY, SAME_TOKENIZER)) == ["CE"]
    assert [one.setting for one in findings(rows, NOISY, {"CE": (), "TVD": ()})] == ["CE"]


def test_equal_scores_are_decided_by_bits():
    rows = Rows()
    for rate, bits in zip(RATES, (3.0, 1.0, 2.0)):
        found = record(NOISY, "CE", rate, 0, 0.0)
        found["selection"]["bits_per_byte"] = bits
        rows.add(found)
    assert rows.rates(NOISY, "CE") == [RATES[1]]


def test_a_rate_that_selection_cannot_tell_from_the_best_is_trained_on_all_seeds():
    """Of 192 questions 0.6 has a standard error of 0.035."""
    rows = Rows()
    for rate, score in zip(RATES, (0.55, 0.58, 0.60)):
        rows.add(record(NOISY, "CE", rate, 0, score))
    assert rows.rates(NOISY, "CE") == [*RATES[1:]]
    due = [Row(NOISY, "CE", rate, seed) for rate in RATES[1:] for seed in SEEDS[1:]]
    assert rows.missing(NOISY, {"CE": ()}) == due
    for row in due:
        assert rows.of(NOISY, "CE") == []
        rows.add(record(*astuple(row), 0.62 if row.rate == RATES[1] else 0.60))
    assert rows.best_rate(NOISY, "CE") == RATES[1], "0.607 on average, against 0.600"
    assert [one["seed"] for one in rows.of(NOISY, "CE")] == list(SEEDS)


def test_of_close_rates_one_that_diverges_on_a_seed_is_left_out():
    rows = Rows()
    for rate, score in zip(RATES, (0.1, 0.59, 0.60)):
        rows.add(record(NOISY, "CE", rate, 0, score))
    for seed in SEEDS[1:]:
        rows.add({"task": NOISY, "setting": "CE", "rate": RATES[2], "seed": seed, "failed": "the loss is NaN"})
        rows.add(record(NOISY, "CE", RATES[1], seed, 0.59))
    assert rows.best_rate(NOISY, "CE") == RATES[1]


def test_texts_tell_rates_apart():
    rows = Rows()
    for rate, score in zip(RATES, (2.001, 2.0, 2.002)):
        rows.add(record("language", "CE", rate, 0, score, measure="bits per byte"))
    assert rows.rates("language", "CE") == [RATES[1]]


def test_texts_count_once_whatever_the_number_of_seeds():
    draw = np.random.default_rng(0)
    base, other = [record("language", "CE", 1e-3, 0, 2.0, measure="bits per byte", items=40) for _ in range(2)]
    other["test"]["items"] = (np.array(base["test"]["items"]) * (0.99 + 0.1 * draw.standard_normal(40))).tolist()
    (low, high), _ = compare([other], [base])
    assert compare([other] * 3, [base] * 3)[0] == pytest.approx((low, high))


def test_rows_of_other_data_are_not_mixed():
    rows = Rows()
    rows.add(record(NOISY, "CE", 1e-3, 0, 0.5) | {"task_hash": "a"})
    rows.add(record(NOISY, "CE", 1e-3, 1, 0.5) | {"task_hash": "b"})
    with pytest.raises(ValueError, match=r"noisy, seed 0: .* got a and b"):
        rows.add(record(NOISY, "TVD", 1e-3, 0, 0.5) | {"task_hash": "b"})


def test_the_best_settings_go_on_with_the_baseline():
    rows = Rows()
    for name, score in {"CE": 0.9, "all logits": 0.7, "TVD": 0.8, "reverse KL": 0.6}.items():
        add_all(rows, NOISY, name, score)
    assert list(rows.best(NOISY, SAME_TOKENIZER, 2)) == ["CE", "TVD", "all logits"]
    shift = TABLES["shift"].settings(rows)["shift"]
    assert set(shift) == {"CE", "TVD", "all logits", "reverse KL", "0.5 KD + 0.5 CE", "top 64, bucket"}


@pytest.mark.parametrize(("measure", "good", "bad"), [("exact match", 0.8, 0.6), ("bits per byte", 1.5, 1.8)])
def test_findings_are_sorted_and_judged_in_the_sense_of_the_measure(measure, good, bad):
    rows = Rows()
    for name, score in {"CE": (good + bad) / 2, "TVD": bad, "all logits": good}.items():
        add_all(rows, NOISY, name, score, measure=measure)
    found = findings(rows, NOISY, dict.fromkeys(("CE", "TVD", "all logits"), ()))
    assert [(one.setting, one.verdict) for one in found] == [("all logits", "better"), ("CE", ""), ("TVD", "worse")]
    assert [one.against_best for one in found] == ["", "worse", "worse"]
    assert all(one.rate == RATES[1] for one in found)
    low, high = found[0].interval
    difference = found[0].score - found[1].score
    assert low <= difference <= high
    assert min(low, high) * difference > 0, "the interval must exclude 0"


def test_a_difference_that_one_seed_contradicts_is_a_tie():
    base = [record(NOISY, "CE", 1e-3, seed, 0.5) for seed in SEEDS]
    mixed = [record(NOISY, "TVD", 1e-3, seed, score) for seed, score in zip(SEEDS, (0.9, 0.9, 0.45))]
    (low, _), verdict = compare(mixed, base)
    assert low > 0
    assert verdict == "tie"
    assert compare(base, base) == ((0.0, 0.0), "tie")


def test_the_page_keeps_its_words_and_gets_new_tables(tmp_path):
    rows = Rows()
    for name, score in {"CE": 0.6, "all logits": 0.8}.items():
        add_all(rows, NOISY, name, score)
        for task, settings in TABLES["few_rows"].settings(rows).items():
            if name in settings:
                add_all(rows, task, name, score)
    rows.add({"task": NOISY, "setting": "TVD", "rate": 0.01, "seed": 0, "failed": "the loss is NaN"})
    page = tmp_path / "results.md"
    page.write_text(
        "Words.\n<!-- table: same -->\nold\n<!-- end -->\nMore.\n<!-- table: few_rows -->\n<!-- end -->\n<!-- table: cross -->\n<!-- end -->\n"
    )
    write_page(page, tmp_path / "results", rows)
    text = page.read_text()
    assert text.startswith("Words.\n<!-- table: same -->\n")
    assert "old" not in text
    assert "\nMore.\n" in text
    assert "No rows yet." in text
    assert text.count("No student: TVD, rate 0.01, seed 0: the loss is NaN.") == 1
    lines = [line for line in text.splitlines() if line.startswith("| all logits | **")]
    assert len(lines) == 1
    assert " better |  | 1.000 | 0.500 | 0.003 |" in lines[0]
    assert "\n11 trainings; their steps took 0.0 hours of a core.\n" in text, (
        "five of each setting, and one without a student"
    )
    pictures = [line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == 2
    assert all((tmp_path / picture).read_text().startswith("<svg") for picture in pictures)
    write_page(page, tmp_path / "results", rows)
    assert page.read_text() == text


def test_every_table_compares_with_the_baseline_on_tasks_that_exist():
    from tests.bench.methods.tasks.catalogue import TASKS

    for table in TABLES.values():
        assert set(table.needs) <= TABLES.keys()
        for task, settings in table.settings(Rows()).items():
            assert task in TASKS, table.name
            assert "CE" in settings


def test_every_table_has_a_place_on_the_page():
    places = re.findall(r"<!-- table: (\w+) -->", PAGE.read_text("utf-8"))
    assert sorted(places) == sorted(TABLES)


def test_rows_of_trl_are_read_and_not_trained(tmp_path, capsys):
    assert not any(is_trl(overrides) for overrides in SAME_TOKENIZER.values())
    for settings in PEERS.values():
        assert [is_trl(overrides) for overrides in settings.values()] == [name.startswith("TRL") for name in settings]
    committed = findings(read_rows([rows_file(COMMITTED, "peers")]), BESIDE, {"TRL GKD, β = 0": ()})
    assert [finding.score for finding in committed] == [pytest.approx(0.957, abs=5e-4)]
    options = ["--table", "peers", "--setting", "TRL GKD, β = 0", "--rows", os.fspath(tmp_path)]
    assert main([*options, "--out", os.fspath(tmp_path / "out.json")]) == 0
    assert f"not trained: {len(RATES)} rows of TRL's trainers" in capsys.readouterr().out
    assert not rows_file(tmp_path, "peers").exists()


def test_text_is_divided_by_source_and_into_short_documents():
    for domain in DOMAINS:
        parts = texts(domain)
        assert len(parts.train) > 5 * len(parts.test) > 100
        trained, held_out = (
            {line for text in part for line in text.splitlines()} for part in (parts.train, parts.test)
        )
        assert len({line for line in held_out & trained if len(line) > 40}) < 0.03 * len(held_out)
    text = "".join(f"line {i}\n" for i in range(200))
    cut = [*pieces(text, 100)]
    assert "".join(cut) == text
    assert all(100 <= len(piece) < 110 for piece in cut[:-1])


def test_settings_are_known_to_the_schema(tmp_path):
    """Every override of every table is one that a configuration accepts."""
    from distill_rl.config.load import load_config
    from distill_rl.config.rules import problems
    from distill_rl.system.environment import CONFIGS
    from tests.bench.methods.settings import ACROSS_TOKENIZERS

    for name, settings in (("quickstart", SAME_TOKENIZER), ("quickstart-cross", ACROSS_TOKENIZERS)):
        for setting, overrides in settings.items():
            assert problems(load_config(CONFIGS / f"{name}.yaml", overrides)) == [], setting
            json.dumps(overrides)


def fake_training(row: Row, overrides, root: Path):
    """Leaves a file, and the middle rate is the best one."""
    (root / row.name.replace(":", "")).touch(exist_ok=False)
    return record(row.task, row.setting, row.rate, row.seed, 0.6 if row.rate == RATES[1] else 0.5) | {
        "overrides": list(overrides)
    }


def failing_training(row: Row, overrides, root: Path):
    if row.setting == "TVD":
        raise ZeroDivisionError("not a training that diverged")
    return fake_training(row, overrides, root)


def test_missing_rows_are_trained_once_and_others_follow_at_the_best_rate(tmp_path, capsys):
    tasks = {NOISY: {"CE": ("a=1",), "TVD": ("b=2",)}, "shift": {"CE": ("a=1",)}}
    file = rows_file(tmp_path, "same")
    first = {**record(NOISY, "CE", RATES[0], 0, 0.5), "overrides": ["a=1"]}
    file.write_text(json.dumps(first) + "\n" + '{"task": "half a li')
    rows = read_rows([file, rows_file(tmp_path, "cross")])
    (tmp_path / "trained").mkdir()
    complete(tasks, rows, tmp_path / "trained", file, 2, attempt=fake_training)
    made = {path.name for path in (tmp_path / "trained").iterdir()}
    assert len(made) == 3 * 5 - 1
    assert {name for name in made if "seed 1" in name} == {
        f"{task} {setting}, rate 0.003, seed 1" for task, settings in tasks.items() for setting in settings
    }
    again = read_rows([file])
    assert again.by_row == rows.by_row
    assert len(again.by_row) == 15
    assert all(set(ENVIRONMENT) <= set(found) for found in again.by_row.values() if found != first)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^\d+ min, at least \d+ more rows: .*: exact match 0\.", printed, re.MULTILINE)) == 14
    complete(tasks, again, tmp_path / "trained", file, 2, attempt=fake_training)
    assert capsys.readouterr().out == ""


def training_of_a_process(row: Row, overrides, root: Path):
    return record(row.task, row.setting, row.rate, row.seed, 0.5) | {"overrides": [], "pid": os.getpid()}


@pytest.mark.parametrize(("fresh", "processes"), [(False, 1), (True, 3)])
def test_each_row_has_a_process_of_its_own_if_it_must(tmp_path, monkeypatch, fresh, processes):
    monkeypatch.setattr("tests.bench.methods.tables.SEEDS", (0,))
    rows = Rows()
    complete({NOISY: {"CE": ()}}, rows, tmp_path, tmp_path / "rows", 1, fresh=fresh, attempt=training_of_a_process)
    assert len({found["pid"] for found in rows.by_row.values()}) == processes


def test_an_error_ends_all_trainings_and_keeps_what_is_finished(tmp_path):
    file = rows_file(tmp_path, "same")
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(ZeroDivisionError):
        complete({NOISY: {"CE": (), "TVD": ()}}, Rows(), tmp_path, file, 1, attempt=failing_training)
    assert {row.setting for row in read_rows([file]).by_row} == {"CE"}
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert not [command for command in told(left) if "resource_tracker" not in command]


def test_rows_of_another_setting_are_refused(tmp_path, capsys):
    changed = {**record(NOISY, "CE", RATES[0], 0, 0.5), "overrides": ["loss.kd_weight=2"]}
    rows_file(tmp_path, "same").write_text(json.dumps(changed) + "\n")
    assert main(["--rows", os.fspath(tmp_path), "--page", "--out", os.fspath(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "methods: error: noisy: CE, rate 0.001, seed 0: its setting must be that of its row, loss.kd_weight=2; got "
    )
    assert error.endswith("; delete its rows\n")
    assert not (tmp_path / "out.json").exists()


def test_a_table_elsewhere_takes_the_committed_rows_that_it_needs(tmp_path, capsys):
    """So that any row can be repeated: `few_rows` compares the best settings of `same`."""
    options = ["--rows", os.fspath(tmp_path), "--table", "few_rows", "--setting", "no such"]
    assert main(options) == 2
    assert "unknown setting 'no such'; there are: 'CE', 'top 64, renormalize'" in capsys.readouterr().err
