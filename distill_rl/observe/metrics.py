"""Metrics that carry their own reduction, so that no consumer needs a list of metric names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

Reduction = Literal["sum", "mean", "max", "last", "per_step"]


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
    """What a recorded number is; in words the page says it."""

    unit: str
    reduction: Reduction
    over: str
    """What a mean is taken over and weighted by; empty for other reductions."""


PAGE = """\
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

| metric | unit | reduction | what | mean over |
|---|---|---|---|---|
| `train/loss` | nats | mean | what is minimised: KD and CE with their weights, and the balance of experts | labelled tokens |
| `train/kl_loss` | nats | mean | KD of all teachers with their shares, T² included; across tokenizers a mean over chunks | labelled tokens; what is asked of teachers, if they are chosen by row |
| `train/kl_loss/NAME` | nats | mean | KD of one of several teachers | labelled tokens; what the teacher is asked for |
| `train/nll_loss` | nats | mean | cross-entropy (CE) with the labels, at temperature 1 | labelled tokens |
| `train/teacher_mass` | share | mean | probability of the first teacher within its top k; of all its columns 1; draws tell none | labelled tokens |
| `train/taught/NAME` | share | mean | labelled tokens for which a teacher is asked, if teachers are chosen by row | labelled tokens |
| `train/router_balance` | ratio | mean | balance of the experts of a mixture; even is 1 | labelled tokens |
| `train/tokens` | tokens | sum | labelled tokens: those that are trained on |  |
| `train/steps` | steps | sum | steps of the record, the denominator of what is per step |  |
| `train/tokens_per_second` | tokens/s | mean | train/tokens by timing/step | seconds in steps |
| `train/ideal_seconds` | seconds | sum | the FLOPs of the student's step (forward and backward; causal attention within documents; nothing that is computed again) by the nominal dense bf16 rate of its GPUs together; absent on CPUs and on cards that are not known |  |
| `train/mfu` | share | mean | model FLOPs utilisation: train/ideal_seconds by timing/step | seconds in steps |
| `train/grad_norm` | norm | last | L2 norm of the gradient before clipping |  |
| `train/lr` | rate | last | learning rate |  |
| `train/kd_scale` | ratio | last | r of loss.dynamic_scale: CE / KD |  |
| `train/skipped` | 0 or 1 | max | a step left the weights alone |  |
| `train/unlabelled` | 0 or 1 | max | a global batch had nothing to train on |  |
| `validation/kl_loss` | nats | mean | as train/kl_loss, on held-out text | labelled tokens |
| `validation/kl_loss/NAME` | nats | mean | as train/kl_loss/NAME | labelled tokens |
| `validation/nll_loss` | nats | mean | as train/nll_loss | labelled tokens |
| `validation/taught/NAME` | share | mean | as train/taught/NAME | labelled tokens |
| `validation/top1_agreement` | share | mean | the most likely tokens of teacher and student are the same | labelled positions that are compared |
| `validation/top1_agreement/NAME` | share | mean | the same with one of several teachers | labelled positions that are compared |
| `validation/acceptance` | share | mean | Σ min(p, q) at temperature 1, where the teacher's whole distribution is known | labelled positions that are compared |
| `validation/acceptance/NAME` | share | mean | the same with one of several teachers | labelled positions that are compared |
| `validation/acceptance_low` | share | mean | its lower bound by a top k: Σ over the top k alone | labelled positions that are compared |
| `validation/acceptance_low/NAME` | share | mean | the same with one of several teachers | labelled positions that are compared |
| `validation/acceptance_high` | share | mean | its upper bound by a top k: all other tokens count as one | labelled positions that are compared |
| `validation/acceptance_high/NAME` | share | mean | the same with one of several teachers | labelled positions that are compared |
| `validation/student_entropy` | nats | mean | entropy of the student at temperature 1 | labelled positions that are compared |
| `validation/student_entropy/NAME` | nats | mean | the same where one of several teachers is asked | labelled positions that are compared |
| `validation/teacher_entropy` | nats | mean | entropy of the teacher at temperature 1, where its whole distribution is known | labelled positions that are compared |
| `validation/teacher_entropy/NAME` | nats | mean | the same of one of several teachers | labelled positions that are compared |
| `validation/teacher_entropy_low` | nats | mean | its lower bound by a top k: all other tokens as one | labelled positions that are compared |
| `validation/teacher_entropy_low/NAME` | nats | mean | the same of one of several teachers | labelled positions that are compared |
| `validation/teacher_entropy_high` | nats | mean | its upper bound by a top k: all other tokens alike | labelled positions that are compared |
| `validation/teacher_entropy_high/NAME` | nats | mean | the same of one of several teachers | labelled positions that are compared |
| `eval/SUITE` | score | last | score of a suite by the weights of this step |  |
| `timing/step` | seconds | per_step | the driver's wall time of a step, from the end of the one before if the student was called on it by then; its parts below, down to timing/other, add up to it |  |
| `timing/wait_aligner` | seconds | per_step | waiting for an aligner |  |
| `timing/wait_teachers` | seconds | per_step | waiting for teachers |  |
| `timing/student` | seconds | per_step | the student's part |  |
| `timing/other` | seconds | per_step | the rest of a step |  |
| `timing/validation` | seconds | per_step | validation passes, outside steps |  |
| `timing/save` | seconds | per_step | saving checkpoints as far as the run waits for it, outside steps |  |
| `timing/recovery` | seconds | per_step | starting lost workers again |  |
| `timing/driver/cpu` | CPU seconds | per_step | of the driver's process |  |
| `timing/student/step` | seconds | per_step | the slowest rank's work on a step |  |
| `timing/student/fetch` | seconds | per_step | of that, fetching targets |  |
| `timing/NAME/forward` | seconds | per_step | the slowest replica's forward passes, of a teacher |  |
| `timing/NAME/publish` | seconds | per_step | writing its targets for the student |  |
| `timing/aligner/align` | seconds | per_step | an aligner's work on a batch |  |
| `busy/NAME` | share | mean | work of student, aligner or a teacher by the time of the step; above 1 if it runs ahead | seconds in steps |
| `memory/NAME` | GiB | max | most memory of a process of student, aligner or a teacher so far |  |
| `transport/bytes` | bytes | sum | targets that teachers sent |  |
| `transport/bytes_between_nodes` | bytes | sum | of these, between nodes |  |
| `transport/bytes_per_token` | bytes | mean | transport/bytes by the positions that they are for | positions |
| `transport/slot_occupancy` | share | max | most slots of a teacher's ring in use |  |
| `transport/slot_occupancy/NAME` | share | max | the same of one of several teachers |  |
| `transport/teacher_wait` | share | mean | timing/wait_teachers by timing/step | seconds in steps |
| `align/documents` | documents | sum | documents in the batches |  |
| `align/truncated` | documents | sum | of these, cut because a row is shorter |  |
| `align/split` | documents | sum | of these, split into several pieces |  |
| `align/unlabelled` | documents | sum | of these, without a label |  |
| `align/incomplete` | documents | sum | of these, of which a chat template left something out |  |
| `align/bad_rows` | documents | sum | left out because they could not be read or aligned |  |
| `align/not_stored` | documents | sum | left out because the store has no targets of them |  |
| `align/tokens` | tokens | sum | all tokens of the documents after cuts, without padding |  |
| `align/tokens_per_second` | tokens/s | mean | align/tokens by timing/step | seconds in steps |
| `align/rows` | rows | sum | rows of the batches |  |
| `align/efficiency` | share | mean | positions that hold a token | positions |
| `align/labelled` | share | mean | tokens with a label | tokens |
| `align/queue` | batches | max | batches that waited for an aligner |  |
| `align/chunks` | chunks | sum | stretches of text that are compared with a teacher of another tokenizer |  |
| `align/one_to_one` | share | mean | chunks of one token on both sides | chunks |
| `align/coverage` | share | mean | labelled tokens inside a chunk | labelled tokens |
| `align/exact` | share | mean | documents whose tokenizations spell the same bytes | documents |
| `align/method/METHOD` | documents | sum | documents that were aligned by this method |  |
| `align/chunks/NAME` | chunks | sum | as align/chunks, with one of several teachers |  |
| `align/one_to_one/NAME` | share | mean | as align/one_to_one | chunks |
| `align/coverage/NAME` | share | mean | as align/coverage | labelled tokens |
| `align/exact/NAME` | share | mean | as align/exact | documents |
| `align/method/METHOD/NAME` | documents | sum | as align/method |  |
| `data/bad_rows` | rows | sum | rows that were left out |  |
| `data/documents/NAME` | documents | sum | documents of a source |  |
| `store/read` | share | mean | targets that were read from a store instead of computed | pieces that were looked up |
| `faults/student_restarts` | faults | last | restarts of the student since the start of this attempt; absent while there are none |  |
| `faults/teacher_restarts` | faults | last | restarts of teachers since the start of this attempt; absent while there are none |  |
| `faults/aligner_restarts` | faults | last | restarts of aligners since the start of this attempt; absent while there are none |  |
| `faults/teachers_lost` | faults | last | teachers that the run goes on without since the start of this attempt; absent while there are none |  |
| `faults/skipped_steps` | faults | last | steps that were skipped since the start of this attempt; absent while there are none |  |
| `faults/unlabelled_steps` | faults | last | steps without a label since the start of this attempt; absent while there are none |  |
"""
"""The text of docs/metrics.md."""
_ROW = re.compile(r"^\| `(.+)` \| (.*) \| (.*) \| .* \| (.*) \|$", re.MULTILINE)
METRICS: Mapping[str, Described] = {name: Described(*cells) for name, *cells in _ROW.findall(PAGE)}
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
    found = (parts.get(part, "[^/]+") if part.isupper() else re.escape(part) for part in name.split("/"))
    return re.compile("/".join(found))


TOKENS, ALL_TOKENS, SECONDS, STEPS = "train/tokens", "align/tokens", "timing/step", "train/steps"
IDEAL, MFU = "train/ideal_seconds", "train/mfu"
RATE, ALL_RATE = "train/tokens_per_second", "align/tokens_per_second"
PER_SECOND = {RATE: TOKENS, ALL_RATE: ALL_TOKENS, MFU: IDEAL, "transport/teacher_wait": "timing/wait_teachers"}
"""Derived metric → the metric that is divided by the seconds of the step."""
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
        case "last":
            value = b.value
    return Metric(value, a.reduction, weight)


if __name__ == "__main__":
    print(PAGE, end="")
