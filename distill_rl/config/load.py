"""YAML, `key=value` and Python values → `Config`, with all problems reported at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_origin

import yaml
from omegaconf import OmegaConf

from distill_rl.config.paths import replace_paths
from distill_rl.config.schema import MISSING, Config, TeacherConfig
from distill_rl.config.schema.backends import FLAT, SECTIONS
from distill_rl.config.walk import Findings, as_yaml, build, hints, item_kind, join, kind_at, unwrap
from distill_rl.errors import ConfigError
from distill_rl.system.files import nearby

ENVIRONMENT = frozenset(
    {"HOME", "USER", "SCRATCH", "WORK", "TMPDIR", "HF_HOME", "HF_DATASETS_CACHE", "SLURM_JOB_ID", "SLURM_JOB_NAME"}
)
"""Environment variables that a configuration may read; any other might hold a secret."""
OF_A_JOB = frozenset({"TMPDIR", "SLURM_JOB_ID", "SLURM_JOB_NAME"})
"""Those that differ from job to job."""

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_REFERENCE_OR_ESCAPE = re.compile(_REFERENCE.pattern + r"|\$\\(\\*)\{")
_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_UNDERSTOOD = "only ${section.key} and ${oc.env:NAME} are understood"
_ENV = re.compile(r"oc\.env:\s*(\w+)\s*(?:,(.*))?")


class _Unresolved(Exception):
    pass


def resolve(node: Any, lookup: Callable[[str], Any], findings: Findings, path: str = "") -> Any:
    """A copy of nested dicts and lists in which every reference in a text is replaced by what it refers to.

    A text that is one reference takes the type of the value; within a longer text the value is inserted as text. A text
    with a reference that cannot be resolved (see `_text`) is reported in `findings` under its dotted key and left
    unchanged. Values that are not texts stay as they are.

    Args:
        lookup: dotted key → raw value, defaults included; raises KeyError.
        path: dotted key of the tree.
    """
    if isinstance(node, dict):
        return {key: resolve(value, lookup, findings, join(path, key)) for key, value in node.items()}
    if isinstance(node, list):
        return [resolve(value, lookup, findings, join(path, i)) for i, value in enumerate(node)]
    if isinstance(node, str):
        try:
            return _text(node, lookup, (path,))
        except _Unresolved as problem:
            findings.add(path, str(problem), node)
    return node


def _text(text: str, lookup: Callable[[str], Any], seen: tuple[str, ...]) -> Any:
    r"""A text with its references replaced, and those of the values inserted; an escaped `$\{` becomes `${`."""
    # A text that is one single reference returns the value with its type, which may be None; otherwise the result is a text, with booleans
    # in lower case.
    if text.count("${") != len(_REFERENCE.findall(text)):
        raise _Unresolved(f"references do not nest and must be closed; {_UNDERSTOOD}")
    if only_reference := _REFERENCE.fullmatch(text):  # keeps the type of the value
        return _reference(only_reference[1].strip(), lookup, seen)

    def replacement(match: re.Match[str]) -> str:
        """The text that replaces one match: `${` for an escape, otherwise the value of the reference as text."""
        if match[1] is None:
            return "$" + match[2] + "{"
        value = _reference(match[1].strip(), lookup, seen)
        if value is None:
            raise _Unresolved(f"refers to {match[1].strip()}, which is null, inside a longer text")
        return str(value).lower() if isinstance(value, bool) else str(value)

    return _REFERENCE_OR_ESCAPE.sub(replacement, text)


def variables_in(text: str) -> set[str]:
    """The environment variables that a text refers to."""
    found = (_ENV.fullmatch(reference.strip()) for reference in _REFERENCE.findall(text))
    return {match[1] for match in found if match}


def escape(text: str) -> str:
    """The text with `${` written as `$\\{`, so that a file that contains it reads back unchanged.

    OmegaConf parses every text that contains `${`, so an escape must not contain it.
    """
    return re.sub(r"\$(\\*)\{", r"$\\\1{", text)


def _reference(name: str, lookup: Callable[[str], Any], seen: tuple[str, ...]) -> Any:
    """The resolved value of what stands between `${` and `}`: a dotted key, or `oc.env:NAME` with an optional fallback."""
    if environment := _ENV.fullmatch(name):
        return _variable(environment[1], environment[2])
    if not _KEY.fullmatch(name):
        raise _Unresolved(_UNDERSTOOD)
    if name in seen:
        raise _Unresolved(f"the reference goes in a circle ({' -> '.join((*seen, name))})")
    try:
        value = lookup(name)
    except KeyError:
        raise _Unresolved(f"refers to {name}, which does not exist") from None
    if isinstance(value, dict | list):
        raise _Unresolved(f"refers to {name}, which is a section")
    return _text(value, lookup, (*seen, name)) if isinstance(value, str) else value


def _variable(name: str, fallback: str | None) -> str:
    """The value of an environment variable, or the stripped fallback where the variable is not set."""
    # An empty value counts as set.
    if name not in ENVIRONMENT:
        allowed = ", ".join(sorted(ENVIRONMENT))
        raise _Unresolved(f"{name} may not be read from a configuration; the variables that may be are {allowed}")
    value = os.environ.get(name, None if fallback is None else fallback.strip())
    if value is None:
        raise _Unresolved(f"the environment has no {name}; write ${{oc.env:{name},FALLBACK}} or set it")
    return value


# Puts `key=value` from the command line, and Python values, into the raw mapping, before anything is checked.


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str], findings: Findings) -> None:
    """Puts `key=value` texts into the raw mapping, in place and in their order, so that later ones win.

    Sections and list entries that the mapping lacks are created. An override that does not fit is reported in
    `findings` and skipped. Unknown keys and wrong types are not noticed here, but by `walk.build`.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key or any(not part for part in key.split(".")):
            findings.add(override, "an override is written key=value", remedy="for example train.steps=100")
            continue
        key, given = _today(key, {} if text.strip().startswith("{") else text), key
        _put(raw, key, _parse(key, text.strip()), given, findings)
        with suppress(yaml.YAMLError):  # then it is a text
            findings.remember(text, key)


