from __future__ import annotations

import os
from pathlib import Path

import pytest

from distill_rl.errors import DataError
from distill_rl.evals.data import GSM8K, MATH, MATH500, MMLU, DataSetNames, find


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def relative_files(data: Path, names: DataSetNames, split: str, root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in find(data, names, split)]


@pytest.mark.parametrize(
    ("names", "split", "existing", "expected"),
    [
        (MATH, "test", ["math/test.parquet", "math/math500.parquet"], ["math/test.parquet"]),
        (MATH500, "test", ["math/test.parquet", "math/math500.parquet"], ["math/math500.parquet"]),
        (MATH500, "test", ["MATH-500/test.jsonl", "math/math500.jsonl"], ["MATH-500/test.jsonl"]),
        (MATH500, "test", ["MATH-500.jsonl", "math.jsonl"], ["MATH-500.jsonl"]),
        (MATH, "test", ["MATH-500.jsonl", "math.jsonl"], ["math.jsonl"]),
        (
            MATH,
            "test",
            ["MATH/test/a/10.json", "MATH/test/a/2.json", "MATH/test/b/1.json", "MATH/train/a/1.json"],
            ["MATH/test/a/2.json", "MATH/test/a/10.json", "MATH/test/b/1.json"],
        ),
        (
            MATH,
            "test",
            ["hendrycks_math/algebra/test-00000-of-00001.parquet", "hendrycks_math/geometry/test-00000-of-00001.parquet"],
            ["hendrycks_math/algebra/test-00000-of-00001.parquet", "hendrycks_math/geometry/test-00000-of-00001.parquet"],
        ),
        (GSM8K, "test", ["gsm8k/main/test-00000-of-00001.parquet", "gsm8k/socratic/test-00000-of-00001.parquet"],
         ["gsm8k/main/test-00000-of-00001.parquet"]),
        (GSM8K, "test", ["openai/gsm8k/main/test-0-of-1.parquet"], ["openai/gsm8k/main/test-0-of-1.parquet"]),
        (GSM8K, "test", ["gsm8k_test.jsonl"], ["gsm8k_test.jsonl"]),
        (
            MMLU,
            "dev",
            [
                "cais_mmlu/all/dev-00000-of-00001.parquet",
                "cais_mmlu/astronomy/dev-00000-of-00001.parquet",
                "cais_mmlu/virology/dev-00000-of-00001.parquet",
            ],
            ["cais_mmlu/all/dev-00000-of-00001.parquet"],
        ),
        (MMLU, "dev", ["mmlu/data/dev/b_dev.csv", "mmlu/data/dev/a_dev.csv", "mmlu/data/test/a_test.csv"],
         ["mmlu/data/dev/a_dev.csv", "mmlu/data/dev/b_dev.csv"]),
        (MMLU, "test", ["MMLU/Test.csv", "MMLU/test.parquet"], ["MMLU/test.parquet"]),
        (MMLU, "test", ["mmlu/test-00001-of-00002.parquet", "mmlu/test-00000-of-00002.parquet", "mmlu/test.jsonl"],
         ["mmlu/test.jsonl"]),
        (MMLU, "test", ["mmlu/test-00001-of-00002.parquet", "mmlu/test-00000-of-00002.parquet"],
         ["mmlu/test-00000-of-00002.parquet", "mmlu/test-00001-of-00002.parquet"]),
        (MMLU, "test", ["mmlu/dataset_dict.json", "mmlu/test/state.json", "mmlu/dev/state.json"], ["mmlu/test"]),
        (MMLU, "test", ["mmlu/state.json", "mmlu/data-00000-of-00001.arrow"], ["mmlu"]),
        (MMLU, "test", ["mmlu/test/state.json", "mmlu/test/data-00000-of-00001.arrow"], ["mmlu/test"]),
    ],
)  # fmt: skip
def test_data_are_found_in_all_common_layouts(
    tmp_path: Path, names: DataSetNames, split: str, existing: list[str], expected: list[str]
) -> None:
    touch(tmp_path, *existing)
    assert relative_files(tmp_path, names, split, tmp_path) == expected


def test_data_may_be_a_suites_folder_or_file(tmp_path: Path) -> None:
    touch(tmp_path, "mmlu/test.parquet", "mmlu/dev.parquet", "x/my_test.jsonl", "x/my_dev.jsonl", "y/test/1.json")
    assert relative_files(tmp_path / "mmlu", MMLU, "dev", tmp_path) == ["mmlu/dev.parquet"]
    assert relative_files(tmp_path / "mmlu" / "test.parquet", MMLU, "test", tmp_path) == ["mmlu/test.parquet"]
    assert relative_files(tmp_path / "mmlu" / "test.parquet", MMLU, "dev", tmp_path) == ["mmlu/dev.parquet"]
    assert relative_files(tmp_path / "x" / "my_test.jsonl", MMLU, "dev", tmp_path) == ["x/my_dev.jsonl"]
    assert relative_files(tmp_path / "y", MATH, "test", tmp_path) == ["y/test/1.json"]


def test_data_of_another_suite_are_not_used(tmp_path: Path) -> None:
    touch(tmp_path, "mmlu/test.parquet", "gsm8k/test.jsonl")
    for data in (tmp_path, tmp_path / "mmlu"):
        with pytest.raises(DataError, match="must hold the split 'test' of math; got nothing of it; looked in"):
            find(data, MATH, "test")


def test_hub_cache_gives_the_revision_of_main(tmp_path: Path) -> None:
    hub = touch(
        tmp_path, *(f"datasets--cais--mmlu/snapshots/{revision}/all/test-0-of-1.parquet" for revision in ("aa", "bb"))
    )
    (hub / "datasets--cais--mmlu" / "refs").mkdir()
    (hub / "datasets--cais--mmlu" / "refs" / "main").write_text("bb")
    assert relative_files(hub, MMLU, "test", hub) == ["datasets--cais--mmlu/snapshots/bb/all/test-0-of-1.parquet"]


def test_missing_data_are_reported_with_searched_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        find(tmp_path / "none", MMLU, "test")
    touch(tmp_path, "mmlu/test.parquet")
    with pytest.raises(DataError) as caught:
        find(tmp_path, MMLU, "dev")
    assert f"looked in {tmp_path}/mmlu, {tmp_path} (there and in main, all, default, data) for dev{{" in str(
        caught.value
    )
    with pytest.raises(DataError, match="split 'dev' of mmlu"):
        find(tmp_path / "mmlu" / "test.parquet", MMLU, "dev")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_unreadable_neighbour_folder_is_ignored(tmp_path: Path) -> None:
    touch(tmp_path, "private/x", "mmlu/test.parquet")
    (tmp_path / "private").chmod(0)
    try:
        assert relative_files(tmp_path, MMLU, "test", tmp_path) == ["mmlu/test.parquet"]
    finally:
        (tmp_path / "private").chmod(0o700)
