"""One row for every kind of bad input: exit code 2, one line with name, rule, value and remedy, and nothing written.

Problems that can occur together are given to one real command in its own process, which must report all of them.
Problems that exclude each other (a run has one data set) go to the same entry point inside this process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from distill_rl import cli
from distill_rl.align.projection import build_projection, save_projection
from distill_rl.models.attention import installed
from distill_rl.run.checkpoints import CheckpointStore, SavedState
from distill_rl.types import TrainState
from tests.helpers.command import Ended, distill_rl, distill_rl_in_process, environment
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.cli

PREFIX = "distill-rl: error: "
POSITIONS = 8192
"""Positions of the models whose length is not the problem."""
BEST = "checkpoint={every: 2, keep_best: 1, best_by: validation"
VALIDATED = "data.validation.fraction=0.1  evaluate.every=2"
NO_LIGER = {
    "kernels that are not installed": ("student.kernels", "needs liger_kernel", "pip install -e", "[liger]"),
}
if installed("liger_kernel"):
    NO_LIGER = {}


@dataclass(frozen=True)
class Place:
    """The folder of models, data and configurations, good and bad, that the rows use."""

    root: Path

    def config(self, name: str, **parts: object) -> Path:
        """Writes `<root>/<name>.yaml`: a valid configuration updated with `parts`, whose runs go to `<root>/<name>`."""
        good = {
            "student": {"model": f"{self.root}/student"},
            "teachers": [{"name": "big", "model": f"{self.root}/teacher"}],
            "data": {"path": f"{self.root}/corpus.jsonl", "max_length": 64},
            "loss": {"top_k": 16},
            "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2},
            "run": {"dir": f"{self.root}/{name}"},
        }
        path = self.root / f"{name}.yaml"
        path.write_text(json.dumps(good | parts))  # JSON is YAML
        return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("bad")
    write_tiny_model(root / "student", hidden=16, seed=2, positions=POSITIONS)
    write_tiny_model(root / "teacher", hidden=16, seed=1, positions=POSITIONS)
    write_tiny_model(root / "foreign", hidden=16, tokenizer=tiny_tokenizer(600, seed=7), positions=POSITIONS)
    write_tiny_model(root / "twin", hidden=16, tokenizer=tiny_tokenizer(320, seed=9), positions=POSITIONS)
    write_tiny_model(root / "stranger", hidden=16, tokenizer=_stranger(), vocab_size=16, positions=POSITIONS)
    write_tiny_model(root / "short", hidden=16, seed=3, positions=512)
    pickled = shutil.copytree(root / "teacher", root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    coded = shutil.copytree(root / "teacher", root / "coded")
    config = json.loads((coded / "config.json").read_text())
    config |= {"model_type": "my_own", "auto_map": {"AutoModelForCausalLM": "mine.Model"}}
    (coded / "config.json").write_text(json.dumps(config))
    adapter = root / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    shutil.copytree(root / "teacher", root / "run" / "export")
    slow = shutil.copytree(root / "teacher", root / "slow")
    (slow / "tokenizer.json").unlink()
    (slow / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    write_corpus(root / "corpus.jsonl", rows=40, seed=5)
    (root / "questions.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "1 + 2"}\n')
    return Place(root)


def _stranger() -> PreTrainedTokenizerFast:
    """A tokenizer of three words that occur nowhere else, so that it has no token in common with any other."""
    words = {f"zzq{i}xx": i for i in range(3)} | {"??": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="??"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="??")


# ------------------------------------------------------------------ problems together, in a process of their own


def settings(place: Place) -> Ended:
    config = place.config("settings", student={"dtype": "fp32"})
    return distill_rl("train", "-c", config, "train.step=3", "train.epochs=many", "teachers.0.parallel={dp: 3, replicas: 3}",
                      "student.parallel.replicas=2", "loss.divergence=skewed_reverse_kl", "loss.beta=1",
                      "loss.temperature=1e-6", "loss.alm_tau=1e-9", "teachers.0.max_length=8",
                      "data.long_documents=split", "loss.dynamic_scale=on",
                      "schedule.steps=5", "schedule.warmup_steps=6")  # fmt: skip


def models_and_files(place: Place) -> Ended:
    folders = ("twin", "stranger", "short", "nowhere", "pickled", "coded", "slow", "adapter")
    special = {
        "twin": {"loss": "same", "attention": "flash_attention_2"},
        "stranger": {"export": "hidden", "attention": "varlen"},
    }
    teachers = [{"name": name, "model": f"{place.root}/{name}", **special.get(name, {})} for name in folders]
    config = place.config("models", student={"model": f"{place.root}/short"}, teachers=teachers)
    return distill_rl(
        "train", "-c", config, "data.max_length=4096", "loss.top_k=1000", "transport=cuda_ipc", "run.dir=/proc/runs",
        "evaluate.suites=[exact_match]", f"evaluate.data={place.root}/questions.jsonl", "aligner.dp.backend=cuda",
        "aligner.num_gpus=0.1", "student.kernels=liger",
    )  # fmt: skip


def evaluation(place: Place) -> Ended:
    answered = place.root / "answered.jsonl"
    answered.write_text('{"prompt": "x", "answer": "y"}\n')
    config = place.config(
        "evaluation",
        evaluate={
            "suites": ["exact_match"],
            "data": f"{answered}",
            "suites_every": 2,
            "num_fewshot": 3,
            "teachers": True,
            "parallel": {"tp": 4},
        },
        teachers=[{"name": "big", "model": f"{place.root}/teacher", "tokenizer": f"{place.root}/student"}],
        checkpoint={"every": 2, "keep_best": 1, "best_by": "eval/gsm8k"},
    )
    return distill_rl_in_process("train", "-c", config)


def quantization(place: Place) -> Ended:
    quantized = shutil.copytree(place.root / "teacher", place.root / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    split = {"quantization": "as_stored", "parallel": {"tp": 2}, "export": "hidden"}
    teachers = [
        {"name": "whole", "model": f"{place.root}/teacher", "quantization": "as_stored"},
        {"name": "unsaid", "model": f"{quantized}"},
        {"name": "stored", "model": f"{quantized}", **split},
    ]
    return distill_rl_in_process("train", "-c", place.config("quantization", teachers=teachers))


def output(place: Place) -> Ended:
    run = place.root / "output" / "taken"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    many = ("checkpoint.every=1", "checkpoint.keep_last=1000000000000", "train.global_batch_size=64")
    ended = distill_rl("train", "-c", place.config("output"), "run.name=taken", *many)
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    shutil.rmtree(place.root / "output")
    return ended


def cramped(place: Place) -> Ended:
    """A small disk and a small /dev/shm, mounted in a namespace that only the command sees."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("unshare: cannot create a mount namespace here")
    runs = place.root / "small"
    runs.mkdir()
    mounts = f"mount -t tmpfs -o size=40m none /dev/shm && mount -t tmpfs -o size=64k none {runs}"
    command = f'{mounts} && exec "$@"'
    config = place.config("cramped", run={"dir": f"{runs}"})
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", sys.executable, "-m", "distill_rl", "train", "-c", config],
        capture_output=True, text=True, timeout=240, env=environment(),
    )  # fmt: skip
    runs.rmdir()
    return Ended(done.returncode, done.stdout, done.stderr)


