"""YAML, `key=value` and Python values → `Config`, with all problems reported at once.

Later sources override earlier ones: defaults, files named by `extends`, the file itself, overrides, Python values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distill_rl.config.paths import replace_paths, teacher_folder
from distill_rl.config.reading.interpolate import resolve
from distill_rl.config.reading.overrides import apply_overrides, apply_settings, merge
from distill_rl.config.reading.walk import Findings, build, join, kind_at, unwrap
from distill_rl.config.schema import MISSING, Config, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.system.files import nearby

UNNAMED = "distill"
"""`run.name` of a configuration that is no file and does not set it."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file, changed by overrides, with references resolved.

    Checks keys and types only; the rules that values must obey are in `validate.problems`. `run.name` defaults to the
    file's stem.

    Args:
        path: a YAML file; its `extends: other.yaml` (relative to the file) names a base, which may extend another.
        overrides: `key=value` with dotted keys and list indices (`teachers.0.model=x`).

    Raises:
        ConfigError: one line per problem: unreadable file, bad override, unresolved reference, unknown
            key, wrong type, missing value, home of an unknown user.
    """
    config, findings = read_config(path, overrides)
    if findings.lines or config is None:
        raise ConfigError.many(findings.lines)
    return config


def read_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> tuple[Config | None, Findings]:
    """Like `load_config`, but a key with a problem keeps its default, so that further checks can run.

    Args:
        source: a YAML file, or Python values by dotted key, for which `run.name` defaults to UNNAMED. A section may be
            a mapping.
        settings: Python values that are placed last, in the same form; a section is merged into that of the source.

    Returns:
        The configuration (None if a file could not be read) and the problems. A missing value stays `"???"`.
    """
    findings = Findings()
    raw, name = _read(source, findings)
    if raw is None:
        return None, findings
    apply_overrides(raw, overrides, findings)
    apply_settings(raw, settings or {}, findings)
    _name_run(raw, name)
    resolved = resolve(raw, partial(_lookup, raw), findings)
    config = build(Config, resolved, findings)
    replace_paths(config, partial(_possible, findings))
    for teacher in config.teachers:
        if teacher.store and teacher.model is None:  # as a model that is not needed is read
            teacher.model = teacher_folder(teacher.store)
    return config, findings


def texts(path: str | Path, overrides: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Every text of a file's configuration, with its dotted key, before references are resolved; nothing of a file that
    cannot be read."""
    findings = Findings()
    raw = _read_chain(Path(path), findings, ()) or {}
    apply_overrides(raw, overrides, findings)
    nodes: list[tuple[str, Any]] = [("", raw)]
    while nodes:
        key, node = nodes.pop(0)
        if isinstance(node, str):
            yield key, node
        elif isinstance(node, dict | list):
            inner = node.items() if isinstance(node, dict) else enumerate(node)
            nodes += [(join(key, name), value) for name, value in inner]


def _read(source: str | Path | Mapping[str, Any], findings: Findings) -> tuple[dict[str, Any] | None, str]:
    """The raw mapping of `read_config`'s source, as of `_read_chain`, and the default of `run.name`."""
    if not isinstance(source, Mapping):
        return _read_chain(Path(source), findings, ()), Path(source).stem
    raw: dict[str, Any] = {}
    apply_settings(raw, source, findings)
    return raw, UNNAMED


def _possible(findings: Findings, key: str, path: str | None) -> str | None:
    """The path; `~user` of an unknown user is a problem, and becomes the missing folder `/~user` for further checks.

    So is a name that no file can have; the setting is then null, or `"???"` where it may not be null.
    """
    longest = max((path or "").split("/"), key=lambda name: len(name.encode(errors="replace")))
    if (size := len(longest.encode(errors="replace"))) > 255:
        rule = f"a name in a path may have 255 bytes; one has {size}"
        findings.add(key, rule, f"{longest[:60]!r}...", "check the path")
        return None if unwrap(kind_at(Config, key))[1] else MISSING
    try:
        Path(path or "").expanduser()
    except RuntimeError:
        findings.add(key, "must not begin with the home of an unknown user", path, "write out the folder")
        return f"/{path}"
    return path


