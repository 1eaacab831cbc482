import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill_rl.align import Vocabulary, common_vocabulary
from distill_rl.align.vocabulary import byte_of_letter
from tests.helpers.align import DATA, FAMILIES, REAL, REAL_LOSSY, SPECIALS, family, real, real_vocabulary, slow_table

needs_data = pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="real tokenizers are not in ../shared/data")


def check_table(tokenizer, vocabulary: Vocabulary) -> None:
    expected = slow_table(tokenizer)
    special = {
        token["id"] for token in json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"] if token["special"]
    }
    assert vocabulary.size == 1 + max(expected)
    assert {number: vocabulary.token_bytes(number) for number in expected} == expected
    assert set(np.flatnonzero(vocabulary.special).tolist()) == special
    assert vocabulary.lengths.dtype == np.int32
    assert np.array_equal(vocabulary.lengths, np.diff(vocabulary.starts))
    assert not vocabulary.lengths[vocabulary.special].any()
    for number in special:
        assert vocabulary.literal(number).decode() == tokenizer.convert_ids_to_tokens(number)


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_of_every_id(name):
    check_table(family(name), Vocabulary.from_tokenizer(family(name)))


@needs_data
@pytest.mark.parametrize("name", REAL + REAL_LOSSY)
def test_bytes_of_every_id_of_real_tokenizers(name):
    check_table(real(name), real_vocabulary(name))


def test_byte_map_is_that_of_the_tokenizers_library():
    letters = byte_of_letter()
    assert sorted(letters.values()) == list(range(256))
    assert {chr(letter) for letter in letters} == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("name", "kind", "normalization", "dummy"),
    [
        ("byte_level", "byte_level", "none", False),
        ("byte_level_nfc", "byte_level", "nfc", False),
        ("byte_level_prefix", "byte_level", "none", True),
        ("tiktoken", "tiktoken", "none", False),
        ("spm_prepend", "sentencepiece", "none", True),
        ("spm_first", "sentencepiece", "none", True),
        ("spm_always", "sentencepiece", "none", True),
        ("unigram_fallback", "unigram", "none", True),
        ("unigram", "unigram", "none", True),
        ("wordpiece", "wordpiece", "lossy", False),
    ],
)
def test_family_and_normalization_are_detected(name, kind, normalization, dummy):
    vocabulary = Vocabulary.from_tokenizer(family(name))
    assert (vocabulary.family, vocabulary.normalization, vocabulary.dummy) == (kind, normalization, dummy)
    assert (vocabulary.lossy is None) == (name not in ("unigram", "wordpiece"))
    assert vocabulary.drops_spaces == (name == "wordpiece")


def test_reason_for_a_lossy_tokenizer():
    assert "unknown token" in Vocabulary.from_tokenizer(family("unigram")).lossy
    assert "BertNormalizer changes the text" in Vocabulary.from_tokenizer(family("wordpiece")).lossy


def test_roles_come_from_tokenizer_and_template():
    vocabulary = Vocabulary.from_tokenizer(family("byte_level"))
    ids = family("byte_level").convert_tokens_to_ids
    assert vocabulary.roles == {
        role: ids(token)
        for role, token in zip(
            ("bos", "eos", "pad", "unk", "end_of_turn"), ("<s>", "</s>", "<pad>", "<unk>", "<|end|>")
        )
    }
    bare = Vocabulary.from_tokenizer(family("byte_level").backend_tokenizer)
    assert dict(bare.roles) == {}
    assert np.array_equal(bare.flat, vocabulary.flat)


def added(*tokens: AddedToken) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ġ": 1, "Ã": 2, "µ": 3}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_plain_added_tokens_spell_their_text():
    tokenizer = added(*(AddedToken(text, normalized=False) for text in ("<think>", "õ", "   ", "Ａ")))
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    spelled = [
        vocabulary.token_bytes(tokenizer.convert_tokens_to_ids(text)).decode() for text in ("<think>", "õ", "   ", "Ａ")
    ]
    assert spelled == ["<think>", "õ", "   ", "Ａ"]
    assert vocabulary.token_bytes(1) == b" "
    assert vocabulary.token_bytes(3) == b"\xb5"


def test_metaspace_runs_that_are_pieces_spell_spaces():
    tokenizer = Tokenizer(models.BPE({"▁": 0, "▁▁": 1, "a": 2, "x▁": 3}, [("▁", "▁")]))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("▁new", normalized=False)])
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert vocabulary.token_bytes(1) == b"  "
    assert vocabulary.token_bytes(tokenizer.token_to_id("▁new")) == "▁new".encode()