def sources(place: Place) -> Ended:
    """Five sources: a corrupt row group, a missing column and a missing file among them."""
    folder = place.root / "parts"
    folder.mkdir()
    for name in ("good", "corrupt"):
        pq.write_table(
            pa.table({"text": [f"{i} {name}" for i in range(64)]}), folder / f"{name}.parquet", row_group_size=8
        )
    content = bytearray((folder / "corrupt.parquet").read_bytes())
    start = pq.read_metadata(folder / "corrupt.parquet").row_group(5).column(0).data_page_offset
    content[start : start + 30] = b"\xff" * 30
    (folder / "corrupt.parquet").write_bytes(content)
    (folder / "body.jsonl").write_text('{"body": "x"}\n' * 64)
    parts = [
        {"path": f"{folder}/good.parquet", "weight": 0.5},
        {"path": f"{folder}/corrupt.parquet", "weight": -1},
        {"path": f"{folder}/body.jsonl"},
        {"path": f"{folder}/goods.parquet", "weight": 0},
        {"path": f"{place.root}/corpus.jsonl", "wieght": 2},
    ]
    return distill_rl("check", "-c", place.config("sources", data={"sources": parts, "path": "corpus.jsonl"}))


TOGETHER: Mapping[Callable[[Place], Ended], Mapping[str, tuple[str, ...]]] = {
    settings: {
        "unknown key": ("train.step:", "unknown key", "did you mean train.steps?"),
        "missing value": ("student.model:", "missing value", "set it in the file or add student.model="),
        "wrong type": ("train.epochs", "a number", "many"),
        "a warm-up beyond the schedule": ("schedule.warmup_steps", "must not exceed schedule.steps (5)", "6"),
        "batch does not divide": ("train.global_batch_size", "8", "dp 3", "use"),
        "replicas do not divide": (
            "student.parallel.replicas",
            "must divide student.parallel.dp = 1",
            "2",
            "use one of",
        ),
        "a skew of 1": ("loss.beta", "less than 1 with skewed_reverse_kl", "itself", "got 1.0", "0.1 is usual"),
        "a temperature at which nothing is left": ("loss.temperature", "must lie in [0.01, 100]", "1e-06"),
        "chunks that are all impossible": ("loss.alm_tau", "must lie in [0.01, 1e+06]", "1e-09"),
        "rows of a teacher shorter than the student's": ("teachers.0.max_length", "at least data.max_length", "got 8"),
        "pieces where a loss needs the whole batch": (
            "data.long_documents",
            "loss.dynamic_scale",
            "all of a batch at once",
            "got split",
            "use data.long_documents=cut",
        ),
        "replicas of a teacher": ("teachers.0.parallel.replicas", "applies to the student only", "3", "leave it at 1"),
    },
    models_and_files: {
        "another vocabulary of the same size": (
            "teachers.0:",
            "tokenizers differ",
            "student ",
            "twin ",
            "set loss.cross_tokenizer",
        ),
        "nothing in common": ("teachers.1:", "the common vocabulary is empty", "use loss.cross_tokenizer=alm"),
        "longer than the student": ("data.max_length", "512 positions of student", "4096", "use 512 or less"),
        "longer than a teacher": ("data.max_length", "512 positions of teacher short", "4096", "use 512 or less"),
        "no model there": ("teachers.3.model", "no such folder", "nowhere", "give a folder"),
        "only pickled weights": ("teachers.4.model", "must be safetensors", "pickled", "convert it"),
        "a model that needs its own code": ("teachers.5.model", "my_own", "auto_map", "never run", "use a model"),
        "a slow tokenizer": ("teachers.6.tokenizer", "must be a fast tokenizer", "ByT5Tokenizer", "tokenizer.json"),
        "an adapter without its model": (
            "teachers.7.model",
            "is a LORA adapter of org/base",
            "merge it first",
            "merge_and_unload()",
        ),
        "top_k over the vocabulary": ("loss.top_k", "320 ids of the student's tokenizer", "1000", "use 320 or less"),
        "CUDA IPC without GPUs": ("transport", "cuda_ipc", "GPU", "transport="),
        **NO_LIGER,
        "kernels without a GPU": ("student.kernels", "needs a GPU; none is visible", "set student.kernels=torch"),
        "a GPU asked, none visible": ("aligner.dp.backend", "none is visible", "cuda", "numba"),
        "flash attention without its package": ("teachers.0.attention", "flash_attn", "not installed", "pip install"),
        "flash attention for heads of another size": (
            "teachers.0.attention",
            "heads of a multiple of 8 features up to 256, not of 4",
            "flash_attention_2",
            "attention=auto",
        ),
        "flash attention without a GPU": ("teachers.0.attention", "needs a GPU", "flash_attention_2", "attention=auto"),
        "variable lengths without a GPU": ("teachers.1.attention", "needs a GPU", "varlen", "attention=auto"),
        "output cannot be written": ("/proc/runs", "must be writable", "choose another run.dir"),
        "an evaluation without answers": (
            "evaluate.suites",
            "questions.jsonl, row 2",
            "`answer`",
            "got nothing",
            "correct the row",
        ),
    },
    evaluation: {
        "worked examples for a suite without": ("evaluate.num_fewshot", "unlike exact_match", "got 3", "leave it out"),
        "the best by a suite that is not run": ("checkpoint.best_by", "(eval/exact_match)", "got eval/gsm8k"),
        "a teacher with a tokenizer of its own": ("evaluate.teachers", "of its own folder", "leave one of them out"),
        "key-value heads of the student": (
            "evaluate.parallel.tp: student: 2 key-value heads ",
            "= 4: 2 = 0 * 4 + 2",
        ),
        "key-value heads of a teacher": ("evaluate.parallel.tp: teacher big: 2 key-value heads ", "= 4: 2 = 0 * 4 + 2"),
    },
    quantization: {
        "a whole checkpoint as it is stored": (
            "teachers.0.quantization",
            "must be quantised",
            "got as_stored",
            "set teachers.0.quantization=int8, int4, fp8 or null",
        ),
        "a quantised checkpoint as if it were whole": (
            "teachers.1.model",
            "must not be quantized",
            "quantization: as_stored",
        ),
        "a method without its package": ("teachers.2.quantization", "hqq weights need hqq", "pip install hqq"),
        "stored weights on two ranks": ("teachers.2.parallel.tp", "must be 1", "got 2", "set it to 1"),
        "hidden states of stored weights": ("teachers.2.export", "hidden needs", "set teachers.2.export=topk"),
    },
    sources: {
        "one source beside several": (
            "data.path:",
            "data.sources is given, too",
            "got corpus.jsonl",
            "leave data.path out",
        ),
        "a corrupt row group": ("data.sources.1.path:", "corrupt.parquet", "a readable, complete parquet file"),
        "no such column in one of five": ("data.sources.2.path:", "body.jsonl", "'text'", "['body']"),
        "a source that is not there": ("data.sources.3.path:", "goods.parquet", "did you mean", "good.parquet?"),
        "a negative weight": ("data.sources.1.weight:", "must be greater than 0", "-1"),
        "a weight of 0": ("data.sources.3.weight:", "must be greater than 0", "got 0.0"),
        "a misspelt key of a source": ("data.sources.4.wieght:", "unknown key", "data.sources.4.weight?"),
    },
    output: {
        "run directory in use": ("output/taken", "in use", "no checkpoint is saved", "--clean"),
        "more checkpoints than the disk holds": ("run.dir", "are free", "GiB", "lower checkpoint.keep_last"),
        "fewer rows than a batch": ("data.path", "40 training documents", "batch of 64", "lower train.global"),
    },
    cramped: {
        "a small disk": ("run.dir", "and 0.1 MiB are free", "free some space"),
        "a small /dev/shm": ("/dev/shm", "object store needs 80 MiB", "40 MiB free", "--shm-size"),
    },
}


