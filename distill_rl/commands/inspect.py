"""distill-rl inspect: shows rows as they will be trained on: every token, which are learnt, and why the others are not."""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distill_rl.align import Tokenized
from distill_rl.align.chats import SWITCHES
from distill_rl.align.vocabulary import TextEncoder
from distill_rl.config import rules
from distill_rl.config.load import read_config
from distill_rl.config.schema import Config
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import STUDENT, AlignedDocument, DocumentAligner, DocumentPiece, Extent
from distill_rl.data.reading.source import Mixture
from distill_rl.data.routing import asked, weights_of
from distill_rl.errors import ConfigError, DataError, problem
from distill_rl.observe.log import open_console, printable, status
from distill_rl.run.opened import OpenedRun, open_rows
from distill_rl.types import IGNORE_INDEX, Cursor, RankBatch, Row, row_of
from distill_rl.workers.pipeline.batches import make_builder

ROWS = 5
"""Rows that are shown unless the user says how many."""
CHUNKS_SHOWN, LINES_SHOWN = 40, 5
"""Chunks of a row, and lines about rows that are refused or left out, that are printed."""
_BRACKETS = "[…] is labelled: the student learns to write it. The rest it only reads.\n"
_COLOURS = (
    "Labelled tokens, which the student learns to write, are green and cyan by turns; yellow and magenta if they are in no "
    "chunk of a teacher. The rest it only reads.\n"
)
_LEARNT, _ALONE, _READ = ("bold green", "bold cyan"), ("bold yellow", "bold magenta"), ("", "dim")
"""Styles of tokens by turns, so that each can be told from its neighbours: labelled, labelled but in no chunk, others."""


def inspect(
    path: str, overrides: Sequence[str], *, rows: int | None, chosen: Sequence[int] | None, tokens: bool, as_json: bool
) -> int:
    """Prints rows of a run as they will be trained on. Loads tokenizers, no models; returns 0.

    Args:
        rows: number of rows from the start of the run, packed as in it; None: ROWS, if none are chosen.
        chosen: numbers of rows of the data, each shown on its own.
        tokens: print one line per token in place of the text.
        as_json: print one JSON object per row.

    Raises:
        DistillError: bad options, settings, data or tokenizers; or rows that the run refuses, after all others are shown.
    """
    with status(f"reading   {path}"):
        viewer = _Viewer(open_rows(_read(path, overrides, rows, chosen)), packed=chosen is None)
        found = islice(viewer.first(), rows or ROWS) if chosen is None else viewer.chosen(chosen)
    console = open_console(110)
    if not as_json:
        console.print(_COLOURS if _has_colours(console) else _BRACKETS, markup=False, soft_wrap=True)
    shown = 0
    for row in found:
        shown += 1
        if as_json:
            print(json.dumps(row))
        else:
            _print(console, row, by_token=tokens)
    sys.stdout.flush()
    problems, notes = _some(viewer.problems), _some(viewer.notes)
    if not shown:
        problems, notes = problems + notes, []
    for note in notes:
        print(f"note       {printable(note)}", file=sys.stderr)
    ConfigError.raise_all(problems)
    return 0


def _some(lines: Iterable[str]) -> list[str]:
    """The first lines, each once, and how many there are besides."""
    once = list(dict.fromkeys(lines))
    further = len(once) - LINES_SHOWN
    return once[:LINES_SHOWN] + ([f"and {further:,} more"] if further > 0 else [])


def _read(path: str, overrides: Sequence[str], rows: int | None, chosen: Sequence[int] | None) -> Config:
    lines = []
    if rows is not None and chosen is not None:
        lines.append(problem("--rows and --row", "exclude each other", None, "--row shows single rows of the data"))
    if rows is not None and rows < 1:
        lines.append(problem("--rows", "must be 1 or more", rows))
    config, invalid = read_config(path, overrides)
    lines += invalid.lines
    if config is not None:
        lines += [text for text in rules.problems(config) if text.partition(":")[0] not in invalid.keys]
    if config is None or lines:
        raise ConfigError.many(dict.fromkeys(lines))
    return config