def apply_settings(raw: dict[str, Any], settings: Mapping[str, Any], findings: Findings) -> None:
    """Like `apply_overrides`, for Python values by dotted key; texts are taken as they are."""
    for key, value in settings.items():
        if not isinstance(key, str) or any(not part for part in key.split(".")):
            findings.add(repr(key), "the name of a setting is a text", remedy="for example train, or train.steps")
            continue
        value = _plain(value)
        _put(raw, _today(key, value), value, key, findings)


# Settings of a teacher's backend were keys of the teacher before they had sections (`backends.FLAT`). They mean what they
# meant: unlike a section, they choose no backend.


def _today(key: str, value: Any) -> str:
    """A dotted key as it is spelled today; `store` is short for `store.path`, unless its value is a section."""
    found = re.fullmatch(r"(teachers\.\d+)\.(\w+)((?:\.\d+)?)", key)
    if found is None or found[2] not in FLAT or isinstance(value, Mapping):
        return key
    return f"{found[1]}.{FLAT[found[2]]}{found[3]}"


def _put(raw: dict[str, Any], key: str, value: Any, given: str, findings: Findings) -> None:
    """Places a value at a key of today, which may have been given in another spelling and may hold such keys."""
    if key == "teachers":
        findings.sections.clear()  # those of the teachers that it replaces
    parts = key.split(".")
    if key == given and parts[0] == "teachers" and len(parts) > 2 and parts[2] in SECTIONS:
        findings.sections.add(".".join(parts[:3]))
    _place(raw, key, _in_sections(value, key, findings), findings)
    findings.forget(key)
    if key != given:
        findings.move(given, key)


def _in_sections(value: Any, key: str, findings: Findings) -> Any:
    """A raw value in which every setting of a teacher's backend is in its section."""
    if key == "" and isinstance(value, dict) and "teachers" in value:
        return value | {"teachers": _in_sections(value["teachers"], "teachers", findings)}
    if key == "teachers" and isinstance(value, list):
        return [_in_sections(entry, join(key, i), findings) for i, entry in enumerate(value)]
    if not (re.fullmatch(r"teachers\.\d+", key) and isinstance(value, dict)):
        return value
    flat = {name: each for name, each in value.items() if _today(join(key, name), each) != join(key, name)}
    findings.sections |= {join(key, name) for name in SECTIONS if name in value and name not in flat}
    teacher = {name: each for name, each in value.items() if name not in flat}
    for name, each in flat.items():
        section, _, inner = FLAT[name].partition(".")
        beside = teacher.get(section) or {}
        old, new = join(key, name), join(key, FLAT[name])
        if not isinstance(beside, dict):
            continue  # whose type is reported
        if beside.get(inner, each) != each:
            rule = f"contradicts {new}={as_yaml(beside[inner])}, which is the same setting"
            findings.add(old, rule, each, "leave one of the two out")
            continue
        teacher[section] = beside | {inner: each}
        findings.move(old, new, default=getattr(SECTIONS[section](), inner), value=each)
    return teacher


