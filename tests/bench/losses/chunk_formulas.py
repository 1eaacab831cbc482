"""What losses across tokenizers do with chunks whose right answer is known: ours, and those of NeMo-RL and TRL by their formulas.

All in fp64, on the same chunks, in which a teacher's word has one or two tokens. Sources: NeMo-RL's P-KL and H-KL (pull requests #2245
and #2508, arXiv 2605.21699), TRL 1.16's GOLD (`ULDLoss`: hybrid, β = 0, `observed` merging, adaptive weights). Each is written here from its published
description, with its differences from ours: what is averaged, what is normalised, and which columns are compared. The figures are numbers,
not times: they are the same on every machine but for the last digit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill_rl.losses import Chunks, DenseLogits, VocabularyProjection, reference_chunks
from tests.bench import harness

PIECES = "abcd"
"""The teacher's tokens."""
WORDS = [*PIECES, *(first + second for first in PIECES for second in PIECES)]
"""The student's: the pieces, and every word of two."""
SURE = 0.97
"""The probability that a teacher gives to the right piece; the others share the rest."""
TOP_K = 8192
TAU = 100.0
"""`loss.alm_tau` of a run."""
EPS = 1e-10
STEPS, RATE = 2000, 0.05


@dataclass(frozen=True)
class Case:
    """Chunks, and what the teacher says of them."""

    teacher: Tensor
    """fp64 [N_t, V_t] logits"""
    chunks: Chunks
    projection: VocabularyProjection
    labels: Tensor
    """int64 [N_s]: the student's tokens"""
    teacher_labels: Tensor
    """int64 [N_t]"""


Loss = Callable[..., Tensor]
"""Case and student logits [N_s, V_s] → the mean over its chunks. One that compares the teacher's largest columns has the keyword `top_k`."""


def ours(method: str, chunk_average: str = "mean") -> Loss:
    """This package's definition, in fp64 (`losses.cross_tokenizer.reference`)."""

    def loss(case: Case, student: Tensor, top_k: int = TOP_K) -> Tensor:
        label_logprob = case.teacher.log_softmax(1).gather(1, case.teacher_labels[:, None])[:, 0]
        output = reference_chunks.chunk_kd_loss(
            student,
            DenseLogits(case.teacher, label_logprob),
            case.chunks,
            case.projection,
            method=method,
            labels=case.labels,
            chunk_average=chunk_average,
            top_k=top_k,
            tau=TAU,
        )
        return output.kd / case.chunks.count

    return loss


def p_kl(case: Case, student: Tensor, top_k: int = TOP_K) -> Tensor:
    """NeMo-RL's P-KL: Σ p (log p − log q) over the columns that are the teacher's largest anywhere in the micro-batch.

    q is the student's probabilities sent through W, averaged over the chunk and then normalised over these columns. log p is
    the mean of the teacher's log-probabilities over these columns; p is not normalised.
    """
    columns = case.teacher.max(0).values.topk(min(top_k, case.teacher.shape[1])).indices.sort().values
    projected = student.softmax(1) @ dense(case.projection)[:, columns]
    log_p = averaged(case.teacher[:, columns].log_softmax(1), case.chunks.teacher, case.chunks.count)
    q = averaged(projected, case.chunks.student, case.chunks.count)
    log_q = (q / (q.sum(1, keepdim=True) + EPS) + EPS).log()
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def h_kl(case: Case, student: Tensor) -> Tensor:
    """NeMo-RL's H-KL: Σ p (log p − log q) over the common vocabulary, and sorted L1 over the rest.

    log p and log q are means of log-probabilities over the chunk; neither is normalised.
    """
    log_q = averaged(student.log_softmax(1), case.chunks.student, case.chunks.count)
    log_p = averaged(case.teacher.log_softmax(1), case.chunks.teacher, case.chunks.count)
    return partitioned(case, log_p.exp(), log_q.exp(), 1.0, 1.0)


def trl_gold(case: Case, student: Tensor) -> Tensor:
    """TRL's hybrid: as H-KL, each part with its share of the teacher's vocabulary as its weight.

    A chunk's probabilities are those of its first row times the probability of its other tokens, on either side.
    """
    q = merged(student.softmax(1), case.labels, case.chunks.student, case.chunks.count)
    p = merged(case.teacher.softmax(1), case.teacher_labels, case.chunks.teacher, case.chunks.count)
    share = len(case.projection.teacher_common) / case.teacher.shape[1]
    return partitioned(case, p, q, share, 1 - share)


