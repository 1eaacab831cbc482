import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from distill_rl.commands.check import summary
from distill_rl.config.load import load_config
from distill_rl.config.schema import DataConfig
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.models.files import read_tokenizer, tokenizer_hash, tokenizer_of
from distill_rl.preflight import gather, inspect, visible_gpus
from distill_rl.run.opened import OpenedRun, open_rows
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.helpers.zoo import write_family, write_model


def only(lines):
    (line,) = lines
    return line


def test_good_configuration_has_all_facts(material):
    checked = gather(material / "run.yaml")
    assert (checked.problems, checked.unreachable) == ([], [])
    facts = checked.facts
    assert facts.vocabulary_size == len(tiny_tokenizer())
    assert (facts.num_documents, facts.total_steps) == (64, 3)
    assert (facts.student.hidden_size, facts.teachers[0].model.hidden_size) == (32, 64)
    assert facts.teachers[0].model.vocabulary_columns == 384
    assert not (material / "runs").exists()


def test_inspect_agrees_with_gather(material):
    inspected = inspect(OpenedRun.of(load_config(material / "run.yaml")))
    assert (inspected.problems, inspected.unreachable) == ([], [])
    assert inspected.facts == gather(material / "run.yaml").facts


def test_validation_documents_are_not_counted(material):
    facts = gather(material / "run.yaml", ["data.validation.fraction=0.25", "train.epochs=2", "train.steps=null"]).facts
    assert (facts.num_documents, facts.total_steps) == (48, 12)


def test_adapters_are_counted_and_a_name_that_no_layer_has_is_refused(material, problems):
    facts = gather(material / "run.yaml", ["student.lora.rank=8"]).facts.student
    assert (facts.adapters.layers, facts.trained, facts.frozen) == (14, facts.adapters.trained, facts.parameters)
    line = only(problems("student.lora.targets=[q_proj, v_pro]"))
    assert line.startswith(
        "student.lora.targets.1: no layer of the student has this name; got v_pro; did you mean v_proj"
    )


def test_liger_is_refused_for_other_families(problems, material, monkeypatch):
    monkeypatch.setattr("distill_rl.preflight.visible_gpus", lambda: 1)
    monkeypatch.setattr("distill_rl.preflight.machine.installed", lambda package: True)
    # auto would choose CUDA IPC, which this machine does not have
    overrides = ("student.kernels=liger", "transport=shared_memory")
    assert problems(*overrides) == []
    line = only(problems(*overrides, f"student.model={material}/gemma2", f"teachers.0.model={material}/gemma2"))
    assert line.startswith(
        "student.kernels: liger replaces parts of llama, mistral, qwen2, qwen3; got gemma2; set student"
    )


def test_router_weight_is_refused_for_a_dense_student(problems):
    line = only(problems("loss.router_weight=0.01"))
    rule = "needs a student that is a mixture of experts; llama is not"
    assert line == f"loss.router_weight: {rule}; got 0.01; set it to 0"


def test_triton_needs_a_gpu_and_a_kernel_for_what_is_compared(problems, material, monkeypatch):
    monkeypatch.setattr("distill_rl.preflight.machine.installed", lambda package: True)
    assert problems("loss.backend=triton") == [
        "loss.backend: triton needs a GPU; none is visible; set loss.backend=auto",
    ]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert problems("loss.backend=triton") == []
    hidden = ("loss.backend=triton", "teachers.0.export=hidden")
    assert problems(*hidden, "loss.divergence=reverse_kl") == []
    assert problems("loss.backend=triton", "loss.divergence=jsd") == []
    assert problems(*hidden, "loss.divergence=jsd") == [
        "loss.backend: triton has no kernel for jsd against the hidden states of teacher big; set loss.backend=auto"
    ]
    assert problems("loss.backend=triton", "teachers.0.export=sampled") == [
        "loss.backend: triton has no kernel for the draws of teacher big (export: sampled); set loss.backend=auto"
    ]
    across = ("loss.backend=triton", f"teachers.0.model={material}/foreign")
    assert problems(*across) == []
    assert problems(*across, "loss.cross_tokenizer=gold", "teachers.0.export=logits") == [
        "loss.backend: triton has no kernel for gold, the loss of teacher big; set loss.backend=auto"
    ]


