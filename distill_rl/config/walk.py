"""Raw mapping → `Config`, in one walk over the leaves that reports every problem with its full path.

OmegaConf's own merge stops at the first error and loses list indices, so it is not used.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from functools import cache
from math import isfinite
from operator import attrgetter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from distill_rl.config.schema import MISSING
from distill_rl.errors import ConfigError

# The keys of NeMo-RL's cross-tokenizer off-policy distillation (pull requests #2245 and #2508) and their counterparts here, for the migration
# table of docs/configuration.md and the suggestion after an unknown key.


FOREIGN: tuple[tuple[str, str, str], ...] = (
    # NeMo-RL's key, our key (empty: none), remark
    ("policy.model_name", "student.model", ""),
    ("policy.tokenizer.name", "student.tokenizer", "null: the model's own"),
    ("policy.precision", "student.dtype", "`bfloat16` is `bf16`; master weights are always fp32"),
    ("policy.train_global_batch_size", "train.global_batch_size", "one value for student and teachers"),
    ("policy.train_micro_batch_size", "train.micro_batch_size", ""),
    ("policy.max_total_sequence_length", "data.max_length", ""),
    ("policy.max_grad_norm", "train.max_grad_norm", ""),
    ("policy.dtensor_cfg.tensor_parallel_size", "student.parallel.tp", ""),
    ("policy.dtensor_cfg.activation_checkpointing", "student.activation_checkpointing", ""),
    (
        "policy.dtensor_cfg.context_parallel_size",
        "student.parallel.sp",
        "positions are exchanged for heads, not sent round a ring",
    ),
    ("policy.dtensor_cfg.cpu_offload", "", "not supported; `student.activation_offload`, dp, sp and tp save memory"),
    ("policy.dtensor_cfg.sequence_parallel", "", "decided by the model family's parallel plan"),
    ("policy.dtensor_cfg.custom_parallel_plan", "", "plans live in `models/families.py`"),
    ("policy.sequence_packing.enabled", "data.packing", "first fit; attention never crosses documents"),
    ("policy.dynamic_batching.enabled", "data.packing", "packing replaces it"),
    ("policy.optimizer.kwargs.lr", "optimizer.lr", ""),
    ("policy.optimizer.kwargs.betas", "optimizer.betas", ""),
    ("policy.optimizer.kwargs.eps", "optimizer.eps", ""),
    ("policy.optimizer.kwargs.weight_decay", "optimizer.weight_decay", "not applied to norms and biases"),
    ("policy.scheduler.total_iters", "schedule.warmup_steps", "of the LinearLR entry"),
    ("policy.scheduler.T_max", "schedule.steps", "T_max plus the warm-up; null: the end of the run"),
    ("policy.scheduler.eta_min", "schedule.min_lr_ratio", "as a fraction of the peak"),
    ("policy.generation", "evaluate.backend", "used for evaluation only"),
    ("teacher.model_name", "teachers.0.model", ""),
    ("teacher.precision", "teachers.0.dtype", ""),
    ("teacher.logprob_batch_size", "teachers.0.micro_batch_size", ""),
    ("teacher.dtensor_cfg.tensor_parallel_size", "teachers.0.parallel.tp", ""),
    ("teachers[].weight", "teachers.0.weight", "relative to the sum of all weights"),
    ("distillation.num_prompts_per_step", "train.global_batch_size", "documents per optimizer step"),
    ("distillation.num_generations_per_prompt", "", "the text is fixed; training generates nothing"),
    ("distillation.max_num_steps", "train.steps", ""),
    ("distillation.max_num_epochs", "train.epochs", "steps or epochs, whichever ends first"),
    ("distillation.seed", "run.seed", ""),
    ("distillation.topk_logits_k", "loss.top_k", "entries per token; the mass of all others is one exact number"),
    ("distillation.use_ipc", "transport", "`cuda_ipc`, or `auto`, which uses it where it works"),
    ("distillation.loss_on_all_tokens", "data.loss_on", "`all` or `assistant`"),
    ("distillation.keep_models_resident", "", "always true"),
    ("distillation.cross_tokenizer_num_workers", "aligner.workers", ""),
    ("distillation.val_period", "evaluate.every", ""),
    ("distillation.val_batches", "data.validation.max_documents", "a number of documents"),
    ("distillation.val_global_batch_size", "train.global_batch_size", "validation uses the training batch size"),
    ("distillation.val_micro_batch_size", "train.micro_batch_size", "validation uses the training micro-batch size"),
    ("distillation.val_at_start", "", "run `distill-rl eval` on the untrained student"),
    ("token_aligner.enabled", "loss.cross_tokenizer", "used automatically where tokenizers differ; null forbids it"),
    ("token_aligner.projection_matrix_path", "projection.path", "safetensors; null: built and cached"),
    ("token_aligner.learnable", "projection.learnable", "with `xtoken`"),
    ("token_aligner.loss_type", "loss.cross_tokenizer", "`KL` is `xtoken`, `chunked_ce` is `alm`"),
    ("token_aligner.temperature", "loss.temperature", ""),
    ("token_aligner.vocab_topk", "loss.top_k", "columns of the teacher that are compared"),
    ("token_aligner.reverse_kl", "loss.divergence", "`reverse_kl`"),
    ("token_aligner.use_sparse_format", "", "the projection is always sparse"),
    ("token_aligner.project_teacher_to_student", "", "the student is projected into the teacher's vocabulary"),
    ("token_aligner.projection_matrix_multiplier", "", "rows of the projection sum to 1"),
    ("token_aligner.max_comb_len", "", "byte boundaries join any number of tokens; the fallback `dp` up to 4"),
    ("token_aligner.use_char_offset", "aligner.method", "`offsets` is closest; `auto` uses `bytes`"),
    ("token_aligner.force_dp_only", "aligner.method", "`dp`"),
    ("token_aligner.use_align_fast", "aligner.fast_ids", ""),
    ("token_aligner.use_cuda_dp", "aligner.dp.backend", "`cuda`, with `aligner.num_gpus`"),
    ("token_aligner.dp_chunk_size", "aligner.dp.band", "only the mismatched window is searched, in a band"),
    ("token_aligner.exact_token_match_only", "loss.cross_tokenizer", "`strict`"),
    ("loss_fn.kl_type", "loss.divergence", "`forward_kl`, `reverse_kl`; `mixed` is `jsd` with `loss.beta`"),
    ("loss_fn.mixed_kl_weight", "loss.beta", ""),
    ("loss_fn.reverse_kl", "loss.divergence", "`reverse_kl`"),
    ("loss_fn.loss_type", "loss.cross_tokenizer", "`KL` is `xtoken`, `chunked_ce` is `alm`"),
    ("loss_fn.zero_outside_topk", "loss.tail", "`truncate`; the default `bucket` keeps the exact mass outside"),
    ("loss_fn.temperature", "loss.temperature", "the KD loss is multiplied by its square"),
    ("loss_fn.vocab_topk", "loss.top_k", ""),
    ("loss_fn.exact_token_match_only", "loss.cross_tokenizer", "`strict`"),
    ("loss_fn.project_teacher_to_student", "", "the student is projected into the teacher's vocabulary"),
    ("loss_fn.gold_loss", "loss.cross_tokenizer", "`hkl` is this loss, `gold` its corrected form; false: `xtoken`"),
    ("loss_fn.xtoken_loss", "loss.gold_relaxed", "accepts matches of weight 0.6 or more in `gold`"),
    ("loss_fn.uncommon_topk", "loss.uncommon_top_k", ""),
    ("loss_fn.ce_loss_scale", "loss.ce_weight", ""),
    ("loss_fn.kd_loss_weight", "loss.kd_weight", ""),
    ("loss_fn.kl_loss_weight", "loss.kd_weight", ""),
    ("loss_fn.dynamic_loss_scaling", "loss.dynamic_scale", "`on`, or `exact`"),
    ("loss_fn.kl_chunk_shift", "", "always true: a chunk's rows predict its tokens"),
    ("loss_fn.prefix_bidir_v3_loss_fn", "loss.divergence", "with `hybrid`, which is closest"),
    ("loss_fn.prefix_bidir_v3_pure_alm", "loss.cross_tokenizer", "`alm`"),
    ("loss_fn.common_indices_from_subtoks", "", "the common vocabulary consists of tokens with equal bytes"),
    ("loss_fn.normalize_by_vocab", "", "losses are means over labelled tokens and over chunks"),
    ("loss_fn.normalize_teacher_by_vocab", "", "weight the teachers with `teachers[].weight`"),
    ("loss_fn.teacher_aggregation_mode", "teachers.0.score", "`static`, `ce`, `entropy`"),
    ("loss_fn.kd_loss_mode", "teachers.0.weight", "always `sum`: the teachers' KD losses are added up"),
    ("loss_fn.sum_weights_metric", "teachers.0.score", "null is `static`; `ce`, `entropy`"),
    ("loss_fn.projection_matrix_path", "projection.path", "safetensors; null: built and cached"),
    ("teachers[].aligner.projection_matrix_path", "projection.path", "one per run"),
    ("teachers[].aligner.pseudo_target_path", "", "not needed: derived from the two tokenizers"),
    ("data.arrow_files", "data.path", "a file, a folder or a glob"),
    ("data.train.data_files", "data.path", "a file, a folder or a glob"),
    ("data.train.characters_per_sample", "data.characters_per_sample", "with `data.concatenate: true`"),
    ("data.collator_mode", "data.format", "`text` or `messages`; `auto` detects it"),
    ("data.num_packed_rows", "data.packing", "first fit; `true` packs"),
    ("data.dataset_name", "data.path", "the format is detected"),
    ("data.max_input_seq_length", "data.max_length", ""),
    ("data.shuffle", "", "always true; the order is a function of run.seed and the epoch"),
    ("data.num_workers", "aligner.workers", ""),
    ("data.prefetch_factor", "prefetch.depth", ""),
    ("data.default.text_key", "data.text_key", ""),
    ("checkpointing.checkpoint_dir", "run.dir", "checkpoints are in the run directory"),
    ("checkpointing.save_period", "checkpoint.every", ""),
    ("checkpointing.keep_top_k", "checkpoint.keep_best", "in addition to the newest `checkpoint.keep_last`"),
    ("checkpointing.metric_name", "checkpoint.best_by", "a metric of validation or eval/SUITE"),
    ("checkpointing.model_save_format", "", "always safetensors"),
    ("eval.benchmarks", "evaluate.suites", ""),
    ("logger.log_dir", "run.dir", "logs are in the run directory"),
    ("logger.wandb_enabled", "observe.wandb", ""),
    ("logger.mlflow_enabled", "observe.mlflow", ""),
    ("logger.tensorboard_enabled", "observe.tensorboard", ""),
    ("cluster.gpus_per_node", "", "follows from the workers' dp × tp; `ray.address` joins a cluster"),
    ("cluster.num_nodes", "", "an option of `launch/slurm.sbatch`"),
)
"""(NeMo-RL's key, our key or empty, remark)"""

OUR_KEY: dict[str, str] = {
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch_size",
    "max_steps": "train.steps",
    "num_epochs": "train.epochs",
    "max_seq_length": "data.max_length",
    "alpha": "loss.kd_weight",
}
"""Widely used names, and the last part of every key of NeMo-RL (the first row wins) → our key."""
for _foreign_key, _our_key, _ in FOREIGN:
    if _our_key:
        OUR_KEY.setdefault(_foreign_key.rpartition(".")[2], _our_key)


_ACCEPTED: dict[type, Any] = {bool: bool, int: int, float: int | float, str: str}
"""Type of a setting → the types of the values that it takes. A bool is no number, although Python says so."""


class Findings:
    """Problem lines, and the keys they concern, so that later checks do not report the same key again.

    `written` has the text of single values that are not quoted, by dotted key, and of names of a mapping, by
    `KEY.NAME:`; None if they are quoted. `moved` has keys that were given → the keys today, `earlier` those of which users hear.
    `sections` are the sections of teachers' backends that were given as such.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.keys: set[str] = set()
        self.written: dict[str, str | None] = {}
        self.moved: dict[str, str] = {}
        self.earlier: list[str] = []
        self.sections: set[str] = set()

    @property
    def notes(self) -> list[str]:
        """At most one line, on settings that were given under earlier keys."""
        pairs = ", ".join(f"{old} is now {self.moved[old]}" for old in self.earlier)
        return [f"earlier keys are read as before: {pairs}"] if pairs else []

    def move(self, old: str, new: str, *, default: Any = NO_DEFAULT, value: Any = None) -> None:
        """Notes that what was given at one key is a value of another one; users hear of it if it is another than the default."""
        for key in [key for key in self.written if key == old or key.startswith(f"{old}.")]:
            self.written.setdefault(new + key.removeprefix(old), self.written.pop(key))
        self.moved[old] = new
        if value != default and not new.startswith(f"{old}."):  # otherwise it is short for a setting in it
            self.earlier.append(old)

    def remember(self, text: str, path: str = "") -> None:
        """Notes how the values of a YAML text are written, where that is not known yet.

        Args:
            path: dotted key of the text's value.
        """
        nodes: list[tuple[str, Any]] = [(path, yaml.compose(text, Loader=yaml.SafeLoader))]
        while nodes:
            key, node = nodes.pop()
            if isinstance(node, yaml.ScalarNode):
                self.written.setdefault(key, None if node.style else node.value)
            elif isinstance(node, yaml.SequenceNode):
                nodes += [(join(key, i), entry) for i, entry in enumerate(node.value)]
            elif isinstance(node, yaml.MappingNode):
                for name, entry in node.value:
                    if name.tag == "tag:yaml.org,2002:merge":
                        nodes.insert(0, (key, entry))  # after the names beside it, which win
                    elif isinstance(name, yaml.ScalarNode):
                        inner = join(key, name.value if name.style else yaml.safe_load(name.value))
                        nodes += [(inner, entry), (f"{inner}:", name)]

    def forget(self, path: str) -> None:
        """Drops what `remember` noted of a dotted key and below it, because it has another value now."""
        self.written = {
            key: text
            for key, text in self.written.items()
            if key != path and not key.startswith((f"{path}.", f"{path}:"))
        }

    def shown(self, key: str, value: Any) -> str:
        """A value as the user wrote it, cut to 80 characters."""
        plain = as_yaml(value) if value is None or isinstance(value, bool) else repr(value)
        text = (not isinstance(value, str) and self.written.get(key)) or plain
        return text if len(text) <= 80 else text[:77] + "..."

    def add(self, key: str, rule: str, value: object = None, remedy: str = "", suspect: str = "") -> None:
        """Adds one problem as a line, and notes the keys that it concerns.

        Args:
            key: dotted key or other name of what is wrong.
            rule, value, remedy: as for `DistillError`.
            suspect: the key that was probably meant, if `key` is unknown.
        """
        self.lines.append(str(ConfigError(key, rule, value, remedy)))
        self.keys.update({key, suspect} - {""})


def join(path: str, key: object) -> str:
    """The dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


@cache
def hints(section: type) -> dict[str, Any]:
    """Field name → evaluated type, for a section of the schema."""
    return get_type_hints(section)


def unwrap(kind: Any) -> tuple[Any, bool]:
    """`Optional[X]` → (X, True); X → (X, False)."""
    if get_origin(kind) in (Union, types.UnionType):
        rest = [part for part in get_args(kind) if part is not type(None)]
        return rest[0], True
    return kind, False


def item_kind(kind: Any) -> Any:
    """Type of a list's entries, or None if `kind` is not a list."""
    kind, _ = unwrap(kind)
    return get_args(kind)[0] if get_origin(kind) is list else None


def is_mapping(kind: Any) -> bool:
    """Whether a setting is a mapping from names, which the user chooses, to single values or lists of them."""
    return get_origin(unwrap(kind)[0]) is dict


def default_of(entry: Field) -> Any:
    """Default value of a field, a fresh one for each call; `dataclasses.MISSING` if the field has none."""
    if entry.default_factory is not NO_DEFAULT:
        return entry.default_factory()
    return entry.default


def kind_at(section: type, path: str) -> Any:
    """Type in the schema at a dotted path (`teachers.0.model`), or None if there is none.

    A list takes any index. An optional type is returned as written, `| None` included.
    """
    kind: Any = section
    for part in path.split("."):
        kind, _ = unwrap(kind)
        if is_dataclass(kind):
            kind = hints(kind).get(part)  # type: ignore[arg-type]
        elif item_kind(kind) is not None and part.isdecimal():
            kind = item_kind(kind)
        else:
            return None
    return kind


def leaves(section: type, path: str = "") -> Iterator[tuple[str, Field, Any]]:
    """Every setting of the schema as (dotted path, field, type), with sections entered.

    A list of sections is entered once, with index `0`. A section that may be null is a setting too.

    Args:
        path: dotted path of the section, put in front of all paths.
    """
    for entry in fields(section):
        kind, key = hints(section)[entry.name], join(path, entry.name)
        inner, (plain, optional) = item_kind(kind), unwrap(kind)
        if is_dataclass(plain):
            if optional:
                yield key, entry, kind
            yield from leaves(plain, key)  # type: ignore[arg-type]
        elif is_dataclass(inner):
            yield from leaves(inner, join(key, 0))  # type: ignore[arg-type]
        else:
            yield key, entry, kind


def pattern_of(key: str) -> str:
    """The setting that a dotted key of `leaves` stands for: `teachers.0.model` → `teachers[].model`."""
    return key.replace(".0.", "[].")


def values(config: Any, pattern: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a setting; for `teachers[].x` one pair per teacher, keyed `teachers.0.x` and so on.

    A setting of a section that is null has no pair.
    """
    sections, _, key = pattern.partition("[].")
    pairs = [(pattern, config, pattern)]
    if key:
        pairs = [(f"{sections}.{i}.{key}", section, key) for i, section in enumerate(attrgetter(sections)(config))]
    for full, node, path in pairs:
        above, _, name = path.rpartition(".")
        section = attrgetter(above)(node) if above else node
        if section is not None:
            yield full, getattr(section, name)


def build(section: type, raw: Mapping[Any, Any], findings: Findings, path: str = "") -> Any:
    """An instance of a section of the schema from a raw mapping; keys that the mapping lacks take their defaults.

    An unknown key, a wrong type or a missing value is added to `findings`, and the setting keeps its default, which is
    `"???"` for a required one. Nothing is raised for bad input.

    Args:
        section: a dataclass of the schema.
        raw: nested mappings and lists with references resolved.
        path: dotted key of the section, for messages.
    """
    names = {entry.name for entry in fields(section)}
    for key in raw:
        if key not in names:
            _unknown(section, key, findings, path)
    values: dict[str, Any] = {}
    for entry in fields(section):
        key, kind = join(path, entry.name), hints(section)[entry.name]
        default = default_of(entry)
        value = raw.get(entry.name, default)
        if entry.metadata.get("one") and isinstance(value, str) and value != MISSING:  # a list of one
            value = [value]
        if value == MISSING and _given(raw, entry.metadata.get("unless", "")):
            values[entry.name] = None
        elif is_dataclass(value):
            values[entry.name] = build(type(value), {}, findings, key)
        else:
            values[entry.name] = _value(kind, value, default, findings, key)
    return section(**values)


def _given(raw: Any, path: str) -> bool:
    """Whether a raw mapping has a value at a dotted path that is not empty."""
    for part in path.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return bool(raw)


def _value(kind: Any, value: Any, default: Any, findings: Findings, key: str) -> Any:
    """The value of one setting, checked against its type; sections and lists are built recursively."""
    # A whole number is accepted as a float and returned as one, a boolean as `on` or `off` where these are choices, None as an empty
    # section. A missing value, one of another type, or a number that is not finite, is reported in `findings`, and the default is returned instead; for
    # a list entry that is `"???"`, or a section without settings. A list of numbers with such an entry is its default as a whole.
    plain, optional = unwrap(kind)
    if value is None and optional:
        return None
    if isinstance(value, str) and value == MISSING:
        findings.add(key, "missing value", remedy=f"set it in the file or add {key}={_example(kind, default)}")
        return _unset(plain, default, findings, key)
    if plain is not str and _is_old_number(value, findings, key):
        return default
    if is_dataclass(plain):
        if isinstance(value, Mapping) or value is None:  # all its keys may be commented out
            return build(plain, value or {}, findings, key)  # type: ignore[arg-type]
    elif item_kind(plain) is not None:
        if isinstance(value, list):
            inner = item_kind(plain)
            entries = [_value(inner, entry, MISSING, findings, join(key, i)) for i, entry in enumerate(value)]
            return entries if inner is str or MISSING not in entries else default
    elif is_mapping(plain):
        if isinstance(value, Mapping):
            return _mapping(value, findings, key)
    elif get_origin(plain) is Literal:
        # YAML 1.1 reads an unquoted `on` or `off` as a boolean.
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        if word in get_args(plain):
            return word
        near = difflib.get_close_matches(str(value), get_args(plain), n=1)
        remedy = f"did you mean {near[0]}?" if near else ""
        findings.add(key, f"must be one of {', '.join(get_args(plain))}", findings.shown(key, value), remedy)
        return default
    elif isinstance(value, bool) == (plain is bool) and isinstance(value, _ACCEPTED[plain]):
        if plain is not float:
            return value
        if isfinite(value):
            return float(value)
        findings.add(key, "must be a finite number", value)
        return default
    remedy = _type_remedy(plain, value, key, default, findings)
    findings.add(key, f"must be {_expected(kind)}", findings.shown(key, value), remedy)
    return _unset(plain, default, findings, key)


def _unset(plain: Any, default: Any, findings: Findings, key: str) -> Any:
    """What a setting has whose value cannot be used: its default. The settings of a section then count as reported."""
    if not is_dataclass(plain) or default is None:
        return default
    findings.keys |= {name for name, _, _ in leaves(plain, key)}  # type: ignore[arg-type]
    return build(plain, {}, Findings(), key)  # type: ignore[arg-type]


def _mapping(value: Mapping[Any, Any], findings: Findings, key: str) -> dict[str, Any]:
    """The entries of a mapping whose name is a text, and whose value is a text, a number, true, false or a list of these."""
    # Others are reported in `findings` and left out.
    found: dict[str, Any] = {}
    for name, entry in value.items():
        inner = join(key, name)
        entries = {join(inner, i): one for i, one in enumerate(entry)} if isinstance(entry, list) else {inner: entry}
        old = [_is_old_number(one, findings, place) for place, one in entries.items()]
        others = (one for one in entries.values() if not isinstance(one, str | bool | int))
        if not isinstance(name, str):
            text = findings.shown(f"{inner}:", name)
            findings.add(inner, "the name must be text", text, f'put it in quotes: "{text}"')
        elif all(isinstance(one, float) and isfinite(one) for one in others):
            if not any(old):
                found[name] = entry
        else:
            rule = "must be a text, a finite number, true or false, or a list of these"
            findings.add(inner, rule, findings.shown(inner, entry))
    return found


def _is_old_number(value: Any, findings: Findings, key: str) -> bool:
    """Whether a value is written in a way that YAML 1.1 reads as another number than it looks like, which is reported."""
    text = findings.written.get(key)
    if text is None or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    digits = text.replace("_", "")
    if re.fullmatch("[-+]?0[0-7]+", digits) and int(digits) != value == int(digits, 8):
        rule, remedy = f"YAML reads a number that begins with 0 as octal, this one as {value}", int(digits)
        findings.add(key, rule, text, f"write {remedy} or {value}")
        return True
    if ":" in text:
        rule = f"YAML reads a number with colons in base 60, this one as {value}"
        findings.add(key, rule, text, "write one number")
        return True
    return False


def _unknown(section: type, key: Any, findings: Findings, path: str) -> None:
    """Reports a key that the section does not have, with the key that was probably meant, or else the keys that exist."""
    # The key that was probably meant counts as reported too (`Findings.keys`). `_target_` is reported as a key that names code.
    full = join(path, key)
    if key == "_target_":
        findings.add(full, "a configuration never names code to run", remedy="remove it")
        return
    siblings = [entry.name for entry in fields(section)]
    near = _nearest(section, str(key), path)
    remedy = f"did you mean {near}?" if near else f"keys here: {', '.join(siblings)}"
    findings.add(full, "unknown key", remedy=remedy, suspect=near)


def _nearest(section: type, key: str, path: str) -> str:
    """Full path of the key that was probably meant; empty if none is similar."""
    # In this order: a very similar key of the section, of a teacher another one of its keys, a key of another framework, the same name in
    # another section, a similar key of the section, a similar name in another section, but for a teacher's.
    from distill_rl.config.schema import Config

    siblings = [entry.name for entry in fields(section)]
    if match := difflib.get_close_matches(key, siblings, n=1, cutoff=0.7):
        return join(path, match[0])
    if teacher := re.match(r"teachers\.\d+", path):
        keys = [
            name.partition(".")[2].partition(".")[2] for name, _, _ in leaves(Config) if name.startswith("teachers.")
        ]
        keys += [entry.name for entry in fields(kind_at(Config, teacher[0]))]
        own = {name.rpartition(".")[2]: name for name in reversed(keys)}
        if match := difflib.get_close_matches(key, own, n=1, cutoff=0.75):
            return join(teacher[0], own[match[0]])
    if key in OUR_KEY:
        return OUR_KEY[key]
    by_name = {"path": "data.path"}  # not that of a store, which comes first
    for name in (*(name for name, _, _ in leaves(Config)), *(entry.name for entry in fields(Config))):
        by_name.setdefault(name.rpartition(".")[2], name)
    if key in by_name:
        return by_name[key]
    if match := difflib.get_close_matches(key, siblings, n=1, cutoff=0.6):
        return join(path, match[0])
    match = [] if teacher else difflib.get_close_matches(key, list(by_name), n=1, cutoff=0.75)
    return by_name[match[0]] if match else ""


def _expected(kind: Any) -> str:
    """The type of a setting in words, for `must be ...`: `a whole number or null`. Not for Literals."""
    plain, optional = unwrap(kind)
    inner = item_kind(plain)
    if is_mapping(plain):
        text = "a mapping from names to values"
    elif is_dataclass(plain):
        text = f"a section with the keys {', '.join(entry.name for entry in fields(plain))}"  # type: ignore[arg-type]
    elif inner is not None:
        text = {str: "a list of texts", float: "a list of numbers"}.get(inner, "a list of sections")
    else:
        text = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[plain]
    return text + (" or null" if optional else "")


def _example(kind: Any, default: Any) -> str:
    """A value to show after `key=` in a message: the default if it says something, else an example by type."""
    plain, _ = unwrap(kind)
    if default not in (None, "", MISSING, NO_DEFAULT) and not is_dataclass(default):
        return as_yaml(default)
    if plain is str:
        return "PATH"
    if is_dataclass(plain) or is_mapping(plain):
        return "{}"
    if get_origin(plain) is Literal:
        return str(get_args(plain)[0])
    return {bool: "true", int: "8", float: "0.5"}.get(plain, "[]") if isinstance(plain, type) else "[]"


def _type_remedy(plain: Any, value: Any, key: str, default: Any, findings: Findings) -> str:
    """What to do about a value of the wrong type, in words."""
    # To quote it, to indent the keys of a section, or an example of a valid override.
    if plain is str and isinstance(value, int | float):
        text, name = findings.written.get(key) or as_yaml(value), key.rpartition(".")[2]
        return f'put it in quotes: "{text}"' if name.isdecimal() else f'put it in quotes: {name}: "{text}"'
    if is_dataclass(plain):
        return "indent its keys below it"
    if is_mapping(plain):
        return f"for example {key}={{column: value}}"
    return f"for example {key}={_example(plain, default)}"


def as_yaml(value: Any) -> str:
    """A default or a single value, as it is written in a YAML file."""
    if value is None:
        return "null"
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
