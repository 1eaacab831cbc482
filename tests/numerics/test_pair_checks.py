"""The checks of `distill-rl align --verify`, on pairs of tokenizers of every family."""

from __future__ import annotations

import pytest

from distill_rl.align import TokenAligner
from distill_rl.align.chats import Chat
from distill_rl.align.projection import build_projection
from distill_rl.align.verify import check_alignment, check_chats
from distill_rl.losses import METHODS
from distill_rl.preflight.verify import check_losses
from tests.helpers.align import FAMILIES, SENTENCES, family
from tests.helpers.tokenizers import seeded_words

TEXTS = [*SENTENCES, " ".join(seeded_words(11, 60)), "", "  a\r\n\tb  12345 中é🙂"]
CHATS = [
    [{"role": "user", "content": "ka lo 12"}, {"role": "assistant", "content": "mi ter"}],
    [
        {"role": "user", "content": "中文 naïve"},
        {"role": "assistant", "content": "42 ß"},
        {"role": "user", "content": "ka"},
        {"role": "assistant", "content": "lo"},
    ],
]
# Every family once on either side, so that lossless meet lossy ones, and chat templates differ.
PAIRS = list(zip(FAMILIES, [*FAMILIES[1:], FAMILIES[0]]))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_every_check_passes_on_a_pair(student: str, teacher: str) -> None:
    ours, theirs = family(student), family(teacher)
    aligner = TokenAligner(ours, theirs)
    checks = check_alignment(aligner, ours, theirs, TEXTS) + check_chats(aligner, [Chat(chat) for chat in CHATS])
    projection = build_projection(
        ours, theirs, student_columns=aligner.student.size, teacher_columns=aligner.teacher.size
    )
    checks += check_losses(aligner, projection, ours, TEXTS)
    assert [(check.name, check.detail) for check in checks if check.passed is False] == []
    assert len(checks) == 7 + 2 + 2 * len(METHODS)
