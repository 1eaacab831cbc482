import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill_rl.align import Vocabulary, common_vocabulary
from distill_rl.align.tokenizer.families import byte_of_letter
from tests.helpers.align import DATA, FAMILIES, REAL, REAL_LOSSY, SPECIALS, family, real, slow_table

needs_data = pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="real tokenizers are not in ../shared/data")


def check_table(tokenizer) -> None:
    made, expected = Vocabulary.from_tokenizer(tokenizer), slow_table(tokenizer)
    special = {
        token["id"] for token in json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"] if token["special"]
    }
    assert made.size == 1 + max(expected)
    assert {number: made.token_bytes(number) for number in expected} == expected
    assert set(np.flatnonzero(made.special).tolist()) == special
    assert made.lengths.dtype == np.int32
    assert np.array_equal(made.lengths, np.diff(made.starts))
    assert not made.lengths[made.special].any()
    for number in special:
        assert made.literal(number).decode() == tokenizer.convert_ids_to_tokens(number)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_id_has_its_exact_bytes(name):
    check_table(family(name))


@needs_data
@pytest.mark.parametrize("name", REAL + REAL_LOSSY)
def test_every_id_of_a_real_tokenizer_has_its_exact_bytes(name):
    check_table(real(name))


def test_the_byte_map_is_that_of_the_tokenizers():
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
def test_a_family_is_told_by_what_it_does(name, kind, normalization, dummy):
    made = Vocabulary.from_tokenizer(family(name))
    assert (made.family, made.normalization, made.dummy) == (kind, normalization, dummy)
    assert (made.lossy is None) == (name not in ("unigram", "wordpiece"))
    assert made.drops_spaces == (name == "wordpiece")


def test_lossy_tokenizers_say_why():
    assert "unknown token" in Vocabulary.from_tokenizer(family("unigram")).lossy
    assert "BertNormalizer changes the text" in Vocabulary.from_tokenizer(family("wordpiece")).lossy


def test_roles_are_the_tokenizers_own_and_the_end_of_turn_is_the_templates():
    made = Vocabulary.from_tokenizer(family("byte_level"))
    ids = family("byte_level").convert_tokens_to_ids
    assert made.roles == {
        role: ids(token)
        for role, token in zip(
            ("bos", "eos", "pad", "unk", "end_of_turn"), ("<s>", "</s>", "<pad>", "<unk>", "<|end|>")
        )
    }
    bare = Vocabulary.from_tokenizer(family("byte_level").backend_tokenizer)
    assert dict(bare.roles) == {}
    assert np.array_equal(bare.flat, made.flat)


def added(*tokens: AddedToken) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ġ": 1, "Ã": 2, "µ": 3}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_added_tokens_that_are_not_special_spell_their_text_and_skip_the_byte_map():
    tokenizer = added(*(AddedToken(text, normalized=False) for text in ("<think>", "õ", "   ", "Ａ")))
    made = Vocabulary.from_tokenizer(tokenizer)
    spelled = [
        made.token_bytes(tokenizer.convert_tokens_to_ids(text)).decode() for text in ("<think>", "õ", "   ", "Ａ")
    ]
    assert spelled == ["<think>", "õ", "   ", "Ａ"]
    assert made.token_bytes(1) == b" "
    assert made.token_bytes(3) == b"\xb5"


def test_runs_of_metaspace_that_are_also_pieces_spell_spaces():
    tokenizer = Tokenizer(models.BPE({"▁": 0, "▁▁": 1, "a": 2, "x▁": 3}, [("▁", "▁")]))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("▁new", normalized=False)])
    made = Vocabulary.from_tokenizer(tokenizer)
    assert made.token_bytes(1) == b"  "
    assert made.token_bytes(tokenizer.token_to_id("▁new")) == "▁new".encode()


def test_slow_tokenizers_and_empty_ones_are_refused():
    class Slow:
        pass

    with pytest.raises(ValueError, match=r"fast tokenizer .* got Slow"):
        Vocabulary.from_tokenizer(Slow())
    with pytest.raises(ValueError, match="with tokens"):
        Vocabulary.from_tokenizer(Tokenizer(models.BPE()))


def test_the_hash_follows_what_decides_ids_and_bytes_only():
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
def test_the_common_vocabulary_is_one_to_one_and_complete(left, right):
    student, teacher = (Vocabulary.from_tokenizer(family(name)) for name in (left, right))
    ours, theirs = common_vocabulary(student, teacher)
    assert ours.dtype == theirs.dtype == np.int32
    assert len(set(ours.tolist())) == len(set(theirs.tolist())) == len(ours)
    spelled = [(student.token_bytes(a), teacher.token_bytes(b)) for a, b in zip(ours, theirs)]
    assert all(a == b for a, b in spelled)
    silent = [pair for pair, text in zip(zip(ours.tolist(), theirs.tolist()), spelled) if text == (b"", b"")]
    assert silent == list(zip(ours.tolist(), theirs.tolist()))[-len(silent) :]
    roles = [(student.roles[role], teacher.roles[role]) for role in ("eos", "end_of_turn", "bos")]
    assert silent[:3] == roles
    written = {(student.literal(a), teacher.literal(b)) for a, b in silent[3:]}
    assert written == {(b"<pad>", b"<pad>"), (b"<|turn|>", b"<|turn|>")}
    both = {student.token_bytes(a) for a in range(student.size)} & {teacher.token_bytes(b) for b in range(teacher.size)}
    assert {a for a, _ in spelled} == both
    assert ours[: -len(silent)].tolist() == sorted(ours[: -len(silent)].tolist())


def test_two_copies_of_a_tokenizer_have_every_id_in_common():
    made = [Vocabulary.from_tokenizer(family("spm_first")) for _ in range(2)]
    ours, theirs = common_vocabulary(*made)
    assert ours.tolist() == theirs.tolist() == list(range(made[0].size))


def test_of_equal_bytes_a_plain_piece_is_taken_before_a_fallback_one():
    tokenizer = family("spm_first")
    made = Vocabulary.from_tokenizer(tokenizer)
    plain, fallback = tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("<0x61>")
    assert made.token_bytes(plain) == made.token_bytes(fallback) == b"a"
    ours, theirs = common_vocabulary(made, Vocabulary.from_tokenizer(family("byte_level")))
    assert plain in ours
    assert fallback not in ours
    back = common_vocabulary(Vocabulary.from_tokenizer(family("byte_level")), made)
    assert set(zip(*(side.tolist() for side in back))) == set(zip(theirs.tolist(), ours.tolist()))


@needs_data
@pytest.mark.parametrize(
    ("left", "right", "count"),
    [("gpt2", "roberta-base", 50256), ("qwen3", "mistral-v1", 29234), ("qwen3", "cl100k_base", 99156)],
)
def test_real_pairs_share_as_many_tokens_as_is_known(left, right, count):
    student, teacher = (Vocabulary.from_tokenizer(real(name)) for name in (left, right))
    ours, theirs = common_vocabulary(student, teacher)
    spelled = student.lengths[ours] > 0
    assert abs(int(spelled.sum()) - count) <= 20
    assert all(student.token_bytes(a) == teacher.token_bytes(b) for a, b in zip(ours[spelled], theirs[spelled]))


def test_specials_of_the_helper_are_special_everywhere():
    for name in FAMILIES:
        made = Vocabulary.from_tokenizer(family(name))
        assert made.special[family(name).convert_tokens_to_ids(list(SPECIALS))].all()
