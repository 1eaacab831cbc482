"""How many positions a student computes per token across tokenizers, packed and padded, and what a position costs.

    bash launch/bench.sh packing --tokenizers STUDENT TEACHER [TEACHER …] --text TEXT.txt

Documents have lognormal lengths and are cut from a text that you supply, one pair of real tokenizers after the other. The
speed is that of small models with tokenizers trained on the same text, on the same documents, with a teacher of the
student's tokenizer and with one of another.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from distill_rl.config.schema import (
    AlignerConfig,
    Config,
    DataConfig,
    LossConfig,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
)
from distill_rl.data.batch.collate import BatchPlan, BatchSharding, pad_id
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder, CrossTokenizerTeacher
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.types import BatchInfo, Cursor, DocumentBatch, RankBatch
from tests.bench import harness
from tests.bench.material import train_tokenizer, write_llama

POSITIONS_TARGET, SPEED_TARGET, OCCUPANCY_TARGET = 1.1, 0.85, 0.94
SIGMA = 1.0
"""Of the logarithms of the lengths: half of the tokens are in a quarter of the documents."""
MICRO_BATCH = 2


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of a batch. Lengths are in characters."""

    texts: tuple[str, ...]
    max_length: int
    """Tokens per row."""

    @classmethod
    def cut(cls, text: str, characters_per_token: float, *, documents: int, mean: int, longest: int) -> Corpus:
        """Consecutive pieces of a text, which is read again from its start when it ends; always the same ones.

        Args:
            mean, longest: length of the documents in tokens, about.
        """
        draw, start, texts = random.Random(0), 0, []
        for _ in range(documents):
            tokens = min(draw.lognormvariate(np.log(mean) - SIGMA**2 / 2, SIGMA), longest)
            size = max(1, int(tokens * characters_per_token))
            if start + size > len(text):
                start = 0
            texts.append(text[start : start + size])
            start += size
        return cls(tuple(texts), longest)

    def batch(self) -> DocumentBatch:
        """All documents as one global batch."""
        return DocumentBatch(0, tuple({"row": i, "text": text} for i, text in enumerate(self.texts)), Cursor())