def trl_installed() -> Loss | None:
    """The same by TRL's own class, with the chunks and the common vocabulary of the case; None where it is not installed."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from trl.experimental.gold import GOLDConfig
        from trl.experimental.gold.gold_trainer import ULDLoss
    except ImportError:
        return None
    theirs = ULDLoss(GOLDConfig(output_dir="unused", uld_use_hybrid_loss=True, beta=0.0, use_cpu=True, bf16=False))

    def loss(case: Case, student: Tensor) -> Tensor:
        ids_q, ids_p = case.projection.student_common, case.projection.teacher_common
        theirs._vocab_mapping = dict(zip(ids_p.tolist(), ids_q.tolist()))
        theirs._teacher_matched_ids, theirs._student_matched_ids = {*ids_p.tolist()}, {*ids_q.tolist()}
        theirs.mapping_tensor = torch.full((case.teacher.shape[1],), -1).index_copy(0, ids_p, ids_q)
        sides = (
            (student.softmax(1), case.chunks.student, case.labels),
            (case.teacher.softmax(1), case.chunks.teacher, case.teacher_labels),
        )
        aligned = [
            theirs._merge_probabilities_with_alignment_groups(
                probs, [(of == i).nonzero()[:, 0].tolist() for i in range(case.chunks.count)], labels.tolist()
            )
            for probs, of, labels in sides
        ]
        return theirs._compute_hybrid_uld_loss(*aligned)  # type: ignore[no-any-return]

    return loss


def partitioned(case: Case, p: Tensor, q: Tensor, common_weight: float, rest_weight: float) -> Tensor:
    """The mean over chunks of Σ p (log p − log q) over the common vocabulary and of sorted L1 over the rest, weighted.

    Args:
        p, q: [chunks, V] of teacher and student.
    """
    ids_q, ids_p = case.projection.student_common, case.projection.teacher_common
    common = (p[:, ids_p] * (p[:, ids_p].clamp_min(EPS).log() - q[:, ids_q].clamp_min(EPS).log())).sum(1)
    left_p = p[:, _others(p.shape[1], ids_p)].sort(1, descending=True).values
    left_q = q[:, _others(q.shape[1], ids_q)].sort(1, descending=True).values
    width = max(left_p.shape[1], left_q.shape[1])
    padded = [torch.nn.functional.pad(side, (0, width - side.shape[1])) for side in (left_p, left_q)]
    return (common_weight * common + rest_weight * (padded[0] - padded[1]).abs().sum(1)).mean()


def averaged(rows: Tensor, chunk_of: Tensor, count: int) -> Tensor:
    """[count, V]: the mean of the rows [N, V] of each chunk."""
    return torch.stack([rows[chunk_of == i].mean(0) for i in range(count)])


def merged(probs: Tensor, labels: Tensor, chunk_of: Tensor, count: int) -> Tensor:
    """[count, V]: the first row of each chunk times the probabilities of the labels of its other rows."""
    own = probs.gather(1, labels[:, None])[:, 0]
    rows = [(chunk_of == i).nonzero()[:, 0] for i in range(count)]
    return torch.stack([probs[of[0]] * own[of[1:]].prod() for of in rows])


def dense(projection: VocabularyProjection) -> Tensor:
    """W as fp64 [V_s, V_t]."""
    full = torch.zeros(projection.num_student, projection.num_teacher, dtype=torch.float64)
    full[projection.entry_rows, projection.indices] = projection.values.double()
    return full


def _others(size: int, ids: Tensor) -> Tensor:
    """bool [size]: not among the ids."""
    left = torch.ones(size, dtype=torch.bool)
    left[ids] = False
    return left


LOSSES: dict[str, Loss] = {
    "hybrid": ours("hybrid"),
    "alm": ours("alm"),
    "xtoken, mean": ours("xtoken"),
    "xtoken, chain": ours("xtoken", "chain"),
    "gold": ours("gold"),
    "hkl": ours("hkl"),
    "uld": ours("uld"),
    "NeMo-RL P-KL (formula)": p_kl,
    "NeMo-RL H-KL (formula)": h_kl,
    "TRL GOLD, hybrid, β = 0 (formula)": trl_gold,
}


def pieces_projection() -> VocabularyProjection:
    """From WORDS to PIECES, as `align.build_projection` weighs the pieces of a word: 0.9 and 0.09, normalised."""
    indptr, indices, values = [0], [], []
    for word in WORDS:
        weights = [0.9 * 0.1**i for i in range(len(word))]
        indices += [PIECES.index(piece) for piece in dict.fromkeys(word)]
        values += [
            sum(w for w, piece in zip(weights, word) if piece == own) / sum(weights) for own in dict.fromkeys(word)
        ]
        indptr.append(len(indices))
    ids = [*range(len(PIECES))]
    return VocabularyProjection.from_arrays(
        indptr, indices, values, num_teacher=len(PIECES), student_common=ids, teacher_common=ids
    )


def sure(pieces: str) -> Tensor:
    """fp64 [len, V_t]: logits of a teacher that is sure of one piece after another."""
    rows = torch.full((len(pieces), len(PIECES)), (1 - SURE) / (len(PIECES) - 1), dtype=torch.float64)
    for row, piece in zip(rows, pieces):
        row[PIECES.index(piece)] = SURE
    return rows.log()


def case_of(words: list[str]) -> Case:
    """A chunk for each word: one token of the student, one or two of the teacher."""
    pieces = "".join(words)
    return Case(
        sure(pieces),
        Chunks(
            torch.arange(len(words)),
            torch.tensor([i for i, word in enumerate(words) for _ in word]),
            len(words),
        ),
        pieces_projection(),
        torch.tensor([WORDS.index(word) for word in words]),
        torch.tensor([PIECES.index(piece) for piece in pieces]),
    )


def ambiguous() -> Case:
    """Two chunks, `ab` and `c`, which are equally likely after the same text."""
    case = case_of(["ab", "c"])
    first = torch.full((len(PIECES),), (1 - SURE) / 2, dtype=torch.float64)
    first[[PIECES.index("a"), PIECES.index("c")]] = SURE / 2
    teacher = case.teacher.clone()
    teacher[[0, 2]] = first.log()
    return replace(case, teacher=teacher)


def same_vocabulary(logits: Tensor, tokens_per_chunk: int) -> Case:
    """Both sides have one vocabulary and the same tokens, as many per chunk as given."""
    rows, columns = logits.shape
    numbers = torch.arange(rows) // tokens_per_chunk
    ids = [*range(columns)]
    projection = VocabularyProjection.from_arrays(
        [*range(columns + 1)], ids, [1.0] * columns, num_teacher=columns, student_common=ids, teacher_common=ids
    )
    labels = torch.arange(rows) % columns
    return Case(logits, Chunks(numbers, numbers, rows // tokens_per_chunk), projection, labels, labels)


def learnt(case: Case, loss: Loss, *, same_text: bool = False) -> Tensor:
    """fp64 [V_s]: the student's distribution in the first chunk, once its logits have been trained on the loss alone.

    Args:
        same_text: whether all rows come after the same text, so that the student gives the same logits in all.
    """
    rows = 1 if same_text else len(case.labels)
    student = torch.zeros(rows, case.projection.num_student, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([student], lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(case, student.expand(len(case.labels), -1)).backward()
        optimizer.step()
    return student.detach().softmax(1)[0]


def slope(case: Case, loss: Loss, student: Tensor) -> float:
    """The norm of the gradient."""
    leaf = student.clone().requires_grad_()
    loss(case, leaf).backward()
    assert leaf.grad is not None
    return float(leaf.grad.norm())


def properties(loss: Loss) -> dict[str, float]:
    """What a loss does, by name."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, len(PIECES), generator=draw, dtype=torch.float64)
    single, double = same_vocabulary(logits, 1), same_vocabulary(logits, 2)
    # Half of the vocabulary is common, and the student agrees with the teacher on it and on the sorted rest.
    half = replace(
        single.projection, student_common=torch.tensor([0, 1]), teacher_common=torch.tensor([0, 1]), _made={}
    )
    student = torch.zeros(2, len(WORDS), dtype=torch.float64)
    both, first = case_of(["ab", "c"]), case_of(["ab"])
    rest = replace(both, teacher=both.teacher[2:], chunks=Chunks(torch.tensor([0]), torch.tensor([0]), 1),
                   labels=both.labels[1:], teacher_labels=both.teacher_labels[2:])  # fmt: skip
    narrow = partial(loss, top_k=2) if "top_k" in signature(loss).parameters else loss
    apart = (narrow(first, student[:1]) + narrow(rest, student[1:])) / 2
    drawn = torch.randn(2, len(WORDS), generator=draw, dtype=torch.float64)
    either = learnt(ambiguous(), loss, same_text=True)
    return {
        "value: a word of one piece": float(loss(case_of(["c"]), drawn[:1])),
        "value: a word of two pieces": float(loss(first, drawn[1:])),
        "slope at the teacher, one token": slope(single, loss, logits),
        "slope at the teacher, two tokens": slope(double, loss, logits),
        "slope at the teacher, half in common": slope(replace(single, projection=half), loss, logits),
        "learnt: a word of one piece": float(learnt(case_of(["c"]), loss)[WORDS.index("c")]),
        "learnt: a word of two pieces": float(learnt(first, loss)[WORDS.index("ab")]),
        **{f"learnt, `ab` or `c`: {word}": float(either[WORDS.index(word)]) for word in ("ab", "c", "a")},
        "changed by another micro-batch": float((narrow(both, student) - apart).abs()),
    }


def measure(_: Path) -> dict[str, Any]:
    """The properties of all losses."""
    installed = trl_installed()
    losses = LOSSES if installed is None else {**LOSSES, f"TRL {version('trl')} GOLD, hybrid, β = 0": installed}
    return {"losses": {name: properties(loss) for name, loss in losses.items()}}


main = harness.program("chunk_formulas", measure)

if __name__ == "__main__":
    sys.exit(main())
