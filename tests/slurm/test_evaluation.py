"""launch/eval.sbatch on a real Slurm: requeued midway, the same job continues where it stopped."""

import json

from tests.cli.test_eval import judged
from tests.helpers.command import until
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite
from tests.slurm.conftest import ROOT, START_S, Job

COUNT = 160


def test_a_requeued_evaluation_judges_every_item_once(cluster, tmp_path):
    model = write_tiny_model(tmp_path / "model", hidden=32, seed=1)
    suite = write_suite(tmp_path, count=COUNT, max_new_tokens=40)
    out, log = tmp_path / "out", tmp_path / "log"
    settings = {"MODELS": f"tiny={model}", "SUITES": suite, "DATA": tmp_path, "OUT": out, "EXTRA": "--batch-size 4"}
    exports = ",".join(["ALL", *(f"{name}={value}" for name, value in settings.items())])
    options = ["--parsable", "--gpus-per-node=0", "--cpus-per-task=2", "--time=10", f"--chdir={ROOT}"]
    job_id = cluster.run("sbatch", *options, f"--output={log}", f"--export={exports}", str(ROOT / "launch/eval.sbatch"))
    job = Job(cluster, job_id, out, log)
    until(lambda: judged(out) >= 8 or cluster.ended(job.id), "the first items", START_S)
    job.look()
    job.signal("USR1")
    cluster.start_requeued(job.id)
    job.assert_nothing_left()
    assert 0 < judged(out) < COUNT
    assert job.until_it_ends() == 0, job.log
    assert cluster.field(job.id, "Restarts") == "1"
    items = [json.loads(line) for line in (out / "own.items.jsonl").read_text().splitlines()]
    assert len({item["id"] for item in items}) == len(items) == COUNT
