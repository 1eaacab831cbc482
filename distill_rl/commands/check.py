"""distill-rl check: the resolved configuration, what follows from it, and every problem. Changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distill_rl.config.derive import GIB, DerivedSizes, sizes
from distill_rl.config.facts import Facts, running_teachers
from distill_rl.config.load import to_yaml
from distill_rl.config.schema import Config
from distill_rl.config.validate import notes, problems
from distill_rl.errors import ConfigError
from distill_rl.observe.log import printable
from distill_rl.preflight import gather
from distill_rl.transport.choose import expected


def check(path: str, overrides: Sequence[str]) -> int:
    """Prints; 0 when a run could start (or only a hub could not be asked).

    Raises:
        ConfigError: every problem found, after the configuration has been printed.
    """
    checked = gather(path, overrides, clean=True, download=False)
    if checked.config is not None:
        print(to_yaml(checked.config), end="")
        if not problems(checked.config):  # of settings that break a rule no size follows
            print("\n".join(f"# {line}" for line in summary(checked.config, checked.facts)))
    for name in checked.unreachable:
        print(f"# not checked: {printable(name)}")
    sys.stdout.flush()
    if checked.problems:
        raise ConfigError.many(checked.problems)
    return 0


def summary(config: Config, facts: Facts) -> list[str]:
    """Derived sizes as lines a person can read."""
    derived = sizes(config, facts)
    lines = [
        f"batch      {derived.documents_per_step} documents in at most {derived.micro_batches} micro-batches per rank, at most {derived.max_tokens_per_step:,} tokens",
        f"run        {_steps(derived)} over {_count(facts.num_documents)} documents",
        *(f"actors     {role}: {layout}" for role, layout in derived.world.items()),
        f"transport  {_transport(config, facts)}",
    ]
    for method, running in zip(facts.cross_tokenizer_losses, running_teachers(config)):
        if method is not None:
            lines.append(
                f"teacher    {running.name}: another tokenizer, loss {method} over chunks of text; rows are padded, not packed"
            )
    for teacher in derived.teachers:
        lines.append(
            f"targets    {teacher.name}: {teacher.entries:,} entries, {teacher.bytes_per_token} bytes per token, "
            f"at most {_bytes(teacher.bytes_per_slot)} per slot, {_bytes(teacher.ring_bytes)} in a ring of {teacher.slots}"
        )
    for worker in derived.memory:
        parts = ", ".join(f"{part} {_bytes(count)}" for part, count in worker.parts.items() if count)
        lines.append(f"memory     {worker.worker}: about {_bytes(worker.total)} in each of {worker.count} ({parts})")
    if derived.checkpoint_bytes is not None:
        lines.append(
            f"disk       about {_bytes(derived.checkpoint_bytes)} per checkpoint, {config.checkpoint.keep_last} kept"
        )
    return lines + [f"note       {printable(note)}" for note in notes(config)]


def _transport(config: Config, facts: Facts) -> str:
    if config.ray.address is not None:
        return f"{config.transport}: proven, or chosen, when the cluster has been joined"
    try:
        choice = expected(config.transport, gpus=facts.gpus)
    except ConfigError:
        return f"{config.transport}: cannot work here"
    return f"{choice.name}: {choice.reason}"


def _steps(derived: DerivedSizes) -> str:
    if derived.total_steps is None:
        return "steps not known before the data are read"
    return f"{derived.total_steps:,} steps" + (f" = {derived.epochs:.2f} epochs" if derived.epochs is not None else "")


def _count(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"


def _bytes(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"
