"""The model card (README.md) of an exported model: its origin, its scores and its licence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from distill_rl import __version__
from distill_rl.config.facts import running_teachers
from distill_rl.config.save import fingerprint, to_yaml
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.observe.log import printable
from distill_rl.observe.report.card_header import header, sign
from distill_rl.observe.report.page import environment
from distill_rl.system.redact import redact

_NONE: Mapping[str, str] = MappingProxyType({})


def model_card(
    config: Config,
    *,
    step: int,
    data_fingerprint: str,
    scores: Mapping[str, float] | None = None,
    dtype: str = "as_stored",
    licence: Mapping[str, str] = _NONE,
    teacher_licences: Sequence[Mapping[str, str]] = (),
    methods: Sequence[str | None] = (),
) -> str:
    """Returns the model card (README.md) of an exported model: Markdown with the YAML header that model hubs read.

    Secrets are removed, and names and paths are escaped, so markup in them has no effect.

    Args:
        config: of the run that trained the model; the card also shows it as YAML.
        step: optimizer steps that these weights were trained for.
        data_fingerprint: SHA-256 of the training data.
        scores: measure → value, such as `validation/kl_loss` or `eval/exact_match`; None: the card shows none.
        dtype: in which weights were written (`as_stored`, `fp32`, `bf16`).
        licence: of the model, as fields of a card's header; empty: unknown.
        teacher_licences: the same for every teacher, in the order of the configuration; none: all unknown.
        methods: of every teacher that was run, its cross-tokenizer loss, None if it was compared token by token; none: only
            what the configuration says is known.
    """
    jinja = environment(keep_trailing_newline=True)
    jinja.filters |= {"md": _text, "code": _code, "cell": _cell}
    ran = running_teachers(config)
    teachers = [str(redact(teacher.model)) for teacher in ran]
    yaml = to_yaml(config).strip()
    table = {"Student": str(redact(config.student.model))}
    table |= {f"Teacher {teacher.name}": model for teacher, model in zip(ran, teachers)}
    if (lora := config.student.lora) is not None:
        layers = "all linear layers" if lora.targets is None else ", ".join(lora.targets)
        scale = f"rank {lora.rank}, alpha {lora.scale * lora.rank:g}"
        base = f", beside weights in {config.student.quantization}" if config.student.quantization else ""
        table["LoRA"] = f"{scale}, on {layers}{base}; merged here, and for PEFT in the folder adapter"
    table |= {
        "Optimizer steps": f"{step:,}",
        "Training data": str(redact(_data(config))),
        "Data, sha256": data_fingerprint,
        "Loss": _loss(config, methods or [teacher.loss for teacher in ran]),
        "Seed": str(config.run.seed),
        "Configuration": fingerprint(config),
    }
    front = header(
        config, step=step, data_fingerprint=data_fingerprint, dtype=dtype, licence=licence, scores=scores or {}
    )
    licences = dict(zip((teacher.name for teacher in config.teachers), teacher_licences))
    card = jinja.get_template("card.md.jinja").render(
        header=front,
        name=config.run.name or "Distilled model",
        version=__version__,
        student=table["Student"],
        teachers=teachers,
        facts=table,
        scores=scores or {},
        licence=_licence(licence),
        teacher_licences={
            f"{teacher.name} ({model})": _licence(licences.get(teacher.name, _NONE))
            for teacher, model in zip(ran, teachers)
        },
        yaml=yaml,
        fence=_fence(yaml, 3),
    )
    return sign(card)


def _licence(fields: Mapping[str, str]) -> str:
    """The name of a licence, with its address if it has one; empty if it is not known."""
    name = fields.get("license_name") or fields.get("license", "")
    link = str(redact(fields.get("license_link", "")))
    return f"{name}, {link}" if name and link else name


def _data(config: Config) -> str:
    """The path of the training data, or of every source with its weight."""
    data = config.data
    return ", ".join(f"{source.path} (weight {source.weight:g})" for source in data.sources) or str(data.path)


def _loss(config: Config, methods: Sequence[str | None]) -> str:
    """What was minimised."""
    loss, teachers = config.loss, running_teachers(config)
    balance = f" + {loss.router_weight:g} x balance of experts" if loss.router_weight else ""
    if not teachers:
        return f"CE with the data{balance}"
    mixed = loss.divergence in ("jsd", "skewed_forward_kl", "skewed_reverse_kl")
    divergence = f"{loss.divergence}, beta = {loss.beta:g}" if mixed else loss.divergence
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
    """`text` on one line, with all Markdown and HTML markup escaped."""
    return re.sub(r"([\\`*_{}\[\]<>()#|&~])", r"\\\1", printable(text))


def _code(text: object) -> str:
    """The text as a Markdown code span on one line, in which backticks have no effect; empty for empty text."""
    line = printable(text)
    fence = _fence(line, 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""


def _cell(text: object) -> str:
    """The text as a code span for a table, with vertical bars escaped: one would end the cell even inside code."""
    return _code(text).replace("|", "\\|")


def _fence(text: str, least: int) -> str:
    """A run of backticks longer than any in `text`, and at least `least` long."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
