"""Checks that a student and its teachers share a vocabulary or can be compared across tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distill_rl.config.derive import EXPORTS, cross_tokenizer_loss
from distill_rl.config.facts import TeacherFacts, running_teachers
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError, problem
from distill_rl.preflight.models.opened import Findings, Opened

ALIGNED_ROWS = 32
ALIGNED_CHARACTERS = 2000
"""Documents, and characters of each text, that are aligned to see what two tokenizers have in common."""


def vocabulary_problems(config: Config, student: Opened, teachers: list[Opened]) -> Iterator[str]:
    """Yields problems with the vocabularies, one line each; sets `cross_tokenizer_loss` and `shared` of the teachers on the way.

    These are a tokenizer that the settings do not allow, an unsuitable export or common vocabulary, and a `loss.top_k`
    above the vocabulary. Pairs of which a tokenizer could not be read are skipped. The iterator must be exhausted,
    since `data_facts` and `projection_problems` use what it sets.

    Args:
        teachers: the running teachers, in the order of the configuration.
    """
    from distill_rl.preflight.models.shared_vocabulary import shared_vocabulary

    same_tokenizer_topk = False
    for teacher, settings in zip(teachers, running_teachers(config)):
        student_hash, teacher_hash = student.tokenizer_hash, teacher.tokenizer_hash
        if not student_hash or not teacher_hash:
            continue
        shared = shared_vocabulary(
            student.tokenizer, teacher.tokenizer, student_stops=student.stops, teacher_stops=teacher.stops
        )
        try:
            teacher.cross_tokenizer_loss = cross_tokenizer_loss(config, settings, same=shared is not None)
        except ConfigError as error:
            hashes = f"student {student_hash[:12]}, {teacher.name} {teacher_hash[:12]}"
            yield problem(teacher.key, error.rule, hashes, error.remedy)
            continue
        if teacher.cross_tokenizer_loss is not None:
            yield from _pair_problems(config, settings, student, teacher)
            continue
        assert shared is not None
        assert teacher.vocabulary_size is not None
        teacher.shared = replace(shared, size=min(shared.size, teacher.vocabulary_size))
        if settings.export == "topk":
            same_tokenizer_topk = True
    size = compared_ids(student, teachers)
    if same_tokenizer_topk and size is not None and config.loss.top_k > size:
        rule = f"must not exceed the {size} ids of the student's tokenizer"
        yield problem("loss.top_k", rule, config.loss.top_k, f"use {size} or less")


def compared_ids(student: Opened, teachers: list[Opened]) -> int | None:
    """Number of ids of the student's tokenizer that every teacher which is compared token by token has, too.

    None if the student's tokenizer could not be read. The teachers must have their `shared` set (`vocabulary_problems`).
    """
    if student.vocabulary_size is None:
        return None
    return min([student.vocabulary_size, *(teacher.shared.size for teacher in teachers if teacher.shared is not None)])


def teacher_facts(student: Opened, teachers: list[Opened]) -> Iterator[TeacherFacts]:
    """Yields what is known of every teacher; those that are compared token by token have as many ids as are compared."""
    compared = compared_ids(student, teachers)
    for teacher in teachers:
        size = teacher.vocabulary_size if teacher.shared is None else compared
        yield TeacherFacts(teacher.facts, size, teacher.cross_tokenizer_loss, teacher.advice, str(teacher.shared or ""))


def _pair_problems(config: Config, settings: TeacherConfig, student: Opened, teacher: Opened) -> Iterator[str]:
    """Yields problems with one teacher that has another tokenizer, one line each.

    These are an export that does not suit the loss, a `loss.top_k` above its vocabulary, a tokenizer whose vocabulary
    cannot be read, and, for losses that need one, the lack of a common vocabulary.

    Args:
        settings: those of the teacher.
        teacher: with `cross_tokenizer_loss` set and its tokenizer open, like the student's.
    """
    from distill_rl.align import Vocabulary
    from distill_rl.align.vocabulary import common_vocabulary
    from distill_rl.preflight.models.shared_vocabulary import some

    method = teacher.cross_tokenizer_loss
    assert method is not None
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
    findings = Findings()
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


def beginning_notes(kind: str | None, models: Sequence[Opened]) -> Iterator[str]:
    """Yields a line for each tokenizer that does not write the first token of its model; chat templates write it themselves.

    Args:
        kind: of the data, `text` or `messages`; None: not known.
    """
    from distill_rl.models.files.beginning import ADVICE, unwritten_beginning

    if kind != "text":
        return
    for model in models:
        if model.tokenizer is not None and unwritten_beginning(model.tokenizer) is not None:
            yield (
                f"{model.key}.tokenizer: writes no {model.tokenizer.bos_token} before a text; a model that was trained with it is "
                f"much worse without; distill-rl try measures both ({ADVICE})"
            )


def projection_problems(config: Config, student: Opened, teachers: list[Opened]) -> Iterator[str]:
    """Yields problems with a projection given by the user, which must fit the only teacher with another tokenizer.

    Nothing if `projection.path` is null. The teachers must have their `cross_tokenizer_loss` set
    (`vocabulary_problems`).
    """
    from distill_rl.align import Vocabulary
    from distill_rl.align.projection import load_projection

    path = config.projection.path
    if path is None:
        return
    cross_tokenizer_teachers = [model for model in teachers if model.cross_tokenizer_loss is not None]
    if len(cross_tokenizer_teachers) != 1:
        rule = f"fits one teacher with another tokenizer; {len(cross_tokenizer_teachers)} of the teachers have one"
        yield problem("projection.path", rule, path, "leave it out: projections are built and kept")
        return
    teacher = cross_tokenizer_teachers[0]
    if student.config is None or teacher.config is None:
        return

    def read() -> None:
        """Reads the projection.

        Raises:
            ConfigError: it does not fit the two tokenizers, or is not valid.
        """
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

    findings = Findings()
    findings.attempt("projection.path", read)
    yield from findings.problems


def template_problems(config: Config, kind: str, student: Opened, teachers: list[Opened]) -> Iterator[str]:
    """Yields tokenizers without the chat template that they need to turn chat messages into text, one line each.

    These are the student's, and those of teachers with another tokenizer.

    Args:
        kind: kind of the data, `text` or `messages`; text needs no template.
    """
    if kind != "messages":
        return
    for model in (student, *(teacher for teacher in teachers if teacher.cross_tokenizer_loss is not None)):
        if model.tokenizer is not None and not model.tokenizer.chat_template:
            owner = "the student's tokenizer" if model is student else f"the tokenizer of {model.name}"
            rule = f"chat messages need a chat template; {owner} has none"
            yield problem("data.format", rule, kind, f"set {model.key}.tokenizer to one that has a template")


def check_alignment(config: Config, source: Any, student: Opened, teachers: list[Opened], findings: Findings) -> None:
    """Aligns a sample of documents with every cross-tokenizer teacher, sets their `advice`, and adds what is wrong to the
    findings.

    If none aligns anywhere, training would have no effect; a chat that a template refuses would end the run later.

    Args:
        source: the training documents, indexed from 0.
    """
    from distill_rl.data.routing import asked, weights_of

    for i, teacher in enumerate(teachers):
        if teacher.cross_tokenizer_loss is not None and student.tokenizer is not None and teacher.tokenizer is not None:
            documents = [document for document in source if asked(weights_of(document), i)]
            aligned = partial(_align, config, documents, student, teacher)
            teacher.advice = findings.attempt(teacher.key, aligned) or ""


def _align(config: Config, source: Any, student: Opened, teacher: Opened) -> str:
    """Which loss suits a pair, by the first ALIGNED_ROWS documents; empty if they have no content.

    Raises:
        ConfigError: none of them has a chunk that student and teacher have in common, or one cannot be aligned at all, for
            instance because a chat template refuses it.
    """
    from distill_rl.align import TokenAligner, audit
    from distill_rl.align.chats import texts_of
    from distill_rl.data.reading.layouts import template_options

    settings = config.aligner
    aligner = TokenAligner(
        student.tokenizer,
        teacher.tokenizer,
        settings.method,
        band=settings.dp.band,
        student_stops=student.stops,
        teacher_stops=teacher.stops,
    )
    rows = [source[i] for i in range(min(len(source), ALIGNED_ROWS))]
    num_chunks = 0
    for row in rows:
        try:
            if "messages" in row:
                alignment = aligner.align_messages(row["messages"], options=template_options(row))
            else:
                alignment = aligner.align(row["text"][:ALIGNED_CHARACTERS])
        except Exception as error:  # a chat template can raise anything
            raise ConfigError(
                f"row {row['row']}",
                f"must be readable by the student and {teacher.name}",
                f"{type(error).__name__}: {error}",
            ) from error
        num_chunks += alignment.num_chunks
    texts = [text[:ALIGNED_CHARACTERS] for row in rows for text in texts_of(row)]
    if texts and not num_chunks:
        rule = f"none of {len(rows)} documents aligns between the student's tokenizer and that of {teacher.name}"
        raise ConfigError("the tokenizers", rule, None, "see `distill-rl align`, or set aligner.method=auto")
    return str(audit(aligner, texts).advice) if texts else ""
