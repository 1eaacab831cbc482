"""A corpus of chats with tools, checked and trained on through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.chat_templates import CHATML, LLAMA3, QWEN3, TOOLS, tool_chat
from tests.helpers.command import distill_rl, distill_rl_in_process, records
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.cli


def _with_template(template: str):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chats")
    write_tiny_model(root / "student", hidden=16, seed=2, tokenizer=_with_template(QWEN3))
    write_tiny_model(root / "chatml", hidden=16, seed=2, tokenizer=_with_template(CHATML))
    write_tiny_model(root / "teacher", hidden=16, seed=1, tokenizer=_with_template(QWEN3))
    foreign = tiny_tokenizer(600, seed=7)
    foreign.chat_template = LLAMA3
    write_tiny_model(root / "foreign", hidden=16, seed=3, tokenizer=foreign)
    # Every other row has no tools: Parquet-like corpora differ in their keys from row to row.
    rows = []
    for i in range(24):
        arguments = {"city": f"city {i}"} if i % 2 else json.dumps({"city": f"city {i}"})
        rows.append({"messages": tool_chat(arguments), "tools": TOOLS if i % 2 else None})
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def _config(root: Path, folder: Path, *teachers: str, student: str = "student") -> Path:
    config = {
        "student": {"model": f"{root}/{student}", "dtype": "fp32"},
        "teachers": [{"name": name, "model": f"{root}/{name}", "dtype": "fp32"} for name in teachers],
        "data": {
            "path": f"{root}/chats.jsonl",
            "max_length": 512,
            "loss_roles": ["assistant", "tool"],
            "stops": "none",
            "validation": {"fraction": 0.1},
        },
        "loss": {"top_k": 16, "ce_weight": 0.5},
        "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 4},
        "aligner": {"workers": 0},
        "observe": {"tensorboard": False},
        "run": {"dir": f"{folder}/runs"},
    }
    path = folder / "chats.yaml"
    path.write_text(json.dumps(config))
    return path


def test_check_names_what_a_template_leaves_out(root, tmp_path):
    ended = distill_rl_in_process("check", "-c", _config(root, tmp_path, "teacher", student="chatml"))
    assert ended.code == 2
    calls, tools = [line for line in ended.errors if "data.unrendered: " in line]
    assert "leaves out `tool_calls` of assistant messages in 24 of 24 rows; got row " in calls
    assert "leaves out the tools in 12 of 24 rows" in tools
    assert "data.unrendered=warn" in tools
    assert "`tool_call_id` of tool messages in 24 of 24 rows" in ended.out
    warned = distill_rl_in_process(
        "check", "-c", _config(root, tmp_path, "teacher", student="chatml"), "data.unrendered=warn"
    )
    assert warned.code == 0, warned.err
    assert "leaves out `tool_calls` of assistant messages in 24 of 24 rows, such as row " in warned.out
    assert "teachers.0: teacher teacher reads chats as the student's chat template writes them" in warned.out
    assert "its own template writes 24 of 24 rows differently" in warned.out


def test_check_refuses_a_template_that_never_ends(root, tmp_path):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    write_tiny_model(tmp_path / "endless", hidden=16, seed=2, tokenizer=_with_template(endless + CHATML))
    path = _config(root, tmp_path, "teacher")
    checked = distill_rl_in_process("check", "-c", path, f"student.model={tmp_path}/endless")
    assert checked.code == 2
    line = next(line for line in checked.err.splitlines() if "the chat template of" in line)
    assert f"the chat template of {tmp_path}/endless ({{% for a in range(99999) %}}" in line
    assert "within 10 s of processor time and 1024 MiB of memory; got more processor time" in line


def test_a_run_on_tool_chats_trains_on_calls_and_says_what_is_left_out(root, cluster, tmp_path):
    """With a teacher of the same tokenizer and one of another tokenizer and template."""
    ended = distill_rl("train", "-c", _config(root, tmp_path, "teacher", "foreign"), cluster=cluster)
    assert ended.code == 0, ended.err
    assert (
        "note      the chat template of the student's tokenizer leaves out `tool_call_id` of tool messages" in ended.out
    )
    assert "chats are read without `tool_call_id` of tool messages" in ended.err + ended.out
    first = records(tmp_path / "runs" / "chats")[0]
    assert first["align/incomplete"] == 8
    assert first["align/chunks"] > 0
    assert first["train/kl_loss"] > 0
