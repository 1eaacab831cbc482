"""Every setting of the table is reported where it has no effect, and is not where it has one."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from distill_rl.config import rules
from distill_rl.config.derive import EXPORTS
from distill_rl.config.facts import TOKENS, Facts, TeacherFacts
from distill_rl.config.load import load_config
from distill_rl.config.rules import no_effect, problems
from distill_rl.config.schema import Config, EvaluateConfig, TeacherConfig
from distill_rl.config.schema.backends import SECTIONS, StoreConfig

TEXT = "{student: {model: s}, teachers: [{model: t}], data: {path: d}, train: {steps: 10}}"
SAME = "teachers.0.loss=same"
SAMPLED = "teachers.0.export=sampled"
ALONE = ("loss.kd_weight=0", "loss.ce_weight=1")
VALIDATED = ("data.validation.fraction=0.1", "evaluate.every=5")
SUITES = ("evaluate.suites=[gsm8k]", "evaluate.data=d")
HERE = ("teachers.0.backend=hf",)
STORED = ("teachers.0.backend=store", "teachers.0.store=s")
SERVED = (
    "teachers.0.backend=endpoint",
    "teachers.0.endpoint.url=http://h",
    "teachers.0.endpoint.api=vllm",
    "teachers.0.tokenizer=t",
)
KEPT = ("student.activation_checkpointing=true",)
TWO = ("teachers.1={name: two, model: u}",)
SAME_TOKENIZER = Facts(vocabulary_size=8, teachers=(TeacherFacts(None, 8, None),))
FOLDER, FILE = str(Path(__file__).parent), __file__


def loss(method: str) -> tuple[str, ...]:
    """Settings of a teacher that is compared with a cross-tokenizer loss."""
    return f"teachers.0.loss={method}", f"teachers.0.export={EXPORTS[method][0]}"


def sources(*paths: str) -> tuple[str, ...]:
    """Settings of several sources in place of data.path."""
    return "data.path=null", *(f"data.sources.{i}.path={path}" for i, path in enumerate(paths))


CASES: dict[tuple[str, str], tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # (setting, part of the reason): the setting with a value, where it has no effect, where it has one
    ("loss.divergence", "no teacher"): ("reverse_kl", ALONE, ()),
    ("loss.beta", "no teacher"): ("0.1", ALONE, ("loss.divergence=jsd",)),
    ("loss.tail", "no teacher"): ("truncate", ALONE, (SAME,)),
    ("loss.top_k", "no teacher"): ("8", ALONE, ()),
    ("loss.draws", "no teacher is started"): ("8", (*ALONE, SAMPLED), (SAMPLED,)),
    ("loss.temperature", "no teacher"): ("2", ALONE, ()),
    ("loss.dynamic_scale", "no teacher"): ("on", ALONE, ()),
    ("loss.cross_tokenizer", "no teacher"): ("alm", ALONE, ()),
    ("loss.chunk_average", "no teacher"): ("chain", ALONE, loss("xtoken")),
    ("loss.uncommon_top_k", "no teacher"): ("8", ALONE, loss("gold")),
    ("loss.gold_relaxed", "no teacher"): ("true", ALONE, loss("gold")),
    ("loss.alm_tau", "no teacher"): ("2", ALONE, loss("alm")),
    ("aligner.method", "no teacher"): ("dp", ALONE, loss("alm")),
    ("aligner.fast_ids", "no teacher"): ("false", ALONE, loss("alm")),
    ("aligner.dp.backend", "no teacher"): ("numpy", ALONE, loss("alm")),
    ("aligner.dp.band", "no teacher"): ("8", ALONE, loss("alm")),
    ("prefetch.slots", "no teacher"): ("16", ALONE, ()),
    ("transport", "no teacher"): ("object_store", ALONE, ()),
    ("faults.teacher_restarts", "no teacher"): ("1", ALONE, ()),
    ("teachers.0.where", "no teacher is started"): ("{domain: maths}", ALONE, ()),
    ("teachers.0.weight_column", "no teacher is started"): ("weight", ALONE, ()),
    ("faults.lost_teacher", "no teacher"): ("drop_and_reweight", ALONE, TWO),
    ("loss.divergence", "of their own"): ("jsd", loss("uld"), (*loss("uld"), *TWO)),
    ("loss.beta", "of their own"): ("0.1", (*loss("strict"), "loss.divergence=jsd"), ("loss.divergence=jsd",)),
    ("loss.beta", "mixture weight"): ("0.1", (), ("loss.divergence=skewed_reverse_kl",)),
    ("loss.tail", "where a top k is compared"): ("truncate", (SAME, "teachers.0.export=hidden"), loss("hybrid")),
    ("loss.top_k", "no teacher exports"): ("8", loss("gold"), loss("xtoken")),
    ("loss.draws", "draws tokens"): ("8", (), (SAMPLED, *TWO)),
    ("teachers.0.wire_dtype", "integers"): ("bf16", (SAMPLED,), ()),
    ("loss.chunk_average", "combine"): ("chain", loss("hybrid"), loss("uld")),
    ("loss.uncommon_top_k", "by rank"): ("8", loss("xtoken"), loss("hkl")),
    ("loss.gold_relaxed", "relaxed"): ("true", loss("uld"), loss("hkl")),
    ("loss.alm_tau", "likelihoods"): ("2", (SAME,), loss("hybrid")),
    ("loss.cross_tokenizer", "token by token"): ("alm", (SAME,), TWO),
    ("aligner.method", "token by token"): ("dp", (SAME,), loss("alm")),
    ("aligner.fast_ids", "token by token"): ("false", (SAME,), loss("alm")),
    ("aligner.dp.backend", "token by token"): ("numpy", (SAME,), loss("alm")),
    ("aligner.dp.band", "token by token"): ("8", (SAME,), loss("alm")),
    ("loss.cross_tokenizer", "loss of its own"): ("alm", loss("uld"), (*loss("uld"), *TWO)),
    ("projection.learnable", "xtoken"): ("true", ("loss.cross_tokenizer=xtoken",), loss("xtoken")),
    ("teachers.0.weight", "one teacher"): ("2", (), TWO),
    ("teachers.0.score", "one teacher"): ("ce", (), ("teachers.1={name: two, model: u, score: ce}",)),
    ("faults.lost_teacher", "one teacher"): ("drop_and_reweight", (), TWO),
    ("teachers.0.wire_dtype", "hidden states"): ("bf16", ("teachers.0.export=hidden",), ()),
    ("teachers.0.store.missing", "read from a store"): ("skip", HERE, STORED),
    ("teachers.0.dtype", "does not load"): ("fp32", STORED, ()),
    ("teachers.0.attention", "does not load"): ("sdpa", STORED, ()),
    ("teachers.0.revision", "does not load"): ("main", STORED, ("teachers.0.model=org/model",)),
    ("teachers.0.endpoint.concurrency", "behind a server"): ("4", HERE, SERVED),
    ("teachers.0.endpoint.request_timeout_s", "behind a server"): ("9", HERE, SERVED),
    ("teachers.0.endpoint.retry_s", "behind a server"): ("9", HERE, SERVED),
    ("teachers.0.tokenizer", "as they were captured"): ("t", STORED, ()),
    ("teachers.0.wire_dtype", "as they were captured"): ("bf16", STORED, ()),
    ("teachers.0.quantization", "as they were captured"): ("int8", STORED, ()),
    ("teachers.0.attention", "vLLM chooses"): ("sdpa", ("teachers.0.backend=vllm",), ()),
    ("capture.mass", "format is exact"): ("0.9", (), ("capture.format=compact",)),
    ("capture.write_every_s", "nothing is stored"): ("5", (), ("teachers.0.cache=c",)),
    ("student.revision", "folder"): ("main", (f"student.model={FOLDER}",), ("student.model=org/model",)),
    ("teachers.0.revision", "folder"): ("main", (f"teachers.0.model={FOLDER}",), ("teachers.0.model=org/model",)),
    ("student.gradient_sync", "not sharded"): (
        "step",
        ("student.parallel={dp: 2, replicas: 2}",),
        ("student.parallel={dp: 4, replicas: 2}",),
    ),
    ("student.activation_offload", "no GPU is visible"): ("true", KEPT, (*KEPT, "ray.address=10.0.0.1:6379")),
    ("teachers.0.max_length", "student's rows"): ("2048", (SAME,), loss("alm")),
    ("data.text_key", "chats"): ("body", ("data.format=messages",), ("data.format=text",)),
    ("data.messages_key", "texts"): ("chat", ("data.format=text",), ("data.format=messages",)),
    ("data.split", "single file"): ("test", (f"data.path={FILE}",), (f"data.path={FOLDER}",)),
    ("data.sources.0.split", "single file"): ("test", sources(FILE), sources(FOLDER)),
    ("data.subset", "hub"): ("en", (f"data.path={FOLDER}",), ()),
    ("data.revision", "hub"): ("v1", (f"data.path={FOLDER}",), ()),
    ("data.sources.0.subset", "hub"): ("en", sources(FOLDER), sources("org/name")),
    ("data.sources.0.revision", "hub"): ("v1", sources(FOLDER), sources("org/name")),
    ("data.sources.0.weight", "one source"): ("2", sources("d"), sources("d", "e")),
    ("data.sample_by", ".txt"): ("document", (f"data.path={FILE}",), (f"data.path={FOLDER}",)),
    ("data.max_bad_rows", "not skipped"): ("5", (), ("data.bad_rows=skip",)),
    ("data.separator", "concatenate is false"): ("x", (), ("data.concatenate=true",)),
    ("data.characters_per_sample", "concatenate is false"): ("5", (), ("data.concatenate=true",)),
    ("data.validation.fraction", "validation.path"): ("0.1", ("data.validation.path=v",), ()),
    ("data.validation.max_documents", "no validation data"): ("8", (), ("data.validation.fraction=0.1",)),
    ("schedule.min_lr_ratio", "constant"): ("0.1", ("schedule.kind=constant",), ()),
    ("schedule.hold_steps", "constant"): ("5", ("schedule.kind=constant",), ()),
    ("schedule.steps", "constant"): ("5", ("schedule.kind=constant",), ()),
    ("aligner.num_gpus", "the driver aligns"): (
        "0.1",
        ("aligner.workers=0",),
        ("aligner.dp.backend=cuda", *loss("alm")),
    ),
    ("aligner.deadline_s", "the driver aligns"): ("9", ("aligner.workers=0",), ()),
    ("faults.aligner_restarts", "the driver aligns"): ("1", ("aligner.workers=0",), ()),
    ("aligner.num_gpus", "backend=cuda"): ("0.1", (), ("aligner.dp.backend=cuda", *loss("alm"))),
    ("faults.spike_factor", "spike_window"): ("5", (), ("faults.spike_window=10",)),
    ("checkpoint.keep_best", "at the end"): ("1", VALIDATED, (*VALIDATED, "checkpoint.every=5")),
    ("checkpoint.best_by", "at the end"): (
        "validation/nll_loss",
        (*VALIDATED, "checkpoint.keep_best=1"),
        (*VALIDATED, "checkpoint.keep_best=1", "checkpoint.every=5"),
    ),
    ("checkpoint.best_by", "keep_best is 0"): (
        "validation/nll_loss",
        ("checkpoint.every=5",),
        (*VALIDATED, "checkpoint.every=5", "checkpoint.keep_best=1"),
    ),
    ("evaluate.suites_every", "no suites"): ("5", (), SUITES),
    ("evaluate.data", "no suites"): ("d", (), SUITES[:1]),
    ("evaluate.backend", "no suites"): ("vllm", (), SUITES),
    ("evaluate.limit", "no suites"): ("5", (), (*SUITES, "evaluate.every=5")),
    ("evaluate.final_limit", "no suites"): ("5", (), SUITES),
    ("evaluate.num_fewshot", "no suites"): ("5", (), SUITES),
    ("evaluate.max_new_tokens", "no suites"): ("5", (), SUITES),
    ("evaluate.samples", "no suites"): ("5", (), SUITES),
    ("evaluate.teachers", "no suites"): ("true", (), SUITES),
    ("evaluate.batch_size", "no suites"): ("8", (), SUITES),
    ("evaluate.gpu_share", "no suites"): ("0.5", (), SUITES),
    ("evaluate.timeout_s", "no suites"): ("9", (), SUITES),
    ("evaluate.parallel.tp", "no suites"): ("2", (), SUITES),
    ("evaluate.every", "no validation data"): ("5", (), ("data.validation.fraction=0.1",)),
    ("evaluate.limit", "at the end"): ("5", SUITES, (*SUITES, "evaluate.suites_every=5")),
    ("evaluate.batch_size", "vLLM"): ("8", (*SUITES, "evaluate.backend=vllm"), SUITES),
    ("ray.num_cpus", "joins one"): ("4", ("ray.address=auto",), ()),
    ("ray.dashboard", "joins one"): ("true", ("ray.address=auto",), ()),
}


@pytest.fixture
def reported(tmp_path):
    """The lines about one setting of a configuration with overrides."""
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)

    def _reported(setting: str, *overrides: str, facts: Facts | None = None) -> list[str]:
        config = load_config(path, overrides)
        assert problems(config) == []
        return [line for line in no_effect(config, facts or Facts()) if f"{setting}=" in line]

    return _reported


def test_every_row_has_a_case():
    names = vars(rules) | {"config": Config(evaluate=EvaluateConfig(backend="vllm"))}
    rows = [
        eval(ast.unparse(node.value), names)
        for node in ast.walk(ast.parse(inspect.getsource(rules._rows)))
        if isinstance(node, ast.Yield)
    ]
    teachers = [TeacherConfig(model="t", backend=name, store=StoreConfig(path="s")) for name in ("hf", *SECTIONS)]
    of_teachers = {rules._OF_WEIGHTS, *(row for teacher in teachers for row in teacher.origin.no_effect(teacher))}
    rows += [(reason, *(f"teachers[].{key}" for key in settings)) for reason, *settings in of_teachers]
    entries = {(key.replace("[]", ".0"), reason) for reason, *settings in rows for key in settings}
    tested = {pair for pair in entries for key, part in CASES if pair[0] == key and part in pair[1]}
    assert entries == tested
    assert len(entries) == len(CASES)


@pytest.mark.parametrize(("setting", "reason"), CASES)
def test_setting_is_reported_only_where_it_has_no_effect(reported, setting, reason):
    value, idle, effective = CASES[setting, reason]
    # A projection without a teacher that may use xtoken is refused; that no teacher does is known from the files.
    facts = SAME_TOKENIZER if setting == "projection.learnable" else Facts()
    (line,) = reported(setting, *idle, f"{setting}={value}", facts=facts)
    assert "no effect: " in line
    assert reason in line.partition("no effect: ")[2]
    assert reported(setting, *effective, f"{setting}={value}", facts=facts) == []
    assert reported(setting, *idle, facts=facts) == [], "not set"


@pytest.mark.parametrize("setting", ["loss.top_k=8", "loss.tail=truncate"])
def test_draws_have_neither_top_k_nor_tail(reported, setting):
    key = setting.partition("=")[0]
    assert len(reported(key, SAME, SAMPLED, setting)) == 1
    assert reported(key, SAME, SAMPLED, *TWO, setting) == []


def test_each_teacher_is_looked_at_for_itself(reported):
    mixed = (
        *STORED,
        "teachers.1={name: two, model: u, store: {missing: skip}, endpoint: {retry_s: 1}}",
        "teachers.1.backend=hf",
    )
    assert len(reported("teachers.0.dtype", *mixed, "teachers.0.dtype=fp32")) == 1
    assert (
        len(reported("teachers.1.store.missing", *mixed)) == len(reported("teachers.1.endpoint.retry_s", *mixed)) == 1
    )
    assert reported("teachers.1.dtype", *mixed, "teachers.1.dtype=fp32") == []


def test_a_tokenizer_describes_a_stored_teacher_without_model(reported):
    without = ("teachers=[{store: {path: s}}]", "teachers.0.tokenizer=t")
    assert reported("teachers.0.tokenizer", *without) == []


def test_settings_with_one_reason_share_a_line(reported):
    line = reported("loss.top_k", *ALONE, "loss.top_k=8", "loss.temperature=2", "transport=object_store")
    settings = "loss.top_k=8, loss.temperature=2.0, transport=object_store"
    assert line == [f"{settings} have no effect: no teacher is started"]


@pytest.mark.parametrize(("known", "lines"), [(None, 0), (TOKENS, 1), ("alm", 1), ("gold", 0)])
def test_tokenizers_decide_once_they_are_known(reported, known, lines):
    method = None if known == TOKENS else known
    facts = Facts() if known is None else Facts(vocabulary_size=8, teachers=(TeacherFacts(None, 9, method),))
    export = "teachers.0.export=hidden"
    assert len(reported("loss.chunk_average", export, "loss.chunk_average=chain", facts=facts)) == lines
    assert len(reported("loss.top_k", export, "loss.top_k=8", facts=facts)) == lines + (known == "gold")


def test_kind_of_the_data_decides_over_auto(reported):
    assert reported("data.text_key", "data.text_key=body") == []
    assert reported("data.text_key", "data.text_key=body", facts=Facts(data_kind="messages"))


def test_offload_has_an_effect_on_a_gpu_and_sync_with_divided_rows(reported):
    offload = ("student.activation_offload=true", *KEPT)
    assert reported("student.activation_offload", *offload, facts=Facts(gpus=1)) == []
    assert reported("student.gradient_sync", "student.gradient_sync=step", "student.parallel.sp=2") == []


def test_forbidding_other_tokenizers_has_an_effect(reported):
    assert reported("loss.cross_tokenizer", SAME, "loss.cross_tokenizer=null") == []