def _read_chain(path: Path, findings: Findings, chain: tuple[Path, ...]) -> dict[str, Any] | None:
    """The file merged over the file that it extends, and so on, as a raw mapping; None with the reason in `findings`.

    Args:
        chain: resolved paths of the files that extend this one, from the outermost on; empty for the user's own file.
    """
    file = path.resolve()
    if file in chain:
        circle = " -> ".join(entry.name for entry in (*chain[chain.index(file) :], file))
        findings.add("extends", "files must not extend each other in a circle", circle)
        return None
    raw = _read_file(path, findings, chain)
    if raw is None:
        return None
    parent = raw.pop("extends", None)
    if parent is None:
        return raw
    if not isinstance(parent, str) or not parent:
        findings.add(f"{path}: extends", "must be the path of one YAML file", parent)
        return None
    below = _read_chain(path.parent / parent, findings, (*chain, file))
    return None if below is None else merge(below, raw, Config)


def _read_file(path: Path, findings: Findings, chain: tuple[Path, ...]) -> dict[str, Any] | None:
    """The contents of one YAML file as nested dicts and lists with references unresolved; {} for an empty file.

    None with the reason in `findings` if the file is missing, unreadable, not UTF-8, not YAML, or not a mapping.

    Args:
        chain: files that extend this one; the last is named in the message.
    """
    named = f" (extended by {chain[-1].name})" if chain else ""
    try:
        if not path.is_file():
            kind = "is a folder, not a YAML file" if path.is_dir() else "no such file"
            findings.add(f"{path}{named}", kind, remedy=nearby(path) or "give the path of a YAML file")
            return None
        text = path.read_text(encoding="utf-8")
        raw = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if text.strip() else {}
        findings.remember(text)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        findings.add(f"{path}:{line}{named}", "not valid UTF-8", remedy="save the file as UTF-8")
        return None
    except OSError as error:
        findings.add(f"{path}{named}", f"cannot be read: {error.strerror}")
        return None
    except Exception as error:
        findings.add(*_syntax_error(f"{path}", named, error))
        return None
    if not isinstance(raw, dict):
        findings.add(f"{path}{named}", "must contain sections (student: ..., data: ...)", type(raw).__name__)
        return None
    return raw  # type: ignore[return-value]


def _syntax_error(path: str, named: str, error: Exception) -> tuple[str, str]:
    """Place and reason of a YAML error, from an exception of any class.

    Args:
        named: text to append to the place, such as ` (extended by x.yaml)`.
    """
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark is not None else path
    reason = getattr(error, "problem", None) or next(iter(str(error).strip().splitlines()), type(error).__name__)
    key = getattr(error, "full_key", None)  # OmegaConf's error for a reference that is not closed
    if key:
        reason = f"{key}: {reason}"
    return f"{place}{named}", f"not valid YAML: {reason}"


def _name_run(raw: dict[str, Any], name: str) -> None:
    """Sets `run.name` in the raw mapping to the name, in place, where it is null, empty or not given."""
    run = raw.get("run")
    if run is None:
        run = raw["run"] = {}
    if isinstance(run, dict) and run.get("name") in (None, ""):
        run["name"] = name


def _lookup(raw: dict[str, Any], key: str) -> Any:
    """The raw value at a dotted key, references in it unresolved, or else the schema's default.

    Raises:
        KeyError: the schema has no such key.
    """
    parts = key.split(".")
    for tree in (raw, asdict(Config())):
        node: Any = tree
        try:
            for part in parts:
                node = node[int(part)] if isinstance(node, list) else node[part]
            return node
        except (KeyError, IndexError, ValueError, TypeError):
            continue
    index = parts[1] if parts[0] == "teachers" and len(parts) > 2 else ""
    if index.isdecimal() and int(index) < len(raw.get("teachers") or ()):
        return _lookup(asdict(TeacherConfig()), ".".join(parts[2:]))
    raise KeyError(key)
