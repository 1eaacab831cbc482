"""Runs and stores of an earlier commit: they are read bit for bit, and training goes on as it did there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoTokenizer

from distill_rl.align.projection import load_projection
from distill_rl.config.load import load_config
from distill_rl.parallel.mesh import World
from distill_rl.preflight import gather
from distill_rl.run.checkpoints import CheckpointStore, find
from distill_rl.store.store import Store
from distill_rl.types import IGNORE_INDEX
from tests.frozen import record
from tests.frozen.past import NEEDED, Past, reads, succeeds
from tests.helpers.command import series
from tests.helpers.one_process import OneProcess

RUNS = pytest.mark.parametrize("run", record.RUNS)
STORES = pytest.mark.parametrize("store", record.STORES)
SAME = {"rel": 1e-5, "abs": 1e-5}
"""The arithmetic may add in another order, nothing more."""


def in_file(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as torch reads them; collective."""
    reader = dcp.FileSystemReader(checkpoint / "student")
    described = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in described.items()}
    dcp.load(tensors, storage_reader=reader)
    return tensors


@RUNS
@reads("runs/{run}")
def test_a_checkpoint_is_read_bit_for_bit(past: Past, world: World, run: str):
    checkpoint, recorded = record.checkpoint_of(run), past.recorded["runs"][run]
    going_on = OneProcess(record.run_config(run, NEEDED.get(run, ())), world, checkpoint)
    loaded, written = record.loaded(going_on), in_file(checkpoint)
    assert loaded.keys() == written.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items())
    assert {name: record.sha256(tensor) for name, tensor in loaded.items()} == recorded["tensors"]
    assert going_on.student.step == going_on.saved.train.step == recorded["step"]


@RUNS
@reads("runs/{run}")
def test_the_next_batch_and_the_next_steps_are_those_of_then(past: Past, world: World, run: str):
    recorded = past.recorded["runs"][run]
    batch, steps = record.steps_of(
        OneProcess(record.run_config(run, NEEDED.get(run, ())), world, record.checkpoint_of(run))
    )
    assert batch == recorded["next_batch"]
    for step, wanted in zip(steps, recorded["steps"], strict=True):
        assert step == pytest.approx(wanted, **SAME)


@RUNS
@reads("runs/{run}")
def test_the_older_checkpoint_goes_on_to_what_the_run_measured(past: Past, world: World, run: str):
    folder = Path("runs", run)
    going_on = OneProcess(
        load_config(folder / "config.yaml", [*NEEDED.get(run, ())]), world, folder / "checkpoints" / "step-2"
    )
    steps = [going_on.step(batch) for batch in going_on.batches()]
    assert len(steps) == 2
    for name in ("train/loss", "train/grad_norm"):
        measured = [value for step, value in series(folder, name) if step > 2]
        assert [step[name].value for step in steps] == pytest.approx(measured, **SAME)


@RUNS
@reads("runs/{run}")
def test_the_check_before_resuming_finds_nothing(past: Past, run: str):
    settings = ["checkpoint.resume=latest", "train.steps=7", *NEEDED.get(run, ())]
    assert gather(Path("runs", run, "config.yaml"), settings).problems == []
    store = CheckpointStore(Path("runs", run, "checkpoints"), keep_last=2, keep_best=0)
    assert find(store, "latest", pytest.fail).path.name == record.RUNS[run]


@reads("runs/lora without data.stops")
def test_a_run_whose_answers_do_not_teach_to_stop_goes_on_only_if_it_is_said(past: Past):
    problems = gather(Path("runs/lora/config.yaml"), ["checkpoint.resume=latest", "train.steps=7"]).problems
    assert [line for line in problems if not line.startswith("data.validation: ")] == problems[:1]
    print("\n".join(problems[:1]))


@reads("runs/lora")
def test_the_labels_of_the_chats_are_the_answers(past: Past):
    rows = [json.loads(line) for line in Path("data/chats.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained("models/student")
    batch = past.recorded["runs"]["lora"]["next_batch"]
    labelled = [label for part in batch["labels"] for row in part for label in row if label != IGNORE_INDEX]
    answers = [turn["content"] for row in batch["row_numbers"] for turn in rows[row]["messages"][1::2]]
    *labels, rest = tokenizer.decode(labelled).split("<|end|>")
    assert sorted(label.strip("\n") for label in labels) == sorted(answers)
    assert not rest.strip("\n")


@reads("runs/two-teachers")
def test_the_export_is_the_last_checkpoint_and_a_student(past: Past, world: World):
    export = Path("runs/two-teachers/export")
    weights = load_file(export / "model.safetensors")
    trained = in_file(record.checkpoint_of("two-teachers"))
    assert weights
    assert all(torch.equal(tensor, trained[f"model.{name}"]) for name, tensor in weights.items())
    config = load_config("runs/two-teachers/config.yaml", [f"student.model={export}", "run.name=again"])
    loaded = record.loaded(OneProcess(config, world))
    assert all(torch.equal(tensor, loaded[f"model.{name}"]) for name, tensor in weights.items())


@reads("runs/two-teachers")
def test_a_learnt_projection_is_read_bit_for_bit(past: Past, world: World):
    (file,) = Path("runs/two-teachers/projections").glob("*.safetensors")
    written, stored = load_file(file), load_projection(file)
    assert all(torch.equal(torch.from_numpy(getattr(stored, name)), tensor) for name, tensor in written.items())
    config = load_config("yaml/two-teachers.yaml", [f"projection.path={file}"])
    learnt = [tensor for name, tensor in record.loaded(OneProcess(config, world)).items() if "objective" in name]
    assert learnt


@STORES
@reads("targets/{store}")
def test_training_from_a_store_takes_the_steps_of_then(past: Past, world: World, store: str):
    steps = record.record_store(store, world)
    for step, wanted in zip(steps, past.recorded["stores"][store], strict=True):
        assert step == pytest.approx(wanted, **SAME)


@reads("targets/exact")
def test_a_store_is_read_bit_for_bit(past: Past):
    (file,) = Path("targets/exact/shards").glob("*.safetensors")
    written = load_file(file)
    (shard,) = Store(Path("targets/exact")).shards
    begin = 0
    for i in range(len(shard)):
        tokens, targets = shard.tokens(i), shard.targets(i)
        place = slice(begin, begin := begin + len(tokens))
        assert tokens.tolist() == written["tokens"][place].tolist()
        for name, column in targets.items():
            assert column.values.tobytes() == written[name][place].numpy().tobytes(), name
    assert begin == len(written["tokens"])


@STORES
@reads("targets/{store}")
def test_a_store_is_described_and_whole(past: Past, store: str):
    manifest = json.loads(Path("targets", store, "manifest.json").read_text())
    assert manifest["model"] in succeeds("store", "info", f"targets/{store}")
    assert "every checksum matches" in succeeds("store", "verify", f"targets/{store}")
