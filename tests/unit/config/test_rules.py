import re

import pytest

from distill_rl.config.load import load_config, read_config
from distill_rl.config.rules import RULES, notes, problems
from distill_rl.config.schema import Config, LossConfig
from distill_rl.config.walk import item_kind, leaves, pattern_of, values

TEXT = """
student: {model: s}
teachers: [{model: t}]
data: {path: d}
train: {steps: 10}
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return lambda *overrides: load_config(path, overrides)


SECTIONS = ("student", "student.lora", "teachers", "teachers.0", "data", "loss", "optimizer", "train", "evaluate")
SETTINGS = [key for key, _, _ in leaves(Config)]
LISTS = [key for key, _, kind in leaves(Config) if item_kind(kind) is not None]


@pytest.mark.parametrize("key", sorted({*SECTIONS, *SETTINGS}))
def test_a_missing_value_is_one_line_and_the_rules_judge_the_default(tmp_path, key):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    config, findings = read_config(path, [f"{key}=???"])
    expected = f"{key}: missing value; set it in the file or add {key}="
    assert [line.startswith(expected) for line in findings.lines].count(True) == 1, findings.lines
    problems(config)
    notes(config)


@pytest.mark.parametrize(
    "entries", ["[0.9, null]", "[0.9, 0.95x]", "[0.9, '???']", "[0.9, 0_10]", "[{}, 0.9]", "[.inf, true]"]
)
def test_a_wrong_entry_of_a_list_is_one_line_and_the_rules_judge_the_rest(tmp_path, entries):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    for key in LISTS:
        config, _ = read_config(path, [f"{key}={entries}"])
        problems(config)
    config, findings = read_config(path, [f"optimizer.betas={entries}", "train.steps=0"])
    assert {line.rpartition(".")[0] for line in findings.keys} == {"optimizer.betas"}
    assert config.optimizer.betas == Config().optimizer.betas
    assert problems(config) == ["train.steps: must be 1 or more; got 0"]


def test_plain_configuration_has_no_problem(load):
    assert problems(load()) == []
    assert problems(load("train.steps=null", "train.epochs=0.5")) == []


@pytest.mark.parametrize(
    "divergence", ["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd"]
)
@pytest.mark.parametrize("tail", ["bucket", "truncate", "renormalize"])
def test_every_divergence_and_tail_is_allowed(load, divergence, tail):
    assert problems(load(f"loss.divergence={divergence}", f"loss.tail={tail}")) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["train.steps=null"],
            "train.steps: the length of the run must be given; set train.steps, train.epochs or train.minutes",
        ),
        (["train.minutes=0"], "train.minutes: must be greater than 0; got 0.0"),
        (
            ["schedule.steps=8", "schedule.warmup_steps=4", "schedule.hold_steps=5"],
            "schedule.hold_steps: must not exceed schedule.steps (8) together with schedule.warmup_steps (4); got 5",
        ),
        (["train.steps=0"], "train.steps: must be 1 or more; got 0"),
        (["train.epochs=0"], "train.epochs: must be greater than 0; got 0.0"),
        (["train.epochs=-1"], "train.epochs: must be greater than 0; got -1.0"),
        (["train.global_batch_size=0"], "train.global_batch_size: must be 1 or more; got 0"),
        (["train.micro_batch_size=0"], "train.micro_batch_size: must be 1 or more; got 0"),
        (["student.parallel.dp=0"], "student.parallel.dp: must be 1 or more; got 0"),
        (
            ["student.parallel={dp: 4, replicas: 3}"],
            "student.parallel.replicas: must divide student.parallel.dp = 4; got 3; use one of 1, 2, 4",
        ),
        (["student.parallel.replicas=0"], "student.parallel.replicas: must be 1 or more; got 0"),
        (
            ["teachers.0.parallel={dp: 2, replicas: 2}"],
            "teachers.0.parallel.replicas: applies to the student only; the dp ranks of a teacher are replicas already",
        ),
        (["teachers.0.parallel.sp=0"], "teachers.0.parallel.sp: must be 1 or more; got 0"),
        (
            ["teachers.0.parallel.sp=2", "teachers.0.backend=vllm"],
            "teachers.0.parallel.sp: divides the positions of a teacher with backend hf only; got 2; leave it at 1",
        ),
        (
            ["teachers.0.parallel.sp=2", "teachers.0.backend=store", "teachers.0.store=s"],
            "teachers.0.parallel.sp: divides the positions of a teacher with backend hf only; got 2; leave it at 1",
        ),
        (
            ["student.parallel.sp=2", "student.compile=true"],
            "student.compile: layers that exchange positions for heads (student.parallel.sp=2) are not compiled",
        ),
        (
            ["student.activation_offload=true"],
            "student.activation_offload: moves what activation checkpointing keeps; got true; "
            "add student.activation_checkpointing=true",
        ),
        (
            ["student.kernels=liger", "student.parallel.tp=2"],
            "student.kernels: liger needs whole layers on every rank; student.parallel.tp is 2; set student.kernels=torch, or",
        ),
        (["teachers.0.parallel.tp=-2"], "teachers.0.parallel.tp: must be 1 or more; got -2"),
        (["teachers.0.micro_batch_size=0"], "teachers.0.micro_batch_size: must be 1 or more; got 0"),
        (["data.max_length=0"], "data.max_length: must be 1 or more; got 0"),
        (["loss.top_k=0"], "loss.top_k: must be 1 or more; got 0"),
        (["loss.draws=0"], "loss.draws: must be 1 or more; got 0"),
        (
            ["loss.draws=32768"],
            "loss.draws: must lie in [1, 32767]: beyond that their counts do not fit into 16 bits, in which they are sent; "
            "got 32768",
        ),
        (
            ["teachers.0.export=sampled", "loss.divergence=jsd"],
            "loss.divergence: must be forward_kl, which the draws of teacher teacher (export: sampled) estimate; got jsd; "
            "set loss.divergence=forward_kl, or another export",
        ),
        (
            ["loss.temperature=101"],
            "loss.temperature: must lie in [0.01, 100]: beyond that the loss, which is multiplied by its square, is "
            "rounding of fp32; got 101.0",
        ),
        (["loss.temperature=0"], "loss.temperature: must be greater than 0; got 0.0"),
        (["loss.beta=1.1"], "loss.beta: must lie in [0, 1]; got 1.1"),
        (["loss.ce_weight=-1"], "loss.ce_weight: must be 0 or more; got -1.0"),
        (["loss.kd_weight=0"], "loss: kd_weight + ce_weight must be greater than 0; got 0 + 0"),
        (["teachers=[]"], "teachers: loss.kd_weight 1 needs a teacher; got none; add teachers.0.model=PATH, or set"),
        (["teachers.0.weight=-1"], "teachers.0.weight: must be 0 or more; got -1.0"),
        (["teachers.0.weight=0"], "teachers: at least one weight must be greater than 0; got [0.0]"),
        (
            ["teachers.1.model=u"],
            "teachers: names must be unique; 2 teachers are called 'teacher'; set teachers.0.name",
        ),
        (["teachers.0.name=a b"], "teachers.0.name: may contain letters, digits"),
        (["teachers.0.name="], "teachers.0.name: must not be empty; got ''"),
        (["run.name=a/b"], "run.name: must be the name of one folder; got a/b; put the folder above it in run.dir"),
        (["run.name=.."], "run.name: must be the name of one folder; got .."),
        (["data.text_key="], "data.text_key: must not be empty"),
        (["data.validation.fraction=1"], "data.validation.fraction: must be a share of the data in [0, 1); got 1.0"),
        (["optimizer.lr=0"], "optimizer.lr: must be greater than 0; got 0.0"),
        (["optimizer.betas=[0.9]"], "optimizer.betas: must be two numbers; got [0.9]"),
        (["optimizer.betas.0=1"], "optimizer.betas.0: must lie in [0, 1); got 1.0"),
        (["optimizer.betas.1=-0.1"], "optimizer.betas.1: must lie in [0, 1); got -0.1"),
        (["schedule.steps=5", "schedule.warmup_steps=6"], "schedule.warmup_steps: must not exceed schedule.steps (5)"),
        (["schedule.min_lr_ratio=2"], "schedule.min_lr_ratio: must lie in [0, 1]; got 2.0"),
        (["prefetch.depth=-1"], "prefetch.depth: must be 0 or more; got -1"),
        (["checkpoint.keep_last=0"], "checkpoint.keep_last: must be 1 or more; got 0"),
        (["checkpoint.resume=newest"], "checkpoint.resume: must be null, latest, auto or a step folder (.../step-100)"),
        (["evaluate.suites=[gsm8k]"], "evaluate.data: must name the data of evaluate.suites; got null"),
        (
            ["checkpoint={keep_best: 1, best_by: accuracy}", "data.validation.fraction=0.1", "evaluate.every=5"],
            "checkpoint.best_by: must be a metric that this run measures (validation/kl_loss, validation/nll_loss, validation/top1_",
        ),
        (
            ["checkpoint={keep_best: 1, best_by: eval/gsm8k}"],
            "checkpoint.best_by: needs suites that run during training; got eval/gsm8k; set evaluate.suites and",
        ),
        (
            ["checkpoint={every: 4, keep_best: 1}", "data.validation.fraction=0.1", "evaluate.every=3"],
            "checkpoint.keep_best: no step up to 10 is a multiple of checkpoint.every 4 and of 3, where validation/kl_loss",
        ),
        (
            [
                "checkpoint.keep_best=1",
                "data.validation.fraction=0.1",
                "evaluate.every=3",
                "loss.kd_weight=0",
                "loss.ce_weight=1",
            ],
            "checkpoint.best_by: needs teachers, and loss.kd_weight above 0; got validation/kl_loss; set checkpoint.best_by=",
        ),
        (["evaluate.at_start=true"], "evaluate.at_start: needs validation data or suites to measure; got true; set"),
        (
            ["evaluate={suites: [gsm8k], data: d, teachers: true}", "loss.kd_weight=0", "loss.ce_weight=1"],
            "evaluate.teachers: needs teachers, and loss.kd_weight above 0; got true; leave it out",
        ),
        (
            ["evaluate={suites: [gsm8k], data: d, teachers: true}", "teachers.0.tokenizer=other"],
            "evaluate.teachers: evaluates a teacher with the tokenizer of its own folder; teachers.0.tokenizer is another",
        ),
        (
            ["checkpoint.keep_best=1", "data.validation.fraction=0.1"],
            "checkpoint.keep_best: needs validation losses to compare; got 1; set evaluate.every",
        ),
        (
            ["checkpoint.keep_best=1", "evaluate.every=5"],
            "checkpoint.keep_best: needs validation data; got 1; set data.v",
        ),
        (["evaluate.gpu_share=0"], "evaluate.gpu_share: must be greater than 0; got 0.0"),
        (["evaluate.gpu_share=1.1"], "evaluate.gpu_share: must lie in [0, 1]; got 1.1"),
        (["observe.every=0"], "observe.every: must be 1 or more; got 0"),
        (["ray.step_timeout_s=0"], "ray.step_timeout_s: must be greater than 0; got 0.0"),
        (
            ["transport=local"],
            "transport: local passes tensors within one process, for tests and notebooks; workers are",
        ),
        (["aligner.workers=-1"], "aligner.workers: must be 0 or more; got -1"),
        (["aligner.dp.band=0"], "aligner.dp.band: must be 1 or more; got 0"),
        (
            ["aligner.num_gpus=1"],
            "aligner.num_gpus: must be less than 1: the ranks need the rest of the GPU; got 1",
        ),
        (
            ["aligner.dp.backend=cuda"],
            "aligner.dp.backend: needs aligners with a share of a GPU; got cuda; set aligner.num_gpus=0.1",
        ),
        (
            ["aligner.dp.backend=cuda", "aligner.num_gpus=0.1", "aligner.workers=0"],
            "aligner.workers: must not be 0 with aligner.dp.backend=cuda; got 0",
        ),
        (["loss.alm_tau=0"], "loss.alm_tau: must be greater than 0; got 0.0"),
        (["loss.uncommon_top_k=0"], "loss.uncommon_top_k: must be 1 or more; got 0"),
        (
            ["projection.learnable=true"],
            "projection.learnable: trains the projection of the loss xtoken; no teacher",
        ),
        (
            ["teachers.0.score=ce", "teachers.1.name=b", "teachers.1.model=m"],
            "teachers: must all have the same score; got ce, static",
        ),
        (["prefetch.slots=0"], "prefetch.slots: must be 1 or more; got 0"),
        (
            ["prefetch.slots=3", "teachers.0.micro_batch_size=1"],
            "prefetch.slots: teacher teacher's ring must hold one micro-batch of every rank: 4 rows of 1 per slot; "
            "got 3; set prefetch.slots=4 or more",
        ),
        (
            ["prefetch.slots=2", "loss.dynamic_scale=on"],
            "prefetch.slots: teacher teacher's ring must hold the whole batch, as loss.dynamic_scale or "
            "teachers[].score requires: 32 rows of 4 per slot; got 2; set prefetch.slots=8 or more",
        ),
    ],
)
def test_broken_rule_gives_one_line(load, overrides, expected):
    (line,) = problems(load(*overrides))
    assert line.startswith(expected), line
    assert "\n" not in line


def test_uneven_batch_shows_the_arithmetic(load):
    (line,) = problems(load("student.parallel.dp=3", "teachers.0.parallel.dp=1", "teachers.0.micro_batch_size=1"))
    assert line == (
        "train.global_batch_size: 32 documents do not divide evenly over student's dp 3 x micro-batch 4 = 12; "
        "32 = 2 x 12 + 8; use 24 or 36"
    )


def test_suggested_batch_fits_student_and_every_teacher(load):
    lines = problems(load("student.parallel.dp=3", "teachers.0.micro_batch_size=5"))
    assert len(lines) == 2
    assert "teacher teacher's dp 1 x micro-batch 5 = 5; 32 = 6 x 5 + 2; use 60" in lines[1]


@pytest.mark.parametrize(
    "setting",
    [
        "student.parallel.dp",
        "train.micro_batch_size",
        "teachers.0.parallel.dp",
        "teachers.0.micro_batch_size",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_ring_is_not_sized_by_a_size_that_is_not_positive(load, setting, value):
    lines = problems(load(f"{setting}={value}", "prefetch.slots=3"))
    assert [line.partition(":")[0] for line in lines] == [setting]
    assert problems(load("student.parallel.dp=3", "teachers.0.micro_batch_size=5", "train.global_batch_size=60")) == []


def test_unused_teachers_need_not_divide_the_batch(load):
    assert problems(load("teachers.0.micro_batch_size=5", "loss.kd_weight=0", "loss.ce_weight=1")) == []


def test_all_broken_rules_are_reported_at_once(load):
    lines = problems(load("train.steps=0", "loss.top_k=0", "transport=local", "aligner.workers=-3"))
    assert [line.partition(":")[0] for line in lines] == ["loss.top_k", "train.steps", "aligner.workers", "transport"]


def test_resume_accepts_a_step_folder(load):
    for resume in ("latest", "auto", "runs/a/checkpoints/step-100", "step-7"):
        assert problems(load(f"checkpoint.resume={resume}")) == []


def test_a_trial_shorter_than_the_first_checkpoint_is_allowed(load):
    best = ("checkpoint={every: 50, keep_best: 1}", "data.validation.fraction=0.1", "evaluate.every=20")
    assert problems(load(*best, "train.steps=30")) == []


def test_defaults_obey_every_rule():
    lines = problems(Config())
    assert {line.partition(":")[0] for line in lines} == {"run.name", "train.steps", "teachers"}


def test_every_rule_names_an_existing_key():
    known = {pattern_of(name) for name, _, _ in leaves(Config)}
    assert RULES.keys() <= known


def test_every_numeric_setting_has_a_rule():
    elsewhere = {"data.validation.fraction", "optimizer.betas"}  # checked by code of their own
    numbers = {pattern_of(name) for name, _, kind in leaves(Config) if re.search(r"\b(int|float)\b", str(kind))}
    assert numbers - elsewhere == {key for key, rule in RULES.items() if rule != "not empty"}


def test_values_gives_one_pair_per_teacher(load):
    config = load("teachers.1.model=u", "teachers.1.weight=2")
    assert list(values(config, "teachers[].weight")) == [("teachers.0.weight", 1.0), ("teachers.1.weight", 2.0)]
    assert list(values(config, "loss.top_k")) == [("loss.top_k", LossConfig().top_k)]


def test_note_on_a_warm_up_that_the_run_is_too_short_for(load):
    (note,) = notes(load("schedule.warmup_steps=11"))
    assert note == "schedule.warmup_steps is 11, but the run ends at step 10: the warm-up takes 1"
    (note,) = notes(load("schedule.warmup_steps=11", "schedule.steps=12"))
    assert note.startswith("the run ends at step 10, within the warm-up of 11 steps: it does not reach optimizer.lr")
    assert notes(load("schedule.warmup_steps=10")) == []


def test_notes_on_surprising_settings(load):
    assert notes(load("data.validation.fraction=0.1", "evaluate.every=5")) == []
    (note,) = notes(load("loss.kd_weight=0", "loss.ce_weight=1"))
    assert note == "loss.kd_weight is 0: no teacher is started"
    (note,) = notes(load("loss.dynamic_scale=on"))
    assert note.startswith("loss.dynamic_scale is on: r KD + CE is minimised; loss.kd_weight")
    (note,) = notes(load("data.validation.fraction=0.1"))
    assert note.startswith("evaluate.every is 0")


IN_VLLM = "teachers.0.backend=vllm"


def test_a_teacher_in_vllm_has_no_problem_of_its_own(load):
    assert problems(load(IN_VLLM, "teachers.0.vllm.gpu_share=0.5", "teachers.0.parallel={dp: 2, tp: 2}")) == []
    assert problems(load(IN_VLLM, "teachers.0.cache=targets")) == []


@pytest.mark.parametrize(
    ("overrides", "start", "remedy"),
    [
        ((IN_VLLM, "teachers.0.export=hidden"), "teachers.0.export: must be topk with backend vllm", "backend=hf"),
        ((IN_VLLM, "loss.temperature=2"), "loss.temperature: must be 1: vLLM gives", "set it to 1"),
        ((IN_VLLM, "transport=cuda_ipc"), "transport: cuda_ipc shares GPU memory", "set transport=auto"),
        (("teachers.0.gpu_share=0.5",), "teachers.0.vllm.gpu_share: is a setting of backend vllm", "leave it out"),
        ((IN_VLLM, "teachers.0.vllm.gpu_share=0"), "teachers.0.vllm.gpu_share: must be greater than 0", ""),
    ],
)
def test_what_vllm_cannot_do_is_refused(load, overrides, start, remedy):
    (line,) = problems(load(*overrides))
    assert line.startswith(start)
    assert remedy in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["student.lora.rank=0"], ("student.lora.rank", "must be 1 or more", "0")),
        (["student.lora.alpha=-1"], ("student.lora.alpha", "must be greater than 0")),
        (["student.lora.dropout=1"], ("student.lora.dropout", "must be less than 1")),
        (["student.lora.targets=[]"], ("student.lora.targets", "must name a layer", "leave it out")),
        (["student.lora.targets=[' ']"], ("student.lora.targets.0", "must be the end of a name")),
        (
            ["student.lora.targets=[q_proj]", "student.lora.modules_to_save=[q_proj]"],
            ("student.lora.modules_to_save", "must not be in student.lora.targets too", "q_proj"),
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused(load, overrides, words):
    (line,) = problems(load(*overrides))
    assert all(word in line for word in words), line