def test_fused_loss_is_refused_for_a_model_whose_head_is_not_known(problems, tmp_path):
    folder = write_model(tmp_path / "olmo2", "olmo2", vocab_size=320)
    tiny_tokenizer().save_pretrained(folder)
    line = only(problems("loss.fused=on", f"student.model={folder}"))
    assert line.startswith("loss.fused: on needs a student whose output layer is known, one of cohere, gemma2, ")
    assert line.endswith("; got olmo2; leave it to auto")


def test_teachers_that_do_not_run_are_not_opened(problems):
    assert problems("teachers.0.model=/nowhere", "loss.kd_weight=0", "loss.ce_weight=1") == []


def test_all_problems_are_reported_at_once_without_repeats(problems, material):
    lines = problems(
        "student.model=/nowhere/student",
        "data.path=/nowhere/data.jsonl",
        "train.step=5",
        "train.micro_batch_size=many",
        "student.parallel.dp=3",
        "teachers.0.weight=-1",
        f"teachers.1={{name: other, model: {material}/absent}}",
    )
    assert [line.partition(":")[0] for line in lines] == [
        "train.step",
        "train.micro_batch_size",
        "teachers.0.weight",
        "train.global_batch_size",
        "student.model",
        "teachers.1.model",
        "data.path",
    ]


def test_missing_value_does_not_stop_other_checks(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"run: {{dir: {tmp_path}}}\nteachers: [{{model: /nowhere}}]\ntrain: {{steps: 1}}\n")
    lines = gather(path).problems
    assert [line.partition(":")[0] for line in lines] == ["student.model", "data.path", "teachers.0.model"]


def test_unreadable_configuration_file_is_the_only_problem(tmp_path):
    checked = gather(tmp_path / "absent.yaml")
    assert checked.config is None
    assert "no such file" in only(checked.problems)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["student.model=/nowhere"], "student.model: no such folder; got /nowhere"),
        (["teachers.0.model=/nowhere"], "teachers.0.model: no such folder; got /nowhere"),
        (["student.tokenizer=/nowhere"], "student.tokenizer: no such folder; got /nowhere"),
        (["loss.top_k=321"], "loss.top_k: must not exceed the 320 ids of the student's tokenizer; got 321; use 320"),
        (
            ["data.max_length=257"],
            "data.max_length: must not exceed the 256 positions of teacher big; got 257; use 256",
        ),
        (["student.parallel.tp=3"], "student.parallel.tp: 4 attention heads cannot be split evenly over"),
        (["data.text_key=body"], "data.path: {root}/data.jsonl: column 'body'"),
        (["data.path=/nowhere/x.jsonl"], "data.path: an existing file, folder or glob"),
        (["train.global_batch_size=128"], "data.path: 64 training documents are fewer than one global batch of 128"),
        (["data.validation.path=/nowhere/v.jsonl"], "data.validation.path: an existing file, folder or glob"),
        (["data.format=messages"], "data.path: {root}/data.jsonl: column 'messages'"),
    ],
)
def test_problem_with_a_file_gives_one_line(problems, material, overrides, expected):
    lines = problems(*overrides)
    assert any(line.startswith(expected.format(root=material)) for line in lines), lines
    assert len({line.partition(":")[0] for line in lines}) == 1


def test_missing_column_lists_the_existing_ones(problems):
    assert "['text']" in only(problems("data.text_key=body"))


def test_other_vocabulary_is_named_by_its_hash(problems, material):
    assert problems(f"teachers.0.model={material}/foreign") == []
    line = only(problems(f"teachers.0.model={material}/foreign", "loss.cross_tokenizer=null"))
    rule = "must have the student's vocabulary (loss.cross_tokenizer: null); the tokenizers differ"
    assert line.startswith(f"teachers.0: {rule}; got student ")
    student_hash = tokenizer_hash(tokenizer_of(load_config(material / "run.yaml").student))
    teacher_hash = tokenizer_hash(read_tokenizer(material / "foreign"))
    assert student_hash[:12] in line
    assert teacher_hash[:12] in line
    assert "loss.cross_tokenizer" in line


