"""Teacher targets that are captured once, and runs from them where the teacher is no more."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file

from distill_rl.config.load import load_config
from distill_rl.store.store import TEACHER, Store, StoreWriter, write_manifest
from tests.helpers.command import Cluster, Ended, distill_rl, distill_rl_in_process, series
from tests.helpers.one_process import Trained
from tests.helpers.one_process import train as train_in_process

pytestmark = pytest.mark.cli

METRICS = (
    "train/kl_loss",
    "train/nll_loss",
    "train/loss",
    "train/grad_norm",
    "validation/kl_loss",
    "validation/acceptance_low",
)
VALIDATED = "evaluate.every=4"
PACKED = ("data.packing=true", "student.parallel.dp=2", "train.micro_batch_size=1", "teachers.0.micro_batch_size=2")
"""Another layout than the usual one; the same file is captured and trained on."""


TWICE = ("train.steps=6", "train.global_batch_size=24")
"""Two epochs."""


def config_of(material, folder: Path, teacher: str) -> Path:
    """The usual configuration with `teacher`, in YAML, as the entry of the teacher `big`."""
    path = material.config(folder)
    path.write_text(re.sub(r"\{name: big.*\}", f"{{name: big, {teacher}}}", path.read_text()))
    return path


def stored(store: Path, **settings: str) -> str:
    return ", ".join([f"backend: store, store: {store}", *(f"{key}: {value}" for key, value in settings.items())])


def train(config: Path, *overrides: str, cluster: Cluster | None) -> Path:
    ended = distill_rl("train", "-c", config, *overrides, cluster=cluster)
    assert ended.code == 0, ended.err
    return config.parent / "runs" / "tiny"


def capture(config: Path, out: Path, *overrides: str, cluster: Cluster) -> Ended:
    ended = distill_rl("capture", "-c", config, "--out", out, *overrides, cluster=cluster)
    assert ended.code == 0, ended.err
    return ended


def assert_equal_runs(run: Path, other: Path) -> None:
    """Every metric of the loss, and the exported weights, to the bit."""
    for metric in METRICS:
        assert series(run, metric) == series(other, metric), metric
    assert len(series(run, "train/kl_loss")) == 8
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (run, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_equal_training(trained: Trained, run: Path) -> None:
    """The same of a run in this process, which does not validate."""
    for metric in METRICS[:4]:
        assert trained.series(metric) == series(run, metric), metric
    theirs = load_file(run / "export" / "model.safetensors")
    assert trained.weights.keys() == theirs.keys()
    assert all(torch.equal(trained.weights[name], theirs[name]) for name in theirs)


@dataclass(frozen=True)
class Captured:
    store: Path
    """A copy of the store. The folder that was captured, and the teacher's, are gone."""
    ended: Ended


def captured(material, folder: Path, teacher: str, *overrides: str, cluster: Cluster) -> Captured:
    model = shutil.copytree(material.root / teacher, folder / "model")
    config = config_of(material, folder, f"model: {model}, dtype: fp32")
    ended = capture(config, folder / "captured", *overrides, cluster=cluster)
    store = shutil.copytree(folder / "captured", folder / "store")
    shutil.rmtree(folder / "captured")
    shutil.rmtree(model)
    return Captured(store, ended)


@pytest.fixture(scope="module")
def same(material, cluster, tmp_path_factory) -> Captured:
    """Targets of the usual configuration."""
    return captured(material, tmp_path_factory.mktemp("same"), "teacher", cluster=cluster)


def test_a_run_from_a_store_has_the_bits_of_the_live_run(straight, same, material, cluster, tmp_path):
    config = config_of(material, tmp_path, stored(same.store))
    run = train(config, VALIDATED, "prefetch.depth=3", "aligner.workers=0", cluster=cluster)
    assert_equal_runs(run, straight)


@pytest.mark.long_run
def test_a_run_from_a_store_of_another_tokenizer_has_the_bits_of_the_live_run(material, cluster, tmp_path):
    live = train(material.config(tmp_path / "live", "foreign"), VALIDATED, cluster=cluster)
    store = captured(material, tmp_path, "foreign", cluster=cluster).store
    run = train(
        config_of(material, tmp_path / "from-store", stored(store)), VALIDATED, "prefetch.depth=0", cluster=cluster
    )
    assert_equal_runs(run, live)


@pytest.mark.long_run
def test_packed_rows_of_two_student_ranks_are_read_as_captured(material, cluster, tmp_path):
    live = train(material.config(tmp_path / "live"), VALIDATED, *PACKED, cluster=cluster)
    store = captured(material, tmp_path, "teacher", *PACKED, cluster=cluster).store
    run = train(config_of(material, tmp_path / "from-store", stored(store)), VALIDATED, *PACKED, cluster=cluster)
    assert_equal_runs(run, live)


