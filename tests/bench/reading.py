"""Reading a corpus in the order of a run: Parquet files, opened, fingerprinted and read to the last document."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench import harness

MOST_MIB, LEAST_PER_S, START_S = 500, 20_000, 5.0
_POOL_BYTES = 32 << 20


def write_files(folder: Path, documents: int, files: int, mean_bytes: int) -> int:
    """Writes Parquet files of texts with lognormal lengths, stretches of one long text, and returns their bytes.

    Row groups have 4,096 rows.
    """
    draw = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoin shrdlu cmfwyp vbgkjqxz ", np.uint8)
    pool = letters[draw.integers(0, len(letters), _POOL_BYTES)]
    for file in range(files):
        rows = documents // files + (file < documents % files)
        lengths = np.maximum(draw.lognormal(np.log(mean_bytes) - 0.5, 1.0, rows).astype(np.int32), 1)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        text = np.resize(np.roll(pool, int(draw.integers(_POOL_BYTES))), int(offsets[-1]))
        column = pa.StringArray.from_buffers(rows, pa.py_buffer(offsets.tobytes()), pa.py_buffer(text.tobytes()))
        table = pa.table({"text": column, "id": np.arange(rows)})
        pq.write_table(table, folder / f"part-{file:03d}.parquet", row_group_size=4096)
    return sum(path.stat().st_size for path in folder.iterdir())


def read(folder: Path) -> dict[str, float]:
    """Opens the files of a folder and reads an epoch of them, in this process.

    Returns:
        documents: the number read, each once.
        start_s: until the first batch is there, its import of the data code included.
        per_s: documents per second of CPU time from then on.
        peak_mib: most memory of this process; `imports_mib` of it before the data were opened.
        windowed: whether the order was one of shuffled blocks.
    """
    start = time.perf_counter()
    from distill_rl.config.schema import Config, DataConfig, TrainConfig
    from distill_rl.data.loader import Loader
    from distill_rl.data.reading.cache import Cache
    from distill_rl.data.reading.sources import open_source
    from distill_rl.types import TrainState

    before = _peak_mib()
    source = open_source(DataConfig(path=str(folder)), cache=Cache(write=False))
    _ = source.fingerprint
    config = Config(train=TrainConfig(global_batch_size=256, epochs=1))
    batches = iter(Loader(source, config, TrainState(), source.order(0)))
    seen = np.zeros(len(source), dtype=np.int8)
    np.add.at(seen, list(next(batches).row_numbers), 1)
    started, cpu = time.perf_counter() - start, time.process_time()
    for batch in batches:
        np.add.at(seen, list(batch.row_numbers), 1)
    rate = (len(source) - 256) / (time.process_time() - cpu)
    if not (seen == 1).all():
        raise SystemExit("an epoch must read every document once")
    return {
        "documents": len(source),
        "start_s": round(started, 2),
        "per_s": round(rate),
        "peak_mib": _peak_mib(),
        "imports_mib": before,
        "windowed": source.windowed,
    }


def _peak_mib() -> int:
    """The most memory that this process has had since it began, in MiB; `ru_maxrss` would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def measure(folder: Path, *, documents: int = 1_000_000, files: int = 64, mean_bytes: int = 1000) -> dict[str, Any]:
    """Writes the files, and reads them in a process of its own.

    Args:
        documents: number of texts.
        files: Parquet files that they are written to.
        mean_bytes: mean size of a text.
    """
    size = write_files(folder, documents, files, mean_bytes)
    code = f"import json; from pathlib import Path; from tests.bench.reading import read; print(json.dumps(read(Path({str(folder)!r}))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"files": files, "mib_on_disk": size >> 20, **json.loads(done.stdout)}


def verdict(figures: dict[str, Any]) -> list[str]:
    """The missed targets."""
    return harness.missed(
        (figures["peak_mib"] >= MOST_MIB, f"missed: {figures['peak_mib']} MiB, the target is below {MOST_MIB}"),
        (figures["per_s"] < LEAST_PER_S, f"missed: {figures['per_s']} documents/s, the target is {LEAST_PER_S}"),
        (
            figures["start_s"] >= START_S,
            f"missed: a start of {figures['start_s']} s, the target is below {START_S:g} s",
        ),
    )


main = harness.program("reading", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