@pytest.fixture(scope="module")
def answered(place: Place) -> Callable[[Callable[[Place], Ended]], Ended]:
    """The result of a command; every command runs once."""
    results: dict[Callable[[Place], Ended], Ended] = {}

    def answer(command: Callable[[Place], Ended]) -> Ended:
        if command not in results:
            results[command] = command(place)
        return results[command]

    return answer


@pytest.mark.parametrize(
    ("command", "words"),
    [pytest.param(command, words, id=name) for command, rows in TOGETHER.items() for name, words in rows.items()],
)
def test_exactly_one_error_line_for(answered, command, words):
    ended = answered(command)
    assert ended.code == 2, ended.err
    assert len([line for line in ended.errors if all(word in line for word in words)]) == 1, (words, ended.err)


@pytest.mark.parametrize("command", TOGETHER, ids=lambda command: command.__name__)
def test_all_problems_are_reported_at_once_and_nothing_is_written(answered, place, command):
    ended = answered(command)
    assert ended.errors == [line for line in ended.err.splitlines() if line.strip()]
    assert len(ended.errors) == len(TOGETHER[command]), ended.err
    assert ended.out == "" or command is sources  # `check` prints the configuration
    for name in ("settings", "sources", "models", "evaluation", "output", "cramped", "small"):
        assert not (place.root / name).exists()


# ------------------------------------------------------------------ problems alone, through the same entry point


