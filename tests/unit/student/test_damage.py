"""R4: every file of a real checkpoint, damaged in every way, or made by someone else. Nothing of it is loaded or run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from distill_rl.errors import CheckpointError
from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.run import checkpoints
from distill_rl.run.checkpoints import MANIFEST, CheckpointStore, SavedState, manifest_of, sealed
from distill_rl.student.engine import StudentEngine
from distill_rl.system.files import write_json
from distill_rl.types import TrainState
from tests.helpers.engines import engine_config, no_targets, random_documents, rank_batch, token_rows, whole_parameters
from tests.helpers.models import write_tiny_model

FILES = ("student/__0_0.distcp", "student/.metadata", "student/student.json", "state.json", "MANIFEST.json")


def flip(file: Path) -> None:
    """Flips one bit in the middle, where weights are, not headers."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def add_a_stranger(file: Path) -> None:
    shutil.copy(file, file.with_name("__9_0.distcp"))


HARMS = {"flip": flip, "cut": cut, "remove": Path.unlink, "stranger": add_a_stranger}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    world = open_world(rank=0, dp=1, tp=1)
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "student", "llama", seed=71, tie=True)
    config = engine_config(folder, loss__kd_weight=0.0, loss__ce_weight=1.0)
    yield StudentEngine(config, world, vocabulary_size=320, total_steps=4)
    close_world(world)


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    """A folder with two checkpoints, and the weights of the first."""
    root = tmp_path_factory.mktemp("checkpoints")
    store, weights = CheckpointStore(root, keep_last=2, keep_best=0), []
    for step in (1, 2):
        rows = token_rows([[document] for document in random_documents(4, seed=step)], 24)
        engine.train_step(rank_batch(rows, index=step), no_targets)
        draft = store.begin(SavedState(TrainState(step)))
        engine.save(draft.student)
        store.commit(draft)
        weights.append(whole_parameters(engine.model))
    return root, weights[0]


def test_checkpoint_holds_exactly_these_files(saved):
    folder = saved[0] / "step-2"
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", HARMS)
def test_damaged_file_is_named_and_previous_checkpoint_loads(engine, saved, tmp_path, name, harm):
    root = tmp_path / "checkpoints"
    shutil.copytree(saved[0], root)
    HARMS[harm](root / "step-2" / name)
    culprit = "__9_0.distcp" if harm == "stranger" else Path(name).name
    with pytest.raises(CheckpointError, match=culprit):
        checkpoints.read(root / "step-2")
    lines: list[str] = []
    found = checkpoints.find(CheckpointStore(root, keep_last=2, keep_best=0), "latest", lines.append)
    assert found.path.name == "step-1"
    assert culprit in lines[0]
    assert "step-1 is taken instead" in lines[0]
    engine.load(found.student)
    assert all(torch.equal(ours, saved[1][key]) for key, ours in whole_parameters(engine.model).items())


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def seal(folder: Path) -> None:
    """Makes the manifest fit what a checkpoint holds now, as anyone can."""
    about = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    write_json(folder / MANIFEST, sealed({**about, **manifest_of(folder)}))


def replace_metadata(student: Path, mark: Path) -> None:
    (student / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))


def replace_number(student: Path, mark: Path) -> None:
    """Writes a pickle in the place of a tensor without dimensions; torch unpickles what is described as bytes."""
    metadata: Metadata = pickle.loads((student / ".metadata").read_bytes())
    name = next(name for name in metadata.state_dict_metadata if name.endswith(".step"))
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    file = student / metadata.storage_data.pop(index).relative_path
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    torch.save(Hostile(mark), student / "hostile")
    content, end = (student / "hostile").read_bytes(), file.stat().st_size
    (student / "hostile").unlink()
    file.write_bytes(file.read_bytes() + content)
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo(file.name, end, len(content))
    (student / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("replace", [replace_metadata, replace_number])
def test_code_in_a_checkpoint_with_a_fitting_manifest_is_not_run(engine, saved, tmp_path, replace):
    folder, mark = tmp_path / "step-2", tmp_path / "ran"
    shutil.copytree(saved[0] / "step-2", folder)
    replace(folder / "student", mark)
    seal(folder)
    before = whole_parameters(engine.model)
    with pytest.raises(CheckpointError, match="its metadata must be what torch writes for tensors"):
        engine.load(checkpoints.read(folder).student)
    assert not mark.exists()
    assert all(torch.equal(ours, before[key]) for key, ours in whole_parameters(engine.model).items())
