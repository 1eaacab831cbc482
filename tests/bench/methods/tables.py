"""The tables: which settings are compared on which task, and what is found of each.

A setting is trained with every rate of RATES on the first seed. The rate with the best score on the questions or texts of the
selection, which are not those of the test, is trained on the other seeds too, and so is any other whose score is within a standard error
of the best. Of these the best mean over the seeds decides. So a setting takes five to nine trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from distill_rl.demo.recipe import RECIPE
from distill_rl.evals.results import paired_bootstrap
from tests.bench.methods.rows import LOWER_IS_BETTER, Row, items_of
from tests.bench.methods.settings import (
    ACROSS_TOKENIZERS,
    CE,
    CE_45,
    CE_60,
    DIVERGENCES,
    FROM_GEMMA,
    HALF,
    HALF_FROM_GEMMA,
    LANGUAGES,
    PEERS,
    PRETRAINED,
    PRETRAINED_SEEDS,
    PRETRAINED_TARGETS,
    RATES,
    ROWS,
    SAME_TOKENIZER,
    SEEDS,
    TARGETS,
    TAU_1,
    TAU_100,
    WIDE,
    Overrides,
)

Record = Mapping[str, Any]
Settings = Mapping[str, Overrides]
BASELINE = "CE"
BEST = 5
"""Settings of the first two tables that are compared on other tasks too."""


@dataclass
class Rows:
    """Finished rows."""

    by_row: dict[Row, Record] = field(default_factory=dict)
    _hashes: dict[tuple[str, int], str] = field(default_factory=dict)
    """Of the models and data of a task and seed."""

    def add(self, record: Record) -> None:
        """Adds a row.

        Raises:
            ValueError: another row of the same task and seed was trained with other models or data.
        """
        if "task_hash" in record:
            known = self._hashes.setdefault((record["task"], record["seed"]), record["task_hash"])
            if known != record["task_hash"]:
                rule = "rows of one task and seed must be of the same models and data"
                raise ValueError(
                    f"{record['task']}, seed {record['seed']}: {rule}; got {known} and {record['task_hash']}"
                )
        self.by_row[Row(record["task"], record["setting"], record["rate"], record["seed"])] = record

    def rates(self, task: str, setting: str) -> list[float]:
        """The rates that are trained with every seed: by the first one, the best and those that selection cannot tell from it.

        Empty while a rate is missing, or if all have failed.
        """
        rates, seeds = _grid(task)
        found = [record for rate in rates if (record := self.by_row.get(Row(task, setting, rate, seeds[0])))]
        scored = [record for record in found if "failed" not in record]
        if len(found) < len(rates) or not scored:
            return []
        if len(rates) == 1:
            return [*rates]
        best = min(scored, key=_by_selection)
        close = _cost(best, "selection") + _noise(best)
        return [float(record["rate"]) for record in scored if record is best or _cost(record, "selection") < close]

    def best_rate(self, task: str, setting: str) -> float | None:
        """The rate with the best mean selection score over the seeds, of equal ones that with the fewest bits per byte.

        None while a row of `rates` is missing, or if each of them has a seed without a student.
        """
        seeds = _grid(task)[1]
        costs: dict[float, tuple[float, float]] = {}
        for rate in self.rates(task, setting):
            found = [self.by_row.get(Row(task, setting, rate, seed)) for seed in seeds]
            records = [record for record in found if record is not None]
            if len(records) < len(seeds):
                return None
            if any("failed" in record for record in records):
                continue
            if task in PRETRAINED:
                return rate
            scores, bits = zip(*map(_by_selection, records))
            costs[rate] = fmean(scores), fmean(bits)
        return min(costs, key=costs.__getitem__, default=None)

    def missing(self, task: str, settings: Settings) -> list[Row]:
        """The rows that can be trained next."""
        rates, seeds = _grid(task)
        due = [Row(task, setting, rate, seeds[0]) for setting in settings for rate in rates]
        for setting in settings:
            due += [Row(task, setting, rate, seed) for rate in self.rates(task, setting) for seed in seeds[1:]]
        return [row for row in due if row not in self.by_row]

    def of(self, task: str, setting: str) -> list[Record]:
        """The records of all seeds at the best rate, in the order of the seeds; empty unless all have a student."""
        rate = self.best_rate(task, setting)
        return [] if rate is None else [self.by_row[Row(task, setting, rate, seed)] for seed in _grid(task)[1]]

    def best(self, task: str, settings: Settings, count: int = BEST) -> dict[str, Overrides]:
        """The baseline and the `count` settings with the best mean selection score; as far as they have been trained."""
        means = {
            name: fmean(_cost(record, "selection") for record in records)
            for name in settings
            if name != BASELINE and (records := self.of(task, name))
        }
        names = [BASELINE, *sorted(means, key=means.__getitem__)[:count]]
        return {name: settings[name] for name in names}

    def measure(self, task: str) -> str:
        """What the score of a task is; empty without rows."""
        known = (
            record["measure"] for row, record in self.by_row.items() if row.task == task and "failed" not in record
        )
        return next(known, "")


def _grid(task: str) -> tuple[Sequence[float], Sequence[int]]:
    """The rates to choose from and the seeds of a task."""
    return ((PRETRAINED[task],), PRETRAINED_SEEDS) if task in PRETRAINED else (RATES, SEEDS)


def _by_selection(record: Record) -> tuple[float, float]:
    """What selection orders by, the lower the better: score, then bits per byte."""
    return _cost(record, "selection"), float(record["selection"]["bits_per_byte"])


def _noise(record: Record) -> float:
    """The standard error of a share of right answers over the questions of the selection; 0 for texts."""
    if record["measure"] in LOWER_IS_BETTER:
        return 0.0
    share = float(record["selection"]["score"])
    return sqrt(share * (1 - share) / RECIPE.validation_rows)


def _cost(record: Record, part: str) -> float:
    """The score of `selection` or `test`, the lower the better."""
    score = float(record[part]["score"])
    return score if record["measure"] in LOWER_IS_BETTER else -score


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    settings: Callable[[Rows], Mapping[str, Settings]]
    """Task → the settings that are compared on it; some follow from the rows of other tables."""
    needs: tuple[str, ...] = ()
    """Tables that come before."""
    fresh: bool = False
    """Whether each row has a process of its own, so that its memory can be compared."""


NOISY, FEW, MOST = "noisy", "noisy, few shared tokens", "noisy, most tokens shared"
SAME_TEMPLATE, BESIDE = "noisy, same template", "noisy, beside TRL"
TRAINED, TRAINED_FEW = "noisy, trained student", "noisy, few shared tokens, trained student"
TEXT_FEW, TEXT_MOST = "language, few shared tokens", "language, most tokens shared"
TEXT_TRAINED = "language, most tokens shared, trained student"


LANGUAGE_TARGETS = (
    "all logits",
    *(f"top {k}, {tail}" for k in (8, 32) for tail in ("bucket", "truncate", "renormalize")),
    "top 64, bucket",
    "8 draws",
    "32 draws",
)
"""Targets that are compared on real text too, where many tokens are likely."""
ACROSS_ON_TEXT = (
    BASELINE,
    "hybrid",
    "hybrid + CE",
    "alm",
    "xtoken, chain",
    "xtoken, chain + CE",
    "xtoken, chain, learnt projection + CE",
)
"""Methods that are compared on real text too, with a student that has read it before."""


def _same(rows: Rows) -> Mapping[str, Settings]:
    return {NOISY: SAME_TOKENIZER}


def _cross(rows: Rows) -> Mapping[str, Settings]:
    settings = {**ACROSS_TOKENIZERS, **TAU_100}
    return {FEW: settings, MOST: settings}


def _trained(rows: Rows) -> Mapping[str, Settings]:
    alike = {BASELINE: CE, "all logits": SAME_TOKENIZER["all logits"], **DIVERGENCES}
    across = {name: of for name, of in ACROSS_TOKENIZERS.items() if "+" not in name}
    on_text = {name: ACROSS_TOKENIZERS[name] for name in ACROSS_ON_TEXT}
    return {TRAINED: alike, TRAINED_FEW: across, TEXT_TRAINED: on_text}


def _few_rows(rows: Rows) -> Mapping[str, Settings]:
    return {f"clean, {count} rows": _contenders(rows) for count in ROWS}


def _contenders(rows: Rows) -> Settings:
    """The best settings, and others that may do better on other tasks."""
    others = "all logits", "reverse KL", "0.5 KD + 0.5 CE"
    return {**rows.best(NOISY, SAME_TOKENIZER), **{name: SAME_TOKENIZER[name] for name in others}}


def _language(rows: Rows) -> Mapping[str, Settings]:
    return {"language": {**rows.best(NOISY, SAME_TOKENIZER), **{name: TARGETS[name] for name in LANGUAGE_TARGETS}}}


def _language_cross(rows: Rows) -> Mapping[str, Settings]:
    best = {TEXT_FEW: rows.best(FEW, ACROSS_TOKENIZERS), TEXT_MOST: rows.best(MOST, ACROSS_TOKENIZERS)}
    return {task: {**settings, **TAU_1, **WIDE} for task, settings in best.items()}


def _shift(rows: Rows) -> Mapping[str, Settings]:
    return {"shift": {**_contenders(rows), "top 64, bucket": TARGETS["top 64, bucket"]}}


def _teachers(rows: Rows) -> Mapping[str, Settings]:
    across = {BASELINE: CE, "hybrid": ACROSS_TOKENIZERS["hybrid"]}
    alike = {BASELINE: CE, "top 32, bucket": SAME_TOKENIZER["top 32, bucket"]}
    tasks = dict.fromkeys((TEXT_MOST, TEXT_FEW, "language, two teachers"), across)
    return {**tasks, "language": alike, "language, two alike": alike}


def _peers(rows: Rows) -> Mapping[str, Settings]:
    return {BESIDE: {BASELINE: CE, **PEERS["gkd"]}, SAME_TEMPLATE: {BASELINE: CE, **PEERS["gold"]}}


def _pretrained(rows: Rows) -> Mapping[str, Settings]:
    across = {name: ACROSS_TOKENIZERS[name] for name in (BASELINE, "hybrid", "hybrid + CE")}
    others = {name: ACROSS_TOKENIZERS[name] for name in ("alm", "gold, chain")}
    return {
        HALF: PRETRAINED_TARGETS,
        HALF_FROM_GEMMA: {**across, **others, **CE_60},
        FROM_GEMMA: {**across, **CE_45},
        LANGUAGES: {**across, **CE_45},
    }


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        table.name: table
        for table in (
            Table("same", "One tokenizer, noisy labels", _same),
            Table("cross", "Two tokenizers, noisy labels", _cross),
            Table("trained", "A student that has learnt from the rows before", _trained),
            Table("few_rows", "Right labels, few rows", _few_rows, ("same",)),
            Table("language", "Real text", _language, ("same",)),
            Table("language_cross", "Real text, two tokenizers", _language_cross, ("cross",)),
            Table("shift", "Another domain", _shift, ("same",)),
            Table("teachers", "One teacher or two", _teachers),
            Table("peers", "Beside TRL", _peers, fresh=True),
            Table("pretrained", "Pretrained models", _pretrained),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A setting on a task."""

    setting: str
    rate: float
    score: float
    """The mean over the seeds, like all that follow but `seeds`."""
    seeds: tuple[float, ...]
    interval: tuple[float, float]
    """95 % interval of the difference to the baseline, over the items of all seeds."""
    verdict: str
    """Against the baseline: better or worse on every seed and by the interval, or a tie."""
    against_best: str
    """The same against the setting with the best mean."""
    bits_per_byte: float
    elsewhere: float | None
    """Bits per byte of text of another kind; None where it is not measured."""
    kl: float | None
    tokens_per_second: float
    """Tokens with a label, repetitions included."""
    cpu_minutes: float | None
    """Of all steps, by the processor's time; None: it was not measured."""
    peak_mib: float
    """Of the process that trained; only where each row has its own (`Table.fresh`)."""


