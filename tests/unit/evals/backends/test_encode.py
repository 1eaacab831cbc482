from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.backends.base import ItemEncoder, Settings, common_start, model_folder, prompt_rows
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.base import Item
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.unit.evals.conftest import chat


@pytest.fixture
def encoder(tmp_path: Path) -> ItemEncoder:
    return ItemEncoder(write_tiny_model(tmp_path, positions=64))


def with_ends(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def test_prefix_and_prompt_are_tokenised_as_one_text(encoder: ItemEncoder) -> None:
    assert encoder.encode(Item("row", " lo", "", prefix="ka")) == encoder.tokenizer("ka lo")["input_ids"]


def test_prompt_is_encoded_without_end_token(tmp_path: Path) -> None:
    encoder = ItemEncoder(write_tiny_model(tmp_path, tokenizer=with_ends(tiny_tokenizer())))
    ids = encoder.encode(Item("row", "ka", ""))
    assert ids[0] == 0
    assert 1 not in ids
    chat_ids = encoder.encode(Item("row", tuple(chat("ka")), ""))
    assert chat_ids.count(0) == 1, "the template writes <s>; the tokenizer must not add another"
    assert 1 not in chat_ids


def test_end_tokens_that_the_author_wrote_stay(tmp_path: Path) -> None:
    """A chat that was rendered beforehand ends with them, and is another question without."""
    for appends in (False, True):
        tokenizer = with_ends(tiny_tokenizer()) if appends else tiny_tokenizer()
        encoder = ItemEncoder(write_tiny_model(tmp_path / str(appends), tokenizer=tokenizer))
        begin = [0] if appends else []
        for text, ends in (("ka", 0), ("ka</s>", 1), ("ka</s></s>", 2)):
            words = tiny_tokenizer()("ka", add_special_tokens=False)["input_ids"]
            assert encoder.encode(Item("row", text, "")) == begin + words + [1] * ends
            context, _ = encoder.choices(Item("row", text, "A", choices=(" A", " B")))
            assert context == begin + words + [1] * ends


def test_special_tokens_without_a_name_are_part_of_an_answer(encoder: ItemEncoder) -> None:
    """Such as `<tool_call>` in some vocabularies; here the one that begins a turn."""
    ids = encoder.tokenizer("ka<|turn|> lo")["input_ids"]
    assert encoder.decode([0, *ids, 2, 1]) == "ka<|turn|> lo"
    assert encoder.decode([*ids, *encoder.stop_ids]) == "ka<|turn|> lo"


def test_choices_continue_the_prompt_without_end_token(tmp_path: Path) -> None:
    encoder = ItemEncoder(write_tiny_model(tmp_path, tokenizer=with_ends(tiny_tokenizer())))
    item = Item("row", "ka lo:", "A", choices=(" A", " B"))
    context, continuations = encoder.choices(item)
    assert context == encoder.encode(item)
    plain = tiny_tokenizer()
    assert continuations == [plain(choice)["input_ids"] for choice in item.choices]


def test_tokens_across_the_prompts_end_belong_to_the_choices(tmp_path: Path) -> None:
    vocabulary = {piece: i for i, piece in enumerate(["<s>", "</s>", "<pad>", ":", "Ġ", "A", "B", "ĠA", "x"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "A")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    encoder = ItemEncoder(write_tiny_model(tmp_path, tokenizer=fast))
    context, continuations = encoder.choices(Item("row", "x: ", "A", choices=("A", "B")))
    assert context == [8, 3], "the space may merge with the next token"
    assert continuations == [[7], [4, 6]]


def test_tokens_shared_by_all_choices_are_still_scored(encoder: ItemEncoder) -> None:
    context, continuations = encoder.choices(Item("row", "ka:", "A", choices=(" (A", " (B")))
    space = encoder.tokenizer(" (")["input_ids"]
    assert context == encoder.encode(Item("row", "ka:", ""))
    assert all(ids[: len(space)] == space for ids in continuations)


@pytest.mark.parametrize(
    ("item", "rule"),
    [
        (Item("row", "", ""), "row: the prompt must have at least one token"),
        (Item("row", "", "A", choices=("A", "B")), "row: the prompt must have at least one token"),
        (Item("row", "ka", "A", choices=("A", "")), "row: every choice must add at least one token"),
    ],
)
def test_an_item_without_tokens_is_named(encoder: ItemEncoder, item: Item, rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        encoder.choices(item) if item.choices else encoder.encode(item)


def test_a_token_without_an_embedding_row_is_named(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<image>", special=True, normalized=False)])
    backend = HfBackend(write_tiny_model(tmp_path, tokenizer=tokenizer, vocab_size=320), Settings(device="cpu"))
    line = (
        f"row: the 320 embedding rows of model {tmp_path} must include every token of the text; got <image> (id 320); "
        "leave this token out, or give the model a row for it (resize_token_embeddings)"
    )
    for item in (
        Item("row", "ka <image> lo", ""),
        Item("row", "lo", "", prefix="ka <image>"),
        Item("row", tuple(chat("ka <image>")), ""),
        Item("row", "ka <image>", "A", choices=(" A", " B")),
        Item("row", "ka", "A", choices=(" A", " <image>")),
    ):
        with pytest.raises(DataError) as refused:
            list(backend.choose([item]) if item.choices else backend.generate([item], max_new_tokens=4))
        assert str(refused.value) == line
    assert next(backend.generate([Item("row", "ka lo", "")], max_new_tokens=4))[1].num_tokens > 0


def test_a_chat_needs_a_chat_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    encoder = ItemEncoder(write_tiny_model(tmp_path, tokenizer=tokenizer))
    with pytest.raises(DataError, match=r"data\.jsonl:7: chat messages need a tokenizer with a chat template"):
        encoder.encode(Item("data.jsonl:7", tuple(chat("ka")), ""))


def test_chat_that_the_template_rejects_is_named(encoder: ItemEncoder) -> None:
    encoder.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(
        DataError, match="row: must be a chat that the tokenizer's template accepts; got no system role"
    ):
        encoder.encode(Item("row", tuple(chat("ka")), ""))


@pytest.mark.parametrize(("configured", "expected"), [(7, (7, 1, 4)), ([7, 1], (7, 1, 4)), (None, (1, 4))])
def test_stop_tokens_come_from_config_tokenizer_and_template(
    tmp_path: Path, configured: object, expected: tuple[int, ...]
) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
    assert ItemEncoder(folder).stop_ids == expected


def test_without_generation_config_the_model_config_has_stops(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert ItemEncoder(folder).stop_ids == (9, 1, 4)


def test_model_without_stop_token_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    folder = write_tiny_model(tmp_path, tokenizer=tokenizer)
    (folder / "generation_config.json").write_text("{}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    with pytest.raises(ConfigError, match="must have an end-of-text token"):
        ItemEncoder(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_completions_are_limited_to_the_positions(tmp_path: Path, family: str) -> None:
    encoder = ItemEncoder(write_tiny_model(tmp_path, family, positions=16))
    items = [Item(str(count), "\x01" * count, "") for count in (1, 15, 16, 40)]
    assert [len(encoder.encode(item)) for item in items] == [1, 15, 16, 40]
    rows, too_long = prompt_rows(encoder, items, 100, encoder.positions)
    assert [(row.item_index, row.max_new_tokens) for row in rows] == [(0, 15), (1, 1)]
    assert [index for index, output in too_long if output.too_long] == [2, 3]
    rows, too_long = prompt_rows(encoder, items, 100, None)
    assert [row.max_new_tokens for row in rows] == [100] * 4
    assert too_long == []


def test_missing_folder_is_refused_without_hub_access() -> None:
    with pytest.raises(ConfigError, match="must be a folder; got no such folder"):
        model_folder("meta-llama/Llama-3.2-1B")


@pytest.mark.parametrize(
    ("rows", "length"), [([[1, 2, 3], [1, 2, 4, 5]], 2), ([[1], [2]], 0), ([[7, 8]], 2), ([[], [1]], 0)]
)
def test_common_start(rows: list[list[int]], length: int) -> None:
    assert len(common_start(rows)) == length
