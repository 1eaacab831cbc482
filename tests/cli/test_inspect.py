"""`distill-rl inspect` from the command line, compared with what plain Transformers says of the same texts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import Ended, distill_rl_in_process
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.cli

CONFIG = """\
student: {{model: {root}/student}}
teachers: [{{name: big, model: {root}/student}}]
data: {{path: {root}/texts.jsonl, max_length: 120}}
train: {{steps: 2, global_batch_size: 8, micro_batch_size: 2}}
run: {{dir: {root}/runs, seed: 3}}
"""
ROWS = 16
FOREIGN = "teachers.0.model={root}/foreign"
STUDENT, TEACHER = tiny_tokenizer(320, seed=1), tiny_tokenizer(600, seed=7)
EOS = STUDENT.eos_token_id


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers, no models, and data of one or two long documents among short ones."""
    root = tmp_path_factory.mktemp("inspect")
    STUDENT.save_pretrained(root / "student")
    TEACHER.save_pretrained(root / "foreign")
    (root / "my.yaml").write_text(CONFIG.format(root=root))
    texts, chats = corpus_rows(ROWS, seed=5), corpus_rows(ROWS, seed=6, messages=True)
    texts[4] = {"text": " ".join(row["text"] for row in texts)}
    chats[4] = {"messages": [{"role": "user", "content": "ka"}, {"role": "assistant", "content": texts[4]["text"]}]}
    for name, rows in {"texts": texts, "chats": chats}.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def inspect(root: Path, *arguments: str) -> Ended:
    return distill_rl_in_process("inspect", "-c", root / "my.yaml", *(each.format(root=root) for each in arguments))


def described(root: Path, *arguments: str) -> list[dict[str, Any]]:
    ended = inspect(root, "--json", *arguments)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def data(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / f"{name}.jsonl").read_text().splitlines()]


