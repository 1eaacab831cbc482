"""The rows of W, with tokenizers made by hand and real ones, and the file of W."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill_rl.align.projection import (
    HEADER,
    Projection,
    build_projection,
    cached_projection,
    load_projection,
    save_projection,
)
from distill_rl.align.vocabulary import Vocabulary, byte_of_letter
from tests.helpers.align import DATA, FAMILIES, family, real, real_vocabulary
from tests.helpers.tokenizers import tiny_tokenizer

ROOT = Path(__file__).parents[3]
LETTERS = {byte: chr(letter) for letter, byte in byte_of_letter().items()}

Row = dict[bytes, float]


def byte_level(
    *merges: str, specials: tuple[str, ...] = (), plain: tuple[str, ...] = (), **roles: str
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the 256 bytes and these merges, such as "a b" for ab; a space in a piece is Ġ."""
    pieces = [LETTERS[byte] for byte in range(256)]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    pieces += [left + right for left, right in pairs]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


def sentencepiece(*merges: str) -> PreTrainedTokenizerFast:
    """A BPE over the letters of `merges` with ▁ for a space, byte fallback, and a dummy space before every text."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for left, right in pairs:
        pieces += [piece for piece in (left, right, left + right) if piece not in pieces]
    numbered = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(numbered, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


Built = tuple[Projection, Vocabulary, Vocabulary]


def built(student, teacher, **sizes: int) -> Built:
    return with_sides(student, teacher, Vocabulary.from_tokenizer(student), Vocabulary.from_tokenizer(teacher), **sizes)


def with_sides(student, teacher, left: Vocabulary, right: Vocabulary, **sizes: int) -> Built:
    columns = {"student_columns": left.size, "teacher_columns": right.size, **sizes}
    return build_projection(student, teacher, **columns), left, right


def row_of(projection: Projection, number: int) -> dict[int, float]:
    entries = slice(projection.indptr[number], projection.indptr[number + 1])
    return dict(zip(projection.indices[entries].tolist(), projection.values[entries].tolist()))


def spelled_row(student, teacher, spelling: bytes) -> Row:
    """The row of the student's token with these bytes, with each column given as its bytes."""
    return row_of_bytes(*built(student, teacher), spelling)


def row_of_bytes(projection: Projection, left: Vocabulary, right: Vocabulary, spelling: bytes) -> Row:
    number = next(i for i in range(left.size) if left.token_bytes(i) == spelling)
    return {right.token_bytes(column): value for column, value in row_of(projection, number).items()}


def parts(*weights: float) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def test_row_is_the_equal_token_or_four_pieces() -> None:
    student = byte_level("a b", "ab c", "abc d", "abcd e", "abcde f", "x y", "xy z")
    teacher = byte_level("a b", "c d", "x y", "xy z")
    assert spelled_row(student, teacher, b"ab") == {b"ab": 1}
    assert spelled_row(student, teacher, b"xyz") == {b"xyz": 1}
    assert spelled_row(student, teacher, b"abc") == pytest.approx(dict(zip((b"ab", b"c"), parts(0.9, 0.09))))
    whole = dict(zip((b"ab", b"cd", b"e", b"f"), parts(0.9, 0.09, 0.009, 0.0009)))
    assert spelled_row(student, teacher, b"abcdef") == pytest.approx(whole)
    four = dict(zip((b"a", b"b", b"c", b"d"), parts(0.9, 0.09, 0.009, 0.0009)))
    assert spelled_row(student, byte_level(), b"abcdef") == pytest.approx(four)


def test_weights_of_a_repeated_piece_add_up() -> None:
    student, teacher = byte_level("1 1", "11 2", "112 1"), byte_level()
    first, second, third, fourth = parts(0.9, 0.09, 0.009, 0.0009)
    assert spelled_row(student, teacher, b"1121") == pytest.approx({b"1": first + second + fourth, b"2": third})
    assert spelled_row(student, teacher, b"11") == {b"1": 1}


def test_rows_of_equal_bytes_share_a_column() -> None:
    """Both `<0x61>` and `a` are the byte a."""
    student, teacher = sentencepiece("a b"), byte_level("a b")
    projection, left, right = built(student, teacher)
    rows = [number for number in range(left.size) if left.token_bytes(number) == b"a"]
    assert len(rows) == 2
    assert [row_of(projection, number) for number in rows] == [{97: 1.0}, {97: 1.0}]
    back, _, _ = built(teacher, student)
    assert row_of(back, 97) == {rows[1]: 1.0}
    assert left.byte_fallback[rows].tolist() == [True, False]
    assert right.token_bytes(97) == b"a"