def measure(
    folder: Path,
    *,
    tokenizers: tuple[Path, ...] = (),
    text: Path | None = None,
    documents: int = 768,
    mean: int = 768,
    longest: int = 4096,
    speed_documents: int = 64,
    rounds: int = 11,
) -> dict[str, Any]:
    """Lay the documents out for each pair of tokenizers, and time a student's step with and without another tokenizer.

    Args:
        tokenizers: folders of the student's tokenizer and of one or more teachers'.
        text: an English text in UTF-8, a megabyte or more.
        documents: documents of the batch.
        mean: their mean length in the student's tokens.
        longest: their largest length, and the tokens of a row.
        speed_documents: documents of the timed batch, of an eighth of these lengths.
        rounds: timed steps of each.
    """
    from transformers import AutoTokenizer

    if len(tokenizers) < 2 or text is None:
        raise harness.Refused("needs --tokenizers STUDENT TEACHER … (folders) and --text FILE")
    for path in (text, *(tokenizer / "tokenizer.json" for tokenizer in tokenizers)):
        if not path.is_file():
            raise harness.Refused(f"{path}: no such file")
    written = text.read_text("utf-8")
    student, *teachers = (AutoTokenizer.from_pretrained(tokenizer) for tokenizer in tokenizers)
    sample = written[:20_000]
    corpus = Corpus.cut(
        written, len(sample) / len(student(sample)["input_ids"]), documents=documents, mean=mean, longest=longest
    )
    return {
        "settings": {"student": tokenizers[0].name, "documents": documents, "mean": mean, "longest": longest},
        "pairs": {
            path.name: describe_pair(student, teacher, corpus) for path, teacher in zip(tokenizers[1:], teachers)
        },
        "speed": compare_speed(folder, written, speed_documents, mean // 8, longest // 8, rounds),
    }


def describe_pair(student: Any, teacher: Any, corpus: Corpus) -> dict[str, Any]:
    """Positions per token and occupancy of the rows of a pair of tokenizers.

    Returns:
        Rows, packed; the share of the rows' capacity that holds tokens, on either side; positions that the student
        computes per token, packed, padded in rows of like length, and padded to the longest row of the batch; the same
        of the packed teacher.
    """
    other = CrossTokenizerTeacher.of("teacher", student, teacher, AlignerConfig())
    info, ours, theirs = lay_out(student, other, corpus, packing=True)
    padded, padded_rows, _ = lay_out(student, other, corpus, packing=False)
    their_tokens = sum(tokens_of(part) for part in theirs)
    capacity = sum(int((part.rows.labels >= 0).any(axis=1).sum()) for part in ours) * corpus.max_length
    return {
        "rows": info.num_rows,
        "occupancy": {"student": info.num_tokens / capacity, "teacher": their_tokens / capacity},
        "positions_per_token": {
            "packed": info.num_positions / info.num_tokens,
            "padded": padded.num_positions / padded.num_tokens,
            "one_width": sum(part.rows.input_ids.size for part in padded_rows) / padded.num_tokens,
            "teacher": sum(part.rows.num_positions for part in theirs) / their_tokens,
        },
    }


def tokens_of(part: RankBatch) -> int:
    """Number of a packed part's positions up to the last label of each row; its documents' last tokens have none."""
    labelled = part.rows.labels >= 0
    last = labelled.shape[1] - labelled[:, ::-1].argmax(axis=1)
    return int(np.where(labelled.any(axis=1), last + 1, 0).sum())


def lay_out(
    student: Any, other: CrossTokenizerTeacher | None, corpus: Corpus, *, packing: bool
) -> tuple[BatchInfo, list[RankBatch], list[RankBatch]]:
    """The batch of a single rank: a summary, the student's part and the teacher's.

    Args:
        other: the teacher; None for one with the student's tokenizer.
    """
    sharding = BatchSharding(1, MICRO_BATCH)
    plan = BatchPlan(sharding, (sharding,), corpus.max_length, packing, pad_id(student))
    tokenization = Tokenization(student, format="text", loss_on="all", max_length=corpus.max_length)
    info, ours, (theirs,) = BatchBuilder(tokenization, plan, [other]).build(corpus.batch())
    return info, ours, theirs


def compare_speed(folder: Path, text: str, documents: int, mean: int, longest: int, rounds: int) -> dict[str, Any]:
    """Microseconds per token of a step of the student with a teacher of the same tokenizer, and of another.

    Model: forward and backward pass with the cross-entropy of the data alone. Distillation: what the loss against the
    teacher's targets takes on top of that. The steps of both take turns.

    Args:
        folder: for the models.
    """
    import torch

    from tests.bench.gpu.engines import one_rank

    student, teacher = (train_tokenizer([text], size, "</s>") for size in (2000, 4000))
    torch.manual_seed(0)
    for name, tokenizer in (("student", student), ("teacher", teacher)):
        write_llama(
            folder / name, tokenizer, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
            max_position_embeddings=longest + 128,
        )  # fmt: skip
        tokenizer.save_pretrained(folder / name)
    sample = text[:20_000]
    per_token = len(sample) / len(student(sample)["input_ids"])
    corpus = Corpus.cut(text, per_token, documents=documents, mean=mean, longest=longest)
    other = CrossTokenizerTeacher.of("teacher", student, teacher, AlignerConfig())
    seconds: dict[str, dict[str, list[float]]] = {}
    tokens: dict[str, int] = {}
    with one_rank(torch.device("cpu")) as world:
        steps = {}
        for name, cross in (("same", None), ("other", other)):
            info, (ours,), (theirs,) = lay_out(student, cross, corpus, packing=True)
            tokens[name] = info.num_tokens
            steps[name] = _steps(
                folder, world, ours, theirs, len(student), len(teacher) if cross else len(student), corpus
            )
        for i in range(rounds + 1):
            for name, kinds in steps.items():
                for kind, step in kinds.items():
                    start = perf_counter()
                    step()
                    if i:
                        seconds.setdefault(name, {}).setdefault(kind, []).append(perf_counter() - start)
    for kinds in seconds.values():
        kinds["distillation"] = [taught - alone for taught, alone in zip(kinds["all"], kinds["model"])]
    micros = {
        name: {kind: 1e6 * median(values) / tokens[name] for kind, values in kinds.items()}
        for name, kinds in seconds.items()
    }
    return {
        "tokens": tokens,
        "model_us_per_token": {name: kinds["model"] for name, kinds in micros.items()},
        "distillation_us_per_token": {name: kinds["distillation"] for name, kinds in micros.items()},
        "speed": micros["same"]["model"] / micros["other"]["model"],
    }


def _steps(
    folder: Path, world: Any, ours: RankBatch, theirs: RankBatch, num_ours: int, num_theirs: int, corpus: Corpus
) -> dict[str, Any]:
    """The forward and backward pass of a batch: without a teacher ("model"), and with its targets ("all").

    Args:
        folder: of the models; the vocabulary projection is kept there.
        num_ours, num_theirs: ids of the tokenizers. Without chunks in `ours` the teacher is the student's model.
    """
    from transformers import AutoTokenizer

    from distill_rl.align.projection import cached_projection
    from distill_rl.losses.targets import target_of
    from distill_rl.student.engine import StudentEngine
    from distill_rl.teacher.engine import TeacherEngine
    from distill_rl.types import CrossTokenizerSpec

    crosses = bool(ours.chunks)
    alone = Config(
        student=StudentConfig(model=str(folder / "student"), dtype="fp32"),
        data=DataConfig(max_length=corpus.max_length),
        loss=LossConfig(top_k=16, kd_weight=0.0, ce_weight=1.0),
        train=TrainConfig(global_batch_size=ours.rows.shape[0], micro_batch_size=MICRO_BATCH),
    )
    teacher = TeacherConfig(model=str(folder / ("teacher" if crosses else "student")), dtype="fp32")
    taught = replace(alone, teachers=[teacher], loss=replace(alone.loss, kd_weight=1.0))
    specs: list[CrossTokenizerSpec | None] = [None]
    if crosses:
        tokenizers = (AutoTokenizer.from_pretrained(folder / name) for name in ("student", "teacher"))
        specs = [
            CrossTokenizerSpec(
                "hybrid",
                str(cached_projection(folder, *tokenizers, student_columns=num_ours, teacher_columns=num_theirs)),
            )
        ]
    engine = TeacherEngine(taught, teacher, world, vocabulary_size=num_theirs)
    targets = {layout.first_row: tensors for layout, tensors in engine.forward(theirs)}

    @contextmanager
    def source(first_row: int, num_rows: int) -> Iterator[Sequence[Any]]:
        yield [target_of(targets[first_row], 1.0)]

    @contextmanager
    def nothing(first_row: int, num_rows: int) -> Iterator[Sequence[Any]]:
        yield []

    students = [
        StudentEngine(alone, world, vocabulary_size=num_ours, total_steps=1),
        StudentEngine(taught, world, vocabulary_size=num_ours, total_steps=1, cross_tokenizer_specs=specs),
    ]
    without = replace(ours, chunks=())
    return {
        "model": lambda: students[0].forward_backward(without, nothing),
        "all": lambda: students[1].forward_backward(ours, source),
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """The missed targets: of every pair, and of the student's speed."""
    pairs = figures["pairs"].items()
    positions = [(name, pair["positions_per_token"]["packed"]) for name, pair in pairs]
    speed = figures["speed"]["speed"]
    return harness.missed(
        *(
            (
                found > POSITIONS_TARGET,
                f"missed: {found:.2f} positions per token with {name}, at most {POSITIONS_TARGET}",
            )
            for name, found in positions
        ),
        *(
            (
                max(pair["occupancy"].values()) < OCCUPANCY_TARGET,
                f"missed: rows are {max(pair['occupancy'].values()):.3f} full with {name}, the target is {OCCUPANCY_TARGET}",
            )
            for name, pair in pairs
        ),
        (speed < SPEED_TARGET, f"missed: {speed:.2f} of the speed with one tokenizer, the target is {SPEED_TARGET}"),
    )


main = harness.program("packing", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
