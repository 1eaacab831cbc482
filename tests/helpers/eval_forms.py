"""Writes the same rows in every common file format."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def write(path: Path, rows: Rows) -> Path:
    """Writes a file in the format of its suffix; without a suffix, a folder saved by `datasets`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    elif path.suffix == ".arrow":
        import pyarrow as pa

        table = pa.Table.from_pylist([dict(row) for row in rows])
        with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    else:
        from datasets import Dataset

        Dataset.from_list([dict(row) for row in rows]).save_to_disk(str(path))
    return path


def write_splits(path: Path, splits: Mapping[str, Rows]) -> Path:
    """Writes a folder with several splits, saved by `datasets`."""
    from datasets import Dataset, DatasetDict

    DatasetDict({name: Dataset.from_list([dict(row) for row in rows]) for name, rows in splits.items()}).save_to_disk(
        str(path)
    )
    return path


def one_file(name: str) -> Callable[[Path, Rows], Path]:
    """A function that writes rows to a file or folder of that name in a folder, and returns the folder."""

    def write_below(folder: Path, rows: Rows) -> Path:
        write(folder / name, rows)
        return folder

    return write_below
