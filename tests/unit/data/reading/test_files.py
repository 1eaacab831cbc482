"""Large data: rows are found through indices and footers, few blocks are in memory, and damage is named."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill_rl.config.schema import DataConfig, ValidationConfig
from distill_rl.data import order
from distill_rl.data.loader import Loader
from distill_rl.data.reading import files, records, source
from distill_rl.data.reading.cache import Cache
from distill_rl.data.reading.files import BlockStore, LineIndex
from distill_rl.data.reading.sources import open_source, split_validation
from distill_rl.errors import DataError, UnreadableFile
from distill_rl.types import TrainState
from tests.helpers.loading import loading

QUIET = Cache(write=False)
ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch):
    """Everything is large: blocks of 256 bytes, windows of 2 KiB."""
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    monkeypatch.setattr(files, "BLOCK_BYTES", 256)
    monkeypatch.setattr(source, "WINDOW_BYTES", 2048)


def corpus(folder: Path, form: str, *, count: int = 3, rows: int = 100) -> DataConfig:
    """Files of rows that are their numbers, in row groups of seven."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        texts = [f"{number} {'x' * 30}" for number in range(i * rows, (i + 1) * rows)]
        if form == "parquet":
            pq.write_table(pa.table({"text": texts}), folder / f"{i}.parquet", row_group_size=7, use_dictionary=False)
        else:
            content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / f"{i}.jsonl").write_text(content)
    return DataConfig(path=str(folder))


def number(document) -> int:
    return int(document["text"].split()[0])


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_epoch_reads_every_row_once_and_most_blocks_once(tmp_path, monkeypatch, form):
    opened = open_source(corpus(tmp_path / "c", form), cache=QUIET)
    assert opened.windowed
    reads = []
    get = BlockStore.get
    monkeypatch.setattr(
        BlockStore, "get", lambda self, key, read: get(self, key, lambda: (reads.append(key), read())[1])
    )
    order_of = opened.order(0)
    numbers = [number(opened[order_of(i)]) for i in range(300)]
    assert sorted(numbers) == list(range(300))
    assert numbers != sorted(numbers)
    assert len(reads) == len(set(reads))
    assert [number(opened[order_of(i)]) for i in range(300, 600)] != numbers


def test_memory_holds_the_blocks_of_one_window(tmp_path):
    opened = open_source(corpus(tmp_path / "c", "parquet"), cache=QUIET)
    order_of = opened.order(0)
    for i in range(300):
        opened[order_of(i)]
        assert len(opened.store._blocks) <= 12  # 45 in all, of more than 200 bytes


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_held_out_rows_are_missing_from_the_order(tmp_path, form):
    data = corpus(tmp_path / "c", form)
    data.validation = ValidationConfig(fraction=0.2)
    training, held_out = split_validation(open_source(data, cache=QUIET), data, 3)
    order_of = training.order(3)
    numbers = [number(training[order_of(i)]) for i in range(len(training))]
    validation = [number(held_out[i]) for i in range(len(held_out))]
    assert len(validation) == 60
    assert sorted(numbers + validation) == list(range(300))


def test_order_of_all_rows_is_that_of_small_data(tmp_path, monkeypatch):
    """A checkpoint from before large data had an order of their own goes on where it was."""
    data = corpus(tmp_path / "c", "parquet")
    opened = open_source(data, cache=QUIET)
    large = [number(opened[opened.order(5, windowed=False)(i)]) for i in range(40)]
    monkeypatch.setattr(files, "SMALL_BYTES", 1 << 20)
    small = open_source(data)
    assert not small.windowed
    assert large == [number(small[small.order(5)(i)]) for i in range(40)]


def test_a_loader_resumes_inside_a_window(tmp_path):
    opened = open_source(corpus(tmp_path / "c", "jsonl"), cache=QUIET)

    def loader(start: TrainState) -> Loader:
        return Loader(opened, loading(7, seed=1, steps=100), start, opened.order(1))

    straight = list(loader(TrainState()))
    for done in (1, 20, 43, 99):
        assert list(loader(TrainState(done, straight[done - 1].cursor))) == straight[done:]


def test_a_damaged_row_group_is_named(tmp_path):
    data = corpus(tmp_path / "c", "parquet", count=1)
    path = tmp_path / "c" / "0.parquet"
    first = pq.read_metadata(path).row_group(9).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[first : first + 40] = b"\xff" * 40
    path.write_bytes(content)
    opened = open_source(data, cache=QUIET)
    assert number(opened[62]) == 62
    with pytest.raises(DataError, match=r"0\.parquet: row group 9 is readable"):
        opened[63]


