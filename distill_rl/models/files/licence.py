"""The licence of a model, in the fields that the headers of model cards have for it.

A header names it by an identifier of the hub's list or, as `license: other`, by `license_name` and `license_link`
(https://huggingface.co/docs/hub/repositories-licenses). Nothing here asks the hub: a model that is not on this machine
has no known licence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.models.files.hub import cached

Licence = Mapping[str, str]
"""Some of FIELDS; empty if no licence is known."""
FIELDS = ("license", "license_name", "license_link")
IDENTIFIERS = frozenset({
    "afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bigcode-openrail-m", "bigscience-bloom-rail-1.0",
    "bigscience-openrail-m", "bsd", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "bsl-1.0", "c-uda", "cc",
    "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0",
    "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0",
    "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "cdla-sharing-1.0",
    "creativeml-openrail-m", "deepfloyd-if-license", "ecl-2.0", "epl-1.0", "etalab-2.0", "eupl-1.1", "gemma",
    "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "isc", "lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr", "llama2", "llama3",
    "llama3.1", "llama3.2", "llama3.3", "lppl-1.3c", "mit", "mpl-2.0", "ms-pl", "ncsa", "odbl", "odc-by", "ofl-1.1",
    "openrail", "openrail++", "osl-3.0", "other", "pddl", "postgresql", "unknown", "unlicense", "wtfpl", "zlib",
})  # fmt: skip
"""Values of `license` that the hub accepts. It refuses a card with any other."""
_LARGEST_CARD = 2**20
"""Bytes. No card is that long; another file of this name is not read."""


def licence(name: str) -> Licence:
    """The fields of a licence that somebody names: an identifier of the hub's list, or any other name."""
    identifier = name.strip().lower()
    if identifier in IDENTIFIERS:
        return {"license": identifier}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", identifier).strip("-") or "other"}


def licence_of(model: StudentConfig | TeacherConfig) -> Licence:
    """The licence that a model's own files state; empty if they state none, or are not on this machine."""
    folder = Path(model.model).expanduser()
    found = folder if folder.is_dir() else cached(model.model, model.revision)
    return {} if found is None else licence_in(found)


def licence_in(folder: Path) -> Licence:
    """The licence in the header of a folder's model card or, without one, in its config.json; empty if neither has it.

    Fields that are not short texts on one line do not count.
    """
    header = _plain_fields(card_header(folder))
    if "license" in header:
        return header
    try:
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("license")
    except (OSError, ValueError, AttributeError):
        return {}
    return licence(stated) if isinstance(stated, str) and _plain_fields({"license": stated}) else {}


def card_header(folder: Path) -> dict[str, Any]:
    """The YAML header of a folder's README.md; empty if there is none that can be read."""
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    try:
        if card.stat().st_size > _LARGEST_CARD:
            return {}
        return metadata_load(card) or {}
    except Exception:  # it is somebody else's file, and YAML has errors of its own
        return {}


def _plain_fields(header: Mapping[str, Any]) -> dict[str, str]:
    """The fields of FIELDS that are texts of one line."""
    texts = {name: header[name] for name in FIELDS if isinstance(header.get(name), str)}
    return {name: text for name, text in texts.items() if text.strip() and len(text) < 300 and text.isprintable()}