def test_roles_are_paired_by_role_not_name() -> None:
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    student = byte_level(specials=("<s>", "</s>", "<pad>"), **roles)
    teacher = byte_level("a b", specials=("[END]", "[BEGIN]"), eos_token="[END]", bos_token="[BEGIN]")
    projection, left, right = built(student, teacher)
    assert row_of(projection, left.roles["eos"]) == {right.roles["eos"]: 1.0}
    assert row_of(projection, left.roles["bos"]) == {right.roles["bos"]: 1.0}
    assert row_of(projection, left.roles["pad"]) == {}
    common = dict(zip(projection.student_common.tolist(), projection.teacher_common.tolist()))
    assert common[left.roles["eos"]] == right.roles["eos"]
    assert projection.exact_rows == 258


def test_teachers_single_stop_serves_both_student_stops() -> None:
    student = byte_level(specials=("<end>", "<turn>"), eos_token="<end>")
    student.chat_template = "{% for message in messages %}{{ message['content'] + '<turn>' }}{% endfor %}"
    teacher = byte_level(specials=("[END]",), eos_token="[END]")
    projection, left, right = built(student, teacher)
    assert left.roles["end_of_turn"] != left.roles["eos"]
    for role in ("eos", "end_of_turn"):
        assert row_of(projection, left.roles[role]) == {right.roles["eos"]: 1.0}
    back, _, _ = built(teacher, student)
    assert row_of(back, right.roles["eos"]) == {left.roles["eos"]: 1.0}


def test_added_token_is_spelled_as_its_text() -> None:
    student = byte_level("t h", plain=("<think>",))
    assert spelled_row(student, byte_level(plain=("<think>",)), b"<think>") == {b"<think>": 1}
    pieces = dict(zip((b"<", b"th", b"i", b"n"), parts(0.9, 0.09, 0.009, 0.0009)))
    assert spelled_row(student, byte_level("t h"), b"<think>") == pytest.approx(pieces)


def test_piece_inside_a_word_gets_no_dummy_space() -> None:
    student = byte_level("i n", "in g", "Ġ ing", "ing s")
    teacher = sentencepiece("i n", "in g", "▁ ing", "s s")
    assert spelled_row(student, teacher, b"ing") == {b"ing": 1}
    assert spelled_row(student, teacher, b"ings") == pytest.approx(dict(zip((b"ing", b"s"), parts(0.9, 0.09))))
    # With a leading space, that one space is part of the token.
    longer = byte_level("i n", "in g", "Ġ ing", "Ġing s")
    pieces = dict(zip((b" ing", b"s"), parts(0.9, 0.09)))
    assert spelled_row(longer, teacher, b" ings") == pytest.approx(pieces)


def test_partial_character_is_split_into_bytes() -> None:
    first, second, third = (LETTERS[byte] for byte in "中".encode())
    spelling = "中".encode()[:2]
    student = byte_level(f"{first} {second}", f"{first + second} {third}")
    two = parts(0.9, 0.09)
    assert spelled_row(student, byte_level(), spelling) == pytest.approx({spelling[:1]: two[0], spelling[1:]: two[1]})
    fallback = spelled_row(student, sentencepiece("a b"), spelling)
    assert fallback == pytest.approx({spelling[:1]: two[0], spelling[1:]: two[1]})
    merged = byte_level(f"{second} {third}")
    assert spelled_row(student, merged, "中".encode()) == pytest.approx(
        {spelling[:1]: two[0], "中".encode()[1:]: two[1]}
    )


def lower_casing() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "h", "##h", "##e", "##y", "hey", "##s", ",", "n", "##n"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def test_lossy_teacher_spells_only_what_it_keeps() -> None:
    student = byte_level("H e", "He y", "Ġ Hey", "ĠHey s", "q q")
    teacher = lower_casing()
    assert spelled_row(student, teacher, b"Hey") == {b"hey": 1}
    assert spelled_row(student, teacher, b" Heys") == pytest.approx(dict(zip((b"hey", b"s"), parts(0.9, 0.09))))
    assert spelled_row(student, teacher, b"qq") == {}


def test_padding_ids_are_empty_rows_and_columns() -> None:
    student, teacher = byte_level("a b"), byte_level("c d")
    projection, left, right = built(student, teacher, student_columns=300, teacher_columns=400)
    assert (projection.num_student, projection.num_teacher) == (300, 400)
    assert [row_of(projection, number) for number in range(left.size, 300)] == [{}] * (300 - left.size)
    assert projection.indices.max() < right.size
    assert (projection.exact_rows, projection.split_rows, projection.empty_rows) == (256, 1, 300 - 257)
    for name, size in (("student", {"student_columns": 256}), ("teacher", {"teacher_columns": 256})):
        with pytest.raises(ValueError, match=rf"the {name} model .* config.vocab_size is 256, the tokenizer has 257"):
            built(student, teacher, **size)


