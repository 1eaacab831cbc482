from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.generate import Generator
from distill_rl.evals.suite import Item
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.unit.evals.conftest import KNOWN, chat


@pytest.fixture(scope="module")
def generator(parrot: Path) -> Generator:
    return Generator(parrot)


def plain(text: str, name: str = "row") -> Item:
    return Item(name, text, "")


def test_generation_is_greedy_whatever_the_folder_asks_for(generator: Generator) -> None:
    items = [plain("ka lo mi "), plain("sol be"), plain("alpha")]
    found = dict(generator.generate(items, max_new_tokens=12, batch_size=3))
    for index, item in enumerate(items):
        ids = generator.encode(item)
        with torch.no_grad():
            while len(ids) < len(generator.encode(item)) + 12:
                ids.append(int(generator.model(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] in generator.stop_ids:
                    break
        expected = ids[len(generator.encode(item)) :]
        assert found[index].num_tokens == len(expected)
        assert found[index].text == generator.tokenizer.decode(expected, skip_special_tokens=True)


def test_batches_of_any_size_give_the_same_completions(generator: Generator) -> None:
    items = [plain("ka " * count + "lo", f"row {count}") for count in (1, 30, 7, 2, 30, 12)]
    lengths = [
        len(generator.encode(items[index])) for index, _ in generator.generate(items, max_new_tokens=1, batch_size=2)
    ]
    assert lengths == sorted(lengths, reverse=True), "the largest batch comes first"
    whole = dict(generator.generate(items, max_new_tokens=10, batch_size=6))
    single = dict(generator.generate(items, max_new_tokens=10, batch_size=1))
    pairs = dict(generator.generate(items, max_new_tokens=10, batch_size=2))
    assert whole == single == pairs
    assert sorted(whole) == list(range(6))


def test_the_end_of_turn_ends_an_answer_and_is_not_part_of_it(generator: Generator) -> None:
    items = [Item("row", tuple(chat(question)), answer) for question, answer in KNOWN]
    completions = [completion for _, completion in sorted(generator.generate(items, max_new_tokens=20, batch_size=2))]
    assert [completion.text for completion in completions] == [answer for _, answer in KNOWN]
    assert not any(completion.truncated for completion in completions)
    end = generator.tokenizer.convert_tokens_to_ids("<|end|>")
    assert set(generator.stop_ids) == {generator.tokenizer.eos_token_id, end}


def test_an_answer_that_does_not_end_is_truncated(generator: Generator) -> None:
    ((_, completion),) = generator.generate([Item("row", tuple(chat(KNOWN[0][0])), "")], max_new_tokens=2, batch_size=1)
    assert completion.truncated
    assert completion.num_tokens == 2


def test_a_prompt_has_the_tokens_of_training_text_without_its_end(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    generator = Generator(write_tiny_model(tmp_path, tokenizer=tokenizer))
    ids = generator.encode(plain("ka"))
    assert ids[0] == 0
    assert 1 not in ids
    chat_ids = generator.encode(Item("row", tuple(chat("ka")), ""))
    assert chat_ids.count(0) == 1, "the template writes <s>; the tokenizer must not add another"
    assert 1 not in chat_ids


def test_a_chat_needs_a_chat_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    generator = Generator(write_tiny_model(tmp_path, tokenizer=tokenizer))
    with pytest.raises(DataError, match=r"data\.jsonl:7: chat messages need a tokenizer with a chat template"):
        generator.encode(Item("data.jsonl:7", tuple(chat("ka")), ""))


def test_a_chat_that_the_template_refuses_is_named(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator.tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(
        DataError, match="row: must be a chat that the tokenizer's template accepts; got no system role"
    ):
        generator.encode(Item("row", tuple(chat("ka")), ""))


def test_a_prompt_beyond_the_models_positions_is_named(tmp_path: Path) -> None:
    generator = Generator(write_tiny_model(tmp_path, positions=16))
    short, long = plain("ka"), plain("\x01" * 15, "data.jsonl:2")
    assert len(list(generator.generate([short], max_new_tokens=2, batch_size=1))) == 1
    with pytest.raises(DataError, match=r"data\.jsonl:2: prompt and answer must fit into the model's 16 positions"):
        list(generator.generate([short, long], max_new_tokens=2, batch_size=1))


def test_a_missing_folder_is_refused_without_asking_a_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a folder; got no such folder"):
        Generator("meta-llama/Llama-3.2-1B")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    torch.save({}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        Generator(folder)


def test_code_of_the_folder_is_never_run(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="auto_map"):
        Generator(folder)
    assert not (tmp_path / "ran").exists()


def test_a_model_with_a_weight_missing_is_refused(parrot: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(parrot, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"must hold every weight; got without model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        Generator(folder)
