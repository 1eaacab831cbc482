"""The folder of a trial: two run directories, the configuration, the result and the report."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distill_rl.config.save import escaped
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import problem
from distill_rl.observe.log import printable
from distill_rl.system.files import write_atomic
from distill_rl.system.redact import redact
from distill_rl.types import RunPaths

WITH, WITHOUT = "with-teacher", "without-teacher"
"""Names of the two run directories."""
CONFIGURATION, RESULT, REPORT = "try.yaml", "result.json", "report.html"
_NAME = re.compile(r"[^\w.-]+")


class TrialPaths:
    """The paths in the folder of a trial."""

    def __init__(self, root: Path):
        self.root = root
        self.configuration, self.result, self.report = root / CONFIGURATION, root / RESULT, root / REPORT
        self.taught, self.control = RunPaths(root / WITH), RunPaths(root / WITHOUT)


def default_out(student: str, teacher: str) -> Path:
    """The folder of a trial that is given none."""
    names = (_NAME.sub("-", Path(name).name) or "model" for name in (student, teacher))
    return Path("runs") / f"try-{'-'.join(names)}"


def out_problems(root: Path, *, clean: bool) -> Iterator[str]:
    """Yields at most one problem: the folder of a new trial is a file or holds something.

    Args:
        clean: whether an earlier trial in it will be deleted.
    """
    if root.exists() and not root.is_dir():
        yield problem(f"{root}", "the folder of a trial must be a folder", "a file", "choose another --out")
    elif root.is_dir() and any(root.iterdir()):
        is_trial = (root / CONFIGURATION).is_file()
        if clean and not is_trial:
            rule = f"holds files and no earlier trial (no {CONFIGURATION})"
            yield problem(f"{root}", rule, remedy="choose another --out")
        elif not clean:
            remedy = "start over with --clean, or choose another --out" if is_trial else "choose another --out"
            yield problem(f"{root}", "the folder is in use", remedy=remedy)


def begin(paths: TrialPaths) -> None:
    """Makes the folder of a trial, without what an earlier one left."""
    if paths.root.is_dir():
        shutil.rmtree(paths.root)
    paths.root.mkdir(parents=True)


def write_configuration(path: Path, config: Config, comments: Sequence[str]) -> None:
    """Writes a configuration for people: settings that differ from their defaults, below lines of comment.

    Secrets are redacted.
    """
    tree = escaped(redact(differing(asdict(config), asdict(Config()))))
    lines = [f"# {printable(comment)}".rstrip() for comment in comments]
    write_atomic(path, "\n".join(lines) + "\n\n" + OmegaConf.to_yaml(OmegaConf.create(tree)))


def differing(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration's tree that differ from its defaults, in their order; of teachers, theirs."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if value == default:
            continue
        if key == "teachers":
            found[key] = [differing(teacher, asdict(TeacherConfig())) for teacher in value]
        elif isinstance(value, dict) and isinstance(default, dict) and default:
            found[key] = differing(value, default)
        else:
            found[key] = value
    return found