def test_other_rows_change_the_last_digits_only(straight, same, material, tmp_path):
    """Unpacked targets serve packed rows; the teacher's arithmetic depends on the shape of a batch."""
    config = load_config(
        config_of(material, tmp_path, stored(same.store)), ["data.packing=true", "train.micro_batch_size=1"]
    )
    trained = train_in_process(config, tmp_path / "export")
    for metric in ("train/kl_loss", "train/nll_loss"):
        ours, theirs = ([value for _, value in values] for values in (trained.series(metric), series(straight, metric)))
        assert ours == pytest.approx(theirs, rel=1e-4), metric


def test_a_capture_says_how_much_it_stored(same):
    tokens = sum(piece.length for piece in Store(same.store).pieces())
    assert re.search(
        rf"^stored    {tokens:,} tokens, .* MiB; 0 tokens were already stored$", same.ended.out, re.MULTILINE
    )


def test_a_capture_leaves_logs_and_nothing_of_a_run(same):
    assert {path.name for path in same.store.iterdir()} == {"manifest.json", TEACHER, "shards", "captures"}
    run = same.store / "captures" / "tiny"
    assert (run / "logs" / "attempt_1" / "driver.log").exists()
    assert not (run / "export").exists()
    assert not list(same.store.rglob("model.safetensors"))


def part_of(store: Path, folder: Path, keep: int) -> Path:
    """A store with the first `keep` of every five pieces of another."""
    whole = Store(store)
    shutil.copytree(store / TEACHER, folder / TEACHER)
    write_manifest(folder, whole.manifest)
    writer = StoreWriter(Store(folder), write_every_s=float("inf"))
    for shard in whole.shards:
        for i in range(len(shard)):
            if i % 5 < keep:
                writer.add(shard.piece(i), shard.tokens(i), shard.targets(i))
    writer.flush()
    return folder


@pytest.fixture(scope="module")
def half(same, tmp_path_factory) -> Path:
    """A store that lacks two of every five pieces."""
    return part_of(same.store, tmp_path_factory.mktemp("half") / "store", keep=3)


def lacking(ended: Ended) -> tuple[int, int]:
    """How many of how many documents a store lacks, as a message says."""
    return tuple(map(int, re.search(r"lacks (\d+) of (\d+) documents", ended.out + ended.err).groups()))


def test_a_document_that_is_missing_stops_a_run_before_its_start(half, material, tmp_path):
    config = config_of(material, tmp_path, stored(half))
    for command in ("check", "train"):
        ended = distill_rl_in_process(command, "-c", config)
        assert ended.code == 2
        (line,) = ended.errors
        assert "teachers.0.store.missing" in line
        assert "the first: row " in line
        assert "capture them, or set teachers.0.store.missing to skip or live" in line
        missing, checked = lacking(ended)
        assert 0 < missing < checked == 64 + 8
    assert not (tmp_path / "runs").exists()


def test_documents_that_are_missing_are_skipped_and_counted(half, material, cluster, tmp_path):
    config = config_of(material, tmp_path, stored(half, missing="skip"))
    ended = distill_rl("train", "-c", config, "data.validation.fraction=0", cluster=cluster)
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "tiny"
    missing, checked = lacking(ended)
    assert checked == 64
    assert sum(count for _, count in series(run, "align/not_stored")) == missing > 0
    assert {count for _, count in series(run, "align/bad_rows")} == {0}
    assert {count for _, count in series(run, "align/documents")} == {8}
    assert len(series(run, "train/kl_loss")) == 8


def test_documents_that_are_missing_are_computed_by_the_teacher(straight, half, material, tmp_path):
    teacher = stored(half, missing="live", model=f"{material.root}/teacher", dtype="fp32")
    trained = train_in_process(load_config(config_of(material, tmp_path, teacher)), tmp_path / "export")
    assert_equal_training(trained, straight)
    assert len(Store(half)) == len(list(Store(half).pieces())), "nothing was written"


@pytest.fixture(scope="module")
def cached(material, cluster, tmp_path_factory) -> Path:
    """The folder of a run of two epochs that fills a cache, `cache`, and is called `one`."""
    folder = tmp_path_factory.mktemp("cached")
    train(cached_config(material, folder), *TWICE, "run.name=one", cluster=cluster)
    return folder


def cached_config(material, folder: Path) -> Path:
    return config_of(material, folder, f"model: {material.root}/teacher, dtype: fp32, cache: {folder}/cache")


def size_of(store: Path) -> tuple[int, int]:
    """How many pieces there are, and how many different ones."""
    pieces = list(Store(store).pieces())
    return len(pieces), len({(piece.name, piece.first) for piece in pieces})


