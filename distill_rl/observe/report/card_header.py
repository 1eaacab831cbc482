"""The YAML header of a model card: what model hubs read of it.

The fields are those of the hub's specification (https://huggingface.co/docs/hub/model-cards). `distill_rl` is one of ours:
what an export holds, so that it is known again without its weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill_rl import __version__
from distill_rl.config.facts import running_teachers
from distill_rl.config.measured import SUITE_SCORE
from distill_rl.config.save import fingerprint
from distill_rl.config.schema import Config
from distill_rl.system.redact import redact

OWN = "distill_rl"
"""Key of our own entry: version, step, dtype, and the hashes of data, configuration and card."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CARD_HASH = re.compile(r'(?<="card_sha256": ")[0-9a-f]{64}(?=")')
_NO_HASH = "0" * 64


def header(
    config: Config,
    *,
    step: int,
    data_fingerprint: str,
    dtype: str,
    licence: Mapping[str, str],
    scores: Mapping[str, float],
) -> str:
    """Returns the lines of a card's header, without the `---` around them. Secrets are removed.

    The student is the `base_model` if it looks like a name on the hub (`is_hub_name`). Hub names of teachers are tags: a
    base model is one that weights come from, and the hub has no field for a teacher. Values are written as JSON, which is
    valid YAML and quotes them safely.

    Args:
        dtype: in which weights were written (`as_stored`, `fp32`, `bf16`).
        licence: fields for the licence; none: `license: unknown`.
        scores: as in `model_card`.
    """
    teachers = [f"teacher:{teacher.model}" for teacher in running_teachers(config) if is_hub_name(teacher.model)]
    entries: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **(licence or {"license": "unknown"}),
        "tags": ["knowledge-distillation", "distill_rl", *dict.fromkeys(teachers)],
    }
    if is_hub_name(config.student.model):
        entries |= {"base_model": config.student.model, "base_model_relation": "finetune"}
    datasets = hub_datasets(config)
    if datasets:
        entries["datasets"] = datasets
    results = _results(scores, datasets)
    if results:
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
    """`text` with only the characters that the hub accepts in an identifier."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.") or "other"


def sign(card: str) -> str:
    """The card with the hash of itself in its header."""
    return _CARD_HASH.sub(_hash(card), card, count=1)


def is_untouched(card: str) -> bool:
    """Whether a card is as `sign` returned it; false for one without a hash, which another version has written."""
    found = _CARD_HASH.search(card)
    return found is not None and found[0] == _hash(card)


def _hash(card: str) -> str:
    """sha256 of a card without its hash."""
    return hashlib.sha256(_CARD_HASH.sub(_NO_HASH, card, count=1).encode()).hexdigest()
