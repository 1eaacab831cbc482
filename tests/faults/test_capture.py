"""Captures that are killed, stopped, starved of disk space or run side by side, and stores that are damaged or deleted."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from distill_rl.errors import StoreError
from distill_rl.store.store import (
    Record,
    Shard,
    Store,
    StoreWriter,
    make_store,
    process_home,
    read_manifest,
    serialize,
    write_manifest,
)
from distill_rl.system.files import size_of
from tests.cli.conftest import Material
from tests.faults.conftest import Disturbed, assert_same_student
from tests.faults.test_teachers import two_teachers
from tests.helpers.captures import (
    WHOLE,
    assert_clean,
    contents,
    from_store,
    info,
    num_shards,
    num_tokens,
    records,
    the_error,
    unfinished,
)
from tests.helpers.command import (
    distill_rl,
    environment,
    leftovers,
    running,
    series,
    shared_memory,
    survivors,
    temporary,
    told,
    until,
)
from tests.helpers.corpus import corpus_rows, write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.cli

KILLS, MOST_SHARDS = 20, 4
ALL = (*WHOLE, "data.validation.fraction=0")
"""The same, with none of them held out, so that batches hold all of them."""
OFTEN, SELDOM = "capture.write_every_s=0.01", "capture.write_every_s=1000"
DEADLINE_S = 240


@pytest.fixture(scope="module")
def long(material: Material) -> tuple[str, ...]:
    """The settings of a capture that takes some seconds, so that it can be disturbed."""
    corpus = write_corpus(material.root / "long.jsonl", rows=1280, seed=8)
    return (f"data.path={corpus}", *WHOLE)


@dataclass(frozen=True)
class Calm:
    """An undisturbed capture."""

    store: Path
    seconds: float

    def equals(self, store: Path) -> bool:
        return contents(store) == contents(self.store)


@pytest.fixture(scope="module")
def calm(material: Material, long: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return _calm(material, tmp_path_factory, *long)


@pytest.fixture(scope="module")
def calm_short(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Of the documents of eight steps."""
    return _calm(material, tmp_path_factory)


def _calm(material: Material, tmp_path_factory: pytest.TempPathFactory, *settings: str) -> Calm:
    folder, began = tmp_path_factory.mktemp("calm"), time.monotonic()
    ended = distill_rl("capture", "-c", material.config(folder), "--out", folder / "store", *settings)
    assert ended.code == 0, ended.err
    assert_clean(folder / "store")
    assert "twice" not in info(folder / "store")
    return Calm(folder / "store", time.monotonic() - began)


@pytest.fixture
def command(material: Material, tmp_path: Path) -> Callable[..., list]:
    """command(settings…): the arguments of a capture into tmp_path/store."""

    def arguments(*settings: str) -> list:
        return ["capture", "-c", material.config(tmp_path), "--out", tmp_path / "store", *settings]

    return arguments


@contextmanager
def capturing(arguments: list, folder: Path) -> Iterator[Disturbed]:
    """Yields a capture while it computes. Afterwards nothing of it may be left."""
    before, log = shared_memory(), folder / "log"
    with running(*arguments, log=log) as process:
        run = Disturbed(process, folder / "store" / "captures" / "tiny", log, {})
        run.wait_for_output("capture ")
        run.look_again()
        family = leftovers(process.pid)
        yield run
        family |= leftovers(process.pid) if process.is_running() and process.poll() is None else {}
    assert not survivors(family.values())
    until(lambda: shared_memory() <= before, "shared memory given back")
    assert not temporary(process.pid)


@dataclass(frozen=True)
class Moment:
    """When to kill a capture: `after_s` seconds after its start, the models' loading, a shard, or its draft.

    The kill comes at the latest a few shards later, so that a fast machine does not reach the end.
    """

    what: str
    after_s: float


def moments(seed: int, start_s: float) -> list[Moment]:
    draw = random.Random(seed)
    kinds = ["start"] * 5 + ["loading"] * 3 + ["shard"] * 6 + ["draft"] * (KILLS - 15)
    draw.shuffle(kinds)
    longest_s = {"start": start_s, "loading": 2.0, "shard": 0.5, "draft": 0.002}
    return [Moment("teacher", 0.0), *(Moment(kind, draw.uniform(0, longest_s[kind])) for kind in kinds)]