def test_tokenizer_with_itself_is_the_identity() -> None:
    tokenizer = tiny_tokenizer()
    projection, vocabulary, _ = built(tokenizer, tokenizer)
    for number in np.flatnonzero(vocabulary.lengths):
        assert row_of(projection, number) == {number: 1.0}
    assert projection.split_rows == 0


@pytest.fixture(scope="module")
def small() -> Projection:
    return built(tiny_tokenizer(400, seed=0), tiny_tokenizer(330, seed=1), student_columns=448)[0]


def test_file_round_trip_is_exact(small: Projection, tmp_path: Path) -> None:
    assert small.split_rows > 20
    save_projection(small, tmp_path / "new" / "w.safetensors")
    known = {"student_hash": small.student_hash, "teacher_hash": small.teacher_hash}
    loaded = load_projection(tmp_path / "new" / "w.safetensors", student_columns=448, teacher_columns=330, **known)
    for field in dataclasses.fields(Projection):
        one, other = getattr(small, field.name), getattr(loaded, field.name)
        assert np.array_equal(one, other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("values", lambda v: np.where(np.arange(len(v)) == 3, np.nan, v), "finite and above 0; entry 3 is nan"),
        ("values", lambda v: np.where(np.arange(len(v)) == 3, np.inf, v), "finite and above 0; entry 3 is inf"),
        ("values", lambda v: np.where(np.arange(len(v)) == 3, -1, v), "finite and above 0; entry 3 is -1"),
        ("values", lambda v: v * 2, "every row must sum to 1; row 0 sums to 2"),
        ("values", lambda v: v[:-1], "there must be one value per index"),
        ("values", lambda v: v.astype(np.float64), r"values must be float32 \[n\]; it is float64"),
        ("indices", lambda v: np.where(v == v.max(), 330, v), "indices must lie in 0 … 329; they range from 0 to 330"),
        ("indices", lambda v: np.where(v == v.max(), -1, v), "they range from -1 to"),
        ("indices", lambda v: v[::-1].copy(), "indices must ascend in every row"),
        ("indptr", lambda v: v[:-1], "indptr must rise from 0 to"),
        ("indptr", lambda v: np.where(np.arange(len(v)) == 9, v[-1], v), "indptr must rise from 0 to"),
        ("student_common", lambda v: v + 448, "student_common must lie in 0 … 447"),
        ("teacher_common", lambda v: np.full_like(v, v[0]), "the common vocabulary must be one to one"),
        ("teacher_common", lambda v: v[1:], "the common vocabulary must be one to one"),
    ],
)
def test_damaged_array_is_rejected(small: Projection, tmp_path: Path, name: str, change, message: str) -> None:
    path = tmp_path / "w.safetensors"
    save_projection(small, path)
    header = json.loads(_metadata(path)[HEADER])
    arrays = load_file(path)
    changed = change(arrays[name])
    arrays[name] = (
        changed if changed.dtype == np.float64 and "float64" in message else changed.astype(arrays[name].dtype)
    )
    save_file(arrays, path, {HEADER: json.dumps(header)})
    with pytest.raises(ValueError, match=message) as caught:
        load_projection(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith("delete the file, it is then built again")
    assert "\n" not in str(caught.value)


def _metadata(path: Path) -> dict[str, str]:
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"student_hash": "0" * 64}, "this pair's, with student_hash 0000"),
        ({"teacher_hash": "0" * 64}, "this pair's, with teacher_hash 0000"),
        ({"student_columns": 400}, "with student_columns 400; the file has 448"),
        ({"teacher_columns": 331}, "with teacher_columns 331; the file has 330"),
    ],
)
def test_file_of_another_pair_is_rejected(small: Projection, tmp_path: Path, wanted, message: str) -> None:
    save_projection(small, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=message):
        load_projection(tmp_path / "w.safetensors", **wanted)


def test_file_of_another_kind_is_rejected(small: Projection, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(ValueError, match="it does not exist"):
        load_projection(path)
    save_file({"weight": np.zeros(3, np.float32)}, path)
    with pytest.raises(ValueError, match="damaged or of another kind"):
        load_projection(path)
    save_projection(small, path)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match="damaged or of another kind"):
        load_projection(path)
    save_file(load_file_of(content, tmp_path), path, {HEADER: json.dumps({"format": 1})})
    with pytest.raises(ValueError, match="the header must hold"):
        load_projection(path)
    save_file(load_file_of(content, tmp_path), path, {HEADER: json.dumps({"format": 0})})
    with pytest.raises(ValueError, match="with format 1; the file has 0"):
        load_projection(path)


def load_file_of(content: bytes, folder: Path) -> dict[str, np.ndarray]:
    (folder / "whole").write_bytes(content)
    return load_file(folder / "whole")


