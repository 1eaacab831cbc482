from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from distill_rl.config.load import load_config, read_config
from distill_rl.demo import trial as run
from distill_rl.demo import trial_setup
from distill_rl.demo.measure import Begun, Measured, Prompt, make_prompts
from distill_rl.demo.trial_setup import TrialRequest, count, in_words
from distill_rl.errors import ConfigError
from distill_rl.evals.suites.base import Item
from distill_rl.run.steps import settled

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]


def measured(per_byte: float, seed: int = 0, documents: int = 60) -> Measured:
    noise = np.random.default_rng(seed).normal(0.0, 0.05, documents)
    sizes = range(40, 40 + documents)
    return Measured(tuple((per_byte + x) * size for x, size in zip(noise, sizes)), tuple(sizes))


@pytest.mark.parametrize(
    ("taught", "control", "words"),
    [(1.0, 1.5, "helped: 0.500"), (1.5, 1.0, "did harm: 0.500"), (1.0, 1.001, "No difference")],
)
def test_verdict_follows_the_interval(taught, control, words):
    outcome = run.difference(measured(taught, 1), measured(control, 1 if "0.500" in words else 2))
    assert words in outcome.verdict
    assert outcome.low <= outcome.saved <= outcome.high


def test_samples_are_shown_on_a_line_each_and_cut_where_they_are_long(capsys):
    prompt = Prompt(Item("row 1", "", ""), "word " * 50, "two\nlines")
    samples = {run.BEFORE: "", run.CONTROL: "x" * 200, run.TAUGHT: "fine"}
    run.print_samples([prompt], {name: Measured((1.0,), (1,), (text,)) for name, text in samples.items()})
    _, first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("  prompt           … ")
    assert first.endswith(" word word")
    assert rest[0] == "  text             two lines"
    assert rest[1:4] == [
        "  before           (nothing)",
        f"  without teacher  {'x' * 160} …",
        "  with teacher     fine",
    ]


@pytest.mark.parametrize("documents", [1, 2, 7, 8])
def test_few_documents_say_nothing_of_the_teacher(documents):
    """Of one document all resamples are the same, so that its interval has no width."""
    outcome = run.difference(measured(1.0, documents=documents), measured(1.5, documents=documents))
    enough = documents == 8
    assert ("helped: 0.500" in outcome.verdict) == enough
    assert outcome.verdict.startswith("Too little text to tell") != enough
    assert (outcome.interval is None) != enough


def test_table_shows_all_models(capsys):
    models = dict(zip(run.ROWS, map(measured, (0.9, 2.0, 1.5, 1.25))))
    trainings = {run.TAUGHT: {"steps": 1, "seconds": 3.0}, run.CONTROL: {"steps": 1234, "seconds": 1500.0}}
    run.print_result(models, run.difference(models[run.TAUGHT], models[run.CONTROL]), trainings)
    shown = capsys.readouterr().out
    for words in (
        "60 held-out documents",
        "1.25",
        "1 step in 3 s",
        "1,234 steps in 1500 s",
        "The teacher helped",
        "took 2.5 times as long",
    ):
        assert words in shown


def test_a_first_token_that_helps_is_a_note():
    plain = measured(1.0)
    models = {
        run.TEACHER: replace(plain, begun=Begun("<bos>", 1.46, 1.02)),
        run.BEFORE: replace(plain, begun=Begun("<s>", 1.0, 0.99)),
    }
    (line,) = run.beginning_lines(models)
    assert line.startswith(
        "note      teacher: 1.460 bits per byte of 6 documents as its tokenizer reads them, 1.020 with <bos>"
    )
    assert "teachers.0.tokenizer=FOLDER" in line
    assert run.beginning_lines({run.TEACHER: plain, run.BEFORE: plain}) == []


def test_prompts_are_beginnings_of_texts_and_questions_of_chats():
    texts = [{"row": i, "text": text} for i, text in enumerate(["short", *["one two three four five six"] * 9])]
    found = make_prompts(texts)
    assert [prompt.item.id for prompt in found] == ["row 1", "row 4", "row 7"]
    assert (found[0].shown, found[0].reference) == ("one two three", " four five six")
    (chat,) = make_prompts([{"row": 0, "messages": CHAT}, {"row": 1, "messages": CHAT[:2]}])
    assert (chat.item.prompt, chat.shown, chat.reference) == (tuple(CHAT[:2]), "2 + 2?", "4")
    assert make_prompts([{"row": 0, "messages": CHAT[:1]}]) == ()


