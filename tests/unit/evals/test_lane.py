"""How the items of a suite are cut into what a model gets at once."""

from __future__ import annotations

import pytest

from distill_rl.evals.lane import CHUNKS_PER_CALL, VLLM_CHUNK, Task, chunks
from distill_rl.evals.suite import Item

ITEMS = [Item(str(n), "q" * (1 + n * 7 % 13), "a", prefix=f"subject {n % 3}: ") for n in range(40)]


@pytest.mark.parametrize("choose", [True, False])
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_every_item_is_in_one_chunk(choose: bool, backend: str) -> None:
    cut = chunks(ITEMS, Task(choose), backend, 4)
    assert sorted(index for chunk in cut for index in chunk) == list(range(40))


def test_chunks_hold_one_prefix_longest_prompts_first() -> None:
    for chunk in chunks(ITEMS, Task(False), "hf", 4):
        assert len({ITEMS[index].prefix for index in chunk}) == 1
        assert len(chunk) <= 4
        lengths = [len(ITEMS[index].prompt) for index in chunk]
        assert lengths == sorted(lengths, reverse=True)


def test_likelihoods_get_several_batches_of_a_prefix_at_once() -> None:
    assert max(map(len, chunks(ITEMS, Task(True), "hf", 2))) == 2 * CHUNKS_PER_CALL


def test_vllm_gets_as_many_as_keep_it_busy() -> None:
    many = [Item(str(n), "q", "a", prefix=str(n)) for n in range(VLLM_CHUNK + 1)]
    assert [len(chunk) for chunk in chunks(many, Task(False), "vllm", 4)] == [VLLM_CHUNK, 1]


def test_chats_are_as_long_as_their_messages() -> None:
    def chat(text: str) -> Item:
        return Item(text, ({"role": "user", "content": text},), "a")

    assert chunks([chat("a"), chat("aaa"), chat("aa")], Task(False), "hf", 9) == [[1, 2, 0]]