def findings(rows: Rows, task: str, settings: Settings, baseline: str = BASELINE) -> list[Finding]:
    """What is found of the settings that have been trained on all seeds, the best first."""
    complete = {name: records for name in settings if (records := rows.of(task, name))}
    ranked = sorted(complete, key=lambda name: fmean(_cost(record, "test") for record in complete[name]))
    base = complete.get(baseline, [])
    return [_finding(name, complete[name], [] if name == baseline else base, complete[ranked[0]]) for name in ranked]


def _finding(setting: str, records: Sequence[Record], base: Sequence[Record], best: Sequence[Record]) -> Finding:
    """What is found of a setting.

    Args:
        records, base, best: of all seeds: its own, those of the baseline (none: not compared), and of the best setting.
    """
    scores = [record["test"]["score"] for record in records]
    interval, verdict = compare(records, base) if base else ((0.0, 0.0), "")
    kls = [record["test"]["kl"] for record in records]
    cpu = [record["cpu_seconds"] for record in records if "cpu_seconds" in record]
    elsewhere = [record.get("elsewhere", {}).get("score") for record in records]
    return Finding(
        setting,
        records[0]["rate"],
        fmean(scores),
        tuple(scores),
        interval,
        verdict,
        "" if records is best else compare(records, best)[1],
        fmean(record["test"]["bits_per_byte"] for record in records),
        None if None in elsewhere else fmean(elsewhere),
        None if None in kls else fmean(kls),
        fmean(record["labels"] / record["seconds"] for record in records),
        fmean(cpu) / 60 if cpu else None,
        fmean(record["peak_mib"] for record in records),
    )