def live_until(moment: Moment, arguments: list, store: Path, log: Path) -> int:
    """Starts a capture, kills all of it at the given moment, and returns the driver's process id."""
    shards = num_shards(store)

    reached = {
        "teacher": lambda: (store / "teacher").exists(),
        "start": lambda: True,
        "loading": lambda: "loading" in log.read_text(),
        "shard": lambda: num_shards(store) > shards,
        "draft": lambda: num_shards(store) > shards or any((store / "shards").glob(".*")),
    }[moment.what]
    with running(*arguments, log=log) as process:
        deadline, family = time.monotonic() + DEADLINE_S, {}
        while not reached():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, moment
            time.sleep(0.001)
        deadline = time.monotonic() + moment.after_s
        while time.monotonic() < deadline and process.poll() is None and num_shards(store) <= shards + MOST_SHARDS:
            family |= leftovers(process.pid)
        assert process.poll() is None, log.read_text()
        if moment.what != "draft":
            family |= leftovers(process.pid)
        os.killpg(process.pid, signal.SIGSTOP)  # while its descendants are listed
        family |= leftovers(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    alive = survivors(family.values(), deadline_s=20)
    assert not alive, told(alive)
    return process.pid


def test_twenty_kills_at_any_moment_lose_and_damage_nothing(command, long, calm, tmp_path):
    before, store = shared_memory(), tmp_path / "store"
    drivers, halves = [], 0
    for i, moment in enumerate(moments(11, 0.4 * calm.seconds)):
        arguments = command(*long, OFTEN, f"prefetch.depth={i % 3}")
        drivers.append(live_until(moment, arguments, store, tmp_path / f"log-{i}"))
        halves += len(unfinished(store))
        assert "damaged" not in (tmp_path / f"log-{i}").read_text()
    assert len(drivers) == KILLS
    assert num_shards(store) > KILLS // 2, "most of the kills must have come while targets were written"
    half = store / "shards" / f".{process_home()}-{drivers[-1]}.0-0.safetensors"
    half.write_bytes(b"half")
    ended = distill_rl(*command(*long, OFTEN))
    assert ended.code == 0, ended.err
    assert not re.search(r"; 0 tokens were already stored", ended.out)
    assert_clean(store)
    assert "twice" not in info(store)
    assert calm.equals(store)
    assert not [left for pid in drivers for left in temporary(pid)]
    until(lambda: shared_memory() <= before, "shared memory given back")


def test_a_killed_teacher_is_replaced_and_nothing_is_missing(command, long, calm, tmp_path):
    """Nothing was written when it died, so all that it had computed is computed once more."""
    with capturing(command(*long, SELDOM), tmp_path) as run:
        run.kill_busy("big/dp0-tp0")
        run.wait_for_output("restarting big/dp0-tp0 (1 of faults.teacher_restarts=3)")
        run.wait_for_output("again     all documents")
        assert run.end() == 0, run.text
        assert run.text.count("again     all documents") == 1
        assert _stored(run.text) == num_tokens(tmp_path / "store"), "what was computed twice is stored once"
        assert "Traceback" not in run.text
    assert_clean(tmp_path / "store")
    assert calm.equals(tmp_path / "store")


def test_without_a_budget_a_dead_teacher_ends_the_capture(material, command, long, calm, tmp_path):
    """Another teacher cannot take its place, so dropping it is not among the remedies."""
    big, other = (tmp_path / "store" / name for name in ("big", "other"))
    settings = (*long, OFTEN, two_teachers(material), "faults.teacher_restarts=0")
    with capturing(command(*settings), tmp_path) as run:
        until(lambda: num_shards(big) > 1 and num_shards(other) > 1, "two shards")
        run.kill_busy("big/dp0-tp0")
        assert run.end() == 1, run.text
        (error,) = run.errors
        for word in ("teacher big", "faults.teacher_restarts=0", "its process died", "what was written is kept"):
            assert word in error
        assert "--resume" not in error
        assert "drop_and_reweight" not in error
        assert "Traceback" not in run.text
    for store in (big, other):
        assert distill_rl("store", "verify", store).code == 0
    kept = contents(big)
    assert kept
    assert kept.items() <= contents(calm.store).items()


def test_a_killed_aligner_is_replaced_without_a_trace(command, long, calm, tmp_path):
    with capturing(command(*long), tmp_path) as run:
        os.kill(run.actors["aligner-0"], signal.SIGKILL)
        assert run.end() == 0, run.text
        assert "aligner-0 is replaced (1 of faults.aligner_restarts=10)" in run.text
        assert "again     all documents" not in run.text
    assert_clean(tmp_path / "store")
    assert calm.equals(tmp_path / "store")


def test_sigterm_writes_what_was_computed_and_exits_85(command, long, calm, tmp_path):
    store, arguments = tmp_path / "store", command(*long, SELDOM)
    with capturing(arguments, tmp_path) as run:
        os.killpg(run.process.pid, signal.SIGTERM)  # to every process of the job, as a scheduler does
        assert run.end() == 85, run.text
        assert "stopped   what was computed is stored; run the same command again to continue" in run.text
        computed = int(re.search(r"^stored +([\d,]+) tokens", run.text, re.MULTILINE)[1].replace(",", ""))
    assert_clean(store)
    kept = contents(store)
    assert num_tokens(store) >= computed > 0
    assert kept.items() <= contents(calm.store).items()
    ended = distill_rl(*arguments)
    assert ended.code == 0, ended.err
    assert calm.equals(store)
    assert f"; {num_tokens(calm.store) - _stored(ended.out):,} tokens were already stored" in ended.out


def _stored(text: str) -> int:
    """The tokens that a capture says it has computed."""
    return int(re.search(r"^stored +([\d,]+) tokens", text, re.MULTILINE)[1].replace(",", ""))


def _already(text: str) -> int:
    """The tokens that a capture says the store had."""
    return int(re.search(r"; ([\d,]+) tokens were already stored$", text, re.MULTILINE)[1].replace(",", ""))


@pytest.fixture
def more(material: Material, tmp_path: Path) -> str:
    """The setting of data with a quarter more documents, among those of the others, which come in another order."""
    rows = corpus_rows(80, seed=5)
    for i, row in enumerate(corpus_rows(20, seed=55)):
        rows.insert(5 * i, {"text": f"new {row['text']}"})
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    return f"data.path={tmp_path}/more.jsonl"


@pytest.fixture(scope="module")
def stored_80(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of all 80 documents of the material."""
    return _calm(material, tmp_path_factory, *ALL).store


def test_of_documents_that_are_added_to_a_store_only_these_are_computed(command, stored_80, more, tmp_path):
    """In batches of another size, packed rows of which hold old and new documents. What is counted is what is there."""
    store = shutil.copytree(stored_80, tmp_path / "store")
    before, kept = num_tokens(store), contents(store)
    ended = distill_rl(*command(more, *ALL, "train.global_batch_size=20"))
    assert ended.code == 0, ended.err
    assert_clean(store)
    assert len({name for name, *_ in contents(store)}) == 100
    assert kept.items() <= contents(store).items()
    assert (_stored(ended.out), _already(ended.out)) == (num_tokens(store) - before, before)


def test_a_capture_that_was_killed_counts_the_pieces_that_are_there(command, stored_80, more, tmp_path):
    """Of every fifth piece: in most rows some are stored, and in some none."""
    store = tmp_path / "store"
    shutil.copytree(stored_80 / "teacher", store / "teacher")
    write_manifest(store, read_manifest(stored_80))
    writer = StoreWriter(Store(store), write_every_s=math.inf)
    for shard in Store(stored_80).shards:
        for i in range(0, len(shard), 5):
            writer.add(shard.piece(i), shard.tokens(i), shard.targets(i))
    writer.flush()
    before = num_tokens(store)
    ended = distill_rl(*command(more, *ALL, "train.global_batch_size=10"))
    assert ended.code == 0, ended.err
    assert len({name for name, *_ in contents(store)}) == 100
    assert (_stored(ended.out), _already(ended.out)) == (num_tokens(store) - before, before)


@pytest.mark.parametrize("way", ["cache", "missing"])
def test_a_run_in_another_order_computes_only_what_is_new(material, stored_80, more, tmp_path, way):
    """Of one step with all documents, whose metrics say which share of the tokens was read."""
    store, config = shutil.copytree(stored_80, tmp_path / "store"), material.config(tmp_path)
    teacher = f"model: {material.root}/teacher, dtype: fp32"
    teacher += f", cache: {store}" if way == "cache" else f", backend: store, store: {store}, missing: live"
    before = num_tokens(store)
    settings = (f"teachers=[{{name: big, {teacher}}}]", more, *ALL, "run.seed=9", "train.global_batch_size=100")
    ended = distill_rl("train", "-c", config, *settings)
    assert ended.code == 0, ended.err
    tokenizer = tiny_tokenizer()
    texts = [json.loads(line)["text"] for line in (tmp_path / "more.jsonl").read_text().splitlines()]
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)  # and eos
    ((_, share),) = series(tmp_path / "runs" / "tiny", "store/read")
    assert share == pytest.approx(before / tokens, rel=1e-12)
    assert num_tokens(store) == (tokens if way == "cache" else before)


FULL_DISK = """\
mount -t tmpfs -o "size=$1" tmpfs "$2" || exit 77
store=$2 python=$3
shift 3
"$python" -m distill_rl "$@" &
while kill -0 $! && ! ls "$store"/shards/*.safetensors; do sleep 0.05; done >/dev/null 2>&1
head -c 1G /dev/zero >"$store/other" 2>/dev/null
wait $!
echo "full: exit code $?"
"$python" -m distill_rl store verify "$store"
find "$store" -name '.*.safetensors'
rm "$store/other"
"$python" -m distill_rl "$@"
echo "room: exit code $?"
cp -a "$store" "$store.kept"
"""
"""Another file fills the disk once a shard is written. Arguments: size, store, Python, arguments of the capture.

Copies the store before its file system goes away.
"""


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(command, long, calm, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    size = sum(path.stat().st_size for path in (calm.store / "shards").iterdir())
    arguments = [str(2 * size), store, sys.executable, *command(*long, OFTEN)]
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", FULL_DISK, "bash", *map(str, arguments)],
        capture_output=True, text=True, timeout=DEADLINE_S, env=environment(),
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    _, rest = done.stdout.split("full: exit code ")
    assert rest.startswith("2\n"), done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("distill-rl: error:")]
    needed = int(re.search(r"a shard of ([\d,]+) bytes must fit on the disk", error)[1].replace(",", ""))
    assert 0 < needed < size
    assert "No space left on device" in error
    assert "what was written before is kept" in error
    assert "Traceback" not in done.stderr
    assert "Logging error" not in done.stderr
    verified, again = rest.removeprefix("2\n").split("every checksum matches\n")
    assert not verified.startswith("verified   0 files")
    assert not again.startswith(str(store)), "no half file is left"
    assert "room: exit code 0" in done.stdout, done.stderr
    assert _stored(rest) < num_tokens(calm.store)
    assert calm.equals(tmp_path / "store.kept")


def test_a_capture_that_goes_on_needs_room_for_the_rest_only(material, calm_short, tmp_path):
    """All is stored, on a disk that has no room to do it once more."""
    store, size = tmp_path / "store", 1.2 * size_of(calm_short.store)
    store.mkdir()
    script = f"mount -t tmpfs -o size={size:.0f} tmpfs {store} || exit 77; cp -r {calm_short.store}/. {store}; "
    capture = [sys.executable, "-m", "distill_rl", "capture", "-c", material.config(tmp_path), "--out", store]
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", script + shlex.join(map(str, capture))],
        capture_output=True, text=True, timeout=DEADLINE_S, env=environment(),
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert _stored(done.stdout) == 0


def test_two_captures_of_the_same_documents_at_once_do_no_harm(command, calm_short, tmp_path):
    """Each writes at its end, so pieces may be there twice, all of them if neither saw the other's. A third of the same
    name is refused.
    """
    store, both = tmp_path / "store", tmp_path / "both"
    with (
        running(*command(SELDOM, "run.name=one"), log=tmp_path / "one") as one,
        running(*command(SELDOM, "run.name=two"), log=tmp_path / "two") as two,
    ):
        lock = store / "captures" / "one" / ".lock"
        until(lambda: (lock.exists() and lock.read_text()) or one.poll() is not None, "the first capture")
        third = distill_rl(*command(SELDOM, "run.name=one"))
        assert third.code == 2
        assert f"{lock.parent}: the run directory is in use; got by process {one.pid}" in the_error(third)
        for process, log in ((one, tmp_path / "one"), (two, tmp_path / "two")):
            assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()
    assert_clean(store)
    expected = contents(calm_short.store)
    assert {piece for piece, _ in records(store)} == set(expected)
    assert all(columns == expected[piece] for piece, columns in records(store))
    merged = distill_rl("store", "merge", store, "--out", both)
    assert merged.code == 0, merged.err
    assert f"merged     {len(expected)} pieces" in merged.out
    assert_clean(both)
    assert calm_short.equals(both)


def test_stores_made_at_the_same_time_are_made_once(material, calm_short, tmp_path):
    """Of two kinds of targets one is refused. What a killed capture left half-written is removed."""
    store, manifest = tmp_path / "store", read_manifest(calm_short.store)
    store.mkdir()
    (store / ".manifest.json.0123abcd").write_text("{")

    def make(i: int) -> str:
        try:
            make_store(store, replace(manifest, entries=16 + i % 2, files={}), [material.root / "teacher"])
        except StoreError as error:
            return str(error)
        return "made"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(make, range(8)))
    assert sorted(outcome == "made" for outcome in outcomes) == [False] * 4 + [True] * 4, outcomes
    assert len({outcomes[i] for i in (0, 2, 4, 6)} | {outcomes[i] for i in (1, 3, 5, 7)}) == 2
    assert all("entries per token" in outcome for outcome in outcomes if outcome != "made")
    assert not unfinished(store)
    assert read_manifest(store).files == manifest.files


def test_targets_of_another_kind_are_refused_with_every_difference(material, calm_short, tmp_path):
    other, store = material.root / "other_teacher", tmp_path / "store"
    write_tiny_model(other, hidden=32, seed=9)
    shutil.copytree(calm_short.store, store)
    before = _files(store)
    settings = (f"teachers.0.model={other}", "loss.top_k=8", "loss.temperature=2.0", "teachers.0.wire_dtype=fp16")
    ended = distill_rl("capture", "-c", material.config(tmp_path), "--out", store, *settings)
    assert ended.code == 2
    error = the_error(ended)
    for clause in (
        "the teacher's weights ",
        "entries per token (loss.top_k or loss.draws) 16 here, 8 there",
        "temperature 1.0 here, 2.0 there",
        "wire_dtype fp32 here, fp16 there",
    ):
        assert clause in error
    assert str(store) in error
    assert _files(store) == before


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def _damage(store: Path, part: str) -> Path:
    """Flips a bit in a part of a store, and returns the file."""
    (shard,) = (store / "shards").iterdir()
    opened = Shard(shard)
    place = {"record": "logprobs", "index": "names"}.get(part)
    file, byte = {
        "header": (shard, shard.read_bytes().index(b'"dtype"') + 1),
        "manifest": (store / "manifest.json", 200),
        "teacher": (store / "teacher" / "config.json", 100),
    }.get(part, (shard, opened._tensors[place or "ids"].begin))
    _flip(file, byte)
    return file


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "f" * 64}, "the teacher's weights "),
        ({"tokenizer": "f" * 64}, "the teacher's tokenizer "),
        ({"temperature": 2.0}, "loss.temperature 1.0 here, 2.0 there"),
        ({"entries": 8}, "entries per token (loss.top_k or loss.draws) 16 here, 8 there"),
        ({"format": "compact"}, "capture.format exact here, compact there"),
    ],
    ids=["teacher", "tokenizer", "temperature", "k", "format"],
)
def test_files_of_another_store_are_refused_by_name(material, calm_short, tmp_path, changes, words):
    """Their checksums are right."""
    store, other = shutil.copytree(calm_short.store, tmp_path / "store"), tmp_path / "other"
    shutil.copytree(store / "teacher", other / "teacher")
    write_manifest(other, replace(read_manifest(store), **changes))
    writer = StoreWriter(Store(other), write_every_s=0)
    (shard,) = Store(store).shards
    for i in range(4):
        writer.add(shard.piece(i), shard.tokens(i), shard.targets(i))
    writer.flush()
    (file,) = (other / "shards").iterdir()
    assert distill_rl("store", "verify", other).code == 0
    foreign = shutil.copy(file, store / "shards")
    config = material.config(tmp_path)
    for command in (
        ("train", "-c", config, from_store(store)),
        ("train", "-c", config, f"teachers.0.cache={store}"),
        ("capture", "-c", config, "--out", store),
        ("store", "info", store),
        ("store", "verify", store),
        ("store", "merge", store, calm_short.store, "--out", tmp_path / "merged"),
        ("store", "export", store, "--out", tmp_path / "parquet"),
    ):
        ended = distill_rl(*command)
        assert ended.code == 2, (command, ended.err)
        line = the_error(ended)
        assert foreign in line
        assert words in line
        assert "must hold the targets that the manifest.json of its store describes" in line
        assert "move it to its own store" in line
    assert not (tmp_path / "merged").exists()
    Path(foreign).unlink()
    assert distill_rl("store", "verify", store).code == 0


def test_files_of_earlier_versions_open_with_a_note_and_merge_names_their_store(material, calm_short, tmp_path):
    """They do not say which store they are of."""
    store = shutil.copytree(calm_short.store, tmp_path / "store")
    (shard,) = Store(store).shards
    all_of_it = [Record(shard.piece(i), shard.tokens(i), shard.targets(i)) for i in range(len(shard))]
    shard.path.unlink()
    shard.path.write_bytes(serialize(all_of_it))
    note = "files of an earlier version, which do not say whose targets they hold: 1 ("
    config = material.config(tmp_path)
    for command in (
        ("check", "-c", config, from_store(store)),
        ("check", "-c", config, f"teachers.0.cache={store}"),
        ("store", "info", store),
        ("store", "verify", store),
        ("store", "merge", store, "--out", tmp_path / "merged"),
    ):
        ended = distill_rl(*command)
        assert ended.code == 0, ended.err
        assert note in ended.out, command
    assert calm_short.equals(store)
    assert calm_short.equals(tmp_path / "merged")
    assert note not in distill_rl("store", "verify", tmp_path / "merged").out


@pytest.mark.parametrize("part", ["record", "index", "header", "manifest", "teacher"])
def test_a_flipped_bit_is_named_with_file_place_and_remedy(material, calm_short, tmp_path, part):
    store = tmp_path / "store"
    shutil.copytree(calm_short.store, store)
    file = _damage(store, part)
    ended = distill_rl("train", "-c", material.config(tmp_path), from_store(store))
    assert ended.code == 2, ended.err
    error, *consequences = ended.errors
    assert re.search(rf"{re.escape(str(file))}, bytes? \d", error), error
    assert all(str(file) in line for line in consequences), "a teacher's configuration may also be unreadable"
    assert "Traceback" not in ended.err
    assert "copy" in error
    assert "again" in error
    verified = distill_rl("store", "verify", store)
    assert verified.code == 2
    assert str(file) in the_error(verified)


def test_every_flipped_bit_of_a_shard_is_found_or_harmless(calm_short, tmp_path):
    """One bit of every byte of the header and the index, and of every seventh of the rest."""
    (shard,) = (calm_short.store / "shards").iterdir()
    content, expected = bytearray(shard.read_bytes()), dict(records(calm_short.store))
    opened, damaged = Shard(shard), tmp_path / shard.name
    draw = random.Random(5)
    columns = min(opened._tensors[name].begin for name in opened.columns)
    places = [*range(opened._data_start), *draw.sample(range(opened._data_start, len(content)), 300), columns]
    found = 0
    for place in places:
        bit = 1 << draw.randrange(8)
        content[place] ^= bit
        damaged.write_bytes(content)
        content[place] ^= bit
        try:
            again = Shard(damaged)
        except StoreError:
            found += 1
            continue
        if again.problems():
            found += 1
        else:
            assert [again.piece(i) for i in range(len(again))] == [opened.piece(i) for i in range(len(opened))]
            for i in range(len(again)):
                columns = {name: column.values.tobytes() for name, column in again.targets(i).items()}
                piece = again.piece(i)
                assert (
                    columns.items()
                    <= expected[piece.name, piece.first, piece.prefix, piece.length, piece.whole].items()
                )
    assert found > 0.8 * len(places)


def test_a_store_deleted_while_it_is_read_is_harmless(material, calm_short, undisturbed, tmp_path):
    """A run maps the files at its start."""
    store, steps = tmp_path / "store", ("train.steps=60", "schedule.steps=60", "teachers.0.store.missing=skip")
    expected = undisturbed(from_store(calm_short.store), *steps)
    shutil.copytree(calm_short.store, store)
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    with running("train", "-c", config, from_store(store), *steps, log=tmp_path / "log") as process:
        until(lambda: series(run, "train/loss") or process.poll() is not None, "the first step")
        assert process.poll() is None, (tmp_path / "log").read_text()
        shutil.rmtree(store)
        assert process.wait(timeout=DEADLINE_S) == 0, (tmp_path / "log").read_text()
    assert_same_student(run, expected)


def test_a_missing_store_is_one_line(material, tmp_path):
    ended = distill_rl("train", "-c", material.config(tmp_path), from_store(tmp_path / "nowhere"))
    assert ended.code == 2
    error = the_error(ended)
    assert f"{tmp_path / 'nowhere'}" in error
    assert "no such folder" in error
