"""Models whose rotary frequencies depend on the length of the text, judged by Transformers on each document alone."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from distill_rl.data.batch.collate import BatchPlan, BatchSharding, arrange, lay_out
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.demo import bits
from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.base import Item
from distill_rl.models import forward
from distill_rl.models.families import engine_length_problem
from distill_rl.models.forward import document_lengths, row_positions, use_own_lengths
from distill_rl.models.load import load_to_generate
from distill_rl.parallel.mesh import World
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import RankBatch
from tests.helpers.engines import engine_config, engine_targets, no_targets, relative_l2, whole_gradients
from tests.helpers.load import load_model
from tests.helpers.zoo import family_config, write_family

ORIGINAL = 32
LENGTHS = (20, 30, ORIGINAL, ORIGINAL + 1, 50, 70, 70, 20)
"""Tokens of the documents: below, at and beyond the original length."""
_HALF = 4
_LONG = {"short_factor": [1.0] * _HALF, "long_factor": [1.0, 2.0, 4.0, 8.0]}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {**_LONG, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"factor": 4.0},
}
"""What each kind of rotary frequencies needs besides its base."""
BY_LENGTH = ("dynamic", "longrope")


def rope(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: ("llama", {"rope_parameters": rope(kind)}) for kind in KINDS},
    "phi3": (
        "phi3",
        {"rope_parameters": {**rope("longrope"), "partial_rotary_factor": 1.0}, "original_max_position_embeddings": 32},
    ),
    # Layers with a window have other frequencies than those without.
    "gemma3, long": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": rope("longrope"), "sliding_attention": rope("default")}}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, settings = CASES[request.param]
    positions = ORIGINAL if request.param == "dynamic" else 128
    path = tmp_path_factory.mktemp("model")
    return write_family(path, family, max_position_embeddings=positions, **settings)


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, settings = CASES["phi3"]
    return write_family(tmp_path_factory.mktemp("longrope"), family, max_position_embeddings=128, **settings)


def documents(seed: int = 0, vocabulary: int = 300) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(5, vocabulary, length).astype(np.int32) for length in LENGTHS]


def alone(folder: Path, ids: np.ndarray) -> tuple[Any, Tensor]:
    """A fresh model of Transformers, which has not seen another text, and its logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model, model(torch.tensor(ids[None], dtype=torch.int64), use_cache=False).logits[0]


def batch_of(texts: list[np.ndarray], size: int, *, packing: bool) -> RankBatch:
    sharding = BatchSharding(1, size)
    plan = BatchPlan(sharding, (), max_length=96, packing=packing, pad_id=7)
    encoded = [Encoded(ids, np.ones(len(ids), bool)) for ids in texts]
    rows = lay_out(encoded, plan, arrange([encoded], [96], plan))
    return RankBatch(0, 0, rows, int((rows.labels != -100).sum()))


def test_every_kind_of_frequencies_is_tried() -> None:
    assert KINDS.keys() == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize(("packing", "size"), [(True, 1), (True, 2), (False, 1), (False, 4)])
def test_a_document_is_trained_as_it_is_alone(folder: Path, world: World, packing: bool, size: int) -> None:
    """Gradient of the mean cross-entropy of the batch, by the engine and by a loop over documents."""
    texts = documents()
    engine = StudentEngine(
        engine_config(folder, train__micro_batch_size=size, data__packing=packing, loss__ce_weight=1.0),
        world,
        vocabulary_size=300,
        total_steps=1,
    )
    batch = batch_of(texts, size, packing=packing)
    metrics = engine.forward_backward(batch, no_targets)

    gradient: dict[str, Tensor] = {}
    total = 0.0
    for ids in texts:
        model, logits = alone(folder, ids)
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:], dtype=torch.int64), reduction="sum")
        loss = loss / batch.num_labels
        loss.backward()
        total += loss.item()
        for name, parameter in model.named_parameters():
            gradient[name] = gradient.get(name, torch.zeros(())) + parameter.grad
    assert metrics["train/nll_loss"].value == pytest.approx(total, rel=1e-5)
    assert relative_l2(whole_gradients(engine.model), gradient) < 1e-5


