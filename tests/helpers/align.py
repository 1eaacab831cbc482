"""Small tokenizers of every family, trained when needed, and a slow aligner that shares no code with the real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from distill_rl.align import Alignment, Vocabulary
from tests.helpers.tokenizers import CHAT_TEMPLATE, seeded_words

DATA = Path(__file__).parents[3] / "shared" / "data"
REAL = ("qwen3", "mistral-tekken", "mistral-v1", "llm-jp-v2.2", "cl100k_base", "gpt2", "roberta-base", "minimind")
REAL_LOSSY = ("t5-small", "bert-uncased")

SPECIALS = ("<s>", "</s>", "<pad>", "<|turn|>", "<|end|>", "<unk>")
OTHER_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>[' + message['role'] + ']: ' + message['content'].strip() + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>[assistant]: ' }}{% endif %}"
)
SENTENCES = (
    "The cat sat on the mat, and 12345 dogs ran home in 1999.",
    "def f(x):\n    return x + 1  # done\n",
    "naïve café Übergröße — “quoted” text…",
    "日本語の文章と中文的句子。",
    "Привет, мир! नमस्ते دنیا",
)
_SPLIT = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _texts(seed: int) -> list[str]:
    words = seeded_words(seed, 3000)
    return [" ".join(words[i : i + 15]) for i in range(0, len(words), 15)] + list(SENTENCES) * 4


def _specials() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in SPECIALS]


def _train_bpe(tokenizer: Tokenizer, seed: int, size: int, alphabet: Sequence[str] = ()) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=_specials(), initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)


def _edited(tokenizer: Tokenizer, edit: Callable[[dict], None]) -> Tokenizer:
    described = json.loads(tokenizer.to_str())
    edit(described)
    return Tokenizer.from_str(json.dumps(described))


def _byte_level(seed: int, *, split: bool = False, composed: bool = False, prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=split))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    parts = [pre_tokenizers.Split(Regex(_SPLIT), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, whole])
    tokenizer.decoder = decoders.ByteLevel()
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    _train_bpe(tokenizer, seed, 420 + 40 * seed, sorted(pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def _sentencepiece(seed: int, scheme: str) -> Tokenizer:
    """`scheme`: prepend (the old normalizer), first or always (Metaspace)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if scheme == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=_specials(), show_progress=False, max_token_length=8)
    tokenizer.train_from_iterator([" ".join(text.split()) for text in _texts(seed)], trainer)

    def add_bytes(described: dict) -> None:
        vocabulary = described["model"]["vocab"]
        for byte in range(256):
            vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
        described["model"]["byte_fallback"] = True

    edited = _edited(tokenizer, add_bytes)
    edited.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", edited.token_to_id("<s>"))])
    return edited


def _unigram(seed: int, *, fallback: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    prefix = normalizers.Replace(Regex(r"(?<!\n)^"), "▁")
    tokenizer.normalizer = normalizers.Sequence([prefix, normalizers.Replace(" ", "▁")])
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=_specials(), unk_token="<unk>", show_progress=False, max_piece_length=6
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)

    def add_bytes(described: dict) -> None:
        described["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
        described["model"]["byte_fallback"] = True

    edited = _edited(tokenizer, add_bytes) if fallback else tokenizer
    edited.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", edited.token_to_id("</s>"))])
    return edited


def _wordpiece(seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=420, special_tokens=_specials(), show_progress=False)
    tokenizer.train_from_iterator(_texts(seed), trainer)
    return tokenizer


_FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": lambda: _byte_level(0),
    "byte_level_other": lambda: _byte_level(1),
    "byte_level_nfc": lambda: _byte_level(2, composed=True),
    "byte_level_prefix": lambda: _byte_level(4, prefix=True),
    "tiktoken": lambda: _byte_level(3, split=True),
    "spm_prepend": lambda: _sentencepiece(4, "prepend"),
    "spm_first": lambda: _sentencepiece(5, "first"),
    "spm_always": lambda: _sentencepiece(6, "always"),
    "unigram_fallback": lambda: _unigram(7, fallback=True),
    "unigram": lambda: _unigram(8, fallback=False),
    "wordpiece": lambda: _wordpiece(9),
}
FAMILIES = tuple(_FAMILIES)
LOSSLESS = tuple(name for name in FAMILIES if name not in ("unigram", "wordpiece"))


@cache
def family(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of this family, with bos, eos, pad, unk and a chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_FAMILIES[name](),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = OTHER_TEMPLATE if name.startswith(("spm", "unigram")) else CHAT_TEMPLATE
    return fast


def _rebuilt(name: str, edit: Callable[[dict], None], **tokens: str) -> PreTrainedTokenizerFast:
    """A family's tokenizer with an edited description."""
    core = _edited(family(name).backend_tokenizer, edit)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"} | tokens
    fast = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **roles)
    fast.chat_template = family(name).chat_template
    return fast


@cache
def stripping(name: str) -> PreTrainedTokenizerFast:
    """Like Phi-3: the tokens that open and end a turn strip the white space that the template writes behind them."""

    def edit(described: dict) -> None:
        for token in described["added_tokens"]:
            token["rstrip"] = token["content"] in ("<|turn|>", "<|end|>")

    fast = _rebuilt(name, edit)
    fast.chat_template = (
        "{% for message in messages %}{{ '<|turn|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}{{ eos_token }}"
    )
    return fast


