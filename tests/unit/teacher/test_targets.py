from __future__ import annotations

import pytest
import torch

from distill_rl.teacher.engine import (
    CHUNK_BYTES,
    TargetHead,
    chunk_tokens,
    hidden_targets,
    logits_targets,
    sampled_targets,
    topk_targets,
)

TOKENS, HIDDEN, VOCABULARY, TOP = 17, 6, 23, 5


@pytest.fixture
def case():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw)
    weight = torch.randn(VOCABULARY + 4, HIDDEN, generator=draw)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)


def targets(case, chunk: int, temperature: float = 1.0, seen: list[int] | None = None):
    hidden, weight, labels = case

    def head(part: torch.Tensor) -> torch.Tensor:
        if seen is not None:
            seen.append(part.shape[0])
        return part @ weight.T

    return topk_targets(hidden, labels, TargetHead(head, temperature, VOCABULARY, chunk), k=TOP)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_topk_targets_are_exact_without_padding(case, temperature: float):
    hidden, weight, labels = case
    logits = (hidden.double() @ weight.double().T)[:, :VOCABULARY] / temperature
    exact = torch.log_softmax(logits, -1)
    found = targets(case, 4, temperature)
    top, ids = exact.topk(TOP, dim=-1)
    assert torch.equal(found.ids.long(), ids)
    torch.testing.assert_close(found.logprobs.double(), top, rtol=1e-5, atol=1e-6)
    rest = exact.scatter(1, ids, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(found.rest_logprob.double(), rest, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found.label_logprob.double(), exact.gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-6
    )
    assert found.temperature == temperature


@pytest.mark.parametrize("chunk", [1, 4, 5, 16, 17, 1000])
def test_chunking_changes_no_result(case, chunk: int):
    whole, parts = targets(case, TOKENS), targets(case, chunk)
    assert torch.equal(whole.ids, parts.ids)
    for name in ("logprobs", "rest_logprob", "label_logprob"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-6, atol=1e-6)


def test_head_sees_one_chunk_at_a_time_and_none_twice(case):
    seen: list[int] = []
    targets(case, 5, seen=seen)
    assert seen == [5, 5, 5, 2]


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_chunking_changes_no_draw(case, chunk: int):
    hidden, weight, labels = case
    keys = torch.arange(TOKENS)

    def drawn(chunk: int):
        head = TargetHead(lambda part: part @ weight.T, 2.0, VOCABULARY, chunk)
        return sampled_targets(hidden, labels, head, draws=8, keys=keys)

    whole, parts = drawn(TOKENS), drawn(chunk)
    assert parts.temperature == 2.0
    assert parts.ids.max() < VOCABULARY
    # A product of other shapes may round logits otherwise, which moves a draw once in a million.
    assert (parts.ids == whole.ids).all(1).float().mean() > 0.9
    torch.testing.assert_close(parts.label_logprob, whole.label_logprob, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 17])
def test_hidden_targets_carry_label_logprob_and_entropy(case, chunk: int):
    hidden, weight, labels = case
    exact = torch.log_softmax((hidden.double() @ weight.double().T)[:, :VOCABULARY] / 2, -1)
    head = TargetHead(lambda part: part @ weight.T, 2.0, VOCABULARY, chunk)
    plain, nothing = hidden_targets(hidden, labels, head)
    found, entropies = hidden_targets(hidden, labels, head, with_entropy=True)
    assert nothing is None
    assert found.hidden is plain.hidden is hidden
    wanted = exact.gather(1, labels[:, None])[:, 0]
    for one in (plain, found):
        torch.testing.assert_close(one.label_logprob.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropies.double(), -(exact.exp() * exact).sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_targets_hold_all_columns_with_masked_padding(case, chunk: int, dtype):
    hidden, weight, labels = case
    head = TargetHead(lambda part: part @ weight.T, 2.0, VOCABULARY, chunk)
    found = logits_targets(hidden, labels, head, wire_dtype=dtype)
    exact = hidden.double() @ weight.double().T
    assert found.logits.dtype == dtype
    # A few units in the last place of either dtype: the logits are summed up in fp32.
    bound = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(found.logits[:, :VOCABULARY], exact[:, :VOCABULARY].to(dtype), **bound)
    assert bool((found.logits[:, VOCABULARY:] == -torch.inf).all())
    wanted = (exact[:, :VOCABULARY] / 2).log_softmax(1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(found.label_logprob.double(), wanted, rtol=1e-5, atol=1e-6)


def test_chunk_takes_at_most_a_quarter_of_what_is_free():
    assert chunk_tokens(65536, free=2**40) == 1024
    assert chunk_tokens(65536, free=4 * 100 * 4 * 65536) == 100


@pytest.mark.parametrize(("columns", "tokens"), [(1, 1024), (65536, 1024), (131072, 512), (151936, 441), (10**9, 1)])
def test_chunk_is_bounded_in_tokens_and_in_bytes(columns: int, tokens: int):
    assert chunk_tokens(columns) == tokens
    assert tokens == 1 or 4 * tokens * columns <= CHUNK_BYTES
