"""Metrics that carry their own reduction, so that no consumer needs a list of metric names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

Reduction = Literal["sum", "mean", "max", "min", "last", "per_step"]


class Metric(NamedTuple):  # a dataclass takes longer to read from a pickle, and the driver reads a thousand per step
    """A value, and how it is merged with others of the same name over ranks and steps.

    A `mean` is weighted: `value` is the mean and `weight` the number of items it was taken over (for a loss, labelled
    tokens), so that merged means are exact. `per_step` is for seconds: the largest of all ranks, and in a record of several
    steps their sum over all of these steps, divided by the number of steps (`Observer`).
    """

    value: float
    reduction: Reduction = "mean"
    weight: float = 1.0


Metrics = Mapping[str, Metric]


class Described(NamedTuple):
    """What a recorded number is."""

    unit: str
    reduction: Reduction
    over: str
    """What a mean is taken over and weighted by; empty for other reductions."""
    meaning: str


LABELS, COMPARED, CHUNKS = "labelled tokens", "labelled positions that are compared", "chunks"
METRICS: Mapping[str, Described] = {
    "train/loss": Described(
        "nats", "mean", LABELS, "what is minimised: KD and CE with their weights, and the balance of experts"
    ),
    "train/kl_loss": Described(
        "nats",
        "mean",
        f"{LABELS}; what is asked of teachers, if they are chosen by row",
        "KD of all teachers with their shares, T² included; across tokenizers a mean over chunks",
    ),
    "train/kl_loss/NAME": Described(
        "nats", "mean", f"{LABELS}; what the teacher is asked for", "KD of one of several teachers"
    ),
    "train/nll_loss": Described("nats", "mean", LABELS, "cross-entropy (CE) with the labels, at temperature 1"),
    "train/teacher_mass": Described(
        "share",
        "mean",
        LABELS,
        "probability of the first teacher within its top k; of all its columns 1; draws tell none",
    ),
    "train/taught/NAME": Described(
        "share", "mean", LABELS, "labelled tokens for which a teacher is asked, if teachers are chosen by row"
    ),
    "train/router_balance": Described("ratio", "mean", LABELS, "balance of the experts of a mixture; even is 1"),
    "train/tokens": Described("tokens", "sum", "", "labelled tokens: those that are trained on"),
    "train/steps": Described("steps", "sum", "", "steps of the record, the denominator of what is per step"),
    "train/tokens_per_second": Described("tokens/s", "mean", "seconds in steps", "train/tokens by timing/step"),
    "train/ideal_seconds": Described(
        "seconds",
        "sum",
        "",
        "the FLOPs of the student's step (forward and backward; causal attention within documents; nothing "
        "that is computed again) by the nominal dense bf16 rate of its GPUs together; absent on CPUs and on cards that are not known",
    ),
    "train/mfu": Described(
        "share", "mean", "seconds in steps", "model FLOPs utilisation: train/ideal_seconds by timing/step"
    ),
    "train/grad_norm": Described("norm", "last", "", "L2 norm of the gradient before clipping"),
    "train/lr": Described("rate", "last", "", "learning rate"),
    "train/kd_scale": Described("ratio", "last", "", "r of loss.dynamic_scale: CE / KD"),
    "train/skipped": Described("0 or 1", "max", "", "a step left the weights alone"),
    "train/unlabelled": Described("0 or 1", "max", "", "a global batch had nothing to train on"),
    "validation/kl_loss": Described("nats", "mean", LABELS, "as train/kl_loss, on held-out text"),
    "validation/kl_loss/NAME": Described("nats", "mean", LABELS, "as train/kl_loss/NAME"),
    "validation/nll_loss": Described("nats", "mean", LABELS, "as train/nll_loss"),
    "validation/taught/NAME": Described("share", "mean", LABELS, "as train/taught/NAME"),
    "validation/top1_agreement": Described(
        "share", "mean", COMPARED, "the most likely tokens of teacher and student are the same"
    ),
    "validation/top1_agreement/NAME": Described("share", "mean", COMPARED, "the same with one of several teachers"),
    "validation/acceptance": Described(
        "share", "mean", COMPARED, "Σ min(p, q) at temperature 1, where the teacher's whole distribution is known"
    ),
    "validation/acceptance/NAME": Described("share", "mean", COMPARED, "the same with one of several teachers"),
    "validation/acceptance_low": Described(
        "share", "mean", COMPARED, "its lower bound by a top k: Σ over the top k alone"
    ),
    "validation/acceptance_low/NAME": Described("share", "mean", COMPARED, "the same with one of several teachers"),
    "validation/acceptance_high": Described(
        "share", "mean", COMPARED, "its upper bound by a top k: all other tokens count as one"
    ),
    "validation/acceptance_high/NAME": Described("share", "mean", COMPARED, "the same with one of several teachers"),
    "validation/student_entropy": Described("nats", "mean", COMPARED, "entropy of the student at temperature 1"),
    "validation/student_entropy/NAME": Described(
        "nats", "mean", COMPARED, "the same where one of several teachers is asked"
    ),
    "validation/teacher_entropy": Described(
        "nats", "mean", COMPARED, "entropy of the teacher at temperature 1, where its whole distribution is known"
    ),
    "validation/teacher_entropy/NAME": Described("nats", "mean", COMPARED, "the same of one of several teachers"),
    "validation/teacher_entropy_low": Described(
        "nats", "mean", COMPARED, "its lower bound by a top k: all other tokens as one"
    ),
    "validation/teacher_entropy_low/NAME": Described("nats", "mean", COMPARED, "the same of one of several teachers"),
    "validation/teacher_entropy_high": Described(
        "nats", "mean", COMPARED, "its upper bound by a top k: all other tokens alike"
    ),
    "validation/teacher_entropy_high/NAME": Described("nats", "mean", COMPARED, "the same of one of several teachers"),
    "eval/SUITE": Described("score", "last", "", "score of a suite by the weights of this step"),
    "timing/step": Described(
        "seconds",
        "per_step",
        "",
        "the driver's wall time of a step; its parts below, down to timing/other, add up to it",
    ),
    "timing/wait_aligner": Described("seconds", "per_step", "", "waiting for an aligner"),
    "timing/wait_teachers": Described("seconds", "per_step", "", "waiting for teachers"),
    "timing/student": Described("seconds", "per_step", "", "the student's part"),
    "timing/other": Described("seconds", "per_step", "", "the rest of a step"),
    "timing/validation": Described("seconds", "per_step", "", "validation passes, outside steps"),
    "timing/save": Described(
        "seconds", "per_step", "", "saving checkpoints as far as the run waits for it, outside steps"
    ),
    "timing/recovery": Described("seconds", "per_step", "", "starting lost workers again"),
    "timing/driver/cpu": Described("CPU seconds", "per_step", "", "of the driver's process"),
    "timing/student/step": Described("seconds", "per_step", "", "the slowest rank's work on a step"),
    "timing/student/fetch": Described("seconds", "per_step", "", "of that, fetching targets"),
    "timing/NAME/forward": Described("seconds", "per_step", "", "the slowest replica's forward passes, of a teacher"),
    "timing/NAME/publish": Described("seconds", "per_step", "", "writing its targets for the student"),
    "timing/aligner/align": Described("seconds", "per_step", "", "an aligner's work on a batch"),
    "busy/NAME": Described(
        "share",
        "mean",
        "seconds in steps",
        "work of student, aligner or a teacher by the time of the step; above 1 if it runs ahead",
    ),
    "memory/NAME": Described("GiB", "max", "", "most memory of a process of student, aligner or a teacher so far"),
    "transport/bytes": Described("bytes", "sum", "", "targets that teachers sent"),
    "transport/bytes_between_nodes": Described("bytes", "sum", "", "of these, between nodes"),
    "transport/bytes_per_token": Described(
        "bytes", "mean", "positions", "transport/bytes by the positions that they are for"
    ),
    "transport/slot_occupancy": Described("share", "max", "", "most slots of a teacher's ring in use"),
    "transport/slot_occupancy/NAME": Described("share", "max", "", "the same of one of several teachers"),
    "transport/teacher_wait": Described("share", "mean", "seconds in steps", "timing/wait_teachers by timing/step"),
    "align/documents": Described("documents", "sum", "", "documents in the batches"),
    "align/truncated": Described("documents", "sum", "", "of these, cut because a row is shorter"),
    "align/split": Described("documents", "sum", "", "of these, split into several pieces"),
    "align/unlabelled": Described("documents", "sum", "", "of these, without a label"),
    "align/incomplete": Described("documents", "sum", "", "of these, of which a chat template left something out"),
    "align/bad_rows": Described("documents", "sum", "", "left out because they could not be read or aligned"),
    "align/not_stored": Described("documents", "sum", "", "left out because the store has no targets of them"),
    "align/tokens": Described("tokens", "sum", "", "all tokens of the documents after cuts, without padding"),
    "align/tokens_per_second": Described("tokens/s", "mean", "seconds in steps", "align/tokens by timing/step"),
    "align/rows": Described("rows", "sum", "", "rows of the batches"),
    "align/efficiency": Described("share", "mean", "positions", "positions that hold a token"),
    "align/labelled": Described("share", "mean", "tokens", "tokens with a label"),
    "align/queue": Described("batches", "max", "", "batches that waited for an aligner"),
    "align/chunks": Described(
        "chunks", "sum", "", "stretches of text that are compared with a teacher of another tokenizer"
    ),
    "align/one_to_one": Described("share", "mean", CHUNKS, "chunks of one token on both sides"),
    "align/coverage": Described("share", "mean", LABELS, "labelled tokens inside a chunk"),
    "align/exact": Described("share", "mean", "documents", "documents whose tokenizations spell the same bytes"),
    "align/method/METHOD": Described("documents", "sum", "", "documents that were aligned by this method"),
    "align/chunks/NAME": Described("chunks", "sum", "", "as align/chunks, with one of several teachers"),
    "align/one_to_one/NAME": Described("share", "mean", CHUNKS, "as align/one_to_one"),
    "align/coverage/NAME": Described("share", "mean", LABELS, "as align/coverage"),
    "align/exact/NAME": Described("share", "mean", "documents", "as align/exact"),
    "align/method/METHOD/NAME": Described("documents", "sum", "", "as align/method"),
    "data/bad_rows": Described("rows", "sum", "", "rows that were left out"),
    "data/documents/NAME": Described("documents", "sum", "", "documents of a source"),
    "store/read": Described(
        "share", "mean", "pieces that were looked up", "targets that were read from a store instead of computed"
    ),
} | {
    f"faults/{name}": Described(
        "faults", "last", "", f"{what} since the start of this attempt; absent while there are none"
    )
    for name, what in (
        ("student_restarts", "restarts of the student"),
        ("teacher_restarts", "restarts of teachers"),
        ("aligner_restarts", "restarts of aligners"),
        ("teachers_lost", "teachers that the run goes on without"),
        ("skipped_steps", "steps that were skipped"),
        ("unlabelled_steps", "steps without a label"),
    )
}
"""Every metric that a run records. A part in capitals stands for one name, of a teacher unless it says otherwise."""


def described(name: str) -> Described | None:
    """What a metric of this name is; None if no run records it."""
    return next((what for pattern, what in METRICS.items() if _pattern(pattern).fullmatch(name)), None)


@cache
def is_sum(name: str) -> bool:
    """Whether a metric adds up over steps, so that it is shown divided by their number."""
    what = described(name)
    return what is not None and what.reduction == "sum"


@cache
def _pattern(name: str) -> re.Pattern[str]:
    # A method of alignment may have a slash of its own (`dp/numba`).
    parts = {"METHOD": "[a-z_]+(/(numba|numpy|cuda))?"}
    return re.compile(
        "/".join(parts.get(part, "[^/]+") if part.isupper() else re.escape(part) for part in name.split("/"))
    )


FAULTS = {
    "faults/student_restarts": "student restarted",
    "faults/teacher_restarts": "teachers restarted",
    "faults/aligner_restarts": "aligners restarted",
    "faults/teachers_lost": "teachers lost",
    "faults/skipped_steps": "steps skipped",
    "faults/unlabelled_steps": "steps without labels",
}
"""Metric → its label. Counts since the start of this attempt; absent from a record while they are 0."""


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merges the metrics of several ranks or steps, name by name, in the given order, each with its own reduction.

    A name need not occur in every part; the result has all of them.

    Raises:
        ValueError: a name has two different reductions.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _join(name, merged[name], metric) if name in merged else metric
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """Name → value of the metrics, without their reductions and weights."""
    return {name: metric.value for name, metric in metrics.items()}


def _join(name: str, a: Metric, b: Metric) -> Metric:
    """Merges two metrics of the same name by their reduction; weights add up."""
    if a.reduction != b.reduction:
        raise ValueError(f"{name}: reduced as {a.reduction} and as {b.reduction}")
    weight = a.weight + b.weight
    match a.reduction:
        case "sum":
            value = a.value + b.value
        case "mean":
            value = (a.value * a.weight + b.value * b.weight) / weight if weight else 0.0
        case "max" | "per_step":
            value = max(a.value, b.value)
        case "min":
            value = min(a.value, b.value)
        case "last":
            value = b.value
    return Metric(value, a.reduction, weight)


_INTRODUCTION = """\
# Metrics

What `metrics.jsonl`, TensorBoard, the trackers, Prometheus and the report call by these names. A record covers one step or, with
`observe.every`, several; `train/steps` is their number. Over its steps, and over ranks, a metric is reduced as the table says:

- `sum`: added up. The report draws it divided by `train/steps`.
- `mean`: a mean over what the last column names, each weighted alike, in whatever step and on whatever rank it is. Skipped steps without
  a finite value are left out, if a record has others.
- `per_step`: the slowest rank's seconds of each step, added up and divided by `train/steps`; what happens in some steps only counts as 0 in
  the others. So the parts of `timing/step` add up to it, and value times `train/steps`, summed over the records, is the time of the run. A
  record without `train/steps`, such as that of the last checkpoint, has the seconds themselves.
- `max`: the largest. `last`: the value of the last step.

`NAME` stands for a teacher, or what the line says. Metrics of several teachers end with the teacher's name.

"""


def page() -> str:
    """The text of docs/metrics.md."""
    lines = ["| metric | unit | reduction | what | mean over |", "|---|---|---|---|---|"]
    lines += [
        f"| `{name}` | {what.unit} | {what.reduction} | {what.meaning} | {what.over} |"
        for name, what in METRICS.items()
    ]
    return _INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