@pytest.fixture
def refused(place: Place, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `distill-rl train` in this process and returns the one error line with which it refuses its input."""

    def train(config: Path, *arguments: str) -> str:
        capsys.readouterr()  # what making the material printed
        code = cli.main(["train", "-c", str(config), *arguments])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        (line,) = lines
        assert code == 2, line
        assert line.startswith(PREFIX)
        return line.removeprefix(PREFIX)

    return train


def _rows(*rows: object) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


GOOD = [{"text": f"row {i}"} for i in range(16)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("data.jsonl", "empty")),
        (_rows(*[{"body": "x"}] * 16), ("data.jsonl", "'text'", "body")),
        (_rows(*GOOD, {"text": 5}), ("data.jsonl", "row 16", "text", "int")),
        (_rows(*GOOD, b'{"text": "\xff\xfe"}'), ("data.jsonl", "row 16", "text", "UTF-8")),
        (_rows(*GOOD, b'{"text": "cut o'), ("data.jsonl", "row 16", "truncated")),
        (_rows(*GOOD[:3]), ("data.jsonl", "3 training documents", "batch of 8")),
    ],
    ids=["empty", "no column", "not text", "not UTF-8", "cut off", "too few rows"],
)
def test_unusable_data_is_refused(place, refused, tmp_path, content, words):
    data = tmp_path / "data.jsonl"
    data.write_bytes(content)
    line = refused(place.config("data"), f"data.path={data}")
    assert line.startswith("data.path")
    assert all(word in line for word in words), line
    assert not (place.root / "data").exists()


USER, ASSISTANT = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
IMAGE = {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "image": "a.png"}]}


def _chats(*last: dict, **columns: object) -> bytes:
    """Sixteen chats, the last of them made of these messages in place of good ones, all with further columns."""
    chats = [[USER, ASSISTANT]] * 15 + [list(last) or [USER, ASSISTANT]]
    return _rows(*[{"messages": chat, **columns} for chat in chats])


@pytest.mark.parametrize(
    ("content", "words", "settings"),
    [
        (_chats(USER, ASSISTANT | {"tool_calls": [CALL]}),
         ("data.unrendered", "leaves out `tool_calls` of assistant messages in 1 of 16 rows", "row 15: ", "=warn"), ()),
        (_chats(USER, ASSISTANT | {"reasoning_content": "2 and 2"}),
         ("data.unrendered", "`reasoning_content` of assistant messages", "'2 and 2'", "=warn"), ()),
        (_chats(tools=[CALL]), ("data.unrendered", "leaves out the tools in 16 of 16 rows", "=warn"), ()),
        (_chats(IMAGE, ASSISTANT), ("row 15", "part 1", "text only", "type image", "leave such rows out"), ()),
        (_chats(images=["a.png"]), ("'images'", "text only", "remove the column"), ()),
        (_chats(USER, {"role": "assistant", "content": None}), ("row 15", "message 1, content", "got null"), ()),
        (_chats(tools="no JSON"), ("row 0", "'tools'", "a list of tools", "no JSON"), ()),
        (_chats(chat_template_kwargs={"tokenize": True}), ("row 0", "variables of the chat template", "tokenize"), ()),
        (_chats(), ("data.loss_roles", "no message of 16 rows", "asistant", "did you mean assistant?"),
         ("data.loss_roles=[asistant]",)),
        (_chats(), ("data.concatenate", "only texts can be joined, not chats", "data.packing"), ("data.concatenate=true",)),
        (_chats(), ("data.concatenate", "only texts can be joined", "got data.format=messages"),
         ("data.concatenate=true", "data.format=messages")),
        (_rows(*GOOD), ("column 'domain'", "teachers.0.where names", "the columns ['text']"),
         ("teachers.0.where={domain: maths}",)),
        (_rows(*[{"text": "some words", "use": 1}] * 15, {"text": "some words", "use": -1}),
         ("row 15", "column 'use'", "a finite number of 0 or more", "-1"), ("teachers.0.weight_column=use",)),
        (_rows(*[{"text": "some words", "domain": "code"}] * 16), ("data.concatenate", "joins texts into one", "data.packing"),
         ("teachers.0.where={domain: code}", "data.concatenate=true")),
        (_rows(*[{"text": "some words", "domain": "code"}] * 16), ("teachers.0.score", "on the same tokens", "score=static"),
         ("teachers.0.where={domain: code}", "teachers.0.score=ce")),
        (_rows(*[{"text": "some words", "domain": "code"}] * 16), ("teachers.0.where.domain", "at least one value", "[]"),
         ("teachers.0.where={domain: []}",)),
        (_rows(*[{"text": "some words", "domain": "code"}] * 16), ("teachers.0.where.domain", "a text, a finite number"),
         ("teachers.0.where={domain: {a: b}}",)),
        (_chats(), ("data.loss_roles", "must have assistant", "['user']", "add assistant"),
         ("data.loss_roles=[user]", "data.loss_on=assistant")),
        (_rows(*GOOD), ("data.loss_roles", "rows of text", "data.loss_on=all"), ("data.loss_roles=[user]",)),
        (_rows(*[{"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]}] * 16),
         ("'text'", "conversations", "set data.format=sharegpt"), ("data.format=text",)),
        (_rows(*[{"messages": [{"from": "human", "value": "?"}]}] * 16), ("row 0", "set data.format=sharegpt"), ()),
        (_rows(*[{"conversations": [{"from": "narrator", "value": "?"}]}] * 16),
         ("row 0", "turn 0, from", "human, user, gpt", "narrator"), ("data.format=sharegpt",)),
        (_rows(*[{"conversations": [USER, ASSISTANT]}] * 16),
         ("row 0", "from and value", "data.format=messages and data.messages_key='conversations'"), ("data.format=sharegpt",)),
        (_rows(*[{"instruction": "Add.", "input": "2 2", "output": "4"}] * 16),
         ("'text'", "instruction", "set data.format=alpaca"), ("data.format=text",)),
        (_rows(*[{"instruction": "Add.", "context": "2 2", "response": "4"}] * 16),
         ("'text'", "rename 'response' to 'output', and set data.format=alpaca"), ()),
        (_rows(*[{"prompt": "2 + 2?", "completion": "4"}] * 16),
         ("'text'", "rename 'prompt' to 'instruction' and 'completion' to 'output'"), ()),
        (_rows(*[{"prompt": "2 + 2?", "completion": "4"}] * 16),
         ("'promt'", "did you mean 'prompt'? set data.text_key"), ("data.text_key=promt",)),
    ],
    ids=["tool calls that are not written", "reasoning that is not written", "tools that are not written",
         "an image in a message", "a column of images", "no content", "tools that are not JSON",
         "a variable that is an argument", "a misspelt role", "chats that are joined", "chats by name that are joined",
         "a column of where that is missing", "a negative weight", "routed texts that are joined", "a score of a routed teacher",
         "where without a value", "where with a mapping", "roles against loss_on", "roles of text", "ShareGPT rows",
         "ShareGPT turns as messages", "an unknown ShareGPT role", "messages as ShareGPT", "Alpaca rows",
         "instructions and responses", "prompts and completions",
         "a misspelt column of prompts"],
)  # fmt: skip
def test_unusable_chats_are_refused(place, refused, tmp_path, content, words, settings):
    data = tmp_path / "data.jsonl"
    data.write_bytes(content)
    line = refused(place.config("data"), f"data.path={data}", *settings)
    assert all(word in line for word in words), line
    assert not (place.root / "data").exists()


@pytest.mark.parametrize(("training", "validation"), [("chats", "rows of text"), ("rows of text", "chats")])
def test_validation_data_of_another_kind_are_refused(place, refused, tmp_path, training, validation):
    contents = {"chats": _chats(), "rows of text": _rows(*GOOD)}
    for name, kind in (("data", training), ("validation", validation)):
        (tmp_path / f"{name}.jsonl").write_bytes(contents[kind])
    data, other = tmp_path / "data.jsonl", tmp_path / "validation.jsonl"
    line = refused(place.config("data"), f"data.path={data}", f"data.validation.path={other}")
    assert line.startswith(f"data.validation.path: {training}, as data.path has; got {validation} in "), line


QUESTION, ANSWER = {"role": "user", "content": "why " * 60}, {"role": "assistant", "content": "so"}


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{"text": ""}, {"text": " \n"}] * 8, (), ("data.path", "none of the 16", "blank rows", "give rows with text")),
        (
            [{"messages": [{"role": "user", "content": "kalo"}, {"role": "assistant", "content": " "}]}] * 8,
            ("data.loss_on=assistant",),
            ("data.path", "none of the 8", "turns of assistant with nothing in them", "give turns with a content"),
        ),
        (
            [{"messages": [QUESTION]}] * 16,
            ("data.loss_on=assistant",),
            ("data.path", "none of the 16", "without a turn of assistant", "set data.loss_on=all"),
        ),
        (
            [{"messages": [QUESTION, ANSWER]}] * 16,
            ("data.loss_roles=[tool]",),
            ("data.path", "none of the 16", "without a turn of tool", "set data.loss_roles=[]"),
        ),
        (
            [{"messages": [QUESTION, ANSWER]}] * 16,
            ("data.loss_on=assistant",),
            ("data.path", "none within data.max_length=64", "raise data.max_length"),
        ),
    ],
    ids=["blank text", "empty answers", "no answers", "no tool results", "answers cut off"],
)
def test_data_with_nothing_to_train_on_is_refused(place, refused, capsys, tmp_path, rows, settings, words):
    data = tmp_path / "data.jsonl"
    data.write_bytes(_rows(*rows))
    config = place.config("nothing")
    line = refused(config, f"data.path={data}", *settings)
    assert all(word in line for word in ("must have a token to train on", *words)), line
    assert not (place.root / "nothing").exists()
    assert cli.main(["check", "-c", str(config), f"data.path={data}", *settings]) == 2
    assert line in capsys.readouterr().err


def test_validation_data_with_nothing_to_measure_is_refused(place, refused, tmp_path):
    data = tmp_path / "blank.jsonl"
    data.write_bytes(_rows(*[{"text": ""}] * 4))
    line = refused(place.config("nothing"), f"data.validation.path={data}")
    assert line.startswith("data.validation: a row must have a token to train on; none of the 4"), line


@pytest.mark.parametrize(("overrides", "words"), [
    ("evaluate.at_start=true", ("evaluate.at_start: needs validation data or suites", "set evaluate.suites, or data.val")),
    ("checkpoint={keep_best: 1, best_by: accuracy}  data.validation.fraction=0.1  evaluate.every=2",
     ("checkpoint.best_by: must be a metric that this run measures (validation/kl_loss, ", "got accuracy")),
    ("checkpoint={keep_best: 1, best_by: eval/gsm8k}",
     ("checkpoint.best_by: needs suites that run during training", "got eval/gsm8k", "set evaluate.suites")),
    ("checkpoint={keep_best: 1, every: 3}  data.validation.fraction=0.1  evaluate.every=2",
     ("checkpoint.keep_best: no step up to 4 is a multiple of", "checkpoint.every 3", "set checkpoint.every=2")),
    (f"{BEST}/acceptance}}  {VALIDATED}  loss.temperature=2",
     ("checkpoint.best_by: is not measured for teacher big", "at loss.temperature 2,", "best_by=validation/top1_agreement")),
    (f"{BEST}/acceptance}}  {VALIDATED}",
     ("checkpoint.best_by: is not measured for teacher big", "its top k tells bounds only", "best_by=validation/top1")),
    (f"{BEST}/acceptance}}  {VALIDATED}  teachers.0.model={{root}}/foreign  teachers.0.export=logits",
     ("checkpoint.best_by: is not measured for teacher big", "not compared token by token", "got validation/acceptance")),
    (f"{BEST}/top1_agreement/wide}}  {VALIDATED}",
     ("checkpoint.best_by: must be a metric that this run measures (", "validation/top1_agreement)", "got validation/top1")),
    (f"{BEST}/acceptance}}  {VALIDATED}  loss.kd_weight=0  loss.ce_weight=1",
     ("checkpoint.best_by: needs teachers", "got validation/acceptance", "best_by=validation/nll_loss")),
])  # fmt: skip
def test_an_evaluation_that_cannot_be_is_refused(place, refused, overrides, words):
    line = refused(place.config("measured"), *overrides.replace("{root}", str(place.root)).split("  "))
    assert all(word in line for word in words), line
    assert not (place.root / "measured").exists()


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_truncated_table_is_refused(place, refused, tmp_path, form):
    table = write_corpus(tmp_path / f"table.{form}", form=form)
    table.write_bytes(table.read_bytes()[:-200])
    line = refused(place.config("data"), f"data.path={table}")
    assert all(word in line for word in ("data.path", table.name, "truncated")), line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "student.parallel.sp=3",
            ("student.parallel.sp: must divide the model's 4 attention heads", "got 3", "use one of 1, 2, 4"),
        ),
        (
            "teachers.0.parallel={sp: 4, tp: 2}",
            (
                "teachers.0.parallel.sp: must divide the model's 2 attention heads of each of 2 tensor-parallel ranks",
                "1, 2",
            ),
        ),
        (
            "student.parallel.sp=2  teachers.0.model={root}/foreign",
            ("student.parallel.sp: must be 1: teacher big is compared by chunks of text (hybrid)", "got 2"),
        ),
    ],
)
def test_rows_that_cannot_be_divided_are_refused(place, refused, overrides, words):
    line = refused(place.config("long-rows"), *overrides.replace("{root}", str(place.root)).split("  "))
    assert all(word in line for word in words), line


@pytest.fixture(scope="module")
def projections(place: Place) -> Path:
    """Projections of another pair, of this pair with a NaN, and of this pair with an index out of range."""
    ours, theirs = tiny_tokenizer(), tiny_tokenizer(600, seed=7)
    valid = build_projection(ours, theirs, student_columns=320, teacher_columns=600)
    values, indices = valid.values.copy(), valid.indices.copy()
    values[3], indices[3] = np.nan, 600
    other = build_projection(theirs, ours, student_columns=600, teacher_columns=320)
    broken = {"another": other, "nan": replace(valid, values=values), "out-of-range": replace(valid, indices=indices)}
    folder = place.root / "projections"
    folder.mkdir()
    for name, projection in broken.items():
        save_projection(projection, folder / name)
    return folder


@pytest.mark.parametrize(("name", "words"), [
    ("another", ("must be this pair's", "student_hash", "the file has", "give this pair's file")),
    ("nan", ("finite", "delete the file, it is then built again")),
    ("out-of-range", ("600", "delete the file, it is then built again")),
])  # fmt: skip
def test_an_unusable_projection_is_refused(place, refused, projections, name, words):
    teacher = {"name": "big", "model": f"{place.root}/foreign"}
    line = refused(place.config("projection", teachers=[teacher]), f"projection.path={projections}/{name}")
    assert line.startswith("projection.path: ")
    assert all(word in line for word in (f"projections/{name}", *words)), line
    assert not (place.root / "projection").exists()


# ------------------------------------------------------------------ models that cannot be trained or teach here

_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 320}
_NO_CAUSAL_LM = {
    "t5": ({"d_model": 16, "num_layers": 1, "vocab_size": 320}, ("t5 is an encoder-decoder", "decoder-only")),
    "bert": (_SMALL, ("bert is an encoder", "sees the tokens that are to be predicted")),
    "vit": (_SMALL, ("vit is none in transformers", "causal language model")),
    "mamba": ({"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 320}, ("mamba has no attention heads",)),
    "bloom": (_SMALL, ("data.packing", "bloom takes no positions", "set data.packing=false")),
    "falcon_h1": (_SMALL, ("data.packing", "falcon_h1 carries a state", "set data.packing=false")),
    "mllama": ({}, ("mllama reads images or sound", "no causal language model of its text")),
    "paligemma": ({}, ("paligemma reads images or sound", "no causal language model of its text")),
    "qwen3_vl_moe": ({}, ("qwen3_vl_moe reads images or sound", "no causal language model of its text")),
    "florence2": ({}, ("florence2 reads images or sound", "no causal language model of its text")),
}


@pytest.mark.parametrize("family", _NO_CAUSAL_LM)
def test_a_model_of_another_kind_is_refused(place, refused, tmp_path, family):
    settings, words = _NO_CAUSAL_LM[family]
    tiny_tokenizer().save_pretrained(tmp_path)
    config = AutoConfig.for_model(family, **settings)
    if words[0] == "data.packing":  # what its class says, about a model that is whole
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    else:
        config.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").symlink_to(place.root / "teacher" / "model.safetensors")
    teacher = {"name": "big", "model": f"{tmp_path}", "attention": "eager"}
    line = refused(place.config("kind", teachers=[teacher]))
    assert line.startswith(("teachers.0.model: ", "data.packing: "))
    assert all(word in line for word in words), line


def test_attention_that_a_family_lacks_is_refused(place, refused, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **_SMALL)).save_pretrained(tmp_path)
    teacher = {"name": "big", "model": f"{tmp_path}", "attention": "sdpa"}
    line = refused(place.config("attention", teachers=[teacher]), "data.packing=false")
    assert line.startswith("teachers.0.attention: transformers has no sdpa attention for bloom; set teachers.0."), line


_NORM, _HEAD = "model.norm.weight", "lm_head.weight"


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[_NORM]


def _left_over(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.mlp.bias"] = torch.zeros(4)


def _narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_HEAD] = tensors[_HEAD][:, :8].clone()


def _rounded(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_NORM] = tensors[_NORM].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without, ("1 tensor of llama must be in the files", _NORM, "copy the model again")),
        (_left_over, ("1 tensor in the files, and llama has none such", "model.layers.7.mlp.bias")),
        (_narrow, ("1 tensor must have the shape that config.json gives", f"{_HEAD} is [320, 8], not [320, 16]")),
        (_rounded, ("floats of 16 bits or more", f"{_NORM} is F8_E4M3", "unquantized")),
    ],
    ids=["missing", "left over", "another shape", "quantized"],
)
def test_tensors_that_the_model_cannot_take_are_refused(place, refused, tmp_path, change, words):
    folder = shutil.copytree(place.root / "teacher", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    line = refused(place.config("tensors", teachers=[{"name": "big", "model": f"{folder}"}]))
    assert line.startswith("teachers.0.model: ")
    assert all(word in line for word in words), line


def _lost(folder: Path) -> None:
    next(iter(sorted(folder.glob("model-*.safetensors")))).unlink()


def _cut(folder: Path) -> None:
    file = next(iter(sorted(folder.glob("model-*.safetensors"))))
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_lost, ("the index names is missing", "model-00001")),
        (_cut, ("cut off", "model-00001", "copy the model again")),
    ],
    ids=["lost", "cut off"],
)
def test_a_model_without_one_of_its_files_is_refused(place, refused, tmp_path, harm, words):
    folder = shutil.copytree(place.root / "teacher", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(place.root / "teacher").save_pretrained(folder, max_shard_size="20KB")
    harm(folder)
    line = refused(place.config("files", teachers=[{"name": "big", "model": f"{folder}"}]))
    assert line.startswith("teachers.0.model: ")
    assert all(word in line for word in words), line


_DAMAGE: dict[str, tuple[str, str | dict[str, object], str]] = {
    "an empty config.json": ("config.json", "", "config.json cannot be read"),
    "a list for a config": ("config.json", "[]", "config.json must be a JSON object"),
    "no family": ("config.json", {"model_type": None}, "must name a model_type"),
    "a family of another type": ("config.json", {"model_type": ["llama"]}, "must name a model_type"),
    "a width in words": ("config.json", {"hidden_size": "wide"}, "config.json must describe a model"),
    "no width": ("config.json", {"hidden_size": None}, "config.json must describe a model"),
    "no heads": ("config.json", {"num_attention_heads": 0}, "config.json must describe a model"),
    "no such activation": ("config.json", {"hidden_act": "no_such"}, "transformers cannot make llama"),
    "an empty tokenizer": ("tokenizer.json", "", "must hold a tokenizer"),
    "a tokenizer of another type": ("tokenizer.json", "[]", "must hold a tokenizer"),
    "a list for tokenizer settings": ("tokenizer_config.json", "[]", "must hold a tokenizer"),
}


@pytest.mark.parametrize("name", _DAMAGE)
def test_a_damaged_model_folder_gives_one_line(place, refused, tmp_path, name):
    file, content, words = _DAMAGE[name]
    folder = shutil.copytree(place.root / "teacher", tmp_path / "model")
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / file).read_text()) | content)
    (folder / file).write_text(content)
    line = refused(place.config("damage", teachers=[{"name": "big", "model": f"{folder}"}]))
    assert line.startswith("teachers.0.")
    assert words in line, line


def test_more_gpus_than_are_visible_are_refused(place, refused, monkeypatch):
    from distill_rl import preflight

    monkeypatch.setattr(preflight, "visible_gpus", lambda: 2)
    line = refused(place.config("gpus"), "student.parallel.dp=4")
    assert line.startswith("student.parallel: dp 4 x tp 1 = 4 GPUs are asked, 2 are visible; lower dp, sp or tp"), line
    questions = place.root / "some.jsonl"
    questions.write_text('{"prompt": "x", "answer": "y"}\n')
    suite = ("evaluate.suites=[exact_match]", f"evaluate.data={questions}")
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 1)
    line = refused(place.config("gpus"), *suite, "evaluate.parallel.tp=2")
    assert line.startswith("evaluate.parallel.tp: 2 GPUs are asked, there are 1; lower it"), line


def test_more_memory_than_the_machine_has_is_refused(place, refused, monkeypatch):
    from distill_rl import preflight

    monkeypatch.setattr(preflight, "total_bytes", lambda: 2**20)
    line = refused(place.config("memory"))
    assert line.startswith("memory: the workers need about "), line
    assert all(word in line for word in ("student", "big", "this machine has 1.0 MiB", "lower train.micro_batch")), line
    assert not (place.root / "memory").exists()


def test_a_worker_that_no_gpu_can_hold_is_refused(place, refused, monkeypatch):
    from distill_rl import preflight

    monkeypatch.setattr(preflight, "visible_gpus", lambda: 2)
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: (2**18, 2**18))
    line = refused(place.config("gpu-memory", loss={"kd_weight": 0.0, "ce_weight": 1.0}))
    assert line.startswith("memory: a process of student needs about "), line
    assert all(word in line for word in ("has 0.2 MiB", "raise parallel.tp", "lower train.micro_batch_size")), line
    assert not (place.root / "gpu-memory").exists()


def test_memory_near_the_limit_is_a_note_of_check(place, monkeypatch):
    from distill_rl import preflight

    monkeypatch.setattr(preflight, "total_bytes", lambda: 920 * 2**20)  # each of two processes is 435 MiB and a little
    ended = distill_rl_in_process("check", "-c", place.config("near"))
    assert ended.code == 0, ended.err
    assert "# note       memory: the workers need about " in ended.out, ended.out
    assert "this machine has 920.0 MiB; if that is not enough, lower train.micro_batch_size" in ended.out


def _newer(step: Path) -> None:
    manifest = json.loads((step / "MANIFEST.json").read_text())
    (step / "MANIFEST.json").write_text(json.dumps(manifest | {"format": 99}))


def _corrupt(step: Path) -> None:
    (step / "student" / "shard").write_bytes(b"weightz")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda step: None, ("the data of this run", "must be the same", "dddd", "--clean")),
        (_newer, ("step-3", "reads checkpoint format", "format 99", "update distill_rl")),
        (_corrupt, ("step-3", "student/shard differs from the manifest", "damaged; use an older one")),
    ],
    ids=["foreign", "newer", "corrupt"],
)
def test_a_checkpoint_that_cannot_be_resumed_is_refused(place, refused, tmp_path, harm, words):
    folder = tmp_path / "runs" / "mine" / "checkpoints"
    store = CheckpointStore(folder, keep_last=2, keep_best=0)
    draft = store.begin(SavedState(TrainState(3), {"data": "d" * 64}, None))
    (draft.student / "shard").write_bytes(b"weights")
    store.commit(draft)
    harm(folder / "step-3")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    resume = ("run.name=mine", "--resume", str(folder / "step-3"))
    line = refused(place.config("resume", run={"dir": f"{tmp_path}/runs"}), *resume)
    assert all(word in line for word in words), line
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


NO_CLUSTER = "http://127.0.0.1:1"
EVAL = "eval --suites gsm8k --data {root}/corpus.jsonl --model {root}"


@pytest.mark.parametrize(("command", "words"), [
    ("status", ("no Ray cluster answers there", NO_CLUSTER, "start one", "`distill-rl train` needs none")),
    ("logs mine --follow", ("no Ray cluster answers there", NO_CLUSTER, "start one")),
    ("stop mine", ("no Ray cluster answers there", NO_CLUSTER, "start one")),
    ("submit -c {config}", ("no Ray cluster answers there", NO_CLUSTER, "start one")),
    ("train -c {config} --gpus-per-node 4", ("--gpus-per-node: ", "without --dry-run", "4", "add --dry-run")),
    (EVAL + "/student --shards 0 --ray-address auto", ("--ray-address: ", "--shards 0", "auto", "leave it out")),
    (EVAL + "/student --shards 0 --tp 2", ("--tp: ", "--shards 0 starts none", "got 2", "set --shards to 1 or more")),
    (EVAL + "/student --tp 0", ("--tp: must be 1 or more", "got 0")),
    (EVAL + "/student --tp 3", ("model student: 4 attention heads cannot be split evenly over tp = 3", "4 = 1 * 3 + 1")),
    (EVAL + "/run", ("model run: ", "must hold a config.json", "the directory of a run: give its model, ", "run/export")),
    ("align --student {root}/run --teacher {root}/teacher --data {root}/corpus.jsonl",
     ("tokenizer ", "must hold a tokenizer", "no tokenizer.json in")),
    (EVAL + "/adapter", ("model adapter: ", "LORA adapter of org/base", "merge_and_unload()")),
    ("capture -c {config} --out {root}/refused --gpus-per-node 4", ("--gpus-per-node: ", "without --dry-run", "4", "add --dry")),
    ("capture -c {config} --out {root}/refused loss.kd_weight=0 loss.ce_weight=1",
     ("teachers: a capture needs a teacher", "loss.kd_weight above 0")),
    ("capture -c {config} --out {root}/refused teachers.0.export=hidden",
     ("teachers.0.cache: a store holds topk or sampled, and this teacher exports hidden", "set teachers.0.export=topk")),
    ("capture -c {config} --out {root}/corpus.jsonl", ("corpus.jsonl", "must be")),
    ("store info {root}/run", ("/run: must be a store", "`distill-rl capture` has made", "no manifest.json")),
    ("store verify {root}/nowhere", ("/nowhere: must be a store", "no such folder")),
    ("store merge {root}/run {root}/nowhere --out {root}/refused", ("/run: must be a store", "no manifest.json")),
    ("store export {root}/run --out {root}/refused", ("/run: must be a store", "no manifest.json")),
])  # fmt: skip
def test_a_command_that_cannot_work_is_refused(place, monkeypatch, capsys, command, words):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", NO_CLUSTER)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = command.format(root=place.root, config=place.config("refused"))
    assert cli.main(line.split()) == 2
    printed = capsys.readouterr()
    errors = [text.removeprefix(PREFIX) for text in printed.err.splitlines() if text.startswith(PREFIX)]
    assert len([text for text in errors if all(word in text for word in words)]) == 1, printed.err
    assert printed.out == ""
    assert not (place.root / "refused").exists()


@pytest.mark.parametrize(("overrides", "words"), [
    ("teachers.0.backend=store", ("teachers.0.store.path: backend store needs the folder of a store", "add teachers.0.store=")),
    ("teachers.0={{name: teacher, backend: store, store: 2024}}", ("teachers.0.store",)),  # one line on it
    ("teachers.0.backend=store  teachers.0.store={root}/run", ("teachers.0.store: ", "must be a store", "no manifest.json")),
    ("teachers.0.store={root}/run", ("teachers.0.store: is read with backend store only", "add teachers.0.backend=store")),
    ("teachers.0.cache={root}/refused  teachers.0.export=logits",
     ("teachers.0.cache: a store holds topk or sampled, and this teacher exports logits", "or run the teacher without cache")),
    ("teachers.0.cache={root}/refused  teachers.1={{name: other, model: {root}/short, cache: {root}/refused}}",
     ("teachers: every teacher needs a store of its own", "name another folder for each")),
])  # fmt: skip
def test_a_store_that_cannot_be_used_is_refused(place, refused, overrides, words):
    line = refused(place.config("stores"), *overrides.format(root=place.root).split("  "))
    assert all(word in line for word in words), line
    assert not (place.root / "stores").exists()
    assert not (place.root / "refused").exists()


@pytest.mark.parametrize(("overrides", "note"), [
    ("loss.beta=0.1", "loss.beta=0.1 has no effect: only jsd, skewed_forward_kl and skewed_reverse_kl have a mixture"),
    ("loss.chunk_average=chain", "loss.chunk_average=chain has no effect: only the losses xtoken, gold, hkl and uld"),
    ("loss.kd_weight=0 loss.ce_weight=1 loss.tail=truncate", "loss.tail=truncate, loss.top_k=16 have no effect: no teacher"),
    ("teachers.0.export=hidden", "loss.top_k=16 has no effect: no teacher exports a top k"),
    ("loss.draws=9", "loss.draws=9 has no effect: no teacher draws tokens (teachers[].export: sampled)"),
    ("evaluate.limit=9 evaluate.batch_size=8", "evaluate.limit=9, evaluate.batch_size=8 have no effect: no suites are set"),
    ("data.messages_key=chat", "data.messages_key=chat has no effect: texts are read"),
    ("teachers.0.revision=main", "teachers.0.revision=main has no effect: teachers[].model is a folder"),
])  # fmt: skip
def test_check_says_what_has_no_effect(place, capsys, overrides, note):
    config = str(place.config("idle"))
    assert cli.main(["check", "-c", config]) == 0
    assert "no effect" not in capsys.readouterr().out
    assert cli.main(["check", "-c", config, *overrides.split()]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
    assert line.startswith(f"# note       {note}"), line