def test_cache_builds_once_and_rebuilds_damaged_files(tmp_path: Path) -> None:
    pair = tiny_tokenizer(320, seed=0), tiny_tokenizer(330, seed=1)
    sizes = {"student_columns": 320, "teacher_columns": 384}
    path = cached_projection(tmp_path / "cache", *pair, **sizes)
    student, teacher = (Vocabulary.from_tokenizer(tokenizer) for tokenizer in pair)
    assert path.name == f"projection-{student.hash[:16]}-{teacher.hash[:16]}-320x384.safetensors"
    before, content = path.stat(), path.read_bytes()
    assert cached_projection(tmp_path / "cache", *pair, **sizes) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    other = cached_projection(tmp_path / "cache", *pair[::-1], student_columns=330, teacher_columns=384)
    assert other != path
    for damaged in (other.read_bytes(), content[:-100]):
        path.write_bytes(damaged)
        assert cached_projection(tmp_path / "cache", *pair, **sizes) == path
        assert path.read_bytes() == content


def test_concurrent_processes_leave_one_identical_file(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from tests.helpers.tokenizers import tiny_tokenizer\n"
        "from distill_rl.align.projection import cached_projection\n"
        "pair = tiny_tokenizer(320, seed=0), tiny_tokenizer(330, seed=1)\n"
        "print(cached_projection(sys.argv[1], *pair, student_columns=320, teacher_columns=330))\n"
    )
    command = [sys.executable, "-c", program]
    folders = [tmp_path / "shared", tmp_path / "shared", tmp_path / "alone"]
    running = [subprocess.Popen([*command, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True) for folder in folders]
    paths = [Path(process.communicate()[0].strip()) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert paths[0] == paths[1]
    assert len({hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}) == 1
    assert list((tmp_path / "shared").iterdir()) == [paths[0]]
    load_projection(paths[0])


def check_rows(projection: Projection, left: Vocabulary, right: Vocabulary) -> None:
    """Every row has at most four columns and sums to 1. Unless the teacher is lossy, no row is empty, and each spells
    the beginning of its token."""
    entries = np.diff(projection.indptr)
    assert entries.max() <= 4
    sums = np.bincount(np.repeat(np.arange(left.size), entries), weights=projection.values, minlength=left.size)
    assert np.abs(sums[entries > 0] - 1).max() < 1e-6
    if right.normalization == "lossy":
        return
    assert right.lossy or (entries[left.lengths > 0] > 0).all()
    draw = np.random.default_rng(0)
    several = np.flatnonzero(entries > 1)
    for number in draw.choice(several, min(len(several), 2000), replace=False).tolist():
        row = row_of(projection, number)
        pieces = [right.token_bytes(column) for column in sorted(row, key=lambda column: -row[column])]
        token = left.token_bytes(number)
        # A repeated piece occurs only once in the row, so the pieces after it are not in order.
        assert token.startswith(pieces[0])
        assert token.startswith(b"".join(pieces)) or all(piece in token for piece in pieces)


@pytest.mark.parametrize("student", FAMILIES)
def test_rows_of_every_pair_of_families(student: str) -> None:
    for teacher in FAMILIES:
        check_rows(*built(family(student), family(teacher)))


@cache
def of_real(student: str, teacher: str) -> Built:
    missing = [name for name in (student, teacher) if not (DATA / "tokenizers" / name / "tokenizer.json").exists()]
    if missing:
        pytest.skip(f"no tokenizer {', '.join(missing)} beside the repository")
    return with_sides(real(student), real(teacher), real_vocabulary(student), real_vocabulary(teacher))


def test_gpt2_to_roberta_is_a_permutation() -> None:
    projection, left, _ = of_real("gpt2", "roberta-base")
    assert np.array_equal(projection.values, np.ones(len(projection.values), np.float32))
    assert len(set(projection.indices.tolist())) == len(projection.indices) == left.size


def test_cl100k_numbers_map_to_single_digits() -> None:
    there, back = of_real("cl100k_base", "qwen3"), of_real("qwen3", "cl100k_base")
    assert row_of_bytes(*back, b"7") == {b"7": 1}
    row = row_of_bytes(*there, b"123")
    assert row == pytest.approx(dict(zip((b"1", b"2", b"3"), parts(0.9, 0.09, 0.009))))
    assert row_of_bytes(*there, b"100") == pytest.approx(dict(zip((b"1", b"0"), parts(0.9, 0.099))))


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ("qwen3", "cl100k_base"),
        ("cl100k_base", "qwen3"),
        ("minimind", "mistral-v1"),
        ("minimind", "llm-jp-v2.2"),
        ("bert-uncased", "minimind"),
        ("mistral-v1", "t5-small"),
    ],
)
def test_rows_of_real_pairs_spell_their_tokens(student: str, teacher: str) -> None:
    projection, left, right = of_real(student, teacher)
    assert projection.exact_rows > 0
    assert projection.split_rows > 100
    check_rows(projection, left, right)
