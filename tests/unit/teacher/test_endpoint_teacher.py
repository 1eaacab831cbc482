"""A served teacher as a whole: the targets of rows are those of the server's model, and a cache keeps them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distill_rl.config.schema import Config
from distill_rl.config.schema.backends import EndpointConfig
from distill_rl.parallel.mesh import World
from distill_rl.store.store import SERVED, served_identity, write_manifest
from distill_rl.teacher.build import build_teacher
from distill_rl.teacher.scored import ScoredTeacher
from distill_rl.teacher.stored import StoredTeacher
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.helpers.engines import engine_config, random_documents
from tests.helpers.served import APIS, MODEL, StandIn, Tables
from tests.helpers.stores import MANIFEST, batch_of

VOCABULARY, WIDTH, TOP = 320, 48, 8


def config_of(url: str, api: str = "vllm", **teacher: object) -> Config:
    config = engine_config("student", ["teacher"], loss__top_k=TOP, train__micro_batch_size=2)
    settings = {
        "model": MODEL,
        "backend": "endpoint",
        "endpoint": EndpointConfig([url], api),
        "tokenizer": "t",
        **teacher,
    }
    config.teachers[0] = replace(config.teachers[0], **settings)
    return config


@pytest.fixture
def batch() -> RankBatch:
    documents = [np.asarray(document, np.int32) for document in random_documents(5, vocabulary=VOCABULARY)]
    return batch_of([documents[:2], documents[2:4], documents[4:5], []], WIDTH)


def gathered(parts) -> dict[str, torch.Tensor]:
    parts = list(parts)
    return {name: torch.cat([tensors[name] for _, tensors in parts]) for name in parts[0][1]}


@pytest.mark.parametrize("api", APIS)
def test_targets_are_those_of_the_servers_model(batch: RankBatch, world: World, api: str) -> None:
    with StandIn() as server:
        config = config_of(server.url, api)
        teacher = build_teacher(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
        assert isinstance(teacher, ScoredTeacher)
        found = gathered(teacher.forward(batch))
        teacher.close()
        teacher.close()
    model, checked = Tables(VOCABULARY), 0
    for row, pieces in enumerate(batch.pieces):
        start = 0
        for piece in pieces:
            tokens = batch.rows.input_ids[row, start : start + piece.length]
            logprobs = torch.from_numpy(model.logprobs(tokens))
            for p in range(piece.length - 1):
                if batch.rows.labels[row, start + p] == IGNORE_INDEX:
                    continue
                i = row * batch.rows.shape[1] + start + p
                top = logprobs[p].topk(TOP)
                assert torch.equal(found["ids"][i].long(), top.indices)
                assert torch.equal(found["logprobs"][i], top.values)
                assert found["label_logprob"][i] == logprobs[p, tokens[p + 1]]
                checked += 1
            start += piece.length
    assert checked > 40


def test_a_cache_asks_for_each_document_once(batch: RankBatch, world: World, tmp_path: Path) -> None:
    with StandIn() as server:
        config = config_of(server.url, cache=str(tmp_path / "store"))
        served = {"weights": served_identity(config.teachers[0]), "dtype": SERVED, "model": MODEL, "entries": TOP}
        write_manifest(tmp_path / "store", replace(MANIFEST, **served))
        live = gathered(build_teacher(config_of(server.url), config_of(server.url).teachers[0], world, vocabulary_size=VOCABULARY).forward(batch))  # fmt: skip
        asked = len(server.seen.prompts)
        teacher = build_teacher(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
        assert isinstance(teacher, StoredTeacher)
        first = gathered(teacher.forward(batch))
        again = gathered(teacher.forward(batch))
        assert len(server.seen.prompts) == 2 * asked
        teacher.close()
    labelled = torch.from_numpy(batch.rows.labels.reshape(-1)) != IGNORE_INDEX
    for name, tensor in live.items():
        assert torch.equal(first[name][labelled], tensor[labelled])
        assert torch.equal(again[name][labelled], tensor[labelled])