def test_a_cache_is_filled_by_one_run_and_read_by_the_next(cached, material, tmp_path):
    """The second epoch reads, and so does another run from its first step on."""
    cache, run = cached / "cache", cached / "runs" / "one"
    filled = size_of(cache)
    assert filled[0] == filled[1], "no piece is stored twice"
    shutil.copytree(cache, tmp_path / "cache")
    again = train_in_process(load_config(cached_config(material, tmp_path), TWICE), tmp_path / "export")
    assert size_of(tmp_path / "cache") == filled, "the second run writes nothing"
    for metric in ("train/kl_loss", "train/grad_norm"):
        assert again.series(metric) == series(run, metric)
        assert len(again.series(metric)) == 6


def test_a_capture_computes_nothing_that_is_stored(cached, material, cluster, tmp_path):
    """Such as what a run has put into its cache."""
    tokens = sum(piece.length for piece in Store(cached / "cache").pieces())
    ended = capture(material.config(tmp_path), cached / "cache", *TWICE, cluster=cluster)
    assert f"stored    0 tokens, 0.0 MiB; {tokens:,} tokens were already stored" in ended.out


def test_everything_that_does_not_fit_a_store_is_refused_at_once(same, material, tmp_path):
    config = config_of(material, tmp_path, stored(same.store, model=f"{material.root}/student"))
    ended = distill_rl_in_process(
        "train", "-c", config, "loss.top_k=17", "loss.temperature=2", "teachers.0.export=logits"
    )
    assert ended.code == 2
    for words in (
        (
            "teachers.0.store",
            "a store holds topk or sampled, and this teacher exports logits",
            "teachers.0.export=topk",
        ),
        ("teachers.0.export", "the store holds topk", "got logits"),
        ("loss.top_k", "must not exceed the 16 entries", "got 17", "use 16 or less, or capture again"),
        ("loss.temperature", "log-probs cannot be taken to another one", "got 2.0", "set loss.temperature=1"),
        (
            "teachers.0.model",
            "must be the model of",
            "leave it out, name the same revision and quantization, or capture again",
        ),
    ):
        assert len([line for line in ended.errors if all(word in line for word in words)]) == 1, (words, ended.err)
    assert len(ended.errors) == 5, ended.err
    assert not (tmp_path / "runs").exists()


def changed_at(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_capture_into_a_store_of_other_targets_is_refused(same, material, tmp_path):
    before = changed_at(same.store)
    ended = distill_rl_in_process(
        "capture", "-c", material.config(tmp_path), "--out", same.store, "loss.top_k=8", "loss.temperature=2"
    )
    assert ended.code == 2
    (line,) = ended.errors
    assert "(loss.top_k or loss.draws) 16 here, 8 there; loss.temperature 1.0 here, 2.0 there" in line
    assert changed_at(same.store) == before


def test_a_dry_run_writes_a_script_for_the_store_and_starts_nothing(material, tmp_path):
    out = tmp_path / "targets"
    ended = distill_rl_in_process("capture", "-c", material.config(tmp_path), "--out", out, "--dry-run")
    assert ended.code == 0, ended.err
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        "captures/tiny/submit.sbatch",
        "captures/tiny/submit.yaml",
    ]
    script = (out / "captures" / "tiny" / "submit.sbatch").read_text()
    assert re.search(rf"^STORE='?{out}'?$", script, re.MULTILINE)
    assert re.search(rf"^RUN_DIR='?{out}/captures/tiny'?$", script, re.MULTILINE)
    assert load_config(out / "captures" / "tiny" / "submit.yaml").teachers[0].cache == str(out)


def test_the_store_is_described_verified_merged_and_exported(same, half, tmp_path):
    described = distill_rl_in_process("store", "info", same.store)
    assert described.code == 0
    assert "targets    top 16 of 320 ids at temperature 1, fp32, format exact" in described.out
    assert "retained" in described.out
    verified = distill_rl_in_process("store", "verify", same.store)
    assert (verified.code, verified.err) == (0, "")
    assert "every checksum matches" in verified.out
    merged = distill_rl_in_process("store", "merge", half, same.store, "--out", tmp_path / "merged")
    assert f"merged     {len(Store(same.store)):,} pieces" in merged.out
    exported = distill_rl_in_process("store", "export", tmp_path / "merged", "--out", tmp_path / "parquet")
    assert exported.code == 0, exported.err
    rows = sum(parquet.read_metadata(path).num_rows for path in (tmp_path / "parquet").iterdir())
    assert rows == len(Store(same.store))


def test_a_damaged_store_is_reported_with_exit_code_2(same, tmp_path):
    store = shutil.copytree(same.store, tmp_path / "store")
    shard = Store(store).shards[0]
    content = bytearray(shard.path.read_bytes())
    content[-1 - 16 * len(shard)] ^= 1
    path = shard.path
    path.unlink()
    path.write_bytes(content)
    ended = distill_rl_in_process("store", "verify", store)
    assert ended.code == 2
    (line,) = ended.errors
    assert re.search(rf"{path}, bytes [\d,]+ to [\d,]+: .* does not match its checksum", line)
