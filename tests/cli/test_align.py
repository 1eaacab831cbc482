"""`distill-rl align` from the command line: figures, checks, files and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill_rl.commands import align as command
from tests.helpers.align import family
from tests.helpers.command import Ended, distill_rl, distill_rl_in_process
from tests.helpers.corpus import write_corpus
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.cli


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizers by name, a corpus of text and a corpus of chats."""
    root = tmp_path_factory.mktemp("align")
    for name, tokenizer in {
        "student": tiny_tokenizer(320, seed=1),
        "teacher": tiny_tokenizer(420, seed=2),
        "lossy": family("wordpiece"),
        "latin": _one_script("abcdefghijklmnopqrstuvwxyz"),
        "greek": _one_script("αβγδεζηθικλμνξοπρστυφχψω"),
    }.items():
        tokenizer.save_pretrained(root / name)
    write_corpus(root / "text.jsonl", rows=40, seed=3)
    chats = [
        [{"role": "user", "content": f"ka lo {n}"}, {"role": "assistant", "content": f"mi ter {n}{n}"}]
        for n in range(30)
    ]
    (root / "snow.jsonl").write_text('{"text": "\u2603\u2603 \u2603"}\n' * 3)  # in neither vocabulary
    (root / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return root


def _one_script(letters: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the letters of one script."""
    core = Tokenizer(
        models.WordPiece({"[UNK]": 0} | {letter: i for i, letter in enumerate(letters, 1)}, unk_token="[UNK]")
    )
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")


def align(
    root: Path,
    *extra: str | Path,
    student: str = "student",
    teacher: str = "teacher",
    data: str = "text.jsonl",
    run: Callable[..., Ended] = distill_rl_in_process,
) -> Ended:
    return run("align", "--student", root / student, "--teacher", root / teacher, "--data", root / data, *extra)


def test_figures_are_printed_written_and_agree_with_the_library(root: Path, tmp_path: Path) -> None:
    from distill_rl.align import TokenAligner, audit

    ended = align(root, "--json", tmp_path / "result.json", "--limit", "25", run=distill_rl)
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "result.json").read_text())
    texts = [json.loads(line)["text"] for line in (root / "text.jsonl").read_text().splitlines()]
    evenly_spaced = [texts[round(i * 39 / 24)] for i in range(25)]
    expected = audit(TokenAligner(tiny_tokenizer(320, seed=1), tiny_tokenizer(420, seed=2)), evenly_spaced).to_dict()
    assert {key: result[key] for key in expected} == json.loads(json.dumps(expected))
    assert result["checks"] == []
    assert f"{result['one_to_one_share']:.1%} of {sum(result['chunk_lengths'].values()):,}" in ended.out
    assert f"{result['common_vocabulary']} of them in common" in ended.out
    assert "suggested  loss.cross_tokenizer=hybrid" in ended.out


def test_verify_runs_and_passes_every_check(root: Path, tmp_path: Path) -> None:
    ended = align(root, "--verify", "--json", tmp_path / "result.json", data="chats.jsonl")
    assert ended.code == 0, ended.out + ended.err
    checks = json.loads((tmp_path / "result.json").read_text())["checks"]
    assert len(checks) == 7 + 2 + 3 + 2 * 7
    assert all(check["passed"] for check in checks)
    assert "26 of 26 checks passed" in ended.out


def test_tools_of_a_row_go_to_both_templates(root: Path, tmp_path: Path) -> None:
    for name, seed in (("student", 1), ("teacher", 2)):
        tokenizer = tiny_tokenizer(220 + 100 * seed, seed=seed)
        refusal = (
            "{% if messages[0].content[:5] == 'ka lo' and not tools %}{{ raise_exception('no tools') }}{% endif %}"
        )
        tokenizer.chat_template = refusal + tokenizer.chat_template
        tokenizer.save_pretrained(tmp_path / name)
    rows = [json.loads(line) for line in (root / "chats.jsonl").read_text().splitlines()]
    tools = [{"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({**row, "tools": tools}) + "\n" for row in rows))
    ended = align(tmp_path, "--verify", data="chats.jsonl")
    assert ended.code == 0, ended.out + ended.err
    assert "26 of 26 checks passed" in ended.out


def test_a_failed_check_is_shown_and_exits_1(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from distill_rl.align.verify import PropertyCheck
    from distill_rl.preflight import verify as losses

    monkeypatch.setattr(losses, "check_losses", lambda *_, **__: [PropertyCheck("a loss is right", False, "off by 1")])
    folders = (str(root / name) for name in ("student", "teacher"))
    columns = {"text_key": None, "messages_key": None, "split": None}
    code = command.align(
        *folders, str(root / "text.jsonl"), **columns, limit=5, json_file=tmp_path / "result.json", verify=True
    )
    assert code == 1
    assert "10 of 11 checks passed" in capsys.readouterr().out
    assert not json.loads((tmp_path / "result.json").read_text())["checks"][-1]["passed"]


def test_a_check_without_samples_does_not_count_as_passed(root: Path, tmp_path: Path) -> None:
    ended = align(root, "--verify", "--json", tmp_path / "result.json", teacher="lossy", data="chats.jsonl")
    assert ended.code == 0, ended.out + ended.err
    checks = json.loads((tmp_path / "result.json").read_text())["checks"]
    unchecked = [check["detail"] for check in checks if check["passed"] is None]
    assert unchecked == ["0 exact rows", "0 exact rows", "0 exact chats"]
    words = " ".join(ended.out.split())
    assert words.count("nothing checked") == 3
    assert f"{len(checks) - 3} of {len(checks)} checks passed, 3 had nothing to look at" in words


def test_a_missing_chat_template_is_only_a_warning(root: Path, tmp_path: Path) -> None:
    ended = align(root, "--verify", "--json", tmp_path / "result.json", teacher="latin", data="chats.jsonl")
    assert ended.code == 0, ended.out + ended.err
    result = json.loads((tmp_path / "result.json").read_text())
    warning = "the teacher's tokenizer has no chat template, so a run on these messages would be refused"
    assert [line for line in result["warnings"] if line.startswith(warning)]
    assert warning in " ".join(ended.out.split())
    assert [check["detail"] for check in result["checks"] if check["passed"] is None][-4:] == [
        "0 exact chats",
        "0 chats",
        "0 paired stop tokens",
        "0 pairs of stop tokens × methods",
    ]
    assert "chat template" not in align(root, teacher="latin").out  # text needs none
    assert "chat template" not in align(root, data="chats.jsonl").out


def test_the_same_tokenizer_twice_is_all_one_to_one(root: Path) -> None:
    ended = align(root, teacher="student")
    assert ended.code == 0
    assert "1:1 100.0%" in ended.out
    assert "320 and 320 ids, 320 of them in common" in ended.out


def test_text_key_selects_the_column(root: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"body": "ka lo mi"}\n{"body": "ter an 42"}\n')
    assert align(root, data=str(tmp_path / "rows.jsonl")).code == 2
    ended = align(root, "--text-key", "body", data=str(tmp_path / "rows.jsonl"))
    assert ended.code == 0, ended.err
    assert "2, 100.0% spelled in full" in ended.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"student": "latin", "teacher": "greek"}, ("common vocabulary is empty",)),
        ({"teacher": "lossy", "data": "snow.jsonl"}, ("none of 3 texts aligns anywhere", "teacher: ")),
        ({"teacher": "absent"}, ("absent", "no such folder")),
        ({"data": "absent.jsonl"}, ("absent.jsonl",)),
    ],
    ids=["nothing in common", "no chunk", "no tokenizer", "no data"],
)
def test_a_pair_or_data_without_anything_to_learn_is_refused(
    root: Path, change: dict[str, str], words: tuple[str, ...]
) -> None:
    ended = align(root, **change)
    assert ended.code == 2, ended.out + ended.err
    assert len(ended.errors) == len(ended.err.splitlines()) == 1
    assert all(word in ended.err for word in words), ended.err


def test_lossy_rows_with_chunks_are_a_warning_with_their_count(root: Path, tmp_path: Path) -> None:
    ended = align(root, "--json", tmp_path / "result.json", teacher="lossy")
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["exact_share"], result["texts"]) == (0, 40)
    assert 0 < result["aligned_share"] < 1
    words = " ".join(ended.out.split())
    assert "warning none of 40 texts is spelled in full by both sides (teacher: " in words
    assert f"{result['aligned_share']:.1%} of the student's tokens are compared" in words
    assert "warning" not in align(root).out


def test_a_slow_tokenizer_and_rows_without_text_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    for change, words in (
        ({"teacher": str(tmp_path / "slow")}, ("fast tokenizer", "ByT5Tokenizer")),
        ({"data": str(tmp_path / "empty.jsonl")}, ("must hold text", "3 empty rows")),
    ):
        ended = align(root, **change)
        assert ended.code == 2, ended.err
        assert len(ended.errors) == len(ended.err.splitlines()) == 1
        assert all(word in ended.err for word in words), ended.err


def test_a_limit_below_one_is_refused(root: Path) -> None:
    ended = align(root, "--limit", "0")
    assert (ended.code, len(ended.errors)) == (2, 1)
    assert "--limit" in ended.err
