"""The time of alignment on one core beside common alternatives, with two real tokenizers and a text that you supply.

    bash launch/bench.sh align --tokenizers STUDENT TEACHER --text ENGLISH.txt [--chinese CHINESE.txt]
        [--lossy TEACHERS]

Rows have 2,048 tokens on the student's side unless their name says otherwise. Times are medians of the thread's CPU time
over rounds in which the contenders take turns. TRL's walk gets precomputed byte offsets, so only the walk is timed.
`beside_intersect1d` has, for every teacher, the times over bare `np.intersect1d` of a row that was aligned before (warm)
and of rows each of which only one contender reads, once (cold). With a lossy teacher, whose ids need the dynamic
programme, the first row of a process is timed separately from later ones.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np

from distill_rl.align import TokenAligner
from tests.bench import harness, record

TOKENS, LONG, PADS = 2048, 65_536, 1500
REPEATED = "The cat sat. "
Run = Callable[[], Any]

OURS, PAIR, BARE, ENCODES, PROGRAMME, WALK = (
    "align_ids", "align with the text, encodes left out", "np.intersect1d of the two boundary arrays", "the two encodes",
    "dynamic programme on the whole row", "TRL's walk over byte offsets",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One pair of id rows to align, and the text they spell; `masks` are the masks to pass to `align_ids`, if any."""

    name: str
    text: str
    student: np.ndarray
    """int32 [n]"""
    teacher: np.ndarray
    """int32 [m]"""
    masks: dict[str, np.ndarray] = field(default_factory=dict)


def measure(
    folder: Path,
    *,
    tokenizers: tuple[Path, ...] = (),
    text: Path | None = None,
    chinese: Path | None = None,
    lossy: tuple[Path, ...] = (),
    rounds: int = 200,
    no_projection: bool = False,
) -> dict[str, Any]:
    """Time the rows of both texts, the lossy teachers, and the vocabulary projection.

    Args:
        tokenizers: folders of two tokenizers.
        text: an English text in UTF-8, 400 KB or more.
        chinese: a Chinese text in UTF-8, 30 KB or more.
        lossy: tokenizer folders of teachers whose tokenizers are lossy.
        rounds: timed runs of each contender.
        no_projection: do not measure the vocabulary projection.
    """
    from transformers import AutoTokenizer

    if not tokenizers or not text:
        raise harness.Refused(
            "needs --tokenizers STUDENT TEACHER (folders) and --text FILE: it measures real tokenizers on real text"
        )
    files = {"English": text} if chinese is None else {"English": text, "Chinese": chinese}
    for path in (*(tokenizer / "tokenizer.json" for tokenizer in (*tokenizers, *lossy)), *files.values()):
        if not path.is_file():
            raise harness.Refused(f"{path}: no such file")
    student, teacher = (AutoTokenizer.from_pretrained(tokenizer) for tokenizer in tokenizers)
    start = time.perf_counter()
    aligner, programme = TokenAligner(student, teacher), TokenAligner(student, teacher, "dp")
    built = (time.perf_counter() - start) / 2
    texts = {name: path.read_text("utf-8") for name, path in files.items()}
    return {
        "settings": {
            "student": tokenizers[0].name,
            "teacher": tokenizers[1].name,
            "vocabularies": [aligner.student.size, aligner.teacher.size],
            "rounds": rounds,
            "trl": walk()[1],
        },
        "aligner_seconds": round(built, 2),
        "beside_intersect1d": [
            over_bare(tokenizers[0], tokenizer, texts["English"], rounds) for tokenizer in (tokenizers[1], *lossy)
        ],
        "results": [measure_row(row, aligner, programme, rounds) for row in rows(aligner, texts)],
        "lossy": [
            measure_lossy(folder / str(i), tokenizers[0], tokenizer, text, rounds) for i, tokenizer in enumerate(lossy)
        ],
        "projection": None if no_projection else run_apart(_PROJECTION, *tokenizers),
    }


