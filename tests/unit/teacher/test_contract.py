"""The backends that need no other software fulfil the contract of teacher backends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from distill_rl.config.schema.backends import StoreConfig
from distill_rl.store.store import Store, StoreWriter
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.teacher.stored import StoredTeacher
from tests.helpers.backends import TOP, VOCABULARY, EveryBackend, contract_config
from tests.helpers.models import write_tiny_model
from tests.helpers.stores import make_store


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "teacher", "llama", seed=2)


class TestHf(EveryBackend):
    @pytest.fixture
    def make(self, world, model):
        def make(vocabulary_size: int = VOCABULARY, **settings) -> TeacherEngine:
            config = contract_config(model, **settings)
            return TeacherEngine(config, config.teachers[0], world, vocabulary_size=vocabulary_size)

        return make


class TestCache(EveryBackend):
    """Computes what is not stored, and reads it when it is asked for again."""

    @pytest.fixture
    def make(self, world, model, tmp_path):
        made = []

        def make(vocabulary_size: int = VOCABULARY, **settings) -> StoredTeacher:
            folder = tmp_path / str(len(made))
            config = contract_config(model, cache=str(folder), **settings)
            live = TeacherEngine(config, config.teachers[0], world, vocabulary_size=vocabulary_size)
            store = make_store(folder, entries=TOP, vocabulary_size=vocabulary_size)
            writer = StoreWriter(store, write_every_s=math.inf)
            made.append(StoredTeacher(config, config.teachers[0], world, store, live, writer))
            return made[-1]

        return make


class TestStore(EveryBackend):
    """Reads what the model has computed before."""

    @pytest.fixture
    def make(self, world, model, tmp_path, batch):
        made = []

        def make(vocabulary_size: int = VOCABULARY, **settings) -> StoredTeacher:
            folder = tmp_path / str(len(made))
            config = contract_config(model, **settings)
            live = TeacherEngine(config, config.teachers[0], world, vocabulary_size=vocabulary_size)
            store = make_store(folder, entries=TOP, vocabulary_size=vocabulary_size)
            capture = StoredTeacher(
                config, config.teachers[0], world, store, live, StoreWriter(store, write_every_s=math.inf)
            )
            capture.fill(batch)
            capture.close()
            config = contract_config(model, backend="store", store=StoreConfig(str(folder)), **settings)
            made.append(StoredTeacher(config, config.teachers[0], world, Store(folder)))
            return made[-1]

        return make