def compare(records: Sequence[Record], base: Sequence[Record]) -> tuple[tuple[float, float], str]:
    """The 95 % interval of the difference in score to the baseline, and `better`, `worse` or `tie`.

    It is a tie unless the difference has one sign on every seed and its interval excludes 0. The interval is a bootstrap over
    the questions of all seeds, each seed having its own, or over the texts, which are the same with every seed and have the mean of
    theirs. An item's difference is scaled so that the mean over items is the difference of the scores.
    """
    by_seed = [_differences(record, other) for record, other in zip(records, base, strict=True)]
    lower = records[0]["measure"] in LOWER_IS_BETTER
    items = np.mean(by_seed, axis=0) if lower else np.concatenate(by_seed)
    low, high = paired_bootstrap(items.tolist())
    signs = {np.sign(differences.mean()) for differences in by_seed}
    if len(signs) > 1 or low <= 0 <= high:
        return (low, high), "tie"
    return (low, high), "better" if (high < 0) == lower else "worse"


def _differences(record: Record, base: Record) -> np.ndarray:
    """float64 [items] whose mean is the difference of two scores."""
    ours, theirs = items_of(record["test"]), items_of(base["test"])
    if record["measure"] not in LOWER_IS_BETTER:
        return ours - theirs
    # Bits of a document → bits per byte: the score is Σ bits / Σ bytes, and Σ bytes = Σ bits / score.
    num_bytes = ours.sum() / record["test"]["score"]
    return (ours - theirs) * len(ours) / num_bytes