def test_slow_and_empty_tokenizers_are_rejected():
    class Slow:
        pass

    with pytest.raises(ValueError, match=r"fast tokenizer .* got Slow"):
        Vocabulary.from_tokenizer(Slow())
    with pytest.raises(ValueError, match="with tokens"):
        Vocabulary.from_tokenizer(Tokenizer(models.BPE()))


def test_hash_depends_only_on_ids_and_bytes():
    first = family("byte_level")
    copy = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(first.backend_tokenizer.to_str()))
    copy.backend_tokenizer.enable_truncation(7)
    copy.backend_tokenizer.enable_padding()
    assert Vocabulary.from_tokenizer(copy).hash == Vocabulary.from_tokenizer(first).hash
    copy.add_tokens(["<another>"])
    assert Vocabulary.from_tokenizer(copy).hash != Vocabulary.from_tokenizer(first).hash


@pytest.mark.parametrize(
    ("left", "right"), [("byte_level", "spm_first"), ("unigram_fallback", "tiktoken"), ("wordpiece", "spm_always")]
)
def test_common_vocabulary_is_one_to_one_and_complete(left, right):
    student, teacher = (Vocabulary.from_tokenizer(family(name)) for name in (left, right))
    student_ids, teacher_ids = common_vocabulary(student, teacher)
    assert student_ids.dtype == teacher_ids.dtype == np.int32
    assert len(set(student_ids.tolist())) == len(set(teacher_ids.tolist())) == len(student_ids)
    spelled = [(student.token_bytes(a), teacher.token_bytes(b)) for a, b in zip(student_ids, teacher_ids)]
    assert all(a == b for a, b in spelled)
    textless = [
        pair for pair, text in zip(zip(student_ids.tolist(), teacher_ids.tolist()), spelled) if text == (b"", b"")
    ]
    assert textless == list(zip(student_ids.tolist(), teacher_ids.tolist()))[-len(textless) :]
    roles = [(student.roles[role], teacher.roles[role]) for role in ("eos", "end_of_turn", "bos")]
    assert textless[:3] == roles
    written = {(student.literal(a), teacher.literal(b)) for a, b in textless[3:]}
    assert written == {(b"<pad>", b"<pad>"), (b"<|turn|>", b"<|turn|>")}
    both = {student.token_bytes(a) for a in range(student.size)} & {teacher.token_bytes(b) for b in range(teacher.size)}
    assert {a for a, _ in spelled} == both
    assert student_ids[: -len(textless)].tolist() == sorted(student_ids[: -len(textless)].tolist())


def test_copies_of_a_tokenizer_share_every_id():
    copies = [Vocabulary.from_tokenizer(family("spm_first")) for _ in range(2)]
    student_ids, teacher_ids = common_vocabulary(*copies)
    assert student_ids.tolist() == teacher_ids.tolist() == list(range(copies[0].size))


def test_plain_piece_precedes_a_fallback_piece():
    tokenizer = family("spm_first")
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    plain, fallback = tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("<0x61>")
    assert vocabulary.token_bytes(plain) == vocabulary.token_bytes(fallback) == b"a"
    student_ids, teacher_ids = common_vocabulary(vocabulary, Vocabulary.from_tokenizer(family("byte_level")))
    assert plain in student_ids
    assert fallback not in student_ids
    back = common_vocabulary(Vocabulary.from_tokenizer(family("byte_level")), vocabulary)
    assert set(zip(*(side.tolist() for side in back))) == set(zip(teacher_ids.tolist(), student_ids.tolist()))


@needs_data
@pytest.mark.parametrize(
    ("left", "right", "count"),
    [("gpt2", "roberta-base", 50256), ("qwen3", "mistral-v1", 29234), ("qwen3", "cl100k_base", 99156)],
)
def test_size_of_real_common_vocabularies(left, right, count):
    student, teacher = real_vocabulary(left), real_vocabulary(right)
    student_ids, teacher_ids = common_vocabulary(student, teacher)
    spelled = student.lengths[student_ids] > 0
    assert abs(int(spelled.sum()) - count) <= 20
    assert all(
        student.token_bytes(a) == teacher.token_bytes(b) for a, b in zip(student_ids[spelled], teacher_ids[spelled])
    )


def test_helper_specials_are_special_in_every_family():
    for name in FAMILIES:
        vocabulary = Vocabulary.from_tokenizer(family(name))
        assert vocabulary.special[family(name).convert_tokens_to_ids(list(SPECIALS))].all()
