"""Checks that a student and its teachers share a vocabulary or can be compared across tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distill_rl.align import TokenAligner, Vocabulary, audit
from distill_rl.align.chats import texts_of
from distill_rl.align.projection import load_projection
from distill_rl.align.vocabulary import common_vocabulary
from distill_rl.config.derive import EXPORTS
from distill_rl.config.schema import Config
from distill_rl.data.reading.layouts import template_options
from distill_rl.data.routing import asked, weights_of
from distill_rl.errors import ConfigError, problem
from distill_rl.models.files import ADVICE, unwritten_beginning
from distill_rl.run.opened import Comparison, OpenedModel, OpenedRun, OpenedTeacher, RunFindings
from distill_rl.run.shared_vocabulary import some

ALIGNED_ROWS = 32
ALIGNED_CHARACTERS = 2000
"""Documents, and characters of each text, that are aligned to see what two tokenizers have in common."""


def compare_vocabularies(run: OpenedRun) -> tuple[list[Comparison | None], list[str]]:
    """How every teacher is compared with the student, and problems with the vocabularies, one line each.

    These are a tokenizer that the settings do not allow, an unsuitable export or common vocabulary, and a `loss.top_k`
    above the vocabulary. A pair that cannot be compared is None; so is one of which a tokenizer could not be read.
    """
    config, student = run.config, run.student
    comparisons: list[Comparison | None] = []
    problems: list[str] = []
    sizes = [student.vocabulary_size]  # of what is compared token by token
    has_topk = False
    for teacher in run.teachers:
        comparison = None
        if student.tokenizer_hash and teacher.tokenizer_hash:
            try:
                comparison = Comparison.of(config, student, teacher)
            except ConfigError as error:
                hashes = f"student {student.tokenizer_hash[:12]}, {teacher.name} {teacher.tokenizer_hash[:12]}"
                problems.append(problem(teacher.key, error.rule, hashes, error.remedy))
        comparisons.append(comparison)
        if comparison is None:
            continue
        if comparison.loss is not None:
            problems += _pair_problems(config, comparison.loss, student, teacher)
            continue
        assert comparison.shared is not None
        sizes.append(comparison.shared.size)
        has_topk = has_topk or teacher.settings.export == "topk"
    size = min((size for size in sizes if size is not None), default=0)
    if has_topk and config.loss.top_k > size:
        rule = f"must not exceed the {size} ids of the student's tokenizer"
        problems.append(problem("loss.top_k", rule, config.loss.top_k, f"use {size} or less"))
    return comparisons, problems


def _pair_problems(config: Config, method: str, student: OpenedModel, teacher: OpenedTeacher) -> Iterator[str]:
    """Yields what is against the cross-tokenizer loss `method` with a teacher, one line each."""
    settings = teacher.settings
    if settings.export not in EXPORTS[method]:
        remedy = f"set {teacher.key}.export={EXPORTS[method][0]}, or another loss.cross_tokenizer"
        rule = f"the loss {method} needs {' or '.join(EXPORTS[method])}"
        yield problem(f"{teacher.key}.export", rule, settings.export, remedy)
    for model in (student, teacher):
        if model.beyond:
            rule = "must have an embedding row for every token where texts are compared over chunks"
            remedy = f"give {model.key}.tokenizer a copy of its tokenizer without these added tokens"
            yield problem(f"{model.key}.model", rule, f"none for {some(model.beyond)}", remedy)
    size = teacher.vocabulary_size
    if settings.export == "topk" and size is not None and config.loss.top_k > size:
        rule = f"must not exceed the {size} ids of the tokenizer of {teacher.name}"
        yield problem("loss.top_k", rule, config.loss.top_k, f"use {size} or less")
    findings = RunFindings()
    vocabularies = [
        findings.attempt(f"{model.key}.tokenizer", partial(Vocabulary.from_tokenizer, model.tokenizer))
        for model in (student, teacher)
    ]
    yield from findings.problems
    if findings.problems:
        return
    common, _ = common_vocabulary(*vocabularies)
    # Special tokens alone, such as the end of a text, do not make a common vocabulary.
    if method not in ("alm", "uld") and vocabularies[0].special[common].all():
        rule = f"the loss {method} compares ids that spell the same bytes in both tokenizers; the common vocabulary is empty"
        yield problem(teacher.key, rule, None, "use loss.cross_tokenizer=alm, or check the tokenizers")


def beginning_notes(kind: str | None, models: Sequence[OpenedModel]) -> Iterator[str]:
    """Yields a line for each tokenizer that does not write the first token of its model; chat templates write it themselves.

    Args:
        kind: of the data, `text` or `messages`; None: not known.
    """
    if kind != "text":
        return
    for model in models:
        if model.tokenizer is not None and unwritten_beginning(model.tokenizer) is not None:
            found = f"{model.key}.tokenizer: writes no {model.tokenizer.bos_token} before a text"
            effect = "a model that was trained with it is much worse without"
            yield f"{found}; {effect}; distill-rl try measures both ({ADVICE})"


def projection_problems(run: OpenedRun) -> Iterator[str]:
    """Yields problems with a `projection.path`, which must fit the only teacher with another tokenizer, one line each."""
    path, student, crossing = run.config.projection.path, run.student, run.crossing
    if path is None:
        return
    if len(crossing) != 1:
        rule = f"fits one teacher with another tokenizer; {len(crossing)} of the teachers have one"
        yield problem("projection.path", rule, path, "leave it out: projections are built and kept")
        return
    (teacher,) = crossing
    if student.config is None or teacher.config is None:
        return

    def read() -> None:
        try:
            load_projection(
                Path(path).expanduser(),
                student_hash=Vocabulary.from_tokenizer(student.tokenizer).hash,
                teacher_hash=Vocabulary.from_tokenizer(teacher.tokenizer).hash,
                student_columns=student.config.vocab_size,
                teacher_columns=teacher.config.vocab_size,
            )
        except ValueError as error:
            raise ConfigError("projection.path", str(error)) from error

    findings = RunFindings()
    findings.attempt("projection.path", read)
    yield from findings.problems


def template_problems(run: OpenedRun) -> Iterator[str]:
    """Yields tokenizers without the chat template that they need to turn chat messages into text, one line each.

    These are the student's, and those of teachers with another tokenizer.
    """
    kind, student = run.train.kind, run.student
    if kind != "messages":
        return
    for model in (student, *run.crossing):
        if model.tokenizer is not None and not model.tokenizer.chat_template:
            owner = "the student's tokenizer" if model is student else f"the tokenizer of {model.name}"
            rule = f"chat messages need a chat template; {owner} has none"
            yield problem("data.format", rule, kind, f"set {model.key}.tokenizer to one that has a template")


def check_alignment(run: OpenedRun, source: Sequence[Any], findings: RunFindings) -> None:
    """Aligns a sample of documents with every cross-tokenizer teacher, sets their `advice`, and adds what is wrong to the
    findings.

    If none aligns anywhere, training would have no effect; a chat that a template refuses would end the run later.
    """
    student = run.student
    for i, teacher in enumerate(run.teachers):
        if teacher.cross_tokenizer_loss is not None and student.tokenizer is not None and teacher.tokenizer is not None:
            documents = [document for document in source if asked(weights_of(document), i)]
            aligned = partial(_align, run.config, documents, student, teacher)
            teacher.advice = findings.attempt(teacher.key, aligned) or ""


def _align(config: Config, source: Any, student: OpenedModel, teacher: OpenedTeacher) -> str:
    """Which loss suits a pair, by the first ALIGNED_ROWS documents; empty if they have no content."""
    settings, tokenizers = config.aligner, (student.tokenizer, teacher.tokenizer)
    stops: Any = {"student_stops": student.stops, "teacher_stops": teacher.stops}
    aligner = TokenAligner(*tokenizers, settings.method, band=settings.dp.band, **stops)
    rows = [source[i] for i in range(min(len(source), ALIGNED_ROWS))]
    num_chunks = 0
    for row in rows:
        try:
            if "messages" in row:
                alignment = aligner.align_messages(row["messages"], options=template_options(row))
            else:
                alignment = aligner.align(row["text"][:ALIGNED_CHARACTERS])
        except Exception as error:  # a chat template can raise anything
            rule = f"must be readable by the student and {teacher.name}"
            raise ConfigError(f"row {row['row']}", rule, f"{type(error).__name__}: {error}") from error
        num_chunks += alignment.num_chunks
    texts = [text[:ALIGNED_CHARACTERS] for row in rows for text in texts_of(row)]
    if texts and not num_chunks:
        rule = f"none of {len(rows)} documents aligns between the student's tokenizer and that of {teacher.name}"
        raise ConfigError("the tokenizers", rule, None, "see `distill-rl align`, or set aligner.method=auto")
    return audit(aligner, texts).advice if texts else ""
