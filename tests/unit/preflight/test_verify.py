"""The checks of the losses pass for the library's losses, and fail for a wrong one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from distill_rl.align import TokenAligner
from distill_rl.align.projection import build_projection
from distill_rl.losses import METHODS
from distill_rl.preflight import verify as checks
from distill_rl.preflight.verify import CHUNKS_OF_A_KIND, IGNORED, cut, take_chunks
from tests.helpers.tokenizers import seeded_words, tiny_tokenizer

STUDENT, TEACHER = tiny_tokenizer(320, seed=1), tiny_tokenizer(420, seed=2)
ALIGNER = TokenAligner(STUDENT, TEACHER)
PROJECTION = build_projection(
    STUDENT, TEACHER, student_columns=ALIGNER.student.size, teacher_columns=ALIGNER.teacher.size
)
TEXTS = [" ".join(seeded_words(seed, 60)) for seed in range(4)]


def test_every_method_passes_both_checks() -> None:
    results = checks.check_losses(ALIGNER, PROJECTION, STUDENT, TEXTS)
    assert [check.detail for check in results if not check.passed] == []
    assert len(results) == 2 * len(METHODS)
    assert all(sum(check.name.startswith(method) for check in results) == 2 for method in METHODS)


def test_sample_has_every_kind_of_chunk() -> None:
    results = [ALIGNER.align(text) for text in TEXTS]
    sample = take_chunks(results)
    assert set(sample.kinds) == {kind for one in results for kind, count in one.counts.items() if count}
    assert max(sample.kinds.count(kind) for kind in sample.kinds) <= CHUNKS_OF_A_KIND
    for numbers, labels in (
        (sample.chunks.student, sample.student_labels),
        (sample.chunks.teacher, sample.teacher_labels),
    ):
        assert numbers.shape == labels.shape
        assert numbers[-2:].tolist() == [-1, -1]
        assert labels[-1] == IGNORED
        assert sorted(set(numbers[:-2].tolist())) == list(range(sample.chunks.count))


def test_cut_keeps_whole_rows_and_common_pairs() -> None:
    projection = build_projection(STUDENT, TEACHER, student_columns=320, teacher_columns=420)
    part = cut(projection, take_chunks([ALIGNER.align(TEXTS[0])]))
    assert len(part.student) < 320
    ends, whole_ends = part.small.indptr.tolist(), projection.indptr.tolist()
    for small, big in enumerate(part.student.tolist()):
        kept, whole = slice(*ends[small : small + 2]), slice(*whole_ends[big : big + 2])
        assert [part.teacher[column] for column in part.small.indices[kept]] == projection.indices[whole].tolist()
        assert np.array_equal(part.small.values[kept].numpy(), projection.values[whole])
    pairs = zip(part.small.student_common.tolist(), part.small.teacher_common.tolist())
    whole_pairs = set(zip(projection.student_common.tolist(), projection.teacher_common.tolist()))
    assert {(part.student[left], part.teacher[right]) for left, right in pairs} <= whole_pairs
    assert part.full.num_student == 320
    assert part.full.indptr[-1] == part.small.indptr[-1]


def test_texts_without_a_chunk_are_rejected() -> None:
    with pytest.raises(ValueError, match="must have a chunk"):
        take_chunks([ALIGNER.align("")])


def test_slightly_wrong_loss_fails_only_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = checks.chunk_kd_loss

    def wrong(*arguments, **settings):
        output = plain(*arguments, **settings)
        off = 1e-4 if settings["method"] == "alm" else 0.0
        return replace(output, kd=output.kd + off)

    monkeypatch.setattr(checks, "chunk_kd_loss", wrong)
    failed = [check.name for check in checks.check_losses(ALIGNER, PROJECTION, STUDENT, TEXTS) if not check.passed]
    assert len(failed) == 2
    assert all(name.startswith("alm") for name in failed)


def test_loss_with_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = checks.chunk_kd_loss

    def wrong(*arguments, **settings):
        output = plain(*arguments, **settings)
        return replace(output, kd=2 * output.kd - output.kd.detach())

    monkeypatch.setattr(checks, "chunk_kd_loss", wrong)
    results = checks.check_losses(ALIGNER, PROJECTION, STUDENT, TEXTS)
    assert not any(check.passed for check in results if "gradient" in check.name)


def test_nan_loss_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = checks.chunk_kd_loss
    monkeypatch.setattr(
        checks, "chunk_kd_loss", lambda *a, **k: replace(out := plain(*a, **k), ce=torch.full_like(out.ce, torch.nan))
    )
    results = checks.check_losses(ALIGNER, PROJECTION, STUDENT, TEXTS)
    assert not any(check.passed for check in results if "reference" in check.name)
