"""The rules of `slurm`: what sbatch would refuse, or the batch script would not survive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from distill_rl.config.schema import Config
from distill_rl.config.schema.slurm import OPTIONS, SlurmConfig
from distill_rl.errors import problem

_MAIL = {"NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
         "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS"}  # fmt: skip
_OF_THE_SCRIPT = {
    "signal",
    "requeue",
    "no-requeue",
    "open-mode",
    "output",
    "chdir",
    "ntasks",
    "ntasks-per-node",
    "array",
    "export",
}
"""Options that the batch script needs as they are, or that `--dry-run` sets."""
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


def slurm_problems(config: Config) -> Iterator[str]:
    """Yields problems of the section, one line each."""
    slurm = config.slurm
    texts = [(field.name, getattr(slurm, field.name)) for field in fields(SlurmConfig)]
    texts += [(f"{name}.{i}", line) for name in ("setup", "extra") for i, line in enumerate(getattr(slurm, name))]
    for name, text in texts:
        if isinstance(text, str) and (not text.strip() or not text.isprintable()):
            yield problem(
                f"slurm.{name}", "must be one line of text", repr(text), "write a list of lines" if "." in name else ""
            )
        elif isinstance(text, str) and name in OPTIONS and ("\\" in text or '"' in text):
            yield problem(f"slurm.{name}", "must have neither backslashes nor double quotes, for #SBATCH lines", text)
    for name in ("mem", "mem_per_cpu"):
        if (size := getattr(slurm, name)) is not None and not _MEMORY.fullmatch(size):
            yield problem(f"slurm.{name}", "must be a number with K, M, G or T", size, "such as 200G")
    for one, other in (("mem", "mem_per_cpu"), ("gres", "gpus_per_node")):
        if getattr(slurm, one) is not None and getattr(slurm, other) is not None:
            yield problem(f"slurm.{one}", f"excludes slurm.{other}", getattr(slurm, one), "leave one of the two out")
    if slurm.mail_type is not None and (unknown := {*slurm.mail_type.split(",")} - _MAIL):
        yield problem("slurm.mail_type", f"must be of {', '.join(sorted(_MAIL))}", ",".join(sorted(unknown)))
    if slurm.time is not None:
        limit = seconds(slurm.time)
        if limit is None:
            yield problem("slurm.time", "must be minutes, H:MM:SS or D-HH:MM:SS", slurm.time, 'such as "04:00:00"')
        elif limit <= slurm.signal_s:
            rule = f"must be more than slurm.signal_s={slurm.signal_s}: the job would be told to end when it starts"
            yield problem("slurm.time", rule, slurm.time, "raise it, or lower slurm.signal_s")
    for i, line in enumerate(slurm.extra):
        option = re.match(r"--([a-z-]+)", line)
        if option is None:
            yield problem(f"slurm.extra.{i}", "must be a long option of sbatch", line, "such as --licenses=scratch:1")
        elif option[1] in OPTIONS.values():
            key = next(key for key, name in OPTIONS.items() if name == option[1])
            yield problem(f"slurm.extra.{i}", f"--{option[1]} has a setting of its own", line, f"set slurm.{key}")
        elif option[1] in _OF_THE_SCRIPT:
            remedy = "set slurm.signal_s" if option[1] == "signal" else "leave it out"
            yield problem(f"slurm.extra.{i}", f"--{option[1]} is set by the batch script", line, remedy)


def seconds(limit: str) -> int | None:
    """A time limit of Slurm's in seconds; None if it is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return None
    days, *rest = found.groups()
    first, second, third = (None if part is None else int(part) for part in rest)
    if days is not None:  # D-H[:M[:S]]
        return ((int(days) * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:  # H:M:S
        return ((first or 0) * 60 + (second or 0)) * 60 + third
    return (first or 0) * 60 + (second or 0)  # M[:S]
