"""Settings that have no effect beside the others: one table, from which `distill-rl check` prints a note.

Such settings are harmless, but whoever set one expects something of it. A setting counts as set if it differs from its
default. Settings that contradict each other are refused instead (`validate.problems`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from distill_rl.config.derive import has_validation
from distill_rl.config.facts import TOKENS, UNKNOWN, Facts
from distill_rl.config.layout import suites_every
from distill_rl.config.schema import Config
from distill_rl.config.schema.backends import SECTIONS
from distill_rl.config.walk import as_yaml, default_of, leaves, pattern_of, values

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


def _rows(config: Config, facts: Facts) -> Iterator[tuple[str, ...]]:
    """Yields a reason, and the settings that have no effect for it (`teachers[].x` is one of each teacher); the first reason counts."""
    data = config.data
    exports = {teacher.export for teacher in config.running_teachers}
    methods = frozenset(facts.comparisons(config))
    data_kind = facts.data_kind or (data.format if data.format in ("text", "messages") else "")
    data_paths = [source.path for source in data.sources] or [data.path or ""]
    validates = has_validation(config)

    def only(*names: str) -> bool:
        """Whether there are running teachers, and all of them are known to be compared in one of these ways."""
        return bool(methods) and methods <= set(names)

    def none(*names: str) -> bool:
        """Whether there are running teachers, and all are known to be compared in other ways than these."""
        return bool(methods) and not methods & {UNKNOWN, *names}

    if not config.running_teachers:
        yield "no teacher is started", *_TEACHERS
    if only("uld", "strict"):
        yield "the losses uld and strict have a divergence of their own", "loss.divergence", "loss.beta"
    if config.loss.divergence in ("forward_kl", "reverse_kl", "tvd"):
        yield "only jsd, skewed_forward_kl and skewed_reverse_kl have a mixture weight", "loss.beta"
    if none("hybrid", "xtoken") and ("topk" not in exports or none(TOKENS)):
        yield (
            "it applies where a top k is compared: token by token with export topk, and in the losses hybrid and xtoken",
            "loss.tail",
        )
    if "topk" not in exports and none("hybrid", "xtoken"):
        yield "no teacher exports a top k, and only the losses hybrid and xtoken choose one themselves", "loss.top_k"
    if "sampled" not in exports:
        yield "no teacher draws tokens (teachers[].export: sampled)", "loss.draws"
    if none("xtoken", "gold", "hkl", "uld"):
        yield "only the losses xtoken, gold, hkl and uld combine the predictions of a chunk", "loss.chunk_average"
    if none("gold", "hkl", "uld"):
        yield "only the losses gold, hkl and uld compare columns by rank", "loss.uncommon_top_k"
    if none("gold", "hkl"):
        yield "only the losses gold and hkl have relaxed matches", "loss.gold_relaxed"
    if none("alm", "hybrid"):
        yield "only the losses alm and hybrid compare likelihoods of chunks", "loss.alm_tau"
    if only(TOKENS):
        yield "every teacher is compared token by token", "loss.cross_tokenizer", *_ALIGNMENT
    if all(teacher.loss is not None for teacher in config.running_teachers):
        yield "every teacher has a loss of its own (teachers[].loss)", "loss.cross_tokenizer"
    if none("xtoken"):
        yield "only the loss xtoken trains its projection, and no teacher is compared with it", "projection.learnable"
    if len(config.teachers) == 1:
        yield "there is one teacher only", "teachers[].weight", "teachers[].score", "faults.lost_teacher"
    if exports == {"hidden"}:
        yield "hidden states are sent in the teacher's dtype", "teachers[].wire_dtype"
    for section in SECTIONS.values():
        yield from section.no_effect(config)
    if config.teachers and not any(teacher.origin.runs_model for teacher in config.teachers):
        yield (
            "the run loads no teacher's model: targets are read from stores, or come from a server",
            "teachers[].dtype",
            "teachers[].attention",
            "teachers[].revision",
        )
    if config.capture.format == "exact":
        yield "capture.format is exact", "capture.mass"
    if all(teacher.cache is None for teacher in config.teachers):
        yield "nothing is stored (teachers[].cache, or distill-rl capture)", "capture.write_every_s"
    if exports == {"sampled"}:
        yield "draws are sent as integers", "teachers[].wire_dtype"
    if _is_folder(config.student.model):
        yield "student.model is a folder, which has no revisions", "student.revision"
    if all(_is_folder(teacher.model) for teacher in config.teachers):
        yield "teachers[].model is a folder, which has no revisions", "teachers[].revision"
    if config.student.parallel.dp == config.student.parallel.replicas and config.student.parallel.sp == 1:
        yield "parameters are not sharded (dp / replicas x sp = 1)", "student.gradient_sync"
    if facts.gpus == 0 and config.ray.address is None:
        yield "no GPU is visible; on a CPU activations are in host memory anyway", "student.activation_offload"
    if only(TOKENS):
        yield "a teacher with the student's tokenizer reads the student's rows", "teachers[].max_length"
    if data_kind == "messages":
        yield "chats are read (data.format)", "data.text_key"
    if data_kind == "text":
        yield "texts are read (data.format)", "data.messages_key"
    if all(_is_file(path) for path in (*data_paths, data.validation.path) if path):
        yield "a single file has no splits", "data.split", "data.sources[].split"
    if all(_is_local(path) for path in data_paths):
        yield (
            "only data sets of the hub have subsets and revisions",
            "data.subset",
            "data.revision",
            "data.sources[].subset",
            "data.sources[].revision",
        )
    if all(_is_file(path) and ".txt" not in Path(path.lower()).suffixes for path in data_paths):
        yield "there are no .txt files", "data.sample_by"
    if len(data.sources) == 1:
        yield "there is one source only", "data.sources[].weight"
    if data.bad_rows == "fail":
        yield "bad rows are not skipped", "data.max_bad_rows"
    if not data.concatenate:
        yield "data.concatenate is false", "data.separator", "data.characters_per_sample"
    if data.validation.path is not None:
        yield "data.validation.path gives the validation data", "data.validation.fraction"
    if not validates:
        yield "there are no validation data", "data.validation.max_documents"
    if config.schedule.kind == "constant":
        yield "schedule.kind is constant", "schedule.min_lr_ratio", "schedule.hold_steps", "schedule.steps"
    if config.aligner.workers == 0:
        yield (
            "aligner.workers is 0, so the driver aligns",
            "aligner.num_gpus",
            "aligner.deadline_s",
            "faults.aligner_restarts",
        )
    if config.aligner.dp.backend != "cuda":
        yield "aligners use a GPU with aligner.dp.backend=cuda only", "aligner.num_gpus"
    if config.faults.spike_window == 0:
        yield "faults.spike_window is 0, so no step counts as a spike", "faults.spike_factor"
    if not config.evaluate.suites:
        yield "no suites are set", *(f"evaluate.{name}" for name in _SUITES)
    if not validates and not (config.evaluate.suites and config.evaluate.suites_every is None):
        yield "there are no validation data, and no suites that follow it", "evaluate.every"
    if not (suites_every(config) or config.evaluate.at_start or config.evaluate.teachers):
        yield "the suites run at the end of the run only (evaluate.every, evaluate.suites_every)", "evaluate.limit"
    if config.evaluate.engine:
        yield f"{config.evaluate.engine} forms its batches itself", "evaluate.batch_size"
    if config.checkpoint.every == 0:
        yield (
            "checkpoint.every is 0, so checkpoints are written at the end of the run only",
            "checkpoint.keep_best",
            "checkpoint.best_by",
        )
    if config.checkpoint.keep_best == 0:
        yield "checkpoint.keep_best is 0", "checkpoint.best_by"
    if config.ray.address is not None:
        yield (
            "they are settings of a Ray that the run starts, and ray.address joins one",
            "ray.num_cpus",
            "ray.dashboard",
        )


_DEFAULTS = {pattern_of(key): default_of(entry) for key, entry, _ in leaves(Config)}


def no_effect(config: Config, facts: Facts) -> Iterator[str]:
    """Yields what was set without any effect, one line per reason.

    Args:
        facts: of the files; what is not known yet has no line.
    """
    reported = set[str]()
    for reason, *settings in _rows(config, facts):
        changed = {key: text for pattern in settings for key, text in _changed(config, pattern)}
        new = [text for key, text in changed.items() if key not in reported]
        reported |= set(changed)
        if new:
            verb = "has" if len(new) == 1 else "have"
            yield f"{', '.join(new)} {verb} no effect: {reason}"


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
