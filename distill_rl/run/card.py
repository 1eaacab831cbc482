"""The model card (README.md) of a run's student: its origin, its scores and its licence."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill_rl import __version__
from distill_rl.config.measured import SUITE_SCORE, is_suite_score, is_validated
from distill_rl.config.save import fingerprint, to_yaml
from distill_rl.config.schema import MIXED, Config, TeacherConfig
from distill_rl.models.files import Licence, licence_of
from distill_rl.observe.log import printable
from distill_rl.observe.report.report import template_environment
from distill_rl.observe.sinks import read_records
from distill_rl.system.redact import redact
from distill_rl.types import RunPaths

# The YAML header of a model card: what model hubs read of it.
#
# The fields are those of the hub's specification (https://huggingface.co/docs/hub/model-cards). `distill_rl` is one of ours:
# what an export holds, so that it is known again without its weights.

OWN = "distill_rl"
"""Key of our own entry: version, step, dtype, and the hashes of data, configuration and card."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CARD_HASH = re.compile(r'(?<="card_sha256": ")[0-9a-f]{64}(?=")')
_NO_HASH = "0" * 64


def header(
    config: Config, step: int, data_fingerprint: str, dtype: str, licence: Licence, scores: Mapping[str, float]
) -> str:
    """Returns the lines of a card's header, without the `---` around them. Secrets are removed.

    The student is the `base_model` if it looks like a name on the hub (`is_hub_name`). Hub names of teachers are tags: a
    base model is one that weights come from, and the hub has no field for a teacher. Values are written as JSON, which is
    valid YAML and quotes them safely.

    Args:
        dtype: in which weights were written (`as_stored`, `fp32`, `bf16`).
        licence: fields for the licence; none: `license: unknown`.
        scores: as in `card_of`.
    """
    teachers = [f"teacher:{teacher.model}" for teacher in config.running_teachers if is_hub_name(teacher.model)]
    entries: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **(licence or {"license": "unknown"}),
        "tags": ["knowledge-distillation", "distill_rl", *dict.fromkeys(teachers)],
    }
    if is_hub_name(config.student.model):
        entries |= {"base_model": config.student.model, "base_model_relation": "finetune"}
    if datasets := hub_datasets(config):
        entries["datasets"] = datasets
    if results := _results(scores, datasets):
        entries["model-index"] = [{"name": config.run.name or "Distilled model", "results": results}]
    entries[OWN] = {
        "version": __version__,
        "step": step,
        "dtype": dtype,
        "data_sha256": data_fingerprint,
        "configuration": fingerprint(config),
        "card_sha256": _NO_HASH,
    }
    return "\n".join(f"{key}: {json.dumps(redact(value))}" for key, value in entries.items())


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form `org/name`, and the current folder has no folder `org`."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name.partition("/")[0]).is_dir()


def hub_datasets(config: Config) -> list[str]:
    """The training data that are data sets on the hub."""
    data = config.data
    paths = [source.path for source in data.sources] or [str(data.path)]
    return [path for path in dict.fromkeys(paths) if is_hub_name(path)]


def _results(scores: Mapping[str, float], datasets: list[str]) -> list[dict[str, Any]]:
    """The results of `model-index`: one for the validation data, with all that was measured on them, and one per suite."""
    finite = {name: value for name, value in scores.items() if math.isfinite(value)}
    suites = {name: value for name, value in finite.items() if name.startswith(SUITE_SCORE)}
    task = {"type": "text-generation", "name": "Text generation"}
    results = []
    measured = [
        {"type": _identifier(name.removeprefix("validation/")), "name": name, "value": value}
        for name, value in finite.items()
        if name not in suites
    ]
    if measured:
        dataset = {"type": datasets[0] if len(datasets) == 1 else "validation", "name": "validation data of the run"}
        results.append({"task": task, "dataset": dataset, "metrics": measured})
    for name, value in suites.items():
        suite = name.removeprefix(SUITE_SCORE)
        metric = {"type": "accuracy", "name": "score", "value": value}
        results.append({"task": task, "dataset": {"type": _identifier(suite), "name": suite}, "metrics": [metric]})
    return results


