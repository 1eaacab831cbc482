from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.base import Item
from tests.helpers.models import FAMILIES, write_tiny_model
from tests.helpers.tokenizers import seeded_words, tiny_tokenizer
from tests.helpers.zoo import write_model
from tests.unit.evals.conftest import KNOWN, chat


@pytest.fixture(scope="module")
def backend(parrot: Path) -> HfBackend:
    return HfBackend(parrot)


def plain(text: str, name: str = "row", prefix: str = "") -> Item:
    return Item(name, text, "", prefix=prefix)


def completions(
    backend: HfBackend, items: list[Item], max_new_tokens: int, batch_size: int = 64, stop: tuple[str, ...] = ()
) -> list[Output]:
    backend.settings = replace(backend.settings, batch_size=batch_size)
    pairs = list(backend.generate(items, max_new_tokens=max_new_tokens, stop=stop))
    assert sorted(index for index, _ in pairs) == list(range(len(items)))
    return [output for _, output in sorted(pairs, key=lambda pair: pair[0])]


def reference(backend: HfBackend, item: Item, max_new_tokens: int) -> Output:
    """The likeliest token of one plain forward pass after another."""
    prompt = backend.encoder.encode(item)
    ids: list[int] = []
    with torch.no_grad():
        while len(ids) < max_new_tokens and not set(ids) & set(backend.encoder.stop_ids):
            logits = backend.model(torch.tensor([prompt + ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    names = ("bos", "eos", "pad")  # of the special tokens of tests.helpers.tokenizers only `<|turn|>` is text
    frame = {getattr(backend.encoder.tokenizer, f"{name}_token_id") for name in names} | {*backend.encoder.stop_ids}
    text = backend.encoder.tokenizer.decode([token for token in ids if token not in frame])
    return Output(text, len(ids), len(prompt), truncated=ids[-1] not in backend.encoder.stop_ids)


def folder_of(path: Path, family: str) -> Path:
    tokenizer = tiny_tokenizer()
    folder = write_model(path, family, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def passes(backend: HfBackend) -> Iterator[list[tuple[int, ...]]]:
    """(rows, columns) of every forward pass."""
    sizes: list[tuple[int, ...]] = []
    embedding = backend.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, arguments, output: sizes.append(tuple(arguments[0].shape)))
    yield sizes
    hook.remove()


def test_generation_is_greedy_despite_generation_config(backend: HfBackend) -> None:
    items = [plain("ka lo mi "), plain("sol be"), plain("alpha")]
    assert completions(backend, items, 12) == [reference(backend, item, 12) for item in items]


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, "mistral-window", "gemma2", "granite", "cohere", "opt", "mixtral", "recurrent-gemma", "falcon-h1"],
)
def test_completions_equal_plain_forward_passes(tmp_path: Path, family: str) -> None:
    backend = HfBackend(folder_of(tmp_path, family))
    words = seeded_words(3, 200)
    prefix = " ".join(words[:20]) + "\n\n"
    items = [plain(" ".join(words[30 + 9 * n :][: 1 + 2 * n]), f"row {n}", prefix * (n % 2)) for n in range(6)]
    expected = [reference(backend, item, 9) for item in items]
    assert len({output.text for output in expected}) > 2, "the texts differ"
    for batch_size in (1, 4, 64):
        assert completions(backend, items, 9, batch_size) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window", "falcon-h1"])
def test_shared_prefix_runs_once_if_padding_may_follow(tmp_path: Path, family: str) -> None:
    backend = HfBackend(folder_of(tmp_path, family))
    words = seeded_words(3, 200)
    items = [plain(" ".join(words[n : 2 * n + 1]), f"row {n}", " ".join(words[100:130])) for n in range(4)]
    with passes(backend) as sizes:
        outputs = completions(backend, items, 4)
    assert outputs == [reference(backend, item, 4) for item in items]
    shares = family in ("llama", "gpt2")
    assert [rows for rows, _ in sizes] == ([1] if shares else []) + [4] * 4


def test_batches_of_any_size_give_the_same_completions(backend: HfBackend) -> None:
    items = [plain("ka " * count + "lo", f"row {count}") for count in (1, 30, 7, 2, 30, 12)]
    whole, pairs, single = (completions(backend, items, 10, batch_size) for batch_size in (6, 2, 1))
    assert whole == pairs == single
    with passes(backend) as sizes:
        completions(backend, items, 1, 2)
    assert [columns for _, columns in sizes] == sorted((columns for _, columns in sizes), reverse=True), "largest first"


def test_end_of_turn_ends_an_answer_and_is_excluded(backend: HfBackend) -> None:
    items = [Item("row", tuple(chat(question)), answer) for question, answer in KNOWN]
    outputs = completions(backend, items, 20, 2)
    assert [output.text for output in outputs] == [answer for _, answer in KNOWN]
    assert not any(output.truncated for output in outputs)
    end = backend.encoder.tokenizer.convert_tokens_to_ids("<|end|>")
    assert set(backend.encoder.stop_ids) == {backend.encoder.tokenizer.eos_token_id, end}


def test_ended_row_leaves_the_batch(backend: HfBackend) -> None:
    items = [Item("row", tuple(chat(question)), answer) for question, answer in KNOWN]
    with passes(backend) as sizes:
        short, long = sorted(output.num_tokens for output in completions(backend, items, 20, 2))
    assert short < long
    assert [rows for rows, _ in sizes] == [2] * short + [1] * (long - short)


def test_answer_without_end_is_truncated(backend: HfBackend) -> None:
    (output,) = completions(backend, [Item("row", tuple(chat(KNOWN[0][0])), "")], 2)
    assert output.truncated
    assert output.num_tokens == 2


@pytest.mark.parametrize(
    ("stop", "text"), [((" two",), "one"), (("two", "ne t"), "o"), (("o", "one"), ""), (("three", "😀" * 9), "one two")]
)
def test_stop_text_ends_a_completion_and_is_excluded(backend: HfBackend, stop: tuple[str, ...], text: str) -> None:
    item = Item("row", tuple(chat(KNOWN[0][0])), "")
    (whole,), (output,) = completions(backend, [item], 20), completions(backend, [item], 20, stop=stop)
    assert whole.text == "one two"
    assert (output.text, output.truncated) == (text, False)
    assert output.num_tokens == whole.num_tokens if text == whole.text else output.num_tokens < whole.num_tokens


@pytest.mark.parametrize("family", ["llama", "falcon-h1"])
def test_stop_text_of_many_tokens_ends_only_its_row(tmp_path: Path, family: str) -> None:
    backend = HfBackend(folder_of(tmp_path, family))
    items = [plain("ka lo mi"), plain("sol be ru"), plain("ter")]
    free = completions(backend, items, 24)
    stop = free[0].text[5:11]
    for output, whole in zip(completions(backend, items, 24, stop=(stop,)), free):
        assert output.text == whole.text.partition(stop)[0]
        assert output.truncated == (stop not in whole.text)
        assert output.num_tokens < 24 or stop not in whole.text[:-1]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_completion_is_limited_to_remaining_positions(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family, positions=16)
    backend = HfBackend(folder)
    backend.encoder.stop_ids = ()
    items = [plain("\x01" * count, f"row {count}") for count in (4, 15, 16, 12, 40)]
    outputs = completions(backend, items, 6)
    assert [output.num_tokens for output in outputs] == [6, 1, 0, 4, 0]
    assert [output.too_long for output in outputs] == [False, False, True, False, True]
    assert [output.truncated for output in outputs] == [True, True, False, True, False]
    assert [output.prompt_tokens for output in outputs] == [4, 15, 16, 12, 40]
    for place in (0, 1, 3):
        assert outputs[place] == reference(backend, items[place], outputs[place].num_tokens)


def test_weights_of_another_folder_are_taken(parrot: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "m", hidden=64)
    backend = HfBackend(other, Settings(batch_size=2, device="cpu"))
    item = Item("row", tuple(chat(KNOWN[0][0])), "")
    before = completions(backend, [item], 20)
    backend.reload(parrot)
    assert [output.text for output in completions(backend, [item], 20)] == ["one two"]
    assert backend.folder == parrot
    backend.reload(other)
    assert completions(backend, [item], 20) == before
    backend.close()
    assert backend.model is None


def test_missing_folder_is_refused_without_hub_access(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a folder; got no such folder"):
        HfBackend("meta-llama/Llama-3.2-1B")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    torch.save({}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        HfBackend(folder)


def test_code_of_the_folder_is_never_run(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="auto_map"):
        HfBackend(folder)
    assert not (tmp_path / "ran").exists()


def test_a_model_with_a_weight_missing_is_refused(parrot: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(parrot, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"must contain every weight; got without model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        HfBackend(folder)