@pytest.mark.parametrize(("packing", "size"), [(True, 2), (False, 1), (False, 4)])
def test_a_teacher_reads_a_document_as_it_is_alone(folder: Path, world: World, packing: bool, size: int) -> None:
    config = engine_config(folder, [folder], data__packing=packing)
    config.teachers[0].export, config.teachers[0].micro_batch_size = "logits", size
    engine = TeacherEngine(config, config.teachers[0], world, vocabulary_size=300)
    texts = documents(1)
    batch = batch_of(texts, size, packing=packing)
    targets = engine_targets(engine, batch)["logits"].float()
    ids = torch.cat([torch.tensor(rows) for rows in micro_ids(batch, size)])
    for text in texts:
        _, logits = alone(folder, text)
        expected = logits.log_softmax(-1)
        place = next(i for i in range(len(ids)) if torch.equal(ids[i : i + len(text)], torch.tensor(text)))
        got = targets[place : place + len(text) - 1].log_softmax(-1)
        assert (got - expected[:-1]).abs().max() <= 2e-5 * expected.abs().max()


def micro_ids(batch: RankBatch, size: int) -> list[np.ndarray]:
    """The ids of a batch in the order of the teacher's targets, micro-batch by micro-batch."""
    from distill_rl.models.forward import micro_batches

    return [rows.input_ids.ravel() for _, rows in micro_batches(batch, size)]


def test_without_own_lengths_the_neighbours_decide(longrope: Path) -> None:
    """The fault itself, so that the tests above can fail: Transformers on a short document beside a long one."""
    short, long = documents()[0], documents()[5]
    model, expected = alone(longrope, short)
    row = torch.tensor(np.concatenate([short, long])[None], dtype=torch.int64)
    positions = torch.cat([torch.arange(len(short)), torch.arange(len(long))])[None]
    with torch.no_grad():
        wrong = forward.logits(model, row, positions)[0, : len(short)]
        use_own_lengths(model)
        right = forward.logits(model, row, positions)[0, : len(short)]
    assert (wrong - expected).abs().max() > 0.1
    assert (right - expected).abs().max() < 1e-5 * expected.abs().max()


def test_every_loader_gives_the_logits_of_a_document_alone(folder: Path, world: World) -> None:
    texts = documents(2)
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[7] * (longest - len(text))] for text in texts])
    with closing(HfBackend(folder, Settings(device="cpu", dtype="fp32"))) as evaluated:
        loaded = {
            "student": load_model(folder, world, role="student", dtype="fp32", packing=False),
            "teacher": load_model(folder, world, role="teacher", dtype="fp32", packing=False),
            "evaluation": evaluated.model,
            "evaluation of several ranks": load_to_generate(folder, world, dtype=torch.float32),
        }
    expected = [alone(folder, text)[1] for text in texts]
    for name, model in loaded.items():
        positions = row_positions(model.config, [len(text) for text in texts], longest, torch.device("cpu"))
        with torch.no_grad():
            found = forward.logits(model.eval(), ids, positions)
        for row, logits in zip(found, expected):
            assert (row[: len(logits)] - logits).abs().max() <= 1e-5 * logits.abs().max(), name