def of_text(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and offsets of a text by the tokenizer itself, with eos, which has no characters."""
    read = STUDENT(text, return_offsets_mapping=True)
    return [*read["input_ids"], EOS], [*read["offset_mapping"], (len(text), len(text))]


def chat_and_turns(row: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """A chat as the template writes it, and the spans of what the assistant says, by a regular expression."""
    text = STUDENT.apply_chat_template(row["messages"], tokenize=False)
    return text, [match.span(1) for match in re.finditer(r"<\|turn\|>assistant\n(.*?<\|end\|>)", text)]


def spans(tokens: Sequence[dict[str, Any]], shift: int = 0) -> list[tuple[int, int]]:
    return [(token["start"] - shift, token["end"] - shift) for token in tokens]


def test_packed_texts_have_the_ids_and_offsets_of_the_tokenizer(root: Path) -> None:
    texts, seen, packed = [row["text"] for row in data(root, "texts")], [], False
    for row in described(root, "data.long_documents=cut", "--rows", "100"):
        joined, packed = "", packed or len(row["documents"]) > 1
        for document in row["documents"]:
            tokens = row["tokens"][document["start_token"] : document["end_token"]]
            text = texts[document["row"]]
            ids, offsets = of_text(text)
            assert [token["id"] for token in tokens] == ids[:120]
            assert spans(tokens, len(joined)) == offsets[:120]
            assert [token["label"] for token in tokens] == [False] + [True] * (len(tokens) - 1)
            assert tokens[0]["why"] == "first token of the document"
            assert not any("why" in token for token in tokens[1:])
            assert (document["source"], document["tokens_in_all"]) == (str(root / "texts.jsonl"), len(ids))
            joined += text[: offsets[:120][-1][1]]
            seen.append(document["row"])
        assert row["text"] == joined
        for token in row["tokens"]:
            assert token["text"] == (joined[token["start"] : token["end"]] or "</s>")
        assert (row["teachers"], row["left_out"]) == ({}, [])
    assert sorted(seen) == list(range(ROWS))  # two steps of eight documents are all of them
    assert packed


def test_only_what_the_assistant_says_stands_in_brackets(root: Path) -> None:
    chats = ("data.path={root}/chats.jsonl", "data.loss_on=assistant", "data.stops=none", "data.max_length=400")
    settings = (*chats, "--row", "2", "--row", "3")
    out = inspect(root, *settings).out
    for number, row in zip((2, 3), described(root, *settings)):
        text, turns = chat_and_turns(data(root, "chats")[number])
        read = STUDENT(text, add_special_tokens=False, return_offsets_mapping=True)
        assert row["text"] == text
        assert [token["id"] for token in row["tokens"]] == read["input_ids"]
        assert spans(row["tokens"]) == read["offset_mapping"]
        for token, (start, _) in zip(row["tokens"], read["offset_mapping"]):
            learnt = any(first <= start < stop for first, stop in turns)
            assert token["label"] == learnt
            assert token.get("why") == (
                None
                if learnt
                else "not the assistant's (data.loss_on=assistant)"
                if start
                else "first token of the document"
            )
        for first, stop in reversed(turns):
            text = f"{text[:first]}[{text[first:stop]}]{text[stop:]}"
        assert text.replace("\n", "↵\n") in out


def test_a_row_that_is_cut_says_how_much_is_left(root: Path) -> None:
    settings = ("data.path={root}/chats.jsonl", "--row", "4")
    (row,) = described(root, *settings)
    text, _ = chat_and_turns(data(root, "chats")[4])
    read = STUDENT(text, add_special_tokens=False, return_offsets_mapping=True)
    assert [token["id"] for token in row["tokens"]] == read["input_ids"][:120]
    assert row["text"] == text[: read["offset_mapping"][119][1]]
    assert f"cut at 120 of {len(read['input_ids']):,} tokens" in inspect(root, *settings).out


def test_a_document_that_is_split_is_shown_in_all_its_pieces(root: Path) -> None:
    rows = described(root, "--row", "4", "data.packing=true")
    text = data(root, "texts")[4]["text"]
    ids, _ = of_text(text)
    assert len(rows) == -(-len(ids) // 120)
    assert [token["id"] for row in rows for token in row["tokens"]] == ids
    assert "".join(row["text"] for row in rows) == text
    assert [row["documents"][0]["tokens_before"] for row in rows] == list(range(0, len(ids), 120))
    assert [row["tokens"][0]["why"] for row in rows[1:]] == ["first token of a later piece of the document"] * (
        len(rows) - 1
    )
    assert not any(row["tokens"][0]["label"] for row in rows)
    assert (
        f"one of {len(rows)} pieces, 120 tokens behind the first 120 of {len(ids):,}" in inspect(root, "--row", "4").out
    )


@pytest.mark.parametrize("name", ["texts", "chats"])
def test_both_sides_of_a_chunk_spell_the_same(root: Path, name: str) -> None:
    settings = (FOREIGN, f"data.path={{root}}/{name}.jsonl", "--rows", "6")
    kinds: set[str] = set()
    for row in described(root, *settings):
        teacher = row["teachers"]["big"]
        in_chunks = set()
        for *ranges, kind in teacher["chunks"]:
            (own, theirs) = (
                side["text"][side["tokens"][first]["start"] : side["tokens"][stop - 1]["end"]]
                for side, (first, stop) in zip((row, teacher), ranges)
            )
            sizes = [stop - first for first, stop in ranges]
            assert kind in {(1, 1): ("1:1", "stop")}.get(tuple(sizes), (_kind(*sizes),))
            assert own == theirs
            in_chunks |= set(range(*ranges[0]))
            kinds.add(kind)
        ids = TEACHER(teacher["text"], add_special_tokens=False)["input_ids"]
        assert [token["id"] for token in teacher["tokens"] if token["text"] != "</s>"] == ids
        for j, token in enumerate(row["tokens"]):
            assert token["label"] or j not in in_chunks
            if token["label"]:
                assert ("why" in token) == (j not in in_chunks)
    assert {"1:1", "stop"} < kinds
    shown = inspect(root, *settings).out
    assert re.search(
        r"^teacher +big, loss hybrid: [\d,]+ chunks, [\d.]+% of them 1:1; \d+ labelled", shown, re.MULTILINE
    )
    assert re.search(r"^student +big +kind$", shown, re.MULTILINE)


def _kind(student: int, teacher: int) -> str:
    return "1:n" if student == 1 else "n:1" if teacher == 1 else "m:n"


def test_labelled_tokens_in_no_chunk_say_what_trains_them(root: Path) -> None:
    chats = (FOREIGN, "data.path={root}/chats.jsonl", "--row", "2")
    for weight, words in (("0.5", "only cross-entropy trains it"), ("0", "nothing trains it (loss.ce_weight=0)")):
        (row,) = described(root, *chats, f"loss.ce_weight={weight}")
        whys = {token["why"] for token in row["tokens"] if token["label"] and "why" in token}
        assert whys == {f"in no chunk of teacher big: {words}"}  # the headers, which each template writes for itself


def test_what_a_template_leaves_out_is_shown_and_refused(root: Path, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [{"role": "user", "content": "ka"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (tmp_path / "tools.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    settings = (
        f"data.path={tmp_path}/tools.jsonl",
        "data.loss_on=assistant",
        "data.stops=none",
        "--row",
        "0",
        "--json",
    )
    ended = inspect(root, *settings)
    row = json.loads(ended.out)
    assert "".join(token["text"] for token in row["tokens"] if token["label"]) == "<|end|>"
    assert row["left_out"] == ["`tool_calls` of assistant messages, by the chat template of the student's tokenizer"]
    assert ended.code == 2
    assert len(ended.errors) == len(ended.err.splitlines()) == 1
    assert "data.unrendered=warn" in ended.err
    assert inspect(root, *settings, "data.unrendered=warn").code == 0


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_turn_that_its_message_takes_out_says_so(root: Path, tmp_path: Path, loss_on: str) -> None:
    chat = [{"role": "user", "content": "ka"}, {"role": "assistant", "content": "be", "weight": 0}]
    chat += [{"role": "user", "content": "lo"}, {"role": "assistant", "content": "an", "weight": 1}]
    (tmp_path / "off.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    settings = (f"data.path={tmp_path}/off.jsonl", f"data.loss_on={loss_on}", "data.stops=none", "--row", "0", "--json")
    tokens = json.loads(inspect(root, *settings).out)["tokens"]
    out = [token for token in tokens if token.get("why", "").startswith("taken out by its message (weight, train,")]
    assert "".join(token["text"] for token in out) == "be<|end|>"
    assert not any(token["label"] for token in out)
    assert "an<|end|>" in "".join(token["text"] for token in tokens if token["label"])


def test_rows_that_are_held_out_are_refused(root: Path) -> None:
    found = [inspect(root, "data.validation.fraction=0.5", "--row", str(number)) for number in range(ROWS)]
    assert [ended.code for ended in found].count(0) == ROWS // 2
    assert all("which data.validation.fraction holds out" in ended.err for ended in found if ended.code)


def test_rows_that_the_run_leaves_out_are_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "ka"}\n{"text": null}\n' * 4)
    settings = (f"data.path={tmp_path}/bad.jsonl", "data.bad_rows=skip")
    ended = inspect(root, *settings, "--rows", "1")
    assert ended.code == 0
    assert sorted(ended.err.splitlines())[0].startswith("note       row 1 is left out: ")
    (tmp_path / "bad.jsonl").write_text('{"text": " "}\n' * 9)
    ended = inspect(root, *settings)
    assert (ended.code, len(ended.errors)) == (2, 6)
    assert ended.errors[-1].endswith("and 4 more")


def test_rows_of_several_sources_are_counted_on(root: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "ka lo"}\n')
    sources = ("data.path=null", "data.sources=[{{path: {root}/texts.jsonl}}, {{path: MORE}}]")
    first, second = described(
        root,
        *(each.replace("MORE", str(tmp_path / "more.jsonl")) for each in sources),
        "--row",
        "0",
        "--row",
        str(ROWS),
    )
    assert (first["source"], first["row"], first["text"]) == ("texts.jsonl", 0, data(root, "texts")[0]["text"])
    assert (second["source"], second["row"], second["text"]) == ("more.jsonl", ROWS, "ka lo")


def test_neither_torch_nor_ray_is_imported(root: Path) -> None:
    program = (
        "import sys; from distill_rl.cli import main; code = main(); "
        "sys.exit(code or ', '.join({'torch', 'ray', 'datasets'} & set(sys.modules)) or None)"
    )
    command = [sys.executable, "-c", program, "inspect", "-c", str(root / "my.yaml"), "--rows", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("--row", "16"), ["--row: must be 0 or more and below 16, the number of rows of data.path; got 16; "]),
        (("--row", "-1", "--row", "20"), ["--row: ", "--row: "]),
        (("--rows", "0", "train.stepz=1"), ["--rows: must be 1 or more; got 0", "train.stepz: unknown key"]),
        (("--rows", "2", "--row", "1"), ["--rows and --row: exclude each other"]),
        (("student.model={root}/none", "data.path={root}/none.jsonl"), ["data.path: ", "model {root}/none: "]),
        (("teachers.0={{name: t, store: {{path: {root}/none}}}}",), ["{root}/none: must be a store"]),
    ],
)
def test_bad_input_is_one_line_each(root: Path, arguments: tuple[str, ...], lines: list[str]) -> None:
    ended = inspect(root, *arguments)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == len(ended.errors) == len(lines)
    for line, begin in zip(ended.errors, lines):
        assert line.startswith(f"distill-rl: error: {begin.format(root=root)}")
