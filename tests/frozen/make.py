"""Makes a frozen past: the files that users of one commit have, and what that commit does with them.

    git clone . /tmp/COMMIT && git -C /tmp/COMMIT checkout COMMIT && cd /tmp/COMMIT
    PYTHONPATH=. PYTHON -m tests.frozen.make OUT      # OUT: tests/data/frozen/<first 8 digits of the commit> in your clone

PYTHON is that of `.venv` (launch/setup.sh). A commit from before this folder, such as ab47e93a, first gets a copy of
`tests/frozen/` and `tests/helpers/one_process.py`; nothing else of the clone may differ from the commit. OUT must not exist. All
paths in the frozen files are relative to it. It takes a few minutes, most of which Ray needs to start.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from distill_rl.config.schema import Config
from distill_rl.config.walk import as_yaml, default_of, leaves
from distill_rl.system.environment import CONFIGS
from tests.frozen import record
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import seeded_words, tiny_tokenizer

BASE = """\
student: {model: models/student, dtype: fp32}
data: {path: data/texts.jsonl, max_length: 64, validation: {fraction: 0.1}}
loss: {top_k: 8, kd_weight: 1.0, ce_weight: 0.5}
optimizer: {lr: 0.01}
schedule: {warmup_steps: 1, steps: 8}
train: {steps: 4, global_batch_size: 4, micro_batch_size: 2}
aligner: {workers: 0}
evaluate: {every: 2}
checkpoint: {every: 2, keep_last: 2}
observe: {tensorboard: false, every: 1}
run: {dir: runs, seed: 3}
"""
FILES = {
    "base": BASE,
    "two-teachers": """\
extends: base.yaml
teachers:
  - {name: big, model: models/teacher, dtype: fp32}
  - {name: foreign, model: models/foreign, dtype: fp32, export: logits, weight: 0.5}
loss: {cross_tokenizer: xtoken}
projection: {learnable: true}
""",
    "lora": """\
extends: base.yaml
student: {lora: {rank: 4, alpha: 8.0, dropout: 0.1}}
teachers: [{name: big, model: models/teacher, dtype: fp32}]
data: {path: data/chats.jsonl, loss_on: assistant, max_length: 128}
evaluate: {suites: [exact_match], data: data/questions.jsonl, max_new_tokens: 4}
""",
    "capture": """\
extends: base.yaml
teachers: [{name: big, model: models/teacher, dtype: fp32}]
train: {steps: null, epochs: 1.0}
""",
    "from-store": """\
extends: base.yaml
teachers: [{name: big, backend: store, store: targets/exact}]
""",
    # The files below set every field of a teacher.
    "teacher-hf": """\
extends: base.yaml
train: {global_batch_size: 8}
teachers:
  - name: big
    model: models/teacher
    tokenizer: models/teacher
    revision: main
    dtype: bf16
    quantization: int8
    weight: 2.0
    weight_column: trust
    loss: same
    parallel: {dp: 2, tp: 1, replicas: 1, sp: 1}
    micro_batch_size: 4
    attention: sdpa
    export: topk
    wire_dtype: fp16
    cache: targets/cache
  - name: foreign
    model: models/foreign
    where: {domain: [maths, physics]}
    loss: hybrid
    max_length: 96
    export: hidden
""",
    "teacher-scores": """\
extends: base.yaml
teachers:
  - {name: big, model: models/teacher, score: entropy}
  - {name: small, model: models/student, score: entropy}
""",
    "teacher-vllm": """\
extends: base.yaml
teachers: [{name: big, model: models/teacher, backend: vllm, gpu_share: 0.3, parallel: {tp: 2}}]
""",
    "teacher-endpoint": """\