def _choose_backends(raw: dict[str, Any], findings: Findings) -> None:
    """Sets the backend of every teacher that names none and has the section of one, in place."""
    teachers = raw.get("teachers")
    for i, teacher in enumerate(teachers if isinstance(teachers, list) else ()):
        if not isinstance(teacher, dict) or "backend" in teacher:
            continue
        key = f"teachers.{i}"
        given = [name for name in SECTIONS if name in teacher and f"{key}.{name}" in findings.sections]
        if len(given) > 1:
            remedy = f"leave one of the sections out, or set {key}.backend"
            findings.add(key, "a teacher has one backend", " and ".join(given), remedy)
        elif given:
            teacher["backend"] = given[0]


def _plain(value: Any) -> Any:
    """A Python value as YAML would have given it: paths as texts, tuples as lists, sections of the schema as dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return fspath(value) if isinstance(value, PathLike) else value


def _parse(key: str, text: str) -> Any:
    """The value of an override, by the type of its setting in the schema."""
    # Settings of text or choice take it as typed, without surrounding quotes; where null is allowed, `null`, `~` and an empty text are
    # None. All other settings, and unknown ones, read it as YAML.
    plain, optional = unwrap(kind_at(Config, key))
    if plain is str or get_origin(plain) is Literal:
        if optional and text in ("null", "~", ""):
            return None
        if not (len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"):
            return text
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except Exception:  # not YAML: taken as text, which the type check rejects if it must
        return text
    return parsed["value"] if isinstance(parsed, dict) and list(parsed) == ["value"] else text


def _place(raw: dict[str, Any], key: str, value: Any, findings: Findings) -> None:
    """Sets one value at a dotted key of the raw mapping, in place, creating what is missing on the way."""
    # A list may grow by one entry; a section given as a value is merged into the one below it. A key that leads into a single value, or a
    # list index that does not fit, is reported in `findings` and the value is not set.
    parts = key.split(".")
    node: Any = raw
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        slot: Any = part
        if isinstance(node, list):
            slot = _index(node, part, here, key, findings)
            if slot is None:
                return
            if slot == len(node):
                node.append(None)
        elif not isinstance(node, dict):
            findings.add(key, f"{here} is a single value and has no parts", remedy=f"use {here}=...")
            return
        if depth == len(parts) - 1:
            node[slot] = merge(_get(node, slot), value, kind_at(Config, key)) if isinstance(value, dict) else value
            return
        if _get(node, slot) is None:
            node[slot] = _new_container(".".join(parts[: depth + 1]))
        node = node[slot]


def _get(node: Any, slot: Any) -> Any:
    """The child of a node: of a list by position, of a mapping by key; None if a mapping has no such key."""
    return node[slot] if isinstance(node, list) else node.get(slot)


def _index(node: list, part: str, here: str, key: str, findings: Findings) -> int | None:
    """The position in a list that a part of a dotted key names, which may be its length: an entry is to be added."""
    # None with the reason in `findings` if the part is no number or a larger one.
    if not part.isdecimal():
        findings.add(key, f"{here} is a list; its entries are numbered from 0", remedy=f"for example {here}.0")
        return None
    if int(part) > len(node):
        entries = "entry" if len(node) == 1 else "entries"
        findings.add(key, f"{here} has {len(node)} {entries}", remedy=f"the next one to add is {here}.{len(node)}")
        return None
    return int(part)


def _new_container(path: str) -> Any:
    """Start value for a dotted path that the file does not set: a list or an empty section."""
    # A list is a copy of the schema's default, with sections as dicts; within another list it is empty.
    kind = kind_at(Config, path)
    if item_kind(kind) is None:
        return {}
    node: Any = Config()
    for part in path.split("."):
        if isinstance(node, list):
            return []
        node = getattr(node, part, None)
    return [asdict(entry) if is_dataclass(entry) else entry for entry in node or ()]  # type: ignore[arg-type]


def merge(below: Any, above: Any, kind: Any = None) -> Any:
    """`below` overridden by `above`: mappings key by key, everything else as a whole.

    Where `below` is a mapping, None in `above` changes nothing, unless the section may be null. Neither argument is
    modified, but the result shares parts with them.

    Args:
        kind: type of the section in the schema; None: not known.
    """
    section, optional = unwrap(kind)
    if isinstance(below, dict) and above is None and not optional:
        return below
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = dict(below)
    for key, value in above.items():
        inner = hints(section).get(key) if is_dataclass(section) else None  # type: ignore[arg-type]
        merged[key] = merge(below[key], value, inner) if key in below else value
    return merged


# All of it, in order.

UNNAMED = "distill"
"""`run.name` of a configuration that is no file and does not set it."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file, changed by overrides, with references resolved.

    Checks keys and types only; the rules that values must obey are in `rules.problems`. `run.name` defaults to the
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
        The configuration (None if a file could not be read) and the problems. A required value that is missing is `"???"`.
    """
    findings = Findings()
    raw: Any = {}
    if isinstance(source, Mapping):
        apply_settings(raw, source, findings)
    else:
        raw = _in_sections(_read_chain(Path(source), findings, ()), "", findings)
    if raw is None:
        return None, findings
    apply_overrides(raw, overrides, findings)
    apply_settings(raw, settings or {}, findings)
    _choose_backends(raw, findings)
    _name_run(raw, UNNAMED if isinstance(source, Mapping) else Path(source).stem)
    resolved = resolve(raw, partial(_lookup, raw), findings)
    config = build(Config, resolved, findings)
    replace_paths(config, partial(_possible, findings))
    for teacher in config.teachers:
        if teacher.store.path and teacher.model is None:  # as a model that is not needed is read
            teacher.model = teacher.store.teacher_folder
    return config, findings


def texts(path: str | Path, overrides: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Every text of a file's configuration, with its dotted key, before references are resolved; nothing of a file that
    cannot be read."""
    findings = Findings()
    raw = _in_sections(_read_chain(Path(path), findings, ()) or {}, "", findings)
    apply_overrides(raw, overrides, findings)
    nodes: list[tuple[str, Any]] = [("", raw)]
    while nodes:
        key, node = nodes.pop(0)
        if isinstance(node, str):
            yield key, node
        elif isinstance(node, dict | list):
            inner = node.items() if isinstance(node, dict) else enumerate(node)
            nodes += [(join(key, name), value) for name, value in inner]


