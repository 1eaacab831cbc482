"""Whether two tokenizers are the same but for tokens at the end, such as a padding token that one side has added.

Such a pair is compared token by token: an id below the smaller vocabulary means the same on both sides, and a text
without the further tokens has the same ids. The further columns count as padding: they have no probability on either
side, exactly as if the models had columns that stand for no token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distill_rl.models.files import tokenizer_hash, vocabulary_size

SHOWN = 4
"""Tokens that are named in a message."""


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    size: int
    """Ids that both sides have, 0 to size - 1."""
    student_only: tuple[str, ...] = ()
    """Tokens from `size` on, of the student; the teacher has none then."""
    teacher_only: tuple[str, ...] = ()
    """The same of the teacher."""

    def __str__(self) -> str:
        """How the tokenizers differ and what follows, as a clause; empty if they do not differ."""
        more = self.student_only or self.teacher_only
        if not more:
            return ""
        count = f"{len(more)} token{'' if len(more) == 1 else 's'}"
        whose = "the student's tokenizer has" if self.student_only else "its tokenizer has"
        other = "the teacher's" if self.student_only else "the student's"
        return f"{whose} {count} more than {other} ({some(more)}); compared token by token over the {self.size:,} ids of both"


def some(tokens: Sequence[str], count: int = SHOWN) -> str:
    """The first few tokens, for a message."""
    return ", ".join(tokens[:count]) + (", ..." if len(tokens) > count else "")


def shared_vocabulary(
    student: Any,
    teacher: Any,
    *,
    student_stops: Sequence[int] = (),
    teacher_stops: Sequence[int] = (),
    same: bool | None = None,
) -> SharedVocabulary | None:
    """What two tokenizers share if they differ at most in added tokens at the end; None if they differ in more.

    They also differ in more if such a token ends the teacher's answers, because a teacher without it would teach the
    student not to stop, or if the student writes it into every text (its bos, eos or chat template), because the
    teacher could not read any.

    Args:
        student, teacher: fast tokenizers.
        student_stops, teacher_stops: ids that end an answer, besides the tokenizers' own eos.
        same: whether the tokenizers have one hash; None: not known.
    """
    sizes = vocabulary_size(student), vocabulary_size(teacher)
    size = min(sizes)
    if tokenizer_hash(student) == tokenizer_hash(teacher) if same is None else same:
        return SharedVocabulary(size)
    if sizes[0] == sizes[1] or _below(student, size) != _below(teacher, size):
        return None
    longer, stops = (student, student_stops) if sizes[0] > size else (teacher, teacher_stops)
    tokens = _merely_added(longer, size, stops, writes=longer is student)
    if tokens is None:
        return None
    return SharedVocabulary(size, student_only=tokens) if longer is student else SharedVocabulary(size, (), tokens)


def tokens_beyond(tokenizer: Any, columns: int, *, stops: Sequence[int] = ()) -> tuple[str, ...] | None:
    """Added tokens of a tokenizer for which its model has no embedding row, by id; empty if there are none.

    None if texts need a token without a row: one that is not merely added, or a bos, eos, stop or token of the chat
    template. The tokenizer then is another model's. Texts that contain a merely added one cannot be read.

    Args:
        columns: rows of the model's embedding table.
        stops: as in `shared_vocabulary`.
    """
    return () if vocabulary_size(tokenizer) <= columns else _merely_added(tokenizer, columns, stops, writes=True)


def _merely_added(tokenizer: Any, size: int, stops: Sequence[int], *, writes: bool) -> tuple[str, ...] | None:
    """The tokens from id `size` on, by id; None if one is more than merely added, or ends answers."""
    more = {token: id for token, id in tokenizer.get_vocab().items() if id >= size}
    needed, template = {*stops, tokenizer.eos_token_id}, ""
    if writes:
        needed.add(tokenizer.bos_token_id)
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
    if more.keys() - tokenizer.get_added_vocab().keys() or needed & set(more.values()):
        return None
    return None if any(token in template for token in more) else tuple(sorted(more, key=more.__getitem__))


def _below(tokenizer: Any, size: int) -> dict[str, Any]:
    """All that decides the ids of a text that has none of the ids from `size` on."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    model = dict(whole["model"])
    if isinstance(model.get("vocab"), dict):  # some files list added tokens there, too
        model["vocab"] = {token: id for token, id in model["vocab"].items() if id < size}
    added = [
        {key: value for key, value in token.items() if key != "special"}
        for token in whole.get("added_tokens") or ()
        if token["id"] < size
    ]
    return {key: whole.get(key) for key in ("normalizer", "pre_tokenizer")} | {"model": model, "added_tokens": added}