def test_configuration_has_what_differs_and_reads_back_equal(tmp_path):
    source = {"student.model": "s", "teachers": [{"model": "t", "dtype": "fp32"}], "data.path": "${x", "train.steps": 3}
    config, _ = read_config(source, ["train.epochs=1.5", "optimizer.betas=[0.9, 0.99]"])
    trial_setup.write_configuration(tmp_path / "my.yaml", config, ["why\x1b[31m", ""])
    text = (tmp_path / "my.yaml").read_text()
    assert load_config(tmp_path / "my.yaml") == config
    assert text.startswith("# why\\x1b[31m\n#\n\n")
    assert "warmup_steps" not in text
    assert "top_k" not in text


def test_a_folder_is_not_overwritten_and_only_a_trial_is_deleted(tmp_path):
    root = tmp_path / "out"
    assert [*trial_setup.out_problems(root, clean=False)] == []
    root.mkdir()
    assert [*trial_setup.out_problems(root, clean=False)] == []
    (root / "mine.txt").touch()
    for clean in (False, True):
        (line,) = trial_setup.out_problems(root, clean=clean)
        assert line.endswith("choose another --out")
    (root / trial_setup.CONFIGURATION).touch()
    (line,) = trial_setup.out_problems(root, clean=False)
    assert "--clean" in line
    assert [*trial_setup.out_problems(root, clean=True)] == []
    (line,) = trial_setup.out_problems(root / "mine.txt", clean=True)
    assert "must be a folder" in line


def test_only_one_trial_at_a_time_uses_a_folder(tmp_path):
    root = tmp_path / "runs" / "out"
    with trial_setup.claimed(root, clean=False):
        rule = r"out: the folder is in use; got another `distill-rl try`; wait for it"
        with pytest.raises(ConfigError, match=rule), trial_setup.claimed(root, clean=False):
            pass
        with trial_setup.claimed(root.with_name("other"), clean=False):
            trial_setup.begin(trial_setup.TrialPaths(root), clean=False)
            (root / trial_setup.CONFIGURATION).touch()
    assert [*root.iterdir()] == [root / trial_setup.CONFIGURATION]
    assert [*root.parent.iterdir()] == [root]


def test_a_trial_that_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), trial_setup.claimed(tmp_path / "runs" / "out", clean=False):
        raise KeyError
    assert [*tmp_path.iterdir()] == []


def test_what_came_into_the_folder_meanwhile_is_not_deleted(tmp_path):
    root = tmp_path / "out"
    with trial_setup.claimed(root, clean=False):
        (root / trial_setup.CONFIGURATION).touch()
        with pytest.raises(ConfigError, match="the folder is in use"):
            trial_setup.begin(trial_setup.TrialPaths(root), clean=False)
        trial_setup.begin(trial_setup.TrialPaths(root), clean=True)
        assert trial_setup._entries(root) == []


def test_the_folder_itself_stays(tmp_path, monkeypatch):
    """The working directory, or a link to a folder."""
    (tmp_path / "target" / "with-teacher").mkdir(parents=True)
    (tmp_path / "target" / trial_setup.CONFIGURATION).touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    monkeypatch.chdir(tmp_path / "target")
    for root in (tmp_path / "link", tmp_path / "link", Path()):
        with trial_setup.claimed(root, clean=True):
            trial_setup.begin(trial_setup.TrialPaths(root), clean=True)
        assert [*root.iterdir()] == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    rule = r"must be one that can be made and written; got Not a directory"
    with pytest.raises(ConfigError, match=rule), trial_setup.claimed(tmp_path / "file" / "out", clean=False):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (line,) = trial_setup.out_problems(tmp_path / "link", clean=False)
    assert "got a link to nothing; choose another --out" in line