def _possible(findings: Findings, key: str, path: str | None) -> str | None:
    """The path, with its home in place of `~`; `~user` of an unknown user is a problem, and becomes the missing folder `/~user` for further checks."""
    # So is a name that no file can have; the setting is then null, or `"???"` where it may not be null.
    longest = max((path or "").split("/"), key=lambda name: len(name.encode(errors="replace")))
    if (size := len(longest.encode(errors="replace"))) > 255:
        rule = f"a name in a path may have 255 bytes; one has {size}"
        findings.add(key, rule, f"{longest[:60]!r}...", "check the path")
        return None if unwrap(kind_at(Config, key))[1] else MISSING
    try:
        return str(Path(path).expanduser()) if path and path.startswith("~") else path
    except RuntimeError:
        findings.add(key, "must not begin with the home of an unknown user", path, "write out the folder")
        return f"/{path}"


def _read_chain(path: Path, findings: Findings, chain: tuple[Path, ...]) -> dict[str, Any] | None:
    """The file merged over the file that it extends, and so on, as a raw mapping; None with the reason in `findings`."""
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
    """The contents of one YAML file as nested dicts and lists with references unresolved; {} for an empty file."""
    # None with the reason in `findings` if the file is missing, unreadable, not UTF-8, not YAML, or not a mapping.
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
    """Place and reason of a YAML error, from an exception of any class."""
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
    """The raw value at a dotted key, references in it unresolved, or else the schema's default."""
    parts = _today(key, None).split(".")
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
