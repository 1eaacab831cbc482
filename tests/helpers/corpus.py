"""Small seeded corpora in every form that `data.path` accepts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.helpers.tokenizers import seeded_words

FORMS = ("jsonl", "parquet", "arrow", "folder")


def corpus_rows(rows: int = 64, seed: int = 0, messages: bool = False) -> list[dict[str, Any]]:
    """Rows `{"text": …}` of 3 to 40 words, or `{"messages": […]}` of one to three turns; determined by `seed`."""
    draw = random.Random(f"corpus-{seed}")
    words = iter(seeded_words(seed, rows * 160))

    def sentence(longest: int) -> str:
        return " ".join(next(words) for _ in range(draw.randint(3, longest))) + "."

    if not messages:
        return [{"text": f"{index}: {sentence(40)}"} for index in range(rows)]
    table = []
    for index in range(rows):
        chat = [{"role": "system", "content": sentence(5)}] if index % 3 == 0 else []
        for turn in range(draw.randint(1, 3)):
            chat.append({"role": "user", "content": f"{index}.{turn}: {sentence(12)}"})
            chat.append({"role": "assistant", "content": sentence(16)})
        table.append({"messages": chat})
    return table


def write_corpus(path: str | Path, rows: int = 64, seed: int = 0, messages: bool = False, form: str = "jsonl") -> Path:
    """Write `corpus_rows(rows, seed, messages)` to `path`: a folder for form "folder", otherwise a file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = corpus_rows(rows, seed, messages)
    if form == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table), encoding="utf-8")
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    elif form == "arrow":
        data = pa.Table.from_pylist(table)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, data.schema) as writer:
            writer.write_table(data)
    elif form == "folder":
        from datasets import Dataset
        from datasets.utils.logging import disable_progress_bar

        disable_progress_bar()
        Dataset.from_list(table).save_to_disk(str(path))
    else:
        raise ValueError(f"form must be one of {FORMS}, got {form!r}")
    return path
