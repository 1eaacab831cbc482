"""The table of sampled targets, with a text of a few hundred tokens and a few steps."""

from __future__ import annotations

import torch

from distill_rl.losses import SampledTokens
from tests.bench.losses import sampled


def test_every_student_is_trained_and_measured(tmp_path, monkeypatch):
    for name, value in {"CHAINS": 32, "LENGTH": 40, "VALIDATED": 256, "BATCH": 64}.items():
        monkeypatch.setattr(sampled, name, value)
    threads = torch.get_num_threads()
    try:
        figures = sampled.measure(tmp_path, seeds=2, steps=3)
        again = sampled.measure(tmp_path, seeds=2, steps=3)
    finally:
        torch.set_num_threads(threads)
    assert figures == again
    rows = figures["students"]
    assert len(rows) == 2 + 4 * len(sampled.ENTRIES)
    for n in sampled.ENTRIES:
        assert {rows[name]["bytes_per_token"] for name in rows if name.startswith((f"top {n},", f"{n} "))} == {
            6 * n + 8
        }
        assert 1 < figures["teacher"][f"distinct_ids_of_{n}_draws"] <= n
    assert len({row["kd"] for row in rows.values()}) == len(rows), "two students are the same"
    assert all(row["kd"] > 0 and row["kd_deviation"] > 0 for row in rows.values())


def test_a_position_has_the_same_draws_whenever_it_is_seen():
    targets, _ = sampled.students()["12 draws"]
    logits = torch.randn(6, sampled.VOCABULARY, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(6) + 5
    whole, part = targets(logits, positions)[0], targets(logits[3:], positions[3:])[0]
    assert isinstance(whole, SampledTokens)
    assert isinstance(part, SampledTokens)
    assert torch.equal(whole.ids[3:], part.ids)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    logits = torch.tensor([[0.8, 0.1, 0.1]] * 10).log()
    labels = torch.tensor([0] * 5 + [1] * 5)
    assert abs(sampled.calibration_error(logits, labels) - 0.3) < 1e-6
