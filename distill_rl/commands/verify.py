"""distill-rl verify teacher: what quantised weights cost a teacher, measured on a sample of the run's documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import Facts
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.data.batch.tokenization import Encoded, Tokenization
from distill_rl.data.reading.sources import open_source
from distill_rl.errors import DataError, problem
from distill_rl.observe.log import printable, say, say_of_data, setup_console, status
from distill_rl.preflight import gather
from distill_rl.run.opened import OpenedRun
from distill_rl.system.files import write_json

if TYPE_CHECKING:
    from distill_rl.teacher.comparison import TeacherComparison


def teacher(path: str, overrides: Sequence[str], *, rows: int, full: str | None, out: Path | None) -> int:
    """Compares every teacher with quantised weights with itself without, prints a table of each, and returns 0.

    The two are loaded one after the other, on the first GPU or else on the CPU, by this process alone.

    Args:
        rows: documents of the sample, evenly spaced over the data.
        full: folder of the original weights, for a teacher that is loaded as it is stored.
        out: JSON file for the figures; None: none.

    Raises:
        ConfigError: bad input, or no teacher with quantised weights.
        DataError: no document of the sample has a token to train on.
    """
    setup_console()
    with status(f"checking  {path}"):
        checked = gather(path, overrides, clean=None, say=say_of_data, trains=False, ask=False)
        config = checked.require_valid(lambda config: _problems(config, rows=rows, full=full))
        run = checked.require_run()
    import torch

    from distill_rl.teacher.comparison import compare

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    found = []
    for settings, tokenizer, vocabulary_size in _quantized(run, checked.facts):
        documents = _documents(run, tokenizer, rows)
        say(f"comparing {settings.name} with and without quantization: {settings.quantization}, on {device}")
        comparison = compare(config, settings, documents, vocabulary_size=vocabulary_size, device=device, full=full)
        print("\n".join(map(printable, lines(comparison))))
        found.append(asdict(comparison) | {"device": device.type})
    if out is not None:
        write_json(out, {"teachers": found})
    return 0


def lines(found: TeacherComparison) -> Iterator[str]:
    """A comparison as a table."""
    yield f"teacher {found.teacher}: {found.quantization}, {found.documents} documents, {found.tokens:,} positions"
    yield f"  KL(full || quantised)       {found.kl_mean:.3g} nats per token, 99 % below {found.kl_p99:.3g}"
    yield f"  same most likely token      {found.top1_agreement:.2%}"
    yield f"  probability of the top {found.top_k:<4} {found.mass_full:.4f}, of the quantised teacher's {found.mass_quantized:.4f}"
    yield f"  {'':<20}{'full':>14}{found.quantization:>14}"
    figures = [
        ("weights, MiB", found.full.weight_bytes / 2**20, found.quantized.weight_bytes / 2**20),
        ("  of them quantised", found.full.quantized_bytes / 2**20, found.quantized.quantized_bytes / 2**20),
        ("peak memory, MiB", found.full.peak_bytes / 2**20, found.quantized.peak_bytes / 2**20),
        ("tokens/s", found.full.tokens_per_s, found.quantized.tokens_per_s),
    ]
    if found.quantization == AS_STORED:
        del figures[1]  # the packages do not say it
    for name, full, other in figures:
        yield f"  {name:<20}{full:>14,.1f}{other:>14,.1f}"


def _problems(config: Config, *, rows: int, full: str | None) -> Iterator[str]:
    teachers = [settings for settings in config.running_teachers if _is_quantized(settings)]
    stored = [settings.name for settings in teachers if settings.quantization == AS_STORED]
    if rows < 1:
        yield problem("--rows", "must be 1 or more", rows)
    if not teachers:
        remedy = "for example teachers.0.quantization=int8"
        yield problem("teachers[].quantization", "a teacher must have it, to be compared", None, remedy)
    if stored and full is None:
        rule = f"needs the original weights of {stored[0]}, which its quantised checkpoint does not hold"
        yield problem("--full", rule, "not given", "name their folder")
    if full is not None and (len(stored) != 1 or len(teachers) != 1):
        rule = "names the original weights of the one teacher with quantization as_stored"
        yield problem("--full", rule, full, "leave it out, or compare that teacher alone")


def _is_quantized(settings: TeacherConfig) -> bool:
    return settings.quantization is not None and settings.origin.runs_model


def _quantized(run: OpenedRun, facts: Facts) -> Iterator[tuple[TeacherConfig, Any, int]]:
    """Yields every teacher to compare, the tokenizer whose ids it reads in the run, and how many of these count."""
    for teacher, known in zip(run.teachers, facts.teachers):
        if _is_quantized(teacher.settings):
            reader = run.student if teacher.cross_tokenizer_loss is None else teacher
            assert known.vocabulary_size is not None
            yield teacher.settings, reader.tokenizer, known.vocabulary_size


def _documents(run: OpenedRun, tokenizer: Any, rows: int) -> list[Encoded]:
    """At most `rows` evenly spaced documents with something to train on, cut at `data.max_length`."""
    config = run.config
    source = open_source(config.data)  # what is held out for validation belongs to the sample, too
    tokenization = Tokenization(tokenizer, config.data, format=source.kind, stops=run.student.stops)
    places = sorted({i * len(source) // rows for i in range(rows)}) if len(source) else []
    documents = []
    for place in places:
        try:
            document = tokenization.encode(source[place])
        except DataError:
            if config.data.bad_rows != "skip":
                raise
            continue
        if document.has_labels:
            documents.append(document)
    if not documents:
        raise DataError("data", "the sample must have tokens to train on", f"{len(places)} rows without any")
    return documents
