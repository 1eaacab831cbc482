from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.models import forward
from distill_rl.teacher.engine import TeacherEngine, wire_dtype
from distill_rl.transport.base import Layout
from distill_rl.types import RankBatch, TokenRows
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    plain_logits,
    plain_model,
    random_documents,
    rank_batch,
    token_rows,
)
from tests.helpers.models import FAMILIES, write_tiny_model

VOCABULARY, WIDTH = 320, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "teacher", "llama", seed=2)


def engine(world, folder, **settings) -> TeacherEngine:
    config = engine_config("unused", [folder])
    for name, value in settings.items():
        setattr(config.teachers[0], name, value)
    return TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)


@pytest.fixture
def rows() -> TokenRows:
    return token_rows([[document] for document in random_documents(4, seed=7)], WIDTH)


@pytest.mark.parametrize(("size", "count"), [(None, 2), (1, 4), (4, 1)])
def test_layouts_have_global_row_numbers(world, folder, rows, size, count):
    batch = RankBatch(3, 12, rows, 100)
    found = list(engine(world, folder, micro_batch_size=size).forward(batch))
    per_slot = 4 // count
    assert [layout for layout, _ in found] == [Layout(12 + i * per_slot, per_slot, WIDTH) for i in range(count)]
    for _, tensors in found:
        assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
            "ids": ((per_slot * WIDTH, 16), torch.int32),
            "logprobs": ((per_slot * WIDTH, 16), torch.float32),
            "rest_logprob": ((per_slot * WIDTH,), torch.float32),
            "label_logprob": ((per_slot * WIDTH,), torch.float32),
        }


def test_targets_are_computed_lazily(world, folder, rows):
    teacher = engine(world, folder, micro_batch_size=1)
    calls = []
    teacher.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    slots = teacher.forward(rank_batch(rows))
    next(slots)
    assert len(calls) == 1
    next(slots)
    assert len(calls) == 2


def test_targets_are_repeatable_without_gradient(world, folder, rows):
    teacher = engine(world, folder)
    one, other = (engine_targets(teacher, rank_batch(rows)) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(tensor.requires_grad for tensor in one.values())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_wire_dtype_applies_to_logprobs_only(world, folder, rows, name, dtype):
    narrow, whole = (engine_targets(engine(world, folder, wire_dtype=n), rank_batch(rows)) for n in (name, "fp32"))
    assert narrow["logprobs"].dtype == dtype
    assert torch.equal(narrow["logprobs"], whole["logprobs"].to(dtype))
    assert all(torch.equal(narrow[key], whole[key]) for key in ("ids", "rest_logprob", "label_logprob"))


def test_auto_wire_dtype_is_fp16_on_gpus_only():
    assert wire_dtype(TeacherConfig(), torch.device("cpu")) == torch.float32
    assert wire_dtype(TeacherConfig(), torch.device("cuda", 0)) == torch.float16


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(world, tmp_path, family):
    teacher = engine(world, write_tiny_model(tmp_path / family, family, seed=8))
    first, second, other = random_documents(3, seed=9, longest=10)
    one, two = (token_rows([[before, second]], 2 * WIDTH) for before in (first, np.resize(other, len(first))))
    alone = token_rows([[second]], WIDTH)
    part = slice(len(first), len(first) + len(second))
    packed, replaced = (engine_targets(teacher, rank_batch(rows))["logprobs"][part] for rows in (one, two))
    torch.testing.assert_close(packed, replaced, rtol=0, atol=1e-6)
    single = engine_targets(teacher, rank_batch(alone))["logprobs"][: len(second)]
    torch.testing.assert_close(packed, single, rtol=1e-4, atol=1e-5)


def test_bf16_teacher_has_bf16_weights_and_near_equal_targets(world, folder, rows):
    teacher = engine(world, folder, dtype="bf16")
    assert {parameter.dtype for parameter in teacher.model.parameters()} == {torch.bfloat16}
    narrow, whole = (engine_targets(one, rank_batch(rows)) for one in (teacher, engine(world, folder)))
    assert narrow["logprobs"].dtype == torch.float32
    assert (narrow["logprobs"][:, 0] - whole["logprobs"][:, 0]).abs().mean() < 0.05


def test_logits_match_the_plain_model_with_masked_padding(world, tmp_path, rows):
    folder = write_tiny_model(tmp_path / "wide", "qwen2", seed=3, vocab_size=337)
    found = engine_targets(engine(world, folder, export="logits"), rank_batch(rows))
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        "logits": ((4 * WIDTH, 337), torch.float32),
        "label_logprob": ((4 * WIDTH,), torch.float32),
    }
    exact = plain_logits(plain_model(folder), rows, VOCABULARY).flatten(0, 1)
    labels = torch.tensor(rows.labels, dtype=torch.long).flatten()
    used = labels >= 0
    torch.testing.assert_close(found["logits"][used, :VOCABULARY].double(), exact[used], rtol=1e-5, atol=1e-5)
    assert (found["logits"][:, VOCABULARY:] == -torch.inf).all()
    wanted = exact.log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[used, 0]
    torch.testing.assert_close(found["label_logprob"][used].double(), wanted, rtol=1e-5, atol=1e-5)