@pytest.mark.parametrize("own", [False, True])
def test_a_longer_training_has_no_end_of_the_short_one(own):
    """One of three steps, which ended within its warm-up, would go on at a rate of 0."""
    source = {"student.model": "s", "teachers": [{"model": "t"}], "data.path": "d", "schedule.warmup_steps": 5}
    config, _ = read_config(source | ({"schedule.steps": 5} if own else {}))
    assert config is not None
    ended = settled(config, done=3, last=3)
    assert ended.schedule.steps == 5
    assert ("schedule.steps=null" in run.longer_training(config, 3)) != own
    assert "train.steps=30" in run.longer_training(config, 3)


@pytest.mark.parametrize(
    ("given", "more"),
    [({}, ""), ({"seed": 3, "out": Path("my out")}, " --seed 3 --out 'my out'")],
)
def test_the_command_is_recorded_with_its_options(given, more):
    request = TrialRequest(**{"student": "a", "teacher": "b", "text": "c", "minutes": 2.0, "seed": 0, "out": Path("runs/try-a-b"),
                         "overrides": ["x=1"], **given})  # fmt: skip
    line, *_ = run._comments(request, SimpleNamespace(reasons=[]))
    assert line == f"Chosen by `distill-rl try a b c --minutes 2{more} x=1`:"


@pytest.mark.parametrize(
    ("student", "teacher", "name"),
    [("models/a/", "/b", "try-a-b"), ("org/My Model", "x/B-1.5", "try-My-Model-B-1.5"), ("..", "/", "try-..-model")],
)
def test_default_folder_is_named_after_the_models(student, teacher, name):
    assert trial_setup.default_out(student, teacher).as_posix() == f"runs/{name}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("student.model: must be a folder; got x", "STUDENT: must be a folder; got x"),
        ("teachers.0.model: weights must not be quantized", "TEACHER: weights must not be quantized"),
        ("teachers.0: the loss hybrid compares", "TEACHER: the loss hybrid compares"),
        ("data.path: a path", "TEXT: a path"),
        ("train.minutes: must be greater than 0; got 0.0", "--minutes: must be greater than 0; got 0.0"),
        ("optimizer.lr: must be a number", "optimizer.lr: must be a number"),
        ("memory: the workers need 9 GiB; lower x", "memory: the workers need 9 GiB, even with one row at a time"),
    ],
)
def test_problems_name_the_arguments(line, words):
    assert in_words(line).startswith(words)


def test_parameters_are_counted_in_words():
    assert [count(n) for n in (999, 82_000, 135_000_000, 8_030_000_000)] == ["999", "82k", "135M", "8.03B"]


def test_a_trial_that_was_stopped_can_be_gone_on_with_and_one_that_ended_cannot(tmp_path):
    paths = trial_setup.TrialPaths(tmp_path)
    paths.configuration.write_text("")
    assert [*trial_setup.out_problems(tmp_path, clean=False, resume=True)] == []
    (line,) = trial_setup.out_problems(tmp_path, clean=False)
    assert (
        line
        == f"{tmp_path}: the folder is in use; go on with --resume, start over with --clean, or choose another --out"
    )
    paths.result.write_text("")
    (line,) = trial_setup.out_problems(tmp_path, clean=False, resume=True)
    assert line == f"{tmp_path}: the folder is in use; start over with --clean, or choose another --out"


def test_a_training_that_ended_is_not_repeated_and_one_with_a_checkpoint_resumes(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(run, "run_all", lambda runs, *_, **__: started.extend(runs) or 0)
    paths = trial_setup.TrialPaths(tmp_path)
    (paths.control.checkpoints / "step-5").mkdir(parents=True)
    run._train(paths)
    paths.taught.export.mkdir(parents=True)
    run._train(paths)
    assert [(each.name, each.arguments[3]) for each in started] == [
        ("with the teacher", "--clean"),
        ("without the teacher", "--resume"),
        ("without the teacher", "--resume"),
    ]


def test_trainings_of_equal_steps_say_so():
    request = TrialRequest("a", "b", "c", minutes=5.0, seed=0, out=Path("runs/try-a-b"), steps=30)
    (line, *_) = run._comments(request, SimpleNamespace(reasons=[]))
    assert line == "Chosen by `distill-rl try a b c --steps 30`:"
    outcome = run.difference(measured(1.0), measured(1.5))
    assert "than the same steps without it" in outcome.verdict
