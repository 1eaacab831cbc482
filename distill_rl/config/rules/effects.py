"""Settings that have no effect beside the others: one table, from which `distill-rl check` prints a note.

Such settings are harmless, but whoever set one expects something of it. A setting counts as set if it differs from its
default. Settings that contradict each other are refused instead (`validate.problems`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from distill_rl.config.derive import has_validation
from distill_rl.config.facts import TOKENS, UNKNOWN, Facts
from distill_rl.config.layout import suites_every
from distill_rl.config.schema import Config, EvaluateConfig
from distill_rl.config.schema.backends import SECTIONS
from distill_rl.config.schema.fields import NoEffect
from distill_rl.config.walk import as_yaml, default_of, leaves, pattern_of, values


@dataclass(frozen=True)
class Run:
    """A configuration, and what is known of its files."""

    config: Config
    facts: Facts

    @cached_property
    def methods(self) -> frozenset[str]:
        """How the running teachers are compared (`comparisons`)."""
        return frozenset(self.facts.comparisons(self.config))

    def only(self, *methods: str) -> bool:
        """Whether there are running teachers, and all of them are known to be compared in one of these ways."""
        return bool(self.methods) and self.methods <= set(methods)

    def none(self, *methods: str) -> bool:
        """Whether there are running teachers, and all are known to be compared in other ways than these."""
        return bool(self.methods) and not self.methods & {UNKNOWN, *methods}

    @property
    def exports(self) -> set[str]:
        """What the running teachers send."""
        return {teacher.export for teacher in self.config.running_teachers}

    @property
    def data_kind(self) -> str:
        """`text` or `messages`; empty if that is not known yet."""
        data = self.config.data
        return self.facts.data_kind or (data.format if data.format in ("text", "messages") else "")

    @property
    def data_paths(self) -> list[str]:
        """The paths of the training data."""
        data = self.config.data
        return [source.path for source in data.sources] or [data.path or ""]

    @property
    def validates(self) -> bool:
        """Whether there are validation data."""
        return has_validation(self.config)


_ALIGNMENT = ("aligner.method", "aligner.fast_ids", "aligner.dp.backend", "aligner.dp.band")
_TEACHERS = (
    "loss.divergence", "loss.beta", "loss.tail", "loss.top_k", "loss.draws", "loss.temperature", "loss.dynamic_scale",
    "loss.cross_tokenizer", "loss.chunk_average", "loss.uncommon_top_k", "loss.gold_relaxed", "loss.alm_tau",
    *_ALIGNMENT, "teachers[].where", "teachers[].weight_column", "prefetch.slots", "transport", "faults.teacher_restarts", "faults.lost_teacher",
)  # fmt: skip
_SUITES = (
    "suites_every", "data", "backend", "limit", "final_limit", "num_fewshot", "max_new_tokens", "samples", "teachers",
    "batch_size", "gpu_share", "timeout_s", "parallel.tp",
)  # fmt: skip

TABLE: tuple[NoEffect, ...] = (
    NoEffect(
        _TEACHERS,
        lambda run: not run.config.running_teachers,
        "no teacher is started",
    ),
    NoEffect(
        ("loss.divergence", "loss.beta"),
        lambda run: run.only("uld", "strict"),
        "the losses uld and strict have a divergence of their own",
    ),
    NoEffect(
        ("loss.beta",),
        lambda run: run.config.loss.divergence in ("forward_kl", "reverse_kl", "tvd"),
        "only jsd, skewed_forward_kl and skewed_reverse_kl have a mixture weight",
    ),
    NoEffect(
        ("loss.tail",),
        lambda run: run.none("hybrid", "xtoken") and ("topk" not in run.exports or run.none(TOKENS)),
        "it applies where a top k is compared: token by token with export topk, and in the losses hybrid and xtoken",
    ),
    NoEffect(
        ("loss.top_k",),
        lambda run: "topk" not in run.exports and run.none("hybrid", "xtoken"),
        "no teacher exports a top k, and only the losses hybrid and xtoken choose one themselves",
    ),
    NoEffect(
        ("loss.draws",),
        lambda run: "sampled" not in run.exports,
        "no teacher draws tokens (teachers[].export: sampled)",
    ),
    NoEffect(
        ("loss.chunk_average",),
        lambda run: run.none("xtoken", "gold", "hkl", "uld"),
        "only the losses xtoken, gold, hkl and uld combine the predictions of a chunk",
    ),
    NoEffect(
        ("loss.uncommon_top_k",),
        lambda run: run.none("gold", "hkl", "uld"),
        "only the losses gold, hkl and uld compare columns by rank",
    ),
    NoEffect(
        ("loss.gold_relaxed",),
        lambda run: run.none("gold", "hkl"),
        "only the losses gold and hkl have relaxed matches",
    ),
    NoEffect(
        ("loss.alm_tau",),
        lambda run: run.none("alm", "hybrid"),
        "only the losses alm and hybrid compare likelihoods of chunks",
    ),
    NoEffect(
        ("loss.cross_tokenizer", *_ALIGNMENT),
        lambda run: run.only(TOKENS),
        "every teacher is compared token by token",
    ),
    NoEffect(
        ("loss.cross_tokenizer",),
        lambda run: all(teacher.loss is not None for teacher in run.config.running_teachers),
        "every teacher has a loss of its own (teachers[].loss)",
    ),
    NoEffect(
        ("projection.learnable",),
        lambda run: run.none("xtoken"),
        "only the loss xtoken trains its projection, and no teacher is compared with it",
    ),
    NoEffect(
        ("teachers[].weight", "teachers[].score", "faults.lost_teacher"),
        lambda run: len(run.config.teachers) == 1,
        "there is one teacher only",
    ),
    NoEffect(
        ("teachers[].wire_dtype",),
        lambda run: run.exports == {"hidden"},
        "hidden states are sent in the teacher's dtype",
    ),
    *(entry for section in SECTIONS.values() for entry in section.NO_EFFECT),
    NoEffect(
        ("teachers[].dtype", "teachers[].attention", "teachers[].revision"),
        lambda run: bool(run.config.teachers) and not any(teacher.origin.runs_model for teacher in run.config.teachers),
        "the run loads no teacher's model: targets are read from stores, or come from a server",
    ),
    NoEffect(
        ("capture.mass",),
        lambda run: run.config.capture.format == "exact",
        "capture.format is exact",
    ),
    NoEffect(
        ("capture.write_every_s",),
        lambda run: all(teacher.cache is None for teacher in run.config.teachers),
        "nothing is stored (teachers[].cache, or distill-rl capture)",
    ),
    NoEffect(
        ("teachers[].wire_dtype",),
        lambda run: run.exports == {"sampled"},
        "draws are sent as integers",
    ),
    NoEffect(
        ("student.revision",),
        lambda run: _is_folder(run.config.student.model),
        "student.model is a folder, which has no revisions",
    ),
    NoEffect(
        ("teachers[].revision",),
        lambda run: all(_is_folder(teacher.model) for teacher in run.config.teachers),
        "teachers[].model is a folder, which has no revisions",
    ),
    NoEffect(
        ("student.gradient_sync",),
        lambda run: (
            run.config.student.parallel.dp == run.config.student.parallel.replicas
            and run.config.student.parallel.sp == 1
        ),
        "parameters are not sharded (dp / replicas x sp = 1)",
    ),
    NoEffect(
        ("student.activation_offload",),
        lambda run: run.facts.gpus == 0 and run.config.ray.address is None,
        "no GPU is visible; on a CPU activations are in host memory anyway",
    ),
    NoEffect(
        ("teachers[].max_length",),
        lambda run: run.only(TOKENS),
        "a teacher with the student's tokenizer reads the student's rows",
    ),
    NoEffect(("data.text_key",), lambda run: run.data_kind == "messages", "chats are read (data.format)"),
    NoEffect(("data.messages_key",), lambda run: run.data_kind == "text", "texts are read (data.format)"),
    NoEffect(
        ("data.split", "data.sources[].split"),
        lambda run: all(_is_file(path) for path in (*run.data_paths, run.config.data.validation.path) if path),
        "a single file has no splits",
    ),
    NoEffect(
        ("data.subset", "data.revision", "data.sources[].subset", "data.sources[].revision"),
        lambda run: all(_is_local(path) for path in run.data_paths),
        "only data sets of the hub have subsets and revisions",
    ),
    NoEffect(
        ("data.sample_by",),
        lambda run: all(_is_file(path) and ".txt" not in Path(path.lower()).suffixes for path in run.data_paths),
        "there are no .txt files",
    ),
    NoEffect(("data.sources[].weight",), lambda run: len(run.config.data.sources) == 1, "there is one source only"),
    NoEffect(("data.max_bad_rows",), lambda run: run.config.data.bad_rows == "fail", "bad rows are not skipped"),
    NoEffect(
        ("data.separator", "data.characters_per_sample"),
        lambda run: not run.config.data.concatenate,
        "data.concatenate is false",
    ),
    NoEffect(
        ("data.validation.fraction",),
        lambda run: run.config.data.validation.path is not None,
        "data.validation.path gives the validation data",
    ),
    NoEffect(("data.validation.max_documents",), lambda run: not run.validates, "there are no validation data"),
    NoEffect(
        ("schedule.min_lr_ratio", "schedule.hold_steps", "schedule.steps"),
        lambda run: run.config.schedule.kind == "constant",
        "schedule.kind is constant",
    ),
    NoEffect(
        ("aligner.num_gpus", "aligner.deadline_s", "faults.aligner_restarts"),
        lambda run: run.config.aligner.workers == 0,
        "aligner.workers is 0, so the driver aligns",
    ),
    NoEffect(
        ("aligner.num_gpus",),
        lambda run: run.config.aligner.dp.backend != "cuda",
        "aligners use a GPU with aligner.dp.backend=cuda only",
    ),
    NoEffect(
        ("faults.spike_factor",),
        lambda run: run.config.faults.spike_window == 0,
        "faults.spike_window is 0, so no step counts as a spike",
    ),
    NoEffect(
        tuple(f"evaluate.{name}" for name in _SUITES), lambda run: not run.config.evaluate.suites, "no suites are set"
    ),
    NoEffect(
        ("evaluate.every",),
        lambda run: not run.validates and not (run.config.evaluate.suites and run.config.evaluate.suites_every is None),
        "there are no validation data, and no suites that follow it",
    ),
    NoEffect(
        ("evaluate.limit",),
        lambda run: not (suites_every(run.config) or run.config.evaluate.at_start or run.config.evaluate.teachers),
        "the suites run at the end of the run only (evaluate.every, evaluate.suites_every)",
    ),
    *EvaluateConfig.NO_EFFECT,
    NoEffect(
        ("checkpoint.keep_best", "checkpoint.best_by"),
        lambda run: run.config.checkpoint.every == 0,
        "checkpoint.every is 0, so checkpoints are written at the end of the run only",
    ),
    NoEffect(("checkpoint.best_by",), lambda run: run.config.checkpoint.keep_best == 0, "checkpoint.keep_best is 0"),
    NoEffect(
        ("ray.num_cpus", "ray.dashboard"),
        lambda run: run.config.ray.address is not None,
        "they are settings of a Ray that the run starts, and ray.address joins one",
    ),
)
"""In this order: a setting is reported with the first reason only."""

_DEFAULTS = {pattern_of(key): default_of(entry) for key, entry, _ in leaves(Config)}


def no_effect(config: Config, facts: Facts) -> Iterator[str]:
    """Yields what was set without any effect, one line per reason.

    Args:
        facts: of the files; what is not known yet has no line.
    """
    run, reported = Run(config, facts), set[str]()
    for entry in TABLE:
        if not entry.when(run):
            continue
        changed = {key: text for pattern in entry.settings for key, text in _changed(config, pattern)}
        new = [text for key, text in changed.items() if key not in reported]
        reported |= set(changed)
        if new:
            verb = "has" if len(new) == 1 else "have"
            yield f"{', '.join(new)} {verb} no effect: {entry.reason}"


def _changed(config: Config, pattern: str) -> Iterator[tuple[str, str]]:
    """(key, `key=value`) of a setting that differs from its default; one pair per teacher for `teachers[].x`."""
    # A loss.cross_tokenizer of null is left out: it forbids other tokenizers, which is an effect.
    for key, value in values(config, pattern):
        if value != _DEFAULTS[pattern] and (key, value) != ("loss.cross_tokenizer", None):
            yield key, f"{key}={as_yaml(value)}"


def _is_folder(model: str) -> bool:
    return Path(model).expanduser().is_dir()


def _is_local(path: str) -> bool:
    return "*" in path or Path(path).expanduser().exists()


def _is_file(path: str) -> bool:
    return Path(path).expanduser().is_file()