def test_hidden_states_keep_the_dtype_of_the_model(world, tmp_path, rows):
    folder = write_tiny_model(tmp_path / "wide", "qwen2", seed=3, vocab_size=337)
    for dtype, torch_dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        teacher = engine(world, folder, export="hidden", dtype=dtype, wire_dtype="fp16")
        found = engine_targets(teacher, rank_batch(rows))
        assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
            "hidden": ((4 * WIDTH, 32), torch_dtype),
            "label_logprob": ((4 * WIDTH,), torch.float32),
        }
    whole = engine(world, folder, export="logits")
    found, logits = (engine_targets(one, rank_batch(rows)) for one in (engine(world, folder, export="hidden"), whole))
    assert torch.equal(found["label_logprob"], logits["label_logprob"])
    made = forward.head(whole.model, found["hidden"])
    assert torch.equal(made[:, :VOCABULARY], logits["logits"][:, :VOCABULARY])


@pytest.mark.parametrize("export", ["topk", "sampled", "hidden", "logits"])
@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_bytes_per_token_is_exact(world, folder, rows, export, wire):
    for dtype in ("fp32", "bf16"):
        teacher = engine(world, folder, export=export, wire_dtype=wire, dtype=dtype)
        found = engine_targets(teacher, rank_batch(rows))
        assert sum(tensor.nbytes for tensor in found.values()) == 4 * WIDTH * teacher.bytes_per_token


@pytest.mark.parametrize("export", ["topk", "hidden", "logits"])
def test_score_is_summed_over_labelled_tokens(world, folder, rows, export):
    exact = (plain_logits(plain_model(folder), rows, VOCABULARY).flatten(0, 1) / 2).log_softmax(1)
    labels = torch.tensor(rows.labels, dtype=torch.long).flatten()
    used = labels >= 0
    scores = {}
    for score in ("static", "ce", "entropy"):
        teacher = engine(world, folder, score=score, export=export)
        teacher.config.loss.top_k = VOCABULARY  # so that nothing is hidden in the rest bucket
        teacher.head = replace(teacher.head, temperature=2.0)
        engine_targets(teacher, rank_batch(rows))
        scores[score] = teacher.score
    assert scores["static"] == 0.0
    assert scores["ce"] == pytest.approx(-exact.gather(1, labels.clamp(min=0)[:, None])[used].sum().item(), rel=1e-5)
    assert scores["entropy"] == pytest.approx(-(exact.exp() * exact).sum(1)[used].sum().item(), rel=1e-5)


def test_draws_are_those_of_the_plain_model(world, folder, rows):
    """The weights differ from the plain model's probabilities by less than one draw, and the log-probs are its own."""
    teacher = engine(world, folder, export="sampled")
    teacher.config.loss.draws = 40
    found = engine_targets(teacher, rank_batch(rows))
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        "ids": ((4 * WIDTH, 40), torch.int32),
        "counts": ((4 * WIDTH, 40), torch.int16),
        "mean_logprob": ((4 * WIDTH,), torch.float32),
        "label_logprob": ((4 * WIDTH,), torch.float32),
    }
    exact = plain_logits(plain_model(folder), rows, VOCABULARY).flatten(0, 1).log_softmax(1)
    labels = torch.tensor(rows.labels, dtype=torch.long).flatten()
    used = labels >= 0
    ids = torch.where(found["ids"] < 0, VOCABULARY, found["ids"].long())
    counts = torch.zeros(len(ids), VOCABULARY + 1).scatter_add_(1, ids, found["counts"].float())[:, :VOCABULARY]
    assert (counts.sum(1) == 40).all()
    assert ((counts - 40 * exact.exp())[used].abs() < 1 + 1e-3).all()
    torch.testing.assert_close(
        found["mean_logprob"][used].double(), (counts.double() / 40 * exact).sum(1)[used], rtol=1e-5, atol=1e-5
    )
    wanted = exact.gather(1, labels.clamp(min=0)[:, None])[used, 0]
    torch.testing.assert_close(found["label_logprob"][used].double(), wanted, rtol=1e-5, atol=1e-5)


def test_draws_depend_on_the_seed_and_the_document_alone(world, folder):
    documents = random_documents(4, seed=7)
    alone = token_rows([[document] for document in documents], WIDTH)
    packed = token_rows([[documents[3], documents[1]], [documents[0], documents[2]]], 2 * WIDTH)
    teacher = engine(world, folder, export="sampled", micro_batch_size=1)
    one, other = (engine_targets(teacher, rank_batch(rows)) for rows in (alone, packed))
    places = [packed_at * WIDTH for packed_at in (2, 0, 2, 0)]  # rows of 2 * WIDTH
    places[1] += len(documents[3])
    places[2] += len(documents[0])
    for i, (document, place) in enumerate(zip(documents, places)):
        mine, theirs = slice(i * WIDTH, i * WIDTH + len(document)), slice(place, place + len(document))
        # Logits of a packed document are rounded otherwise, which moves a draw once in a million.
        same = (one["ids"][mine] == other["ids"][theirs]).all(1)
        assert same.float().mean() > 0.9
    teacher.config.run.seed = 1
    assert not torch.equal(engine_targets(teacher, rank_batch(alone))["ids"], one["ids"])


def test_entropy_of_draws_is_an_estimate(world, folder, rows):
    exact = plain_logits(plain_model(folder), rows, VOCABULARY).flatten(0, 1).log_softmax(1)
    used = torch.tensor(rows.labels).flatten() >= 0
    wanted = -(exact.exp() * exact).sum(1)[used].sum().item()
    teacher = engine(world, folder, export="sampled", score="entropy")
    teacher.config.loss.draws = 200
    engine_targets(teacher, rank_batch(rows))
    assert teacher.score == pytest.approx(wanted, rel=0.01)


def test_unsupported_backend_is_refused(world, folder):
    with pytest.raises(ConfigError, match="must have backend hf; got vllm"):
        engine(world, folder, backend="vllm")