@cache
def unknown_is_eos(name: str) -> PreTrainedTokenizerFast:
    """Like CLIP: the unknown token is also the token that ends a text."""

    def edit(described: dict) -> None:
        model = described["model"]
        if model["type"] == "Unigram":
            model["unk_id"] = next(number for number, (piece, _) in enumerate(model["vocab"]) if piece == "</s>")
        else:
            model["unk_token"] = "</s>"

    fast = _rebuilt(name, edit, unk_token="</s>")
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + eos_token }}{% endfor %}"
    )
    return fast


@cache
def real(name: str) -> PreTrainedTokenizerFast:
    """One of the tokenizers of the shared data; callers skip their test if it is missing."""
    return AutoTokenizer.from_pretrained(DATA / "tokenizers" / name)


@cache
def real_vocabulary(name: str) -> Vocabulary:
    """The vocabulary of one of them."""
    return Vocabulary.from_tokenizer(real(name))


@cache
def slow_table(tokenizer: PreTrainedTokenizerFast) -> dict[int, bytes]:
    """Id → bytes, by an independent implementation: special tokens have none, other added tokens are literal."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = '"ByteLevel"' in json.dumps([described["pre_tokenizer"], described["normalizer"]])
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)]
    rest = [byte for byte in range(256) if byte not in printable]
    letter = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    table = {}
    for piece, token_id in tokenizer.get_vocab().items():
        if byte_level:
            table[token_id] = bytes(letter[char] for char in piece) if set(piece) <= letter.keys() else piece.encode()
        elif described["model"].get("byte_fallback") and len(piece) == 6 and piece.startswith("<0x"):
            table[token_id] = bytes.fromhex(piece[3:5])
        elif described["model"].get("type") == "WordPiece":
            table[token_id] = piece.removeprefix("##").encode()
        else:
            table[token_id] = piece.replace("▁", " ").encode()
    for token in described["added_tokens"]:
        table[token["id"]] = b"" if token["special"] else token["content"].encode()
    return table


def slow_walk(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray, text: bytes) -> list[tuple[int, int]] | None:
    """(start, end) in bytes of every token, token by token; None if the tokens do not spell the text.

    If the tokens spell the text behind one additional space, that is a dummy space and is left out.
    """
    table = slow_table(tokenizer)
    pieces = [table[token] for token in ids.tolist()]
    spelled = b"".join(pieces)
    if spelled == text:
        surplus = 0
    elif spelled == b" " + text:
        surplus = 1
    else:
        return None
    places, cursor = [], 0
    for piece in pieces:
        size = len(piece)
        if surplus and size:
            size, surplus = size - 1, 0
        places.append((cursor, cursor + size))
        cursor += size
    return places


def slow_chunks(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Chunk indices of two walks over one text, by sets of ends and a loop over tokens."""
    common = {end for start, end in left if end > start} & {end for start, end in right if end > start}

    def chunk_of_token(places: list[tuple[int, int]]) -> list[int]:
        chunks, current = [], 0
        for start, end in places:
            if start == end or current == len(common):
                chunks.append(-1)
                continue
            chunks.append(current)
            if end in common:
                current += 1
        return chunks

    return chunk_of_token(left), chunk_of_token(right)


def check_row(
    student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, text: str, alignment: Alignment
) -> None:
    """Compares a row with the slow walk: an exact row chunk by chunk; another one must be flagged, with correct chunks."""
    raw = text.encode()
    walks = [
        slow_walk(side, ids, raw) for side, ids in ((student, alignment.student_ids), (teacher, alignment.teacher_ids))
    ]
    left, right = walks
    assert alignment.exact == (left is not None and right is not None), text
    if left is not None and right is not None:
        assert (alignment.student_chunk.tolist(), alignment.teacher_chunk.tolist()) == slow_chunks(left, right), text
        assert alignment.method == "bytes"
        return
    check_chunks_spell_alike(student, teacher, alignment)


def chunk_bytes(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray, chunk: np.ndarray, count: int) -> list[bytes]:
    """The bytes of each chunk on one side."""
    table, pieces = slow_table(tokenizer), [b""] * count
    for i, token in zip(chunk.tolist(), ids.tolist()):
        if i >= 0:
            pieces[i] += table[token]
    return pieces


def check_chunks_spell_alike(
    student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, alignment: Alignment
) -> None:
    """Both sides of every chunk spell the same, up to one space at the front or spaces that WordPiece drops."""
    drops = any(isinstance(side.backend_tokenizer.model, models.WordPiece) for side in (student, teacher))
    left = chunk_bytes(student, alignment.student_ids, alignment.student_chunk, alignment.num_chunks)
    right = chunk_bytes(teacher, alignment.teacher_ids, alignment.teacher_chunk, alignment.num_chunks)
    for student_bytes, teacher_bytes in zip(left, right):
        if drops:
            assert student_bytes.replace(b" ", b"") == teacher_bytes.replace(b" ", b"")
        else:
            assert student_bytes.removeprefix(b" ") == teacher_bytes.removeprefix(b" ")


def check_numbers(alignment: Alignment) -> None:
    """Chunk indices run from 0 in order and without gaps on both sides, and the counts by kind add up."""
    for chunk in (alignment.student_chunk, alignment.teacher_chunk):
        used = chunk[chunk >= 0]
        assert chunk.dtype == np.int32
        assert np.array_equal(np.unique(used), np.arange(alignment.num_chunks))
        assert (np.diff(used) >= 0).all()
    assert list(alignment.counts) == ["1:1", "1:n", "n:1", "m:n"]
    assert sum(alignment.counts.values()) == alignment.num_chunks
