"""The tokens at which a model stops, as its files say.

Who reads them adds what the tokenizer says, each for its own end:

- `data/batch/tokenization.py` (`StopTokens`), to see whether an answer that is trained on ends: the tokenizer's eos.
- `align/vocabulary.py` (`Vocabulary.stops`), to pair the stops of two models: eos, and what the chat template writes
  after an answer. Ids that are no special tokens are left out, because they are text.
- `evals/backends/base.py` (`ItemEncoder.stop_ids`), to end an answer: the same two.
"""

from __future__ import annotations

import json
from pathlib import Path

from distill_rl.config.paths import described_by
from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.models.files import resolve


def configured_stops(path: str | Path, revision: str | None = None) -> tuple[int, ...]:
    """Returns the ids that end an answer of the model: one, several or none.

    They are `eos_token_id` of generation_config.json or, if there is no such file, of config.json. There are none if
    the file does not set it, or in a folder without both files.

    Raises:
        ConfigError: the file is not a JSON object, or as in `resolve`.
    """
    folder = resolve(path, revision)
    file = folder / "generation_config.json"
    if not file.is_file():
        file = folder / "config.json"
    if not file.is_file():
        return ()  # a folder with a tokenizer only
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        ends = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model {path}", f"{file.name} must be JSON", str(error), "copy it again") from error
    return tuple(token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int))


def stops_of(model: StudentConfig | TeacherConfig) -> tuple[int, ...]:
    """The ids that end an answer of a model's settings, as in `configured_stops`."""
    return configured_stops(*described_by(model))
