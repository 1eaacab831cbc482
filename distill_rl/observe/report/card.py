"""The README.md of an exported model: where it comes from and how good it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from distill_rl import __version__
from distill_rl.config.save import fingerprint, to_yaml
from distill_rl.config.schema import Config
from distill_rl.observe.log import printable
from distill_rl.system.redact import redact

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def model_card(
    config: Config,
    *,
    step: int,
    data_fingerprint: str,
    scores: Mapping[str, float] | None = None,
    facts: Mapping[str, str] | None = None,
) -> str:
    """The card as Markdown with a YAML header, as model hubs read it.

    Names and paths are shown as text whatever they hold: no markup of theirs takes effect.

    Args:
        step: optimizer steps behind these weights.
        data_fingerprint: sha256 of the training data.
        scores: measure → value, such as `validation/kl_loss` or `eval/exact_match`.
        facts: further lines of the table, such as the number of rows or of parameters.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("distill_rl.observe.report", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": _text, "code": _code, "cell": _cell}
    teachers = [str(redact(teacher.model)) for teacher in config.teachers]
    yaml = to_yaml(config).strip()
    table = {"Student": str(redact(config.student.model))}
    table |= {f"Teacher {teacher.name}": model for teacher, model in zip(config.teachers, teachers)}
    table |= {
        "Optimizer steps": f"{step:,}",
        "Training data": str(redact(config.data.path)),
        "Data, sha256": data_fingerprint,
        "Loss": f"{config.loss.kd_weight:g} x KD ({config.loss.divergence}, top {config.loss.top_k}, "
        f"T = {config.loss.temperature:g}) + {config.loss.ce_weight:g} x CE",
        "Seed": str(config.run.seed),
        "Configuration": fingerprint(config),
    }
    return environment.get_template("card.md.jinja").render(
        header=_header(config),
        name=config.run.name or "Distilled model",
        version=__version__,
        student=table["Student"],
        teachers=teachers,
        facts=table | dict(facts or {}),
        scores=scores or {},
        yaml=yaml,
        fence=_fence(yaml, 3),
    )


def _header(config: Config) -> str:
    """YAML for the hub. JSON is YAML, so each value is written as JSON and cannot break out."""
    entries: dict[str, object] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["knowledge-distillation", "distill_rl"],
    }
    student = config.student.model
    if _HUB_NAME.fullmatch(student) and not Path(student).exists():
        entries["base_model"] = student
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in entries.items())


def _text(text: object) -> str:
    """`text` on one line with everything escaped that Markdown or HTML would take as markup."""
    return re.sub(r"([\\`*_{}\[\]<>()#|&~])", r"\\\1", printable(text))


def _code(text: object) -> str:
    """`text` as a code span on one line."""
    line = printable(text)
    fence = _fence(line, 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""


def _cell(text: object) -> str:
    """A code span in a table, where a bar ends the cell even inside of code."""
    return _code(text).replace("|", "\\|")


def _fence(text: str, least: int) -> str:
    """More backticks than stand together anywhere in `text`."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