def test_a_file_that_changes_under_a_run_is_named(tmp_path):
    data = corpus(tmp_path / "c", "jsonl", count=1)
    opened = open_source(data, cache=QUIET)
    path = tmp_path / "c" / "0.jsonl"
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"\n", b" "))
    with pytest.raises(DataError, match="has the size and time that it had when it was opened"):
        opened[99]
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # a file system may tell the time too coarsely
    with pytest.raises(DataError, match="has the lines that it had when it was opened"):
        opened[99]


def test_several_bad_files_are_all_named(tmp_path):
    data = corpus(tmp_path / "c", "parquet", count=3)
    for i in (1, 2):
        pq.write_table(pa.table({"body": ["x"]}), tmp_path / "c" / f"{i}.parquet")
    with pytest.raises(DataError) as caught:
        open_source(data, cache=QUIET)
    assert [name in str(caught.value) for name in ("0.parquet", "1.parquet", "2.parquet")] == [False, True, True]
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_index_counts_lines_as_python_does(tmp_path, seed):
    draw = random.Random(seed)
    parts = [b"", b" ", b"\r", b"\t \r", b"x", b" x", b"y" * 300, b"z" * 700, b"a\rb"]
    content = b"\n".join(draw.choice(parts) for _ in range(draw.randint(0, 200))) + draw.choice([b"", b"\n", b"end"])
    path = tmp_path / "c.txt"
    path.write_bytes(content)
    index = LineIndex.of(path, QUIET)
    assert index.rows[-1] == sum(bool(line.strip()) for line in content.split(b"\n"))
    assert index.offsets[-1] == len(content)
    for first, last, rows in zip(index.offsets, index.offsets[1:], np.diff(index.rows)):
        block = content[first:last]
        assert sum(bool(line.strip()) for line in block.split(b"\n")) == rows
        assert block.endswith(b"\n") or last == len(content)


def test_windows_of_the_order_have_a_bounded_size():
    blocks = order.Blocks(np.arange(10, 1010, 10), np.random.default_rng(0).integers(1, 400, 100))
    windows = []
    windowed = order.WindowedOrder(0, blocks, window_bytes=1000, entered=windows.append)
    rows = [windowed(i) for i in range(1000)]
    assert sorted(rows) == list(range(1000))
    assert sorted(np.concatenate(windows).tolist()) == list(range(100))
    assert all(blocks.sizes[window].sum() <= 1000 or len(window) == 2 for window in windows)


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY cut"])
def test_a_damaged_index_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = corpus(tmp_path / "data", "jsonl", count=1)
    whole = [dict(document) for document in map(open_source(data).__getitem__, range(100))]
    (kept,) = (tmp_path / "cache").rglob("*.npy")
    kept.write_bytes(damage)
    assert [dict(document) for document in map(open_source(data).__getitem__, range(100))] == whole


def test_a_long_line_is_indexed_in_one_pass(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "x" * 5000}).encode()
    path.write_bytes(b'{"text": "a"}\n' + line + b"\n" + line)
    index = LineIndex.of(path, QUIET)
    assert index.offsets[-1] == path.stat().st_size
    assert index.rows[-1] == 3
    assert np.all(np.diff(index.offsets) > 0)


@pytest.mark.parametrize("change", ["shorter", "gone"])
def test_a_file_that_changed_ends_the_run_even_if_bad_rows_are_skipped(tmp_path, change):
    data = corpus(tmp_path / "data", "jsonl", count=1)
    data.bad_rows = "skip"
    opened = open_source(data, cache=QUIET)
    (path,) = (tmp_path / "data").iterdir()
    path.write_bytes(path.read_bytes()[:1000]) if change == "shorter" else path.unlink()
    loader = Loader(opened, loading(100, epochs=1, bad_rows="skip"), TrainState())
    with pytest.raises(UnreadableFile):
        list(loader)


FORMS = ("jsonl", "txt", "parquet", "arrow", "folder")
"""What is read block by block where it is large, or mapped."""
EDITED_LARGE = """\
import os, sys
from pathlib import Path
from distill_rl.config.schema import Config, DataConfig, TrainConfig
from distill_rl.data.loader import Loader
from distill_rl.data.reading.sources import open_source
from distill_rl.types import TrainState

opened = open_source(DataConfig(path=sys.argv[1], bad_rows=sys.argv[2]))
config = Config(data=DataConfig(bad_rows="skip"), train=TrainConfig(global_batch_size=4, epochs=1))
steps = iter(Loader(opened, config, TrainState()))
next(steps)
print("reading", flush=True)
sys.stdin.readline()
try:
    print(sum(1 for _ in steps))
except Exception as error:
    print(type(error).__name__, error)
"""