def _identifier(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.") or "other"


def sign(card: str) -> str:
    """The card with the hash of itself in its header."""
    return _CARD_HASH.sub(_hash(card), card, count=1)


def is_untouched(card: str) -> bool:
    """Whether a card is as `sign` returned it; false for one without a hash, which another version has written."""
    found = _CARD_HASH.search(card)
    return found is not None and found[0] == _hash(card)


def _hash(card: str) -> str:
    return hashlib.sha256(_CARD_HASH.sub(_NO_HASH, card, count=1).encode()).hexdigest()


def card_of(
    config: Config,
    *,
    step: int,
    data_fingerprint: str,
    scores: Mapping[str, float] | None = None,
    dtype: str = "as_stored",
    licence: Licence | None = None,
    methods: Sequence[str | None] = (),
) -> str:
    """Returns the card (README.md) of a run's student: Markdown with the YAML header that model hubs read.

    Secrets are removed, and names and paths are escaped, so markup in them has no effect. Licences of teachers are read
    from the models' own files.

    Args:
        config: of the run that trained the model; the card also shows it as YAML.
        step: optimizer steps that these weights were trained for.
        data_fingerprint: SHA-256 of the training data.
        scores: measure → value, such as `validation/kl_loss` or `eval/exact_match`; None: the card shows none.
        dtype: in which weights were written (`as_stored`, `fp32`, `bf16`).
        licence: of the student, as fields of a card's header; None: that of the model that it was trained from.
        methods: of every teacher that was run, its cross-tokenizer loss, None if it was compared token by token; none: only
            what the configuration says is known.
    """
    jinja = template_environment(keep_trailing_newline=True)
    jinja.filters |= {"md": _text, "code": _code, "cell": _cell}
    licence, scores, ran = licence or licence_of(config.student), scores or {}, config.running_teachers
    teachers = {teacher.name: str(redact(teacher.model)) for teacher in ran}
    yaml = to_yaml(config).strip()
    sources = ", ".join(f"{source.path} (weight {source.weight:g})" for source in config.data.sources)
    table = {"Student": str(redact(config.student.model))}
    table |= {f"Teacher {name}": model for name, model in teachers.items()}
    if (lora := config.student.lora) is not None:
        layers = "all linear layers" if lora.targets is None else ", ".join(lora.targets)
        scale = f"rank {lora.rank}, alpha {lora.scale * lora.rank:g}"
        base = f", beside weights in {config.student.quantization}" if config.student.quantization else ""
        table["LoRA"] = f"{scale}, on {layers}{base}; merged here, and for PEFT in the folder adapter"
    table |= {
        "Optimizer steps": f"{step:,}",
        "Training data": str(redact(sources or str(config.data.path))),
        "Data, sha256": data_fingerprint,
        "Loss": _loss(config, methods or [teacher.loss for teacher in ran]),
        "Seed": str(config.run.seed),
        "Configuration": fingerprint(config),
    }
    licences = {f"{teacher.name} ({teachers[teacher.name]})": _licence(licence_of(teacher)) for teacher in ran}
    card = jinja.get_template("card.md.jinja").render(
        header=header(config, step, data_fingerprint, dtype, licence, scores),
        name=config.run.name or "Distilled model",
        version=__version__,
        student=table["Student"],
        teachers=list(teachers.values()),
        facts=table,
        scores=scores,
        licence=_licence(licence),
        teacher_licences=licences,
        yaml=yaml,
        fence=_fence(yaml, 3),
    )
    return sign(card)


def measured_at(paths: RunPaths, step: int) -> dict[str, float]:
    """What validation and suites measured at a step, by metric; empty if nothing was, or the records are gone."""
    try:
        records = read_records(paths.metrics)
    except OSError:
        return {}
    return {
        name: float(value)
        for record in records
        if record.get("step") == step
        for name, value in record.items()
        if (is_validated(name) or is_suite_score(name)) and isinstance(value, int | float)
    }


def _licence(fields: Mapping[str, str]) -> str:
    """The name of a licence, with its address if it has one; empty if it is not known."""
    name = fields.get("license_name") or fields.get("license", "")
    link = str(redact(fields.get("license_link", "")))
    return f"{name}, {link}" if name and link else name


def _loss(config: Config, methods: Sequence[str | None]) -> str:
    """What was minimised."""
    loss, teachers = config.loss, config.running_teachers
    balance = f" + {loss.router_weight:g} x balance of experts" if loss.router_weight else ""
    if not teachers:
        return f"CE with the data{balance}"
    divergence = f"{loss.divergence}, beta = {loss.beta:g}" if loss.divergence in MIXED else loss.divergence
    compared = sorted({_compared(config, teacher, method) for teacher, method in zip(teachers, methods)})
    kd = f"KD ({divergence}, {' and '.join(compared)}, T = {loss.temperature:g})"
    if loss.dynamic_scale != "off":
        return f"r x {kd} + CE, r = CE / KD{balance}"
    ce = f" + {loss.ce_weight:g} x CE" if loss.ce_weight else ""
    return f"{loss.kd_weight:g} x {kd}{ce}{balance}"


def _compared(config: Config, teacher: TeacherConfig, method: str | None) -> str:
    """What of a teacher's distributions was compared."""
    loss = config.loss
    rest = {"bucket": "", "truncate": " without the rest", "renormalize": " rescaled to 1"}[loss.tail]
    ways = {"sampled": f"{loss.draws} draws", "topk": f"top {loss.top_k}{rest}"}
    entries = ways.get(teacher.export, "the whole vocabulary")
    return entries if method is None else f"{entries} by {method} across tokenizers"


def _text(text: object) -> str:
    return re.sub(r"([\\`*_{}\[\]<>()#|&~])", r"\\\1", printable(text))


def _code(text: object) -> str:
    """The text as a Markdown code span on one line, in which backticks have no effect; empty for empty text."""
    line = printable(text)
    fence = _fence(line, 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""


def _cell(text: object) -> str:
    return _code(text).replace("|", "\\|")


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