def test_too_few_embedding_rows_are_refused(problems, material, tmp_path):
    small = write_tiny_model(tmp_path / "small", vocab_size=300)
    line = only(problems(f"teachers.0.model={small}"))
    assert line.startswith(
        "teachers.0.model: the model has fewer embedding rows (300) than its tokenizer has ids (320)"
    ), line
    assert problems() == []


def test_added_tokens_beyond_the_table_are_allowed_and_rows_with_them_refused(problems, material, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<image>", special=True, normalized=False)])
    for name, seed in (("student", 1), ("teacher", 2)):
        write_tiny_model(tmp_path / name, vocab_size=320, seed=seed)
        tokenizer.save_pretrained(tmp_path / name)
    overrides = [f"student.model={tmp_path}/student", f"teachers.0.model={tmp_path}/teacher", "data.max_length=64"]
    checked = gather(material / "run.yaml", overrides)
    assert checked.problems == []
    assert checked.facts.vocabulary_size == 320
    rule = (
        "has 320 embedding rows, and none for added tokens of its tokenizer (<image>); rows that contain one are left"
    )
    assert [note for note in checked.notes if rule in note] == [
        f"{model} {rule} out as bad rows" for model in ("student", "teacher big")
    ]
    table = ("the 320 embedding rows of {}", "give the model a row for it (resize_token_embeddings)")
    student, teacher = (write_tiny_model(tmp_path / f"wide-{name}", vocab_size=328) for name in ("student", "teacher"))
    shorter = write_tiny_model(tmp_path / "shorter", vocab_size=328)
    tokenizer.save_pretrained(student)
    tokenizer.save_pretrained(teacher)
    for models, lacking, remedy in (
        ((), " and ".join(table[0].format(name) for name in ("the student", "teacher big")), table[1]),
        ((f"teachers.0.model={teacher}",), table[0].format("the student"), table[1]),
        ((f"student.model={student}",), table[0].format("teacher big"), table[1]),
        ((f"student.model={student}", f"teachers.0.model={shorter}"),
         "the 320 token ids of teacher big", "set teachers[].loss=hybrid"),
    ):  # fmt: skip
        rows = open_rows(load_config(material / "run.yaml", [*overrides, *models]))
        assert (rows.num_ids, rows.plan.num_ids) == (320, 320)
        tokenization = Tokenization(rows.student.tokenizer, DataConfig(max_length=64), format="text")
        with pytest.raises(ValueError) as refused:  # noqa: PT011 (the whole line follows)
            BatchBuilder(tokenization, rows.plan).align([{"row": 31, "text": "lo <image> ka"}])
        assert str(refused.value) == (
            f"row 31: {lacking} must include every token of the text; got <image> (id 320); leave this token out, or {remedy}"
        )

    line = only(problems(*overrides, f"teachers.0.model={material}/foreign"))
    assert line.startswith("student.model: must have an embedding row for every token where texts are compared over ")
    tokenizer.eos_token = "<image>"
    tokenizer.save_pretrained(tmp_path / "student")
    assert any("fewer embedding rows (320) than its tokenizer has ids (321)" in line for line in problems(*overrides))


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("cohere", {"use_qk_norm": True})],
    ids=["llama", "tied", "gpt2", "cohere-q-norm"],
)
def test_check_says_how_many_tensors_are_decayed(material, tmp_path, family, settings):
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    folder = write_family(tmp_path, family, vocab_size=320, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder)
    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    matrices = {module.weight for module in model.modules() if isinstance(module, kinds)}
    count = f"{len(matrices)} of {len(list(model.parameters()))} tensors in the student's files"
    overrides = [f"student.model={folder}", "optimizer.weight_decay=0.25"]
    lines = {}
    for lora in ("null", "{rank: 4}"):
        checked = gather(material / "run.yaml", [*overrides, f"student.lora={lora}"])
        lines[lora] = [line for line in summary(checked.config, checked.facts) if line.startswith("decayed")]
    assert lines == {"null": [f"decayed    {count}, by 0.25; no norms, no biases"], "{rank: 4}": []}


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_tied_tables_that_differ_are_refused(problems, tmp_path, family):
    folder = write_tiny_model(tmp_path, family, tie=True)
    tensors = load_file(folder / "model.safetensors")
    (table,) = (name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    tensors["lm_head.weight"] = tensors[table].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert problems(f"student.model={folder}") == []
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    line = only(problems(f"student.model={folder}"))
    assert line.startswith("student.model: ")
    assert table in line
    assert line.endswith(
        "must be equal, because config.json ties them; got different values; set tie_word_embeddings: false in config.json"
    )


def test_family_without_tp_plan_is_refused_over_two_ranks(problems, material, tmp_path):
    tiny_tokenizer().save_pretrained(write_model(tmp_path, "opt", vocab_size=320))
    settings = (f"student.model={tmp_path}", "data.packing=false")
    assert problems(*settings) == []
    assert "opt has no tensor-parallel plan" in only(problems(*settings, "student.parallel.tp=2"))


def test_messages_need_a_chat_template(problems, material, tmp_path):
    assert problems(f"data.path={material}/chat.jsonl") == []
    plain = tiny_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    line = only(problems(f"data.path={material}/chat.jsonl", f"student.tokenizer={tmp_path}/plain"))
    assert line.startswith("data.format: chat messages need a chat template; the student's tokenizer has none")


def rows(path: Path, *lines) -> Path:
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n"
    )
    return path


