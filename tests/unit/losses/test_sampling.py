"""The teacher's draws: unbiased, systematic, and the same however rows and columns are divided."""

from __future__ import annotations

import math

import pytest
import torch

from distill_rl.losses import SampledTokens, context_keys, vocab_parallel_sample
from distill_rl.losses.sampling import MOST_DRAWS, uniform
from distill_rl.losses.targets import TopKLogprobs, target_of

ROWS, COLUMNS = 40, 60


def logits_of(rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return (2 * torch.randn(rows, columns, generator=draw)).to(dtype)


def keys_of(rows: int = ROWS) -> torch.Tensor:
    return torch.arange(rows) * 7919


def dense(target: SampledTokens, columns: int) -> torch.Tensor:
    """The weights of all columns, fp64 [N, columns]."""
    weights = torch.zeros(len(target.ids), columns + 1, dtype=torch.float64)
    ids = torch.where(target.ids < 0, columns, target.ids.long())
    return weights.scatter_add_(1, ids, target.weights(torch.float64))[:, :columns]


def splitmix(state: int) -> int:
    """splitmix64 in unsigned integers of any size, as published."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the published first output for the seed 0
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    expected = [(splitmix(key % 2**64) >> 11) / 2**53 for key in keys]
    assert uniform(torch.tensor(keys)).tolist() == expected


@pytest.mark.parametrize("n", [1, 5, 50, 200])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_counts_are_the_expectation_rounded_down_or_up(n: int, temperature: float) -> None:
    logits = logits_of()
    target = vocab_parallel_sample(logits, n, keys=keys_of(), temperature=temperature)
    assert target.ids.shape == target.counts.shape == (ROWS, min(n, COLUMNS))
    assert (target.counts.sum(1) == n).all()
    expected = n * (logits.double() / temperature).softmax(1)
    # 1e-4: p is computed from fp32 exponentials, so n·p may lie on the other side of an integer.
    assert ((dense(target, COLUMNS) * n - expected).abs() < 1 + 1e-4).all()


def test_expectation_over_all_offsets_is_the_probability() -> None:
    """With 2^16 equidistant uniform numbers in place of random ones, the mean weight is p but for 1/2^16."""
    from distill_rl.losses import sampling

    logits, count, n = logits_of(1, 9), 2**16, 7
    shard = sampling.VocabularyShard(0, 9, 9)
    draws = sampling._Draws(logits.expand(count, 9), shard, n, torch.zeros(count, dtype=torch.int64), 1.0, 4096)
    draws.uniform = (torch.arange(count) + 0.5) / count
    ids, counts = sampling._merged(draws.make(None)[0], n)
    mean = dense(SampledTokens(ids, counts), 9).mean(0)
    assert (mean - logits.double().softmax(1)[0]).abs().max() < 1 / count


def test_weights_are_unbiased_over_100000_draws() -> None:
    rows, columns, n = 100_000, 12, 3
    logits = logits_of(1, columns)
    p = logits.double().softmax(1)[0]
    weights = dense(vocab_parallel_sample(logits.expand(rows, columns), n, keys=torch.arange(rows)), columns)
    # A count is ⌊np⌋ or ⌈np⌉, so its variance is f·(1 − f) with f the fraction of np.
    fraction = n * p - (n * p).floor()
    error = (fraction * (1 - fraction)).sqrt() / n / math.sqrt(rows)
    assert ((weights.mean(0) - p).abs() <= 3 * error).all()
    assert torch.allclose(weights.std(0) / math.sqrt(rows), error, rtol=0.05)


def test_log_probabilities_are_those_of_the_whole_vocabulary() -> None:
    logits, labels = logits_of(), torch.arange(ROWS)
    target = vocab_parallel_sample(logits, 20, keys=keys_of(), labels=labels, temperature=2.0)
    exact = (logits.double() / 2).log_softmax(1)
    mean = (dense(target, COLUMNS) * exact).sum(1)
    torch.testing.assert_close(target.mean_logprob.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        target.label_logprob.double(), exact.gather(1, labels[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )
    assert target.mean_logprob.dtype == torch.float32
    assert vocab_parallel_sample(logits, 20, keys=keys_of()).label_logprob is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_depends_on_its_logits_and_key_alone(dtype: torch.dtype) -> None:
    logits, keys, labels = logits_of(dtype=dtype), keys_of(), torch.arange(ROWS)
    whole = vocab_parallel_sample(logits, 10, keys=keys, labels=labels)
    for chunk in (1, 7, ROWS):
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(chunk))
        part = vocab_parallel_sample(logits[rows], 10, keys=keys[rows], labels=labels[rows], chunk_size=chunk)
        for name in ("ids", "counts", "mean_logprob", "label_logprob"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
    other = vocab_parallel_sample(logits, 10, keys=keys + 1)
    assert not torch.equal(other.ids, whole.ids)


def test_masked_columns_are_never_drawn() -> None:
    logits = logits_of(2000, 6)
    logits[:, [0, 3, 5]] = -torch.inf
    target = vocab_parallel_sample(logits, 6, keys=keys_of(2000))
    assert set(target.ids.unique().tolist()) == {-1, 1, 2, 4}
    alone = torch.full((1, 6), -torch.inf)
    alone[0, 3] = -5.0
    certain = vocab_parallel_sample(alone, 4, keys=torch.tensor([1]))
    assert certain.ids.tolist() == [[3, -1, -1, -1]]
    assert certain.counts.tolist() == [[4, 0, 0, 0]]
    assert certain.mean_logprob.item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_without_a_distribution_are_nan(value: float) -> None:
    logits = logits_of(4)
    logits[1, 5], logits[2] = value, -torch.inf
    target = vocab_parallel_sample(logits, 8, keys=keys_of(4), labels=torch.arange(4))
    for bad in (1, 2):
        assert (target.ids[bad] == -1).all()
        assert (target.counts[bad] == 0).all()
        assert target.mean_logprob[bad].isnan()
        assert target.label_logprob[bad].isnan()
    assert target.mean_logprob[[0, 3]].isfinite().all()
    assert (target.counts[[0, 3]].sum(1) == 8).all()


def test_far_columns_of_a_large_vocabulary_are_drawn_without_bias() -> None:
    """A tenth of the mass is in 100,000 columns of 1e-6 each, which fp32 sums would add to a large total."""
    rows, columns, n = 400, 100_001, 50
    logits = torch.full((1, columns), math.log(1e-6))
    logits[0, 0] = math.log(0.9)
    target = vocab_parallel_sample(logits.expand(rows, columns), n, keys=torch.arange(rows))
    tail = (dense(target, columns)[:, 1:].sum(1)).mean()
    halves = dense(target, columns)[:, 1:].unflatten(1, (2, -1)).sum(2).mean(0)
    assert abs(tail - 0.1) < 1e-6  # n·p is a whole number, so every row draws it exactly
    # Every row splits its five draws of the tail as evenly as can be: 2 or 3 in either half.
    assert (halves - 0.05).abs().max() < 3 * 0.5 / n / math.sqrt(rows)


def test_keys_depend_on_the_document_up_to_the_position() -> None:
    one, other = torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9])
    positions = torch.arange(4)
    alone = context_keys(one[None], positions[None], seed=3)[0]
    packed = context_keys(torch.cat([other, one])[None], torch.cat([positions[:3], positions])[None], seed=3)[0]
    assert torch.equal(packed[3:], alone)
    assert torch.equal(packed[:2], alone[:2])  # the same beginning
    assert packed[2] != alone[2]
    assert len(set(alone.tolist())) == 4
    assert not torch.equal(context_keys(one[None], positions[None], seed=4)[0], alone)
    swapped = context_keys(one[[1, 0, 2, 3]][None], positions[None], seed=3)[0]
    assert (swapped != alone).all()


def test_wire_format_is_exact_and_recognised() -> None:
    target = vocab_parallel_sample(logits_of(), 9, keys=keys_of(), labels=torch.arange(ROWS), temperature=1.5)
    sent = target.to_tensors(torch.float16)
    assert {name: tensor.dtype for name, tensor in sent.items()} == {
        "ids": torch.int32, "counts": torch.int16, "mean_logprob": torch.float32, "label_logprob": torch.float32,
    }  # fmt: skip
    found = target_of(sent, 1.5)
    assert isinstance(found, SampledTokens)
    assert torch.equal(found.weights(torch.float64), target.weights(torch.float64))
    assert found.temperature == 1.5
    del sent["counts"]
    with pytest.raises(ValueError, match="must hold ids and logprobs; logprobs missing"):
        target_of(sent, 1.0)
    with pytest.raises(ValueError, match="must hold ids and counts; ids missing"):
        SampledTokens.from_tensors({"counts": target.counts}, 1.0)
    assert isinstance(target_of({"ids": sent["ids"], "logprobs": sent["ids"].float()}, 1.0), TopKLogprobs)


def test_most_drawn_is_the_lowest_of_equals() -> None:
    target = SampledTokens(
        torch.tensor([[4, 2, 9], [3, 8, -1], [-1, -1, -1]]), torch.tensor([[2, 2, 1], [1, 4, 0], [0, 0, 0]])
    )
    assert target.most_drawn().tolist() == [2, 8, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n: must lie in .1, 32767.; got 0"),
        ({"n": MOST_DRAWS + 1}, "n: must lie in .1, 32767.; got 32768"),
        ({"keys": torch.zeros(ROWS)}, "keys: must be int64; got torch.float32"),
        ({"keys": torch.zeros(3, dtype=torch.int64)}, "keys: must have the shape of the logits' rows"),
        ({"labels": torch.zeros(3)}, "labels: must have the shape of the logits' rows"),
        ({"temperature": 0.0}, "temperature: must be positive and finite"),
        ({"chunk_size": 0}, "chunk_size: must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    arguments = {"n": 4, "keys": keys_of(), **change}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_sample(logits_of(), **arguments)