def test_bits_do_not_depend_on_the_other_documents(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    use_own_lengths(model)
    read = [bits.EncodedText(ids.astype(np.int64), np.arange(len(ids)) > 0, len(ids)) for ids in documents(3)]
    found = bits.bits(model, read, 96)
    for document, number in zip(read, found):
        _, logits = alone(folder, document.ids[:-1])  # the last token is only predicted
        picked = logits.double().log_softmax(-1).gather(1, torch.tensor(document.ids[1:, None]))
        assert number == pytest.approx(-picked.sum().item() / np.log(2), rel=1e-5)


def prompts(backend: HfBackend) -> list[Item]:
    """Texts of so many tokens that completions of 24 tokens stay below the original length, cross it, or begin beyond it."""
    words = ["ka", "lo", "mi", "ne", "po", "ru", "sa", "ti"]
    items = []
    for count in (6, 14, 20, 31, 32, 40):
        text = ""
        for i in range(400):
            more = f"{text} {words[(i * count) % 8]}" if text else words[count % 8]
            if len(backend.encoder.tokenizer(more)["input_ids"]) > count:
                break
            text = more
        items.append(Item(str(count), text, "x", choices=("lo mi", "ru sa ti ka lo mi ne po ru sa ti ka")))
    return items


def test_completions_of_a_batch_are_those_of_each_prompt_alone(longrope: Path) -> None:
    with closing(HfBackend(longrope, Settings(device="cpu", dtype="fp32", batch_size=8))) as backend:
        items = prompts(backend)
        found = dict(backend.generate(items, max_new_tokens=24))
        crossing = 0
        for i, item in enumerate(items):
            ids = list(backend.encoder.encode(item))
            start = len(ids)
            for _ in range(found[i].num_tokens):  # without a cache, so that all keys are of the whole text
                _, logits = alone(longrope, np.array(ids))
                ids.append(int(logits[-1].argmax()))
            stops = backend.encoder.stop_ids
            assert found[i].text == backend.encoder.decode([token for token in ids[start:] if token not in stops])
            crossing += start <= ORIGINAL < len(ids)
        assert crossing >= 2


def test_likelihoods_of_a_batch_are_those_of_each_choice_alone(longrope: Path) -> None:
    with closing(HfBackend(longrope, Settings(device="cpu", dtype="fp32", batch_size=12))) as backend:
        items = prompts(backend)
        found = dict(backend.choose(items))
        for i, item in enumerate(items):
            context, continuations = backend.encoder.choices(item)
            for continuation, got in zip(continuations, found[i].logprobs):
                # The last token is only predicted, so the text that the model reads ends before it.
                ids = np.array([*context, *continuation])
                _, logits = alone(longrope, ids[:-1])
                picked = logits.log_softmax(-1)[len(context) - 1 :].gather(1, torch.tensor(ids[len(context) :, None]))
                assert got == pytest.approx(picked.sum().item(), rel=1e-5)


def test_lengths_follow_from_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3], [5, 6, 0, 1, 2, 3]])
    expected = [[3, 3, 3, 2, 2, 1], [1, 1, 4, 4, 4, 4], [7, 7, 4, 4, 4, 4]]
    assert document_lengths(positions).tolist() == expected
    for row in positions.tolist():
        starts = [i for i in range(1, len(row)) if row[i] != row[i - 1] + 1]
        lengths = [row[stop - 1] + 1 for start, stop in pairwise([0, *starts, len(row)]) for _ in range(start, stop)]
        assert document_lengths(torch.tensor([row])).tolist() == [lengths]


def test_a_family_with_frequencies_of_its_own_making_is_refused(longrope: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(longrope)
    model.model.rotary_emb = torch.nn.Identity()
    with pytest.raises(ConfigError, match="phi3: the family's rotary frequencies of type longrope must be known"):
        use_own_lengths(model)


@pytest.mark.parametrize(
    ("kind", "context", "said"),
    [
        ("longrope", ORIGINAL, None),
        (
            "longrope",
            ORIGINAL + 1,
            "vLLM has one set of rotary frequencies, with texts of 32 tokens that of long texts",
        ),
        ("dynamic", 16, "vLLM has one set of rotary frequencies, while those of the model (dynamic) follow from"),
        ("yarn", 128, None),
    ],
)
def test_an_engine_with_one_set_of_frequencies_is_refused(kind: str, context: int, said: str | None) -> None:
    positions = ORIGINAL if kind == "dynamic" else 128
    config = family_config("llama", max_position_embeddings=positions, rope_parameters=rope(kind))
    line = engine_length_problem(config, "vLLM", context - 1, context)
    assert (line is None) if said is None else str(line).startswith(said)