GOOD = [{"text": f"row {i}"} for i in range(16)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ["data.jsonl", "empty"]),
        ([*GOOD, {"text": 3}], ["row 16", "text", "int"]),
        ([*GOOD, {"text": None}], ["row 16", "text", "null"]),
        ([*GOOD, {"body": "x"}], ["row 16", "'text'"]),
        ([*GOOD, b'{"text": "cut o'], ["row 16", "truncated"]),
        ([*GOOD, b'{"text": "\xff\xfe"}'], ["row 16", "UTF-8"]),
    ],
)
def test_broken_row_is_named_with_file_and_reason(problems, tmp_path, lines, expected):
    path = rows(tmp_path / "data.jsonl", *lines) if lines else tmp_path / "data.jsonl"
    path.touch()
    line = only(problems(f"data.path={path}"))
    assert str(path) in line
    assert all(part in line for part in expected), line


def test_truncated_parquet_and_arrow_files_are_named(problems, tmp_path):
    parquet = write_corpus(tmp_path / "x.parquet", form="parquet")
    parquet.write_bytes(parquet.read_bytes()[:-200])
    assert "x.parquet" in only(problems(f"data.path={parquet}"))
    folder = write_corpus(tmp_path / "folder", form="folder")
    next(folder.glob("*.arrow")).unlink()
    assert str(folder) in only(problems(f"data.path={folder}"))