extends: base.yaml
teachers:
  - name: big
    backend: endpoint
    model: served-name
    tokenizer: models/teacher
    url: [https://one:8000, https://two:8000]
    api: vllm
    token_env: DISTILL_RL_TOKEN
    ca_file: ca.pem
    concurrency: 4
    request_timeout_s: 30.0
    retry_s: 60.0
""",
    "teacher-store": """\
extends: base.yaml
teachers: [{name: big, model: models/teacher, backend: store, store: targets/exact, missing: skip}]
""",
}


def main(out: Path) -> None:
    if out.exists():
        raise SystemExit(f"{out}: must not exist")
    clone = Path.cwd()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        write_material()
        write_yaml()
        run("train", "-c", "yaml/two-teachers.yaml")
        write_questions()
        run("train", "-c", "yaml/lora.yaml")
        for store in record.STORES:
            run("capture", "-c", "yaml/capture.yaml", f"capture.format={store}", "--out", f"targets/{store}")
        evaluate("results")
        write_record(commit)
        clean()
        shutil.copytree(folder, out, symlinks=True)


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "distill_rl", *arguments], check=True)


def evaluate(out: str) -> None:
    models = "student=models/student", "trained=runs/two-teachers/export"
    options = "--suites", "exact_match", "--data", "data/questions.jsonl", "--max-new-tokens", "4", "--shards", "0"
    run("eval", "--model", *models, *options, "--out", out)


def write_material() -> None:
    """Three models of two tokenizers, texts, and chats whose template ends every turn and begins it in one way."""
    write_tiny_model("models/student", hidden=16, layers=1, tie=True, seed=2)
    write_tiny_model("models/teacher", hidden=16, layers=2, seed=1)
    write_tiny_model("models/foreign", "qwen2", hidden=16, layers=1, tie=True, seed=4, tokenizer=tiny_tokenizer(300, 7))
    draw = random.Random("texts")
    words = iter(seeded_words(5, 2000))
    texts = [" ".join(next(words) for _ in range(draw.randint(3, 20))) for _ in range(40)]
    Path("data").mkdir()
    Path("data/texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def sentence() -> str:
        return " ".join(next(words) for _ in range(draw.randint(2, 5)))

    turns = [{"role": role} for role in ("user", "assistant")]
    chats = [[turn | {"content": sentence()} for turn in turns * draw.randint(1, 2)] for _ in range(40)]
    Path("data/chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def write_questions() -> None:
    """Questions of which the trained student answers every second one right."""
    prompts = seeded_words(8, 12)
    rows = [{"prompt": f"{i}: {prompt}", "answer": "?", "task": "ab"[i % 2]} for i, prompt in enumerate(prompts)]
    write = Path("data/questions.jsonl").write_text
    write("".join(json.dumps(row) + "\n" for row in rows))
    evaluate("asked")
    items = Path("asked/trained/exact_match.items.jsonl").read_text().splitlines()
    for row, item in list(zip(rows, map(json.loads, items), strict=True))[::2]:
        row["answer"] = item["completion"].strip() or "?"
    write("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree("asked")


def write_yaml() -> None:
    """The files above, those of `configs/`, and every setting with its default as it is written on a command line."""
    Path("yaml").mkdir()
    for name, text in FILES.items():
        Path("yaml", f"{name}.yaml").write_text(text)
    shutil.copytree(CONFIGS, "yaml/configs")
    defaults = [(key, default_of(entry)) for key, entry, _ in leaves(Config)]
    lines = [f"{key}={as_yaml(default)}\n" for key, default in defaults]
    Path("yaml/overrides.txt").write_text("".join(lines))


def write_record(commit: str) -> None:
    with record.one_thread() as world:
        found = {
            "commit": commit,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "runs": {name: record.record_run(name, world) for name in record.RUNS},
            "stores": {store: record.record_store(store, world) for store in record.STORES},
            "scores": record.scores(Path("results")),
        }
    Path("recorded.json").write_text(json.dumps(found, sort_keys=True) + "\n")


def clean() -> None:
    """Removes links, locks, and the reports, which are large and made from the rest."""
    for path in sorted(Path().rglob("*"), reverse=True):
        if path.is_symlink() or path.name in (".lock", "report.html"):
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