def edit(path: Path, word: bytes, other: bytes) -> None:
    """Overwrites a word in place, everywhere, by one of the same length."""
    content = path.read_bytes()
    assert word in content
    with path.open("r+b") as file:
        file.write(content.replace(word, other))


@pytest.mark.parametrize(
    ("form", "change", "bad_rows"),
    [
        *((form, "edited", bad_rows) for form in FORMS for bad_rows in ("fail", "skip")),
        ("jsonl", "replaced", "fail"),
        ("jsonl", "touched", "fail"),
    ],
)
def test_a_large_file_that_is_edited_while_it_is_read_is_refused_by_name(tmp_path, large_files, form, change, bad_rows):
    """By another process, and without a change of its size or of the number of its lines."""
    data = shutil.copytree(large_files[form].parent, tmp_path / "data") / large_files[form].name
    path = next(data.glob("*.arrow")) if form == "folder" else data
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", EDITED_LARGE, str(data), bad_rows]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as reader:
        assert reader.stdout.readline() == "reading\n"
        if change == "touched":
            os.utime(path)
        elif change == "edited":
            edit(path, b"needle", b"thread")
        else:
            shutil.copy(path, tmp_path / "other")
            (tmp_path / "other").replace(path)
        said, _ = reader.communicate("\n", timeout=120)
    assert said == (
        f"UnreadableFile {path}: has the size and time that it had when it was opened; "
        "got others: it was edited or replaced; start again\n"
    )


@pytest.fixture(scope="module")
def large_files(tmp_path_factory) -> dict[str, Path]:
    """A file of 66 MiB in each of the `FORMS`."""
    import datasets

    root = tmp_path_factory.mktemp("large")
    draw = np.random.default_rng(0)
    rows = [{"text": f"{i} needle {draw.bytes(12_000).hex()}"} for i in range(2900)]
    paths = {form: root / form / f"data.{form}" for form in ("jsonl", "txt", "parquet", "arrow")}
    for path in paths.values():
        path.parent.mkdir()
    paths["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths["txt"].write_text("".join(row["text"] + "\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, paths["parquet"], row_group_size=300, compression="none", use_dictionary=False)
    with pa.OSFile(str(paths["arrow"]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    paths["folder"] = root / "folder" / "data"
    datasets.Dataset.from_list(rows).save_to_disk(str(paths["folder"]))
    return paths


def test_a_copy_in_the_cache_may_be_renewed_while_it_is_read(tmp_path, monkeypatch):
    """Another run that began at the same time has converted the file, too."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "".join(f"row {i}\n" for i in range(50)))
    opened = open_source(DataConfig(path=str(path)))
    (copy,) = (tmp_path / "cache").rglob("*.parquet")
    os.utime(copy, (0, 0))
    assert [document["text"] for document in opened] == [f"row {i}" for i in range(50)]


def test_a_file_that_changes_while_it_is_converted_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "".join(f"row {i}\n" for i in range(50)))

    def edit_and_say(_: str) -> None:
        documents = records.documents

        def edited(*arguments, **settings):
            yield from documents(*arguments, **settings)
            edit(path, b"row 49", b"row 94")

        monkeypatch.setattr(records, "documents", edited)

    with pytest.raises(DataError, match=r"a\.csv: has the size and time"):
        open_source(DataConfig(path=str(path)), cache=Cache(say=edit_and_say))
    assert not list((tmp_path / "cache").rglob("*.parquet"))


def test_blocks_of_a_column_with_a_dot_have_their_size(tmp_path):
    table = pa.table(
        {
            "other": [[{"a": 1, "b": "x" * 50}]] * 40,
            "meta.text": [f"{i} {'y' * 40}" for i in range(40)],
            "meta": [{"text": "z"}] * 40,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    opened = open_source(DataConfig(path=str(tmp_path / "a.parquet"), text_key="meta.text"), cache=QUIET)
    sizes = opened.parts[0].rows.blocks.sizes
    footer = pq.read_metadata(tmp_path / "a.parquet")
    (leaf,) = (i for i in range(footer.num_columns) if footer.schema.column(i).max_definition_level == 1 and i == 2)
    assert sizes.tolist() == [footer.row_group(i).column(leaf).total_uncompressed_size for i in range(4)]


def test_optional_columns_do_not_change_the_order(tmp_path):
    chat = [{"role": "user", "content": "a" * 30}]
    table = pa.table({"messages": [chat] * 90, "tools": ["[]" + " " * (i % 7) * 50 for i in range(90)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    orders = []
    for key in ("tools", "none"):
        opened = open_source(DataConfig(path=str(tmp_path / "a.parquet"), tools_key=key), cache=QUIET)
        order = opened.order(0)
        orders.append([order(i) for i in range(90)])
    assert orders[0] == orders[1]