def test_damaged_tokenizer_is_one_line(problems, material, tmp_path):
    broken = shutil.copytree(material / "student", tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    assert only(problems(f"student.model={broken}")).startswith("student.tokenizer: ")


def test_unreachable_hub_names_are_listed_separately(material, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    overrides = [
        "student.model=meta-llama/Llama-3.2-1B",
        "teachers.0.model=meta-llama/Llama-3.1-8B",
        "data.path=org/texts",
    ]
    checked = gather(material / "run.yaml", overrides, download=False)
    assert checked.problems == []
    assert [line.partition(":")[0] for line in checked.unreachable] == [
        "student.model",
        "teachers.0.model",
        "data.path",
    ]


def test_used_run_directory_needs_resume_or_clean(problems, material):
    run = material / "runs" / "run"
    run.mkdir(parents=True)
    try:
        assert problems() == []
        (run / "config.yaml").touch()
        (run / "metrics.jsonl").touch()
        line = only(problems())
        assert str(run) in line
        assert "no checkpoint is saved: start over with --clean" in line
        (run / "checkpoints" / "step-3").mkdir(parents=True)
        (run / "checkpoints" / "step-3" / "MANIFEST.json").touch()
        line = only(problems())
        assert "--resume" in line
        assert "--clean" in line
        assert problems(clean=True) == []
        assert problems("checkpoint.resume=latest") == []
    finally:
        shutil.rmtree(material / "runs")


def test_unwritable_run_directory_is_refused(problems, tmp_path):
    (tmp_path / "file").touch()
    assert str(tmp_path) in only(problems(f"run.dir={tmp_path}/file"))
    assert "/proc/runs" in only(problems("run.dir=/proc/runs"))


def test_too_little_space_names_needed_and_free_bytes(problems, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    disk, shared = problems()
    assert "2 checkpoints and the export need about 1.0 MiB, and 0.0 MiB are free" in disk
    assert shared.startswith(
        "/dev/shm: Ray's object store needs 80 MiB of it; got 0 MiB free; free some, or enlarge it"
    )
    assert len(problems("ray.address=auto")) == 1, "a cluster has its own /dev/shm"


def test_more_gpus_than_visible_are_refused(problems, monkeypatch):
    from distill_rl import preflight

    monkeypatch.setattr(preflight, "visible_gpus", lambda: 2)
    assert problems("student.parallel.dp=2") == []
    line = only(problems("student.parallel.dp=4"))
    assert line.startswith("student.parallel: dp 4 x tp 1 = 4 GPUs are asked, 2 are visible"), line
    assert problems("student.parallel.dp=4", "ray.address=auto") == []


def test_visible_gpus_are_those_that_torch_counts(monkeypatch):
    assert visible_gpus() == torch.cuda.device_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == 0


def test_cuda_aligner_without_compiler_is_refused(problems, monkeypatch):
    from distill_rl import preflight
    from distill_rl.align.dp.windows import missing_for_cuda

    if missing_for_cuda() is None:
        pytest.skip("Numba has a usable CUDA target here")
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 1)
    overrides = ("aligner.dp.backend=cuda", "aligner.num_gpus=0.1")
    line = only(problems(*overrides))
    assert line.startswith("aligner.dp.backend: needs "), line
    assert line.endswith("set aligner.dp.backend=numba"), line
    assert problems(*overrides, "ray.address=auto") == []


def test_loss_on_assistant_needs_messages(problems, material):
    line = only(problems("data.loss_on=assistant"))
    assert line.startswith("data.loss_on: assistant turns are found in chat messages only")
    assert problems("data.loss_on=assistant", f"data.path={material}/chat.jsonl") == []


@pytest.mark.parametrize(("overrides", "noted"), [
    ((), True),
    (("data.packing=false",), False),
    (("teachers.0.model={root}/foreign",), True),
])  # fmt: skip
def test_packing_that_only_loading_tries_is_noted(material, tmp_path, overrides, noted):
    olmo = write_model(tmp_path / "olmo", "olmo2", vocab_size=320)
    tiny_tokenizer().save_pretrained(olmo)
    overrides = [text.format(root=material) for text in overrides]
    checked = gather(material / "run.yaml", [f"student.model={olmo}", *overrides])
    assert checked.problems == []
    lines = [note for note in checked.notes if note.startswith("data.packing: no test covers olmo2; whether")]
    assert len(lines) == noted
    assert not any("data.packing" in note for note in gather(material / "run.yaml").notes)


def test_best_by_acceptance_needs_the_students_tokenizer(problems):
    best = "checkpoint={every: 1, keep_best: 1, best_by: validation/acceptance}"
    validated = ("data.validation.fraction=0.1", "evaluate.every=1", best, "teachers.0.export=logits")
    assert problems(*validated) == []
    (line,) = problems(*validated, file="pair.yaml")
    assert line.startswith(
        "checkpoint.best_by: is not measured for teacher big: it is not compared token by token; got"
    )
    assert problems(*validated, "checkpoint.keep_best=0", file="pair.yaml") == []