class _Tokens:
    """All tokens of a document on one side: ids, int32 [n], and the characters that each covers.

    Args:
        spans: as the tokenizer reports them, which may lack that of an eos at the end.
    """

    def __init__(self, tokenizer: Any, text: str, ids: np.ndarray, spans: np.ndarray):
        self.tokenizer, self.text, self.ids = tokenizer, text, ids
        spans = np.concatenate([spans.reshape(-1, 2), np.zeros((len(ids) - len(spans), 2), np.int64)])
        ends = np.maximum.accumulate(spans[:, 1]) if len(spans) else spans[:, 1]
        self.spans = np.where(spans[:, :1] < spans[:, 1:], spans, ends[:, None])
        """int64 [n, 2]; an empty span stands behind the token before it"""

    def part(self, held: np.ndarray, extent: Extent, shift: int) -> tuple[str, list[dict[str, Any]]]:
        """The text of the tokens that a row holds, and each of them, with offsets in a text that continues with this one.

        Args:
            shift: characters before this text.
        """
        first, prefix, _ = extent
        stop = first + len(held) - prefix
        spans = self.spans[first:stop]
        begin = 0 if first == 0 else int(spans[:, 0].min(initial=len(self.text)))
        end = len(self.text) if stop == len(self.ids) else int(spans[:, 1].max(initial=begin))
        spans = np.concatenate([np.full((prefix, 2), begin), spans.clip(begin, end)])
        tokens = [
            {
                "id": id,
                "text": self.text[left:right] or self.tokenizer.convert_ids_to_tokens(id),
                "start": left - begin + shift,
                "end": right - begin + shift,
            }
            for id, left, right in np.column_stack([held, spans]).tolist()
        ]
        return self.text[begin:end], tokens


class _Arrays:
    """The rows of a batch as workers get them, of all ranks and sub-batches in order; every value at the token it is about.

    Args:
        parts: the student's rows that `BatchBuilder.assemble` returns, where a value is at the prediction of its token.
    """

    def __init__(self, parts: Sequence[Sequence[RankBatch]]):
        in_order = sorted(chain.from_iterable(parts), key=lambda part: part.first_row)

        def at_tokens(arrays: Iterable[np.ndarray], fill: int) -> np.ndarray:
            """Moves values to the tokens; the first of a row, which is not predicted, gets `fill`."""
            return np.pad(np.concatenate([*arrays])[:, :-1], ((0, 0), (1, 0)), constant_values=fill)

        self.ids = np.concatenate([part.rows.input_ids for part in in_order])
        """int32 [R, S]"""
        self.labels = at_tokens((part.rows.labels for part in in_order), IGNORE_INDEX)
        """int32 [R, S]"""
        self.chunks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """int32 [R, S], int32 [R, St], by index of the teacher: the chunk of every token, −1 for none"""
        for i in range(len(in_order[0].teachers)):
            if found := [rows for part in in_order if (rows := part.teachers[i].chunks) is not None]:
                self.chunks[i] = (
                    at_tokens((rows.student for rows in found), -1),
                    at_tokens((rows.teacher for rows in found), -1),
                )


@dataclass
class _RowSide:
    """One side of a row."""

    text: str = ""
    tokens: list[dict[str, Any]] = field(default_factory=list)


class _Document:
    """A document of a batch, and which of its tokens rows hold.

    Args:
        pieces: what rows hold of it.
        sides: all tokens of STUDENT, and of teachers by index.
        taken_out: bool [tokens]: which of the student's a key of their message takes out of what is learnt.
        first: index of its first piece in the batch.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        pieces: Sequence[DocumentPiece],
        sides: dict[int, _Tokens],
        taken_out: np.ndarray,
        first: int,
    ):
        self.row, self.weights, self.sides, self.taken_out = row_of(document), weights_of(document), sides, taken_out
        self.left_out = list(pieces[0].encoded.left_out)
        """What chat templates leave out."""
        self.held: dict[int, dict[int, tuple[np.ndarray, Extent]]] = {}
        """For each side, by index of the piece: its tokens, and which of the document's they are."""
        for i in sides:
            ids = [piece.encoded.input_ids if i == STUDENT else piece.alignments[i].teacher_ids for piece in pieces]
            self.held[i] = dict(enumerate(zip(ids, (piece.extents[i] for piece in pieces)), first))

    def add(self, i: int, piece: int, side: _RowSide) -> int:
        """Adds what a row holds to a side of it; returns the number of the document's tokens before that."""
        ids, extent = self.held[i][piece]
        text, tokens = self.sides[i].part(ids, extent, len(side.text))
        side.text += text
        side.tokens += tokens
        return extent.first


