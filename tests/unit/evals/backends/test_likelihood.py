"""Log-likelihoods of choices, batched, padded and with a shared prefix, against one plain forward pass per choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from distill_rl.errors import DataError
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.base import Item
from tests.helpers.models import FAMILIES, write_tiny_model
from tests.helpers.tokenizers import seeded_words, tiny_tokenizer
from tests.helpers.zoo import write_model
from tests.unit.evals.conftest import chat

LETTERS = (" A", " B", " C", " D")
WORDS = (" ka lo", " mi", " sol be ru 42", " ter ter ter")
ZOO = (
    "llama-rope-scaled", "mistral-window", "gemma2", "gemma3", "granite", "cohere", "olmo2", "opt", "mixtral",
    "recurrent-gemma", "falcon-h1",
)  # fmt: skip
NEVER_SHARE = ("recurrent-gemma", "falcon-h1")


def folder_of(path: Path, family: str) -> Path:
    tokenizer = tiny_tokenizer()
    folder = write_model(path, family, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def questions(choices: tuple[str, ...] = LETTERS, count: int = 7) -> list[Item]:
    """Questions of many lengths on two subjects, whose prefixes are long enough to be shared."""
    words = seeded_words(5, 400)
    items = []
    for i in range(count):
        subject = ("ka lo", "mi ter")[i % 2]
        prefix = f"About {subject}: " + " ".join(words[40 * (i % 2) :][:20]) + "\n\n"
        question = " ".join(words[100 + 11 * i :][: 1 + 3 * (i % 4)]) + "\nAnswer:"
        items.append(Item(f"row {i}", question, choices[0].strip(), subject, prefix, choices))
    return items


def reference(backend: HfBackend, item: Item) -> tuple[float, ...]:
    """One forward pass per choice, of the whole text, without padding or cache."""
    encoder = backend.encoder
    prompt = encoder.encode(replace(item, choices=()))
    sums = []
    for choice in item.choices:
        ids = encoder.tokenizer(item.prefix + str(item.prompt) + choice)["input_ids"]
        assert ids[: len(prompt)] == prompt, "the choices do not merge with the prompt"
        with torch.no_grad():
            logprobs = backend.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        sums.append(sum(float(logprobs[place - 1, ids[place]]) for place in range(len(prompt), len(ids))))
    return tuple(sums)


def chosen(backend: HfBackend, items: list[Item], batch_size: int) -> list[Output]:
    backend.settings = replace(backend.settings, batch_size=batch_size)
    pairs = list(backend.choose(items))
    assert sorted(index for index, _ in pairs) == list(range(len(items)))
    return [output for _, output in sorted(pairs, key=lambda pair: pair[0])]


@contextmanager
def counted(backend: HfBackend) -> Iterator[list[tuple[int, ...]]]:
    """(rows, columns) of every forward pass."""
    sizes: list[tuple[int, ...]] = []
    embedding = backend.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, arguments, output: sizes.append(tuple(arguments[0].shape)))
    yield sizes
    hook.remove()


@pytest.mark.parametrize("family", [*FAMILIES, *ZOO])
def test_log_likelihoods_equal_plain_forward_passes(tmp_path: Path, family: str) -> None:
    backend = HfBackend(folder_of(tmp_path, family))
    items = [*questions(), *questions(WORDS, 3)]
    expected = [reference(backend, item) for item in items]
    for batch_size in (1, 4, 64):
        for output, sums in zip(chosen(backend, items, batch_size), expected):
            assert output.logprobs == pytest.approx(sums, abs=1e-4)
            assert output.logprobs.index(max(output.logprobs)) == sums.index(max(sums))
        lengths = [len(backend.encoder.encode(replace(item, choices=()))) for item in items]
        assert [output.prompt_tokens for output in chosen(backend, items, batch_size)] == lengths


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", *NEVER_SHARE])
def test_shared_prefix_runs_once_if_the_cache_allows(tmp_path: Path, family: str) -> None:
    backend = HfBackend(folder_of(tmp_path, family))
    items = questions(count=16)
    alone = [replace(item, prompt=item.prefix + str(item.prompt), prefix="") for item in items]
    with counted(backend) as shared_sizes:
        shared = chosen(backend, items, 4)
    with counted(backend) as alone_sizes:
        separate = chosen(backend, alone, 4)
    for left, right in zip(shared, separate):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
    if family in NEVER_SHARE:
        assert shared_sizes == alone_sizes
    else:
        assert [rows for rows, _ in shared_sizes] == [1, 4, 4, 1, 4, 4], "each prefix alone, then its questions"
        assert sum(map(prod, shared_sizes)) < sum(map(prod, alone_sizes)) / 2
        assert sum(output.run_tokens for output in shared) < sum(output.run_tokens for output in separate) / 2


def test_phi3_with_two_ropes_does_not_share(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "phi3")
    backend = HfBackend(folder)
    assert backend.cache_support.share_aligned
    half = backend.model.config.hidden_size // backend.model.config.num_attention_heads // 2
    scaling = {
        "partial_rotary_factor": 1.0,
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
    }
    config = backend.model.config
    config.rope_parameters = {**scaling, "original_max_position_embeddings": 64}
    config.original_max_position_embeddings = 64
    backend.model.save_pretrained(folder)
    assert not HfBackend(folder).cache_support.share_aligned


def test_one_token_choices_need_one_row_and_its_last_logits(tmp_path: Path) -> None:
    backend = HfBackend(folder_of(tmp_path, "llama"))
    item = replace(questions(("A", "B", "C", "D"))[0], prefix="")
    heads: list[torch.Size] = []
    hook = backend.model.lm_head.register_forward_hook(lambda _, arguments, output: heads.append(output.shape))
    with counted(backend) as sizes:
        (output,) = chosen(backend, [item], 8)
    hook.remove()
    length = len(backend.encoder.encode(item))
    assert sizes == [(1, length)]
    assert heads == [(1, 1, 320)]
    assert (output.prompt_tokens, output.num_tokens, output.text) == (length, 4, "")


def test_choices_may_follow_a_chat(tmp_path: Path) -> None:
    backend = HfBackend(folder_of(tmp_path, "llama"))
    item = Item("row", tuple(chat("ka")), "x", choices=("yes", "no"))
    ((_, output),) = backend.choose([item])
    ids = backend.encoder.encode(item)
    for choice, logprob in zip(item.choices, output.logprobs):
        more = backend.encoder.tokenizer(choice)["input_ids"]
        with torch.no_grad():
            logprobs = backend.model(torch.tensor([ids + more])).logits[0].log_softmax(-1)
        expected = sum(float(logprobs[len(ids) - 1 + place, token]) for place, token in enumerate(more))
        assert logprob == pytest.approx(expected, abs=1e-4)


def test_too_long_items_are_reported_and_the_rest_run(tmp_path: Path) -> None:
    backend = HfBackend(write_tiny_model(tmp_path, "gpt2", positions=32))
    fits, exact, over = (
        Item(f"row {count}", "\x01" * count, "A", choices=("\x02", "\x03\x04")) for count in (4, 30, 31)
    )
    outputs = chosen(backend, [over, fits, exact], 8)
    assert [output.too_long for output in outputs] == [True, False, False]
    assert outputs[0] == Output(prompt_tokens=31, too_long=True)
    assert all(len(output.logprobs) == 2 for output in outputs[1:])


def test_a_choice_without_tokens_is_refused(tmp_path: Path) -> None:
    backend = HfBackend(write_tiny_model(tmp_path))
    with pytest.raises(DataError, match="row: every choice must add at least one token to the prompt; got ''"):
        list(backend.choose([Item("row", "ka", "x", choices=("x", ""))]))


def test_bf16_log_likelihoods_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    backend = HfBackend(folder_of(tmp_path, "llama"), Settings(dtype="bf16", threads=torch.get_num_threads()))
    assert backend.model.dtype == torch.bfloat16
    for output, item in zip(chosen(backend, questions(), 4), questions()):
        assert output.logprobs == pytest.approx(reference(backend, item), abs=0.25)