def rows(aligner: TokenAligner, texts: dict[str, str]) -> Iterator[Row]:
    """Yields one row per text, then rows of a repeated sentence, of English with padding, and of long English.

    Args:
        texts: by language; `English` must be among them.
    """
    for name, text in texts.items():
        yield row(aligner, name, text, TOKENS)
    yield row(aligner, "repeats", REPEATED * 3000, TOKENS)
    short = row(aligner, "padded", texts["English"], TOKENS - PADS)
    sides = ((short.student, aligner.student.roles), (short.teacher, aligner.teacher.roles))
    student, teacher = (
        np.r_[ids, np.full(PADS, roles.get("pad", roles.get("eos", 0)), np.int32)] for ids, roles in sides
    )
    student_mask, teacher_mask = (np.r_[np.ones(len(ids), np.int32), np.zeros(PADS, np.int32)] for ids, _ in sides)
    name = f"{PADS:,} pads of {TOKENS:,}"
    yield Row(name, short.text, student, teacher, {"student_mask": student_mask, "teacher_mask": teacher_mask})
    english = texts["English"]
    yield row(aligner, f"{LONG:,} tokens", english * (1 + 8 * LONG // len(english)), LONG)


def row(aligner: TokenAligner, name: str, text: str, tokens: int) -> Row:
    """The beginning of a text as a row of about `tokens` tokens on the student's side.

    The student's tokens are cut off there, and both sides tokenize the text that those spell.

    Args:
        name: of the row.
    """
    size = min(len(text), 12 * tokens)
    alignment = aligner.align(text[:size], max_student_tokens=tokens)
    ids = alignment.student_ids[alignment.student_chunk >= 0]
    spelled = b"".join(aligner.student.token_bytes(token) for token in ids.tolist())
    kept = spelled.decode(errors="ignore")
    student, teacher = aligner.tokenize_student(kept), aligner.tokenize_teacher(kept)
    return Row(name, kept, student.ids, teacher.ids)


def measure_row(row: Row, aligner: TokenAligner, programme: TokenAligner, rounds: int) -> dict[str, Any]:
    """Median milliseconds by contender, the properties of the row, and our time over those of two contenders.

    A padded row leaves out the contenders that read the text, and TRL's walk, which is also left out where it cannot be
    used. Long rows leave out the dynamic programme, and the longest takes a tenth of the rounds.

    Args:
        programme: an aligner with the method `dp`.
    """
    alignment = aligner.align_ids(row.student, row.teacher, **row.masks)
    ends = boundaries(aligner, row.student, row.teacher)
    runs: dict[str, Run] = {
        OURS: lambda: aligner.align_ids(row.student, row.teacher, **row.masks),
        BARE: lambda: np.intersect1d(ends[0], ends[1], assume_unique=True),
    }
    if not row.masks:
        tokenized = aligner.tokenize_student(row.text), aligner.tokenize_teacher(row.text)
        runs[PAIR] = lambda: aligner.pair(*tokenized)
        runs[ENCODES] = lambda: (aligner.tokenize_student(row.text), aligner.tokenize_teacher(row.text))
        trl = walk()[0]
        if trl is not None:
            pairs = [np.stack([np.r_[0, side[:-1]], side], 1).tolist() for side in ends]
            runs[WALK] = lambda: trl(*pairs)
    if len(row.student) <= TOKENS + PADS:
        runs[PROGRAMME] = lambda: programme.align_ids(row.student, row.teacher, **row.masks)
    times = medians(runs, rounds if len(row.student) < LONG else rounds // 10)
    encodes = times.get(ENCODES)
    return {
        "row": row.name,
        "tokens": [len(row.student), len(row.teacher)],
        "bytes": len(row.text.encode()),
        "chunks": dict(alignment.counts),
        "exact": alignment.exact,
        "milliseconds": times,
        "over_intersect1d": round(times[OURS] / times[BARE], 2),
        "share_of_encodes": round(times[OURS] / encodes, 4) if encodes else None,
    }


def over_bare(student: Path, teacher: Path, text: str, rounds: int) -> dict[str, Any]:
    """Microseconds of `pair` and `align_ids` and how many times those of bare `intersect1d` they are, warm and cold.

    Args:
        student, teacher: tokenizer folders.
        text: is divided into rows of about `TOKENS` of the student's tokens.
    """
    from transformers import AutoTokenizer

    aligner = TokenAligner(*(AutoTokenizer.from_pretrained(folder) for folder in (student, teacher)))
    aligner.warm_up()
    ids = aligner.tokenize_student(text).ids
    contenders = []
    for start in range(0, max(1, len(ids) - TOKENS), TOKENS):
        spelled = b"".join(map(aligner.student.token_bytes, ids[start : start + TOKENS].tolist()))
        kept = spelled.decode(errors="ignore")
        sides = aligner.tokenize_student(kept), aligner.tokenize_teacher(kept)
        contenders.append(
            {
                PAIR: partial(aligner.pair, *sides),
                OURS: partial(aligner.align_ids, sides[0].ids, sides[1].ids),
                BARE: partial(np.intersect1d, *boundaries(aligner, sides[0].ids, sides[1].ids), assume_unique=True),
            }
        )
    first, *others = contenders
    alignments = first[PAIR](), first[OURS]()
    times = {"warm": medians(first, rounds)}
    if len(others) >= len(first):
        cold: dict[str, list[float]] = {name: [] for name in first}
        for runs, name in zip(others, cycle(first)):
            cold[name].append(_seconds(runs[name]))
        times["cold"] = {name: 1e3 * median(seconds) for name, seconds in cold.items()}
    return {
        "teacher": teacher.name,
        "rows": len(contenders),
        "methods": {name: alignment.method for name, alignment in zip(first, alignments)},
        "microseconds": {
            state: {name: round(1e3 * ms, 1) for name, ms in each.items()} for state, each in times.items()
        },
        **{state: {name: round(each[name] / each[BARE], 2) for name in (PAIR, OURS)} for state, each in times.items()},
    }


def boundaries(aligner: TokenAligner, student: np.ndarray, teacher: np.ndarray) -> list[np.ndarray]:
    """int64 [a], int64 [b]: the distinct byte positions at which the tokens of each side end."""
    sides = ((aligner.student, student), (aligner.teacher, teacher))
    return [np.unique(vocabulary.lengths[ids].cumsum()) for vocabulary, ids in sides]


def medians(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Median milliseconds of a call by contender.

    After a call that is not timed and one that is, contenders take turns, so that a slow moment of the machine affects
    all. There are `rounds` / 10 turns, at least one; a turn has ten calls, or as many as take 5 ms, but at least one.
    """
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        run()  # warm-up; compiles the dynamic programme
        times[name] = [_seconds(run)]
    turns = {name: max(1, min(10, int(5e-3 / seconds[0]))) for name, seconds in times.items()}
    for _ in range(max(1, rounds // 10)):
        for name, run in runs.items():
            times[name] += [_seconds(run) for _ in range(turns[name])]
    return {name: round(1e3 * median(seconds), 4) for name, seconds in times.items()}


def _seconds(run: Run) -> float:
    """The CPU time of one call in this thread."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def walk() -> tuple[Callable[..., Any] | None, str]:
    """TRL's walk over byte offsets and TRL's version, or None and the reason why it cannot be used. Never raises."""
    if importlib.util.find_spec("trl") is None:
        return None, "not installed"
    try:
        module = importlib.import_module("trl.experimental.gold.gold_trainer")
    except Exception as error:  # a problem of TRL must not cost the other figures
        return None, f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    owner = next((part for part in vars(module).values() if hasattr(part, "_align_by_byte_offsets")), None)
    if owner is None:
        return None, "not in this version"
    return owner._align_by_byte_offsets, importlib.metadata.version("trl")


_LOSSY = """
import json, sys, time
from pathlib import Path
from statistics import median
from transformers import AutoTokenizer
from distill_rl.align import TokenAligner
*folders, text, tokens, rounds = sys.argv[1:]
aligner = TokenAligner(*(AutoTokenizer.from_pretrained(folder) for folder in folders))
ids = aligner.tokenize_student(Path(text).read_text("utf-8")[: 12 * int(tokens)]).ids[: int(tokens)]
kept = b"".join(aligner.student.token_bytes(token) for token in ids.tolist()).decode(errors="ignore")
sides = aligner.tokenize_student(kept).ids, aligner.tokenize_teacher(kept).ids
times = []
for _ in range(1 + int(rounds)):
    start = time.perf_counter()
    alignment = aligner.align_ids(*sides)
    times.append(time.perf_counter() - start)
figures = {"tokens": [*map(len, sides)], "method": alignment.method, "chunks": dict(alignment.counts)}
print(json.dumps(figures | {"first_seconds": round(times[0], 3), "milliseconds": round(1e3 * median(times[1:]), 3)}))
"""


def measure_lossy(cache: Path, student: Path, teacher: Path, text: Path, rounds: int) -> dict[str, Any]:
    """Times `align_ids` with a lossy teacher: the first row with an empty and a filled Numba cache, and later rows.

    Two separate processes share the cache, which the first fills.

    Args:
        cache: a folder for Numba's cache, which does not exist yet.
        student: tokenizer folder.
        teacher: tokenizer folder.
        text: a UTF-8 file; its first `TOKENS` tokens are aligned.
        rounds: later rows in each process.

    Returns:
        The figures of the second process, with the first's time as `first_seconds_without_cache`; only `teacher` and
        `status` if a process failed.
    """
    runs = []
    for _ in ("empty", "filled"):
        runs.append(run_apart(_LOSSY, student, teacher, text, TOKENS, rounds, NUMBA_CACHE_DIR=str(cache)))
        if "status" in runs[-1]:
            return {"teacher": teacher.name, **runs[-1]}
    return {"teacher": teacher.name, **runs[1], "first_seconds_without_cache": runs[0]["first_seconds"]}


_PROJECTION = """
import json, sys, time
from transformers import AutoTokenizer
from distill_rl.align.projection import build_projection
from tests.bench.record import peak_bytes
tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in sys.argv[1:]]
before = peak_bytes()
start = time.perf_counter()
made = build_projection(*tokenizers, student_columns=len(tokenizers[0]), teacher_columns=len(tokenizers[1]))
seconds = time.perf_counter() - start
peaks = {"peak_mib": round(peak_bytes() / 2**20, 1), "peak_mib_before": round(before / 2**20, 1)}
sizes = {"shape": [len(made.indptr) - 1, made.num_teacher], "entries": len(made.indices)}
print(json.dumps({"seconds": round(seconds, 2), **peaks, **sizes}))
"""
"""Time and peak memory of building W; its own process, so that the peak includes nothing else."""


def run_apart(program: str, *arguments: object, **environment: str) -> dict[str, Any]:
    """Runs Python code in a process of its own, in the repository's root, and returns the JSON that it prints.

    If the process fails, returns only a `status` with the last line of its standard error; nothing is raised.

    Args:
        program: source code.
        arguments: its `sys.argv[1:]`, converted to text.
        environment: variables added to those of this process.
    """
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=record.ROOT, env=os.environ | environment)
    if done.returncode:
        return {"status": f"failed: {done.stderr.strip().rpartition(chr(10))[2][:200]}"}
    return json.loads(done.stdout)


main = harness.program(
    "align",
    measure,
    columns=("row", "tokens", "milliseconds", "over_intersect1d", "teacher", "warm", "cold", "status", "first_seconds"),
    arguments={"tokenizers": {"nargs": 2, "metavar": ("STUDENT", "TEACHER")}},
)

if __name__ == "__main__":
    sys.exit(main())
