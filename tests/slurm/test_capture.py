"""A capture by the batch script of `capture --dry-run` on a real two-node Slurm: requeued midway, it goes on and completes."""

import re

from tests.helpers.captures import WHOLE, assert_clean, contents, num_tokens
from tests.helpers.command import distill_rl, until
from tests.helpers.corpus import write_corpus
from tests.slurm.conftest import START_S, Job

ROWS = 2560


def test_a_requeued_capture_computes_only_what_was_missing(cluster, material, tmp_path):
    corpus = write_corpus(tmp_path / "long.jsonl", rows=ROWS, seed=8)
    config, store = material.config(tmp_path), tmp_path / "store"
    capture = ["capture", "-c", config, f"data.path={corpus}", *WHOLE]
    calm = distill_rl(*capture, "--out", tmp_path / "calm")
    assert calm.code == 0, calm.err
    dry_run = distill_rl(*capture, "--out", store, "--dry-run", "--gpus-per-node", "0", "capture.write_every_s=1000")
    assert dry_run.code == 0, dry_run.err
    run = store / "captures" / "tiny"
    exports = "--export=ALL,RAY_OBJECT_STORE_BYTES=100000000"
    job_id = cluster.run("sbatch", "--parsable", "--nodes=2", "--time=10", exports, str(run / "submit.sbatch"))
    job = Job(cluster, job_id, run, run / f"slurm-{job_id}.log")
    try:
        until(lambda: re.search(r"^capture ", job.log, re.MULTILINE) or cluster.ended(job.id), "a batch", START_S)
        job.look()
        job.signal("USR1")
        cluster.start_requeued(job.id)
        job.assert_nothing_left()
        assert "stopped   what was computed is stored; run the same command again to continue" in job.log
        assert "stopped and saved; continues with attempt 2 (requeue)" in job.log
        assert_clean(store)
        kept, expected = num_tokens(store), contents(tmp_path / "calm")
        assert 0 < kept < num_tokens(tmp_path / "calm")
        assert contents(store).items() < expected.items()
        assert job.until_it_ends() == 0, job.log
        assert cluster.field(job.id, "Restarts") == "1"
    finally:
        cluster.clear()
    job.assert_nothing_left()
    assert f"stored    {num_tokens(store) - kept:,} tokens" in job.log
    assert_clean(store)
    assert contents(store) == expected
