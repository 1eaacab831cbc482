"""distill-rl check: prints the resolved configuration, derived sizes and every problem. Changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from distill_rl.config.derive import GIB, DerivedSizes, sizes
from distill_rl.config.facts import Facts, ModelFacts
from distill_rl.config.memory import fused_chunk, fused_loss, micro_batch_logits, teacher_logits
from distill_rl.config.rules import notes
from distill_rl.config.save import to_yaml
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError
from distill_rl.observe.log import printable, status
from distill_rl.preflight import gather
from distill_rl.transport.choose import expected


def check(path: str, overrides: Sequence[str]) -> int:
    """Prints the resolved configuration and, if its settings are valid, the derived sizes; starts nothing.

    Downloads no weights or data.

    Returns 0 if a run could start, even if a hub could not be reached to check a name; an existing run directory is no
    problem.

    Raises:
        ConfigError: all problems found, after the configuration has been printed, if it could be read at all.
    """
    reading: list[str] = []
    with status(f"checking  {path}"):
        checked = gather(path, overrides, clean=None, download=False, say=reading.append)
    if checked.opened is not None:
        config = checked.opened.config
        print(to_yaml(config), end="")
        if not checked.opened.rules:  # sizes of invalid settings are meaningless
            print("\n".join(f"# {line}" for line in summary(config, checked.facts)))
    found = (("data       ", reading), ("note       ", checked.notes), ("not checked: ", checked.unreachable))
    for begin, lines in found:
        for line in lines:
            print(f"# {begin}{printable(line)}")
    sys.stdout.flush()
    ConfigError.raise_all(checked.problems)
    return 0


def summary(config: Config, facts: Facts) -> list[str]:
    """Derived sizes as readable lines: batch, run, actors, transport, teachers, targets, memory, disk, then the notes.

    For a configuration without problems of its own. What is not known is left out or called unknown.
    """
    derived = sizes(config, facts)
    documents = "an unknown number of" if facts.num_documents is None else f"{facts.num_documents:,}"
    lines = [
        f"batch      {_batch(config, facts, derived)}",
        f"run        {_steps(config, derived)} over {documents} documents",
        *(f"data       {printable(source)}" for source in facts.sources),
        *([] if facts.step is None else [f"rows       {facts.step}"]),
        *(f"actors     {role}: {layout}" for role, layout in derived.world.items()),
        f"transport  {_transport(config, facts)}",
    ]
    on_gpu = facts.gpus > 0
    if (student := facts.student) is not None:
        if student.adapters is not None:
            lines.append(f"trained    {student.adapters}")
        elif student.tensors:
            count = f"{student.decayed} of {student.tensors} tensors in the student's files"
            lines.append(f"decayed    {count}, by {config.optimizer.weight_decay:g}; no norms, no biases")
        lines.append(f"logits     student: {_logits(config, student, on_gpu=on_gpu)}")
    for teacher, known in facts.by_teacher(config):
        if known.model is not None and not teacher.origin.engine:
            size = _bytes(teacher_logits(config, teacher, known.model, on_gpu=on_gpu))
            lines.append(f"logits     {teacher.name}: at most {size} at once")
        if (loss := known.cross_tokenizer_loss) is not None:
            lines.append(f"teacher    {teacher.name}: another tokenizer, loss {loss} over chunks of text")
            if known.advice:
                lines.append(f"suggested  {teacher.name}: {known.advice}")
        elif known.tokens_apart:
            lines.append(f"teacher    {teacher.name}: {printable(known.tokens_apart)}")
    for targets in derived.teachers:
        lines.append(
            f"targets    {targets.name}: {targets.entries:,} entries, {targets.bytes_per_token} bytes per token, "
            f"at most {_bytes(targets.bytes_per_slot)} per slot, {_bytes(targets.ring_bytes)} in a ring of {targets.slots}"
        )
    for worker in derived.memory:
        total, parts = _sum(worker.peak)
        lines.append(f"memory     {worker.worker}: about {total} in each of {worker.count} ({parts})")
    for teacher in config.running_teachers:
        if teacher.origin.engine:
            lines.append(f"memory     {teacher.name}: not estimated; {teacher.origin.takes(on_gpu=on_gpu)}")
    if derived.checkpoint_bytes is not None:
        size = _bytes(derived.checkpoint_bytes)
        lines.append(f"disk       about {size} per checkpoint, {config.checkpoint.keep_last} kept")
    if facts.gpus or config.ray.address:  # what is predicted are times on GPUs
        from distill_rl.scaling.splits import suggestions

        lines += [f"suggested  {line}" for line in suggestions(config, facts)]
    return lines + [f"note       {printable(note)}" for note in notes(config, facts)]


def _batch(config: Config, facts: Facts, derived: DerivedSizes) -> str:
    documents = config.train.global_batch_size
    if facts.data_kind is not None and config.splits_documents(facts.data_kind):
        return f"{documents} documents; those longer than a row of {config.data.max_length:,} tokens are split"
    tokens = documents * config.data.max_length
    return f"{documents} documents in at most {derived.micro_batches} micro-batches per rank, at most {tokens:,} tokens"


def _transport(config: Config, facts: Facts) -> str:
    """The transport that a run on this machine would use, and why; `cannot work here` for one that cannot."""
    if config.ray.address is not None:
        return f"{config.transport}: chosen or checked after joining the cluster"
    try:
        choice = expected(config.transport, gpus=facts.gpus)
    except ConfigError:
        return f"{config.transport}: cannot work here"
    return f"{choice.name}: {choice.reason}"


def _logits(config: Config, student: ModelFacts, *, on_gpu: bool) -> str:
    """How the student's logits are made (`loss.fused`), and what they take with all that is computed from them."""
    if fused_loss(config, student.vocabulary_columns, known_head=student.known_head, on_gpu=on_gpu):
        size = _bytes(fused_chunk(config, student.vocabulary_columns, on_gpu=on_gpu))
        return f"made in the loss, a few rows at a time: at most {size} with their gradient"
    size = _bytes(3 * micro_batch_logits(config, student.vocabulary_columns, on_gpu=on_gpu))
    return f"all of a micro-batch at once: {size} with their gradient"


def _steps(config: Config, derived: DerivedSizes) -> str:
    if config.train.minutes is not None:
        most = "" if derived.total_steps is None else f", at most {derived.total_steps:,},"
        return f"as many steps{most} as take {config.train.minutes:g} minutes"
    if derived.total_steps is None:
        return "number of steps not known until the data are read"
    epochs = "" if derived.epochs is None else f" = {derived.epochs:.2f} epochs"
    return f"{derived.total_steps:,} steps{epochs}"


def _sum(parts: Mapping[str, int]) -> tuple[str, str]:
    """A sum of bytes and its parts as text, in one unit and rounded so that what is printed adds up."""
    # Parts that round to nothing are left out.
    total = sum(parts.values())
    unit, name, digits = (GIB, "GiB", 2) if total >= GIB else (2**20, "MiB", 1)
    steps = {part: count * 10**digits / unit for part, count in parts.items()}
    rounded = {part: int(count) for part, count in steps.items()}
    missing = round(sum(steps.values())) - sum(rounded.values())
    for part in sorted(steps, key=lambda part: rounded[part] - steps[part])[:missing]:
        rounded[part] += 1
    texts = {part: f"{count / 10**digits:.{digits}f}" for part, count in rounded.items() if count}
    whole = f"{sum(rounded.values()) / 10**digits:.{digits}f} {name}"
    return whole, " + ".join(f"{part} {text}" for part, text in texts.items())


def _bytes(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"