class _Viewer:
    """Makes rows as the run does, and describes them.

    Args:
        packed: as the run packs them; otherwise every document alone.
    """

    def __init__(self, run: OpenedRun, *, packed: bool):
        self.run, self.packed = run, packed
        self.notes: list[str] = []
        """Documents that the run leaves out."""
        self.problems: list[str] = []
        """Documents at which the run would end, one line each."""
        # A template that leaves something out is shown, even where the run refuses it.
        self._builder = self._open("warn")
        teachers, plan = self._builder.teachers, run.plan
        lengths = {i: plan.length_of(i) for i in teachers}
        self._aligner = DocumentAligner(self._builder.tokenization, teachers, lengths, split=plan.split)
        self._strict = cache(lambda: self._open("fail"))
        self._encoder = cache(TextEncoder)
        self._names = [teacher.name for teacher in run.config.running_teachers]

    def _open(self, unrendered: Any) -> BatchBuilder:
        """The builder of the run's rows, on this machine, which may have no GPU; an aligner on a GPU changes no result."""
        config, plan = self.run.config, self.run.plan
        config = replace(config, data=replace(config.data, unrendered=unrendered))
        if config.aligner.dp.backend == "cuda":
            config = replace(config, aligner=replace(config.aligner, dp=replace(config.aligner.dp, backend="numba")))
        plan = plan if self.packed else replace(plan, packing=False)
        teachers = [
            None if teacher.cross_tokenizer_loss is None else (teacher.tokenizer, teacher.stops)
            for teacher in self.run.teachers
        ]
        student = (self.run.student.tokenizer, self.run.student.stops)
        return make_builder(config, self.run.train.kind, plan, student, teachers)

    def _tokens(self, document: Mapping[str, Any]) -> dict[int, _Tokens]:
        """All tokens of a document: STUDENT's, and those of teachers with their own tokenizer that are asked for it, by index."""
        tokenization, teachers = self._builder.tokenization, self._builder.teachers
        made = self._aligner.tokenize(document)
        if made.student is None:
            if "messages" in document:
                text = tokenization.render(document)[0]
                spans = tokenization.tokens(document, text)[1]
            else:
                text = document["text"]
                read = tokenization.tokenizer(text, return_offsets_mapping=True, verbose=False)
                spans = np.array(read["offset_mapping"], np.int64)
            return {STUDENT: _Tokens(tokenization.tokenizer, text, made.encoded.input_ids, spans)}

        def tokens(tokenizer: Any, side: Tokenized) -> _Tokens:
            """One side, as an aligner reads it."""
            spans = self._encoder(tokenizer).offsets(side.text)[1] if side.offsets is None else side.offsets
            return _Tokens(tokenizer, side.text, side.ids, spans)

        student = {STUDENT: tokens(tokenization.tokenizer, made.student)}
        return student | {i: tokens(teachers[i].tokenizer, side) for i, side in made.teachers.items()}

    def _taken_out(self, document: Mapping[str, Any]) -> np.ndarray:
        """bool [tokens]: which of the student's tokens are not learnt because of a key of their message (SWITCHES)."""
        encode = self._builder.tokenization.encode_all
        learnt = encode(document).label_mask
        if not any(key in message for message in document.get("messages", ()) for key in SWITCHES):
            return np.zeros_like(learnt)
        kept = [{k: v for k, v in message.items() if k not in SWITCHES} for message in document["messages"]]
        return encode({**document, "messages": kept}).label_mask & ~learnt

    def first(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of the run, up to a batch at which it would end."""
        shown = False
        for batch in self.run.loader():
            self.notes += [f"row {bad.row} is left out: {bad.reason}" for bad in batch.bad_rows]
            for row in self._rows(batch.documents):
                yield {"step": batch.index + 1, **row}
                shown = True
            if self.problems or (batch.cursor.epoch and not shown):
                return

    def chosen(self, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yields the rows that hold these rows of the data.

        Raises:
            ConfigError: one of them is not trained on, because the data do not have it or because it is held out.
        """
        train = self.run.train
        parts = train.sources if isinstance(train, Mixture) else (train,)
        total = sum(part.rows_in_all for part in parts)
        where = "data.sources" if isinstance(train, Mixture) else "data.path"
        places, problems = [], []
        for number in numbers:
            place = bisect_left(range(len(train)), number, key=train.row_number)
            places.append(place)
            if not 0 <= number < total:
                rule = f"must be 0 or more and below {total:,}, the number of rows of {where}"
                problems.append(problem("--row", rule, number, "rows are counted from 0"))
            elif place == len(train) or train.row_number(place) != number:
                rule = "must be a row that is trained on"
                problems.append(problem("--row", rule, f"{number}, which data.validation.fraction holds out"))
        ConfigError.raise_all(problems)
        return chain.from_iterable(self._rows([train[place]]) for place in places)

    def _rows(self, documents: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the rows of one batch of documents, in the order of the run; alone, pieces in their order."""
        kept = [(document, aligned) for document in documents if (aligned := self._align(document)) is not None]
        batch = [aligned for _, aligned in kept]
        if not batch:
            return
        self.notes += [f"row {each.bad.row} is left out: {each.bad.reason}" for each in batch if each.bad]
        missing = "is left out: the store of a teacher does not have it"
        self.notes += [f"row {each.row} {missing}" for each in batch if not each.is_stored]
        members = self._builder.members(batch)
        arrays = _Arrays(self._builder.assemble(0, Cursor(), [batch])[1])
        order = sorted(range(len(members)), key=lambda row: 0 if self.packed else members[row])
        pieces = [(i, piece) for i, each in enumerate(batch) for piece in each.pieces]
        owners = [i for i, _ in pieces]

        @cache
        def described(i: int) -> _Document:
            document, _ = kept[i]
            held, _ = self._aligner.pieces_of(document)
            return _Document(document, held, self._tokens(document), self._taken_out(document), first=owners.index(i))

        for row in order:
            held = [(described(owners[j]), j) for j in members[row] if len(pieces[j][1].encoded.input_ids)]
            if held:
                yield self._row(arrays, row, held)

    def _align(self, document: Mapping[str, Any]) -> AlignedDocument | None:
        """The tokens of a document; None if there is no way to show them. What the run refuses is noted."""
        refuses = self.run.config.data.unrendered == "fail"
        try:
            (aligned,) = self._builder.align([document])
        except (DataError, ValueError) as error:
            self.problems += getattr(error, "problems", [str(error)])
            return None
        if refuses and any(piece.encoded.left_out for piece in aligned.pieces):
            try:
                self._strict().align([document])
            except DataError as error:
                self.problems += error.problems
        return aligned

    def _row(self, arrays: _Arrays, row: int, held: Sequence[tuple[_Document, int]]) -> dict[str, Any]:
        student = _RowSide()
        teachers = {i: _RowSide() for i in arrays.chunks if any(i in document.sides for document, _ in held)}
        listed: list[dict[str, Any]] = []
        for document, piece in held:
            first = len(student.tokens)
            before = document.add(STUDENT, piece, student)
            for i, side in teachers.items():
                document.add(i, piece, side)
            listed.append(
                {
                    "source": self._source(document.row),
                    "row": document.row,
                    "start_token": first,
                    "end_token": len(student.tokens),
                    "tokens_before": before,
                    "tokens_in_all": len(document.sides[STUDENT].ids),
                    "pieces": len(document.held[STUDENT]),
                    "not_asked": [name for i, name in enumerate(self._names) if not asked(document.weights, i)],
                    "left_out": document.left_out,
                }
            )
        tokens = student.tokens
        assert [token["id"] for token in tokens] == arrays.ids[row, : len(tokens)].tolist()
        for token, label in zip(tokens, arrays.labels[row].tolist()):
            token["label"] = label != IGNORE_INDEX
        chunks = {self._names[i]: arrays.chunks[i][0][row] for i in teachers}
        for each, (document, _) in zip(listed, held):
            self._explain(tokens, each, chunks, document.taken_out)
        aligners = {i: self._builder.teachers[i].aligner for i in teachers}
        return {
            "source": listed[0]["source"],
            "row": listed[0]["row"],
            "text": student.text,
            "tokens": tokens,
            "teachers": {
                self._names[i]: {
                    "loss": self.run.teachers[i].cross_tokenizer_loss,
                    "text": side.text,
                    "tokens": side.tokens,
                    "chunks": _chunks(
                        (tokens, arrays.chunks[i][0][row], aligners[i].student.special),
                        (side.tokens, arrays.chunks[i][1][row], aligners[i].teacher.special),
                    ),
                }
                for i, side in teachers.items()
            },
            "left_out": list(dict.fromkeys(chain.from_iterable(each["left_out"] for each in listed))),
            "documents": listed,
        }

    def _explain(
        self, tokens: list[dict[str, Any]], document: dict[str, Any], chunks: Mapping[str, Any], taken_out: np.ndarray
    ) -> None:
        """Says of the tokens of a document in a row that are not learnt, or not from all teachers, why."""
        # `chunks` are by name of the teacher, int32 [n]: the chunk of each token of the row, −1 for none.
        data, roles = self.run.config.data, self._builder.tokenization.roles
        setting = "data.loss_roles" if data.loss_roles else f"data.loss_on={data.loss_on}"
        outside = "not the assistant's" if roles == ("assistant",) else f"not of {' or '.join(roles)}"
        has_ce = self.run.config.loss.ce_weight > 0
        left_to = "only cross-entropy trains it" if has_ce else "nothing trains it (loss.ce_weight=0)"
        first, of_piece = document["start_token"], document["tokens_before"] > 0
        for j in range(first, document["end_token"]):
            token = tokens[j]
            if token["label"]:
                if missing := [name for name, numbers in chunks.items() if numbers[j] < 0]:
                    token["why"] = f"in no chunk of teacher {' or '.join(missing)}"
                    if len(missing) + len(document["not_asked"]) >= len(self._names):
                        token["why"] += f": {left_to}"
            elif j == first:
                token["why"] = f"first token of {'a later piece of ' if of_piece else ''}the document"
            elif of_piece and token["start"] == token["end"] == tokens[first]["start"]:
                token["why"] = "special token with which every piece begins"
            elif taken_out[document["tokens_before"] + j - first : document["tokens_before"] + j - first + 1].any():
                token["why"] = f"taken out by its message ({', '.join(SWITCHES[:-1])} or {SWITCHES[-1]})"
            else:
                token["why"] = f"{outside} ({setting})"

    def _source(self, row: Row) -> str:
        """The path of a document's data, or the name of its source."""
        train = self.run.train
        if not isinstance(train, Mixture):
            return self.run.config.data.path or ""
        counts = train.count([row if isinstance(row, int) else row[0]])
        return next(name for name, count in counts.items() if count)


_ChunkSide = tuple[Sequence[Mapping[str, Any]], np.ndarray, np.ndarray]
"""The tokens of a side of a row; int32 [n], the chunk of every token or −1; bool [ids], which ids are special tokens. These
stand in chunks only where a text or turn ends."""


def _chunks(student: _ChunkSide, teacher: _ChunkSide) -> list[list[Any]]:
    """The chunks of a row: the student's tokens, the teacher's, and the kind: 1:1, 1:n, n:1, m:n, or stop."""
    found = []
    for chunk in range(int(student[1].max(initial=-1)) + 1):
        ranges, ends = [], []
        for tokens, numbers, special in (student, teacher):
            start, stop = np.flatnonzero(numbers == chunk)[[0, -1]].tolist()
            ranges.append([start, stop + 1])
            ends.append(special[tokens[start]["id"]])
        ours, theirs = (stop - start for start, stop in ranges)
        kind = f"{'1' if ours == 1 else 'm' if theirs > 1 else 'n'}:{'1' if theirs == 1 else 'n'}"
        found.append([*ranges, "stop" if kind == "1:1" and all(ends) else kind])
    return found


def _print(console: Console, row: Mapping[str, Any], *, by_token: bool) -> None:
    tokens, labelled = row["tokens"], [token for token in row["tokens"] if token["label"]]
    share = len(labelled) / max(len(tokens), 1)

    def line(name: str, text: str, style: str = "") -> None:
        """Prints one line, which is not wrapped."""
        console.print(Text(f"{name:<10} {printable(text)}", style), soft_wrap=True)

    where = f"step {row['step']}, " if "step" in row else ""
    line("row", f"{where}{len(tokens):,} tokens, {len(labelled):,} labelled ({share:.1%})", "bold")
    for why, count in Counter(token["why"] for token in tokens if not token["label"]).items():
        line("unlabelled", f"{count:,}: {why}")
    for document in row["documents"]:
        line("document", _describe(document), "bold")
        for what in document["left_out"]:
            line("left out", what, "yellow")
        _print_tokens(console, row, document, by_token=by_token)
    for name, teacher in row["teachers"].items():
        kinds = Counter(kind for *_, kind in teacher["chunks"])
        one_to_one = (kinds["1:1"] + kinds["stop"]) / max(len(teacher["chunks"]), 1)
        outside = len(labelled) - sum(stop - start for (start, stop), *_ in teacher["chunks"])
        figures = f"{len(teacher['chunks']):,} chunks, {one_to_one:.1%} of them 1:1"
        line("teacher", f"{name}, loss {teacher['loss']}: {figures}; {outside:,} labelled tokens in no chunk", "bold")
        table = Table(box=None, pad_edge=False)
        for heading in ("student", printable(name), "kind"):
            table.add_column(Text(heading))
        for ours, theirs, kind in teacher["chunks"][:CHUNKS_SHOWN]:
            table.add_row(Text(_cell(row, ours)), Text(_cell(teacher, theirs)), kind)
        console.print(table)
        if len(teacher["chunks"]) > CHUNKS_SHOWN:
            line("", f"and {len(teacher['chunks']) - CHUNKS_SHOWN:,} more chunks; --json prints all")
    console.print()


def _describe(document: Mapping[str, Any]) -> str:
    count, before, total = (document[key] for key in ("end_token", "tokens_before", "tokens_in_all"))
    count -= document["start_token"]
    held = f"{count:,} tokens"
    if document["pieces"] > 1:
        held = f"one of {document['pieces']:,} pieces, {count:,} tokens behind the first {before:,} of {total:,}"
    elif count < total:
        held = f"cut at {count:,} of {total:,} tokens (data.max_length, data.long_documents)"
    numbers = document["row"] if isinstance(document["row"], int) else ", ".join(map(str, document["row"]))
    unasked = "".join(f"; teacher {name} is not asked for it (teachers[].where)" for name in document["not_asked"])
    return f"{document['source']}, row {numbers}: {held}{unasked}"


def _has_colours(console: Console) -> bool:
    """Whether labelled tokens have colours; otherwise they stand in brackets."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def _print_tokens(console: Console, row: Mapping[str, Any], document: Mapping[str, Any], *, by_token: bool) -> None:
    """Prints the text of a document in a row, or its tokens line by line."""
    marked = not _has_colours(console)
    first, stop = document["start_token"], document["end_token"]
    tokens = row["tokens"][first:stop]
    if by_token:
        for j, token in enumerate(tokens, start=first):
            name = f"[{_visible(token['text'])}]" if marked and token["label"] else _visible(token["text"])
            style = (_LEARNT if token["label"] else _READ)[0]
            why = token.get("why", "")
            console.print(Text(f"{j:>6} {token['id']:>7}  {name:<20} {why}".rstrip(), style), soft_wrap=True)
        return
    shown, before = Text(), False
    at = row["tokens"][first - 1]["end"] if first else 0
    for j, (token, text) in enumerate(zip(tokens, _texts_of(row["text"], tokens, at))):
        label = token["label"]
        if marked and label != before:
            shown.append("[" if label else "]")
        styles = _ALONE if label and "why" in token else _LEARNT if label else _READ
        shown.append(_visible(text, "↵\n"), styles[j % 2])
        before = label
    shown.append("]" if marked and before else "")
    console.print(shown, soft_wrap=True)


def _texts_of(text: str, tokens: Sequence[Mapping[str, Any]], at: int) -> Iterator[str]:
    """Yields what every token adds to a text, from a place on; of one without characters, its name."""
    # What lies before a token and belongs to none is added to it, a character of several tokens to the first.
    for token in tokens:
        yield text[at : token["end"]] + (token["text"] if token["start"] == token["end"] else "")
        at = max(at, token["end"])


def _cell(side: Mapping[str, Any], chunk: Sequence[int]) -> str:
    """The text of the tokens of a chunk, with marks for blanks and between tokens."""
    tokens = side["tokens"][slice(*chunk)]
    return "|".join(_visible(part).replace(" ", "␣") for part in _texts_of(side["text"], tokens, tokens[0]["start"]))


def _visible(text: str, newline: str = "↵") -> str:
    """A text without control characters, with something else for its newlines."""
    return newline.join(printable(part) for part in text.split("\n"))
