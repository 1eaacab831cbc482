from dataclasses import replace

import pytest

from distill_rl.config.derive import EXPORTS, sizes, total_steps
from distill_rl.config.facts import Facts, ModelFacts, TeacherFacts, row_width
from distill_rl.config.layout import aligner_workers, compute_groups, gpu_groups, gpus_of_ranks
from distill_rl.config.load import load_config
from distill_rl.config.memory import (
    FUSED_BYTES_PER_LOGIT,
    FUSED_CHUNK_BYTES,
    FUSED_CHUNK_BYTES_GPU,
    FUSED_FROM_BYTES,
    FUSED_LEAST_ROWS,
    WHOLE_GRADIENT_BYTES,
    fused_chunk,
    fused_loss,
    micro_batch_logits,
    student_memory,
    teacher_memory,
)
from distill_rl.config.schema import Config, DataConfig
from distill_rl.data.loader import Loader
from distill_rl.data.reading.sources import open_source
from distill_rl.losses.core import logits as logits_module
from distill_rl.types import TrainState

MODEL = ModelFacts(
    family="llama",
    parameters=10_000_000,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=4,
    num_heads=8,
    num_key_value_heads=4,
    vocabulary_columns=8000,
    tied=False,
    bytes_on_disk=40_000_000,
)
TEXT = """
student: {model: s, dtype: fp32}
teachers: [{model: t, name: big, dtype: fp32, wire_dtype: fp16}]
data: {path: d, max_length: 128}
loss: {top_k: 16}
train: {steps: 100, global_batch_size: 16, micro_batch_size: 2}
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return lambda *overrides: load_config(path, overrides)


def test_slot_holds_the_targets_of_a_full_micro_batch(load):
    derived = sizes(load("prefetch.depth=3", "teachers.0.parallel.dp=2", "teachers.0.micro_batch_size=4"), Facts())
    (teacher,) = derived.teachers
    assert teacher.bytes_per_token == 16 * (4 + 2) + 4 + 4
    assert teacher.bytes_per_slot == 4 * 128 * 104
    assert teacher.ring_bytes == 4 * 2 * teacher.bytes_per_slot


def test_slots_and_activations_fit_the_widest_rows_of_the_device(load):
    config = load("data.max_length=1000")
    for gpus, width in ((0, 1000), (1, 1024)):
        derived = sizes(config, Facts(student=MODEL, teachers=(TeacherFacts(MODEL),), gpus=gpus))
        assert derived.teachers[0].bytes_per_slot == 2 * width * 104
        assert derived.memory[0].logits == 2 * width * MODEL.vocabulary_columns * 3 * 4
    assert sizes(load("data.max_length=1001"), Facts()).teachers[0].bytes_per_slot == 2 * 1008 * 104


def test_hidden_export_counts_wire_dtype_and_output_layers(load):
    teacher, columns = replace(MODEL, hidden_size=512, vocabulary_columns=9000), 8000
    for name, item in (("fp32", 4), ("bf16", 2)):
        config = load("teachers.0.export=hidden", f"teachers.0.dtype={name}", "student.parallel.tp=2")
        facts = Facts(student=MODEL, teachers=(TeacherFacts(teacher),), gpus=2)
        derived = sizes(config, facts)
        assert derived.teachers[0].entries == 512
        assert derived.teachers[0].bytes_per_token == 512 * item + 4
        assert derived.memory[0].heads == columns // 2 * 512 * item
        across = sizes(config, replace(facts, teachers=(TeacherFacts(teacher, cross_tokenizer_loss="gold"),))).memory[0]
        assert across.heads == 9000 * 512 * item
        on_cpu = sizes(config, replace(facts, gpus=0)).memory[0]
        assert on_cpu.heads == columns // 2 * 512 * 4
    assert sizes(load(), facts).memory[0].heads == 0


def test_small_vocabulary_limits_the_entries(load):
    (teacher,) = sizes(load("loss.top_k=500"), Facts(vocabulary_size=320)).teachers
    assert teacher.entries == 320
    facts = Facts(teachers=(TeacherFacts(replace(MODEL, vocabulary_columns=320)),))
    (teacher,) = sizes(load("loss.draws=500", "teachers.0.export=sampled"), facts).teachers
    assert teacher.entries == 320


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_draws_are_an_id_and_a_count_each(load, dtype):
    config = load("loss.draws=30", "teachers.0.export=sampled", f"teachers.0.wire_dtype={dtype}")
    (teacher,) = sizes(config, Facts()).teachers
    assert (teacher.entries, teacher.bytes_per_token) == (30, 30 * (4 + 2) + 4 + 4)


def test_auto_wire_dtype_depends_on_the_device(load):
    on_cpu, on_gpu = (sizes(load("teachers.0.wire_dtype=auto"), Facts(gpus=gpus)).teachers[0] for gpus in (0, 1))
    assert (on_cpu.bytes_per_token, on_gpu.bytes_per_token) == (16 * 8 + 8, 16 * 6 + 8)


def test_batches_and_processes_follow_the_layout(load):
    derived = sizes(load("student.parallel={dp: 2, tp: 2}", "teachers.0.parallel.tp=2"), Facts(num_documents=160))
    assert derived.micro_batches == 4
    assert derived.epochs == 10.0
    assert derived.world == {
        "student": "dp 2 x tp 2 = 4 processes",
        "big": "dp 1 x tp 2 = 2 processes",
        "aligner": "1 process (half the GPUs, at least 1)",
    }


@pytest.mark.parametrize(
    ("settings", "when"),
    [
        (["evaluate.every=50"], "every 50 steps on a copy of the student, and at the end"),
        (
            ["evaluate.every=50", "evaluate.suites_every=200"],
            "every 200 steps on a copy of the student, and at the end",
        ),
        (["evaluate.every=50", "evaluate.suites_every=0"], "at the end"),
        ([], "at the end"),
    ],
)
def test_evaluator_is_counted_if_suites_are_set(load, settings, when):
    derived = sizes(load("evaluate.suites=[mmlu,math500]", "evaluate.data=d", *settings), Facts())
    assert derived.world["evaluator"] == f"1 process: mmlu, math500 {when}"
    assert "evaluator" not in sizes(load(), Facts()).world


def test_evaluator_memory_is_student_copy_and_prompt_cache(load):
    (evaluator,) = (
        worker
        for worker in sizes(
            load("evaluate.suites=[mmlu]", "evaluate.data=d", "evaluate.batch_size=2"), Facts(student=MODEL)
        ).memory
        if worker.worker == "evaluator"
    )
    assert evaluator.weights == 4 * MODEL.parameters
    key_value = MODEL.hidden_size * MODEL.num_key_value_heads // MODEL.num_heads
    assert evaluator.cache == 2 * 1024 * MODEL.num_layers * 2 * key_value * 4


def test_evaluator_that_is_split_is_counted_by_rank(load):
    settings = ("evaluate.suites=[mmlu]", "evaluate.data=d", "evaluate.batch_size=2")
    whole, split = (sizes(load(*settings, *more), Facts(student=MODEL)) for more in ((), ("evaluate.parallel.tp=2",)))
    assert split.world["evaluator"] == "tp 2 = 2 processes: mmlu at the end"
    (one,), (half,) = ([worker for worker in found.memory if worker.worker == "evaluator"] for found in (whole, split))
    assert (one.count, half.count) == (1, 2)
    assert (2 * half.weights, 2 * half.cache, half.logits) == (one.weights, one.cache, one.logits)


def test_without_kd_no_teacher_is_counted(load):
    derived = sizes(load("loss.kd_weight=0", "loss.ce_weight=1"), Facts(student=MODEL, teachers=()))
    assert derived.teachers == ()
    assert [worker.worker for worker in derived.memory] == ["student"]
    assert "big" not in derived.world


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("length", [(100, None), (None, 0.01), (None, 1), (None, 2.5), (3, 2.5), (None, 1.03)])
def test_number_of_steps_agrees_with_the_loader(load, rows, length):
    steps, epochs = length
    config = load(f"train.steps={steps or 'null'}", f"train.epochs={epochs or 'null'}")
    loader = Loader([{}] * rows, config, TrainState())
    assert total_steps(config, rows) == loader.total_steps


def test_number_of_steps_is_unknown_without_data(load):
    assert total_steps(load("train.steps=null", "train.epochs=1"), None) is None
    assert total_steps(load(), None) == 100


def test_student_needs_sixteen_bytes_per_parameter_over_all_ranks(load):
    whole = student_memory(load(), MODEL)
    assert whole.weights + whole.gradients + whole.optimizer == 16 * MODEL.parameters
    split = student_memory(load("student.parallel={dp: 2, tp: 2}"), MODEL)
    assert split.weights + split.gradients + split.optimizer == 4 * MODEL.parameters
    assert split.logits * 2 == whole.logits
    assert (whole.count, split.count) == (1, 4)


def test_one_shard_copies_all_weights_and_several_gather_a_unit(load):
    def gathered(*settings: str) -> int:
        return student_memory(load(*settings), MODEL).gathered

    unit = 2 * 8000 * 256  # both tables
    assert gathered("student.parallel.dp=2") == unit * 16
    assert gathered() == 4 * unit, "fp32 on one rank computes with the weights themselves"
    assert gathered("student.dtype=bf16") == 2 * MODEL.parameters + 2 * unit
    replicated = student_memory(load("student.parallel={dp: 2, replicas: 2}"), MODEL)
    expected = (4 * MODEL.parameters + unit * 12, 4 * MODEL.parameters, 2)
    assert (replicated.gathered, replicated.weights, replicated.count) == expected


def test_loss_is_fused_on_request_or_where_logits_would_be_large(load):
    def fused(*settings: str, columns: int, known: bool = True) -> bool:
        return fused_loss(load(*settings), columns, known_head=known, on_gpu=False)

    largest = FUSED_FROM_BYTES // (2 * 128 * 4)  # columns of fp32 logits of two rows of 128
    assert micro_batch_logits(load(), largest, on_gpu=False) == FUSED_FROM_BYTES
    assert [fused(columns=columns) for columns in (largest, largest + 1)] == [False, True]
    assert not fused("student.parallel.tp=2", columns=2 * largest)
    assert not fused(columns=largest + 1, known=False)
    assert fused("loss.fused=on", columns=1)
    assert not fused("loss.fused=off", columns=largest + 1)


def test_fused_loss_needs_a_chunk_and_the_heads_gradient_however_many_tokens(load):
    def logits(length: int, model: ModelFacts) -> int:
        return student_memory(load("loss.fused=on", f"data.max_length={length}"), model).logits

    large = replace(MODEL, vocabulary_columns=262_144)
    for model in (replace(MODEL, vocabulary_columns=32_768), large):
        head = 4 * model.vocabulary_columns * 256
        assert logits(4096, model) == FUSED_CHUNK_BYTES + head + 4 * 2 * 4096 * 256
    second = load("loss.fused=on", "data.max_length=4096", "teachers.1={name: second, model: m}")
    whole = student_memory(second, large).logits
    assert whole - logits(4096, large) == 4 * large.vocabulary_columns * 256, "a gradient per teacher"
    small = load("loss.fused=on", "data.max_length=8")
    assert fused_chunk(small, 1000, on_gpu=False) == 32 * 2 * 8 * 1000, "all rows fit into one chunk"
    assert fused_chunk(load(), 10**6, on_gpu=False) == 32 * 16 * 10**6, "16 rows at least"
    many = load("data.max_length=4096")
    assert fused_chunk(many, 262_144, on_gpu=True) == FUSED_CHUNK_BYTES_GPU
    assert (FUSED_CHUNK_BYTES, FUSED_CHUNK_BYTES_GPU) == (logits_module._CHUNK_BYTES, logits_module._CUDA_CHUNK_BYTES)
    assert (logits_module._LEAST_ROWS, max(logits_module._BYTES.values())) == (FUSED_LEAST_ROWS, FUSED_BYTES_PER_LOGIT)


def test_reduction_per_step_costs_a_whole_gradient_per_rank(load):
    def accumulated(*settings: str, model=MODEL) -> int:
        config = load("student.parallel={dp: 2, tp: 2}", "train.global_batch_size=16", *settings)
        return student_memory(config, model).accumulated

    assert accumulated() == accumulated("student.gradient_sync=step") == 2 * MODEL.parameters
    assert accumulated("student.gradient_sync=micro_batch") == 0
    large = replace(MODEL, parameters=2 * WHOLE_GRADIENT_BYTES // 4)
    assert accumulated(model=large) == WHOLE_GRADIENT_BYTES
    assert accumulated(model=replace(large, parameters=large.parameters + 2)) == 0
    whole = ("train.micro_batch_size=8", "data.long_documents=cut")
    assert accumulated(*whole) == 0, "one micro-batch has nothing to add up"
    assert accumulated(whole[0]) > 0, "a document that is split makes a second one"
    assert accumulated("student.parallel.replicas=2") == 0, "one shard: the sum is the gradient itself"


def test_fused_optimizer_on_gpus_needs_no_scratch(load):
    assert student_memory(load(), MODEL).scratch == 4 * MODEL.parameters
    assert student_memory(load(), MODEL, on_gpu=True).scratch == 0


def test_fused_projections_are_not_split_over_tp(load):
    config = load("student.parallel.tp=2", "teachers.0.parallel.tp=2")
    for model, share in ((MODEL, 1), (replace(MODEL, family="phi3"), 2)):
        student, teacher = student_memory(config, model), teacher_memory(config, config.teachers[0], model)
        # queries, rotated queries and attention's output; keys, rotated keys and values; four of the MLP
        work = 4 * 256 // 2 + 3 * 128 // 2 + 4 * 1024 // 2
        assert student.activations == 2 * 128 * 4 * (2 * 256 * 12 + 4 * work * share)
        assert teacher.activations == 2 * 128 * 4 * (6 * 256 + 3 * 512 * share)


def test_activation_checkpointing_saves_most_activations(load):
    model = replace(MODEL, num_layers=32)
    plain = student_memory(load(), model)
    saved = student_memory(load("student.activation_checkpointing=true"), model)
    assert saved.activations < plain.activations / 5
    assert saved.weights == plain.weights


def test_positions_over_ranks_divide_activations_logits_and_shards(load):
    one, four = (student_memory(load(f"student.parallel.sp={sp}"), MODEL) for sp in (1, 4))
    assert (four.count, 4 * four.logits, 4 * four.weights) == (4, one.logits, one.weights)
    # Attention's tensors exist in both divisions.
    assert one.activations / 4 < four.activations < one.activations / 3
    config = load("teachers.0.parallel={dp: 2, sp: 2}")
    whole, divided = (teacher_memory(each, each.teachers[0], MODEL) for each in (load(), config))
    assert (divided.count, divided.weights, 2 * divided.activations) == (4, whole.weights, whole.activations)
    assert compute_groups(load("student.parallel={dp: 2, sp: 2, tp: 2}", "teachers.0.parallel.sp=4")) == [8, 4]


def test_offload_leaves_the_input_of_two_layers_on_a_gpu(load):
    model = replace(MODEL, num_layers=32)
    settings = ("student.activation_checkpointing=true", "student.activation_offload=true")
    kept, moved = (student_memory(load(*each), model, on_gpu=True).activations for each in (settings[:1], settings))
    assert kept - moved == 30 * 2 * 128 * MODEL.hidden_size * 4
    assert student_memory(load(*settings), model).activations == student_memory(load(settings[0]), model).activations


@pytest.mark.parametrize(("on_gpu", "width"), [(False, 1008), (True, 1152)])
def test_width_of_rows_divides_by_the_ranks_of_all_models(load, on_gpu: bool, width: int):
    config = load("student.parallel.sp=2", "teachers.0.parallel.sp=3")
    assert row_width(1000, on_gpu=on_gpu, divisor=config.width_divisor) == width
    assert width % 6 == 0


def test_teacher_weights_are_split_over_tp_only(load):
    fp32 = teacher_memory(load(), load().teachers[0], MODEL)
    config = load("teachers.0.dtype=bf16", "teachers.0.parallel={dp: 4, tp: 2}")
    bf16 = teacher_memory(config, config.teachers[0], MODEL)
    assert fp32.weights == 4 * MODEL.parameters
    assert bf16.weights == MODEL.parameters
    assert (fp32.gradients, fp32.optimizer, bf16.count) == (0, 0, 8)


def test_total_is_the_sum_of_the_parts(load):
    worker = student_memory(load(), MODEL, targets=1000)
    assert sum(worker.parts.values()) == worker.total
    assert worker.parts["targets"] == 1000
    assert worker.parts["scratch"] == 4 * MODEL.parameters
    assert "loading" not in worker.parts


def test_loading_a_large_teacher_is_the_peak_on_cpus_only(load):
    config = load()
    model = replace(MODEL, parameters=10**9, bytes_on_disk=4 * 10**9)
    on_cpu, on_gpu = (teacher_memory(config, config.teachers[0], model, on_gpu=gpu) for gpu in (False, True))
    assert on_cpu.total == on_cpu.base + 8 * 10**9
    assert on_gpu.total < on_gpu.base + 5 * 10**9


def test_of_a_mixture_a_token_has_activations_of_the_experts_that_it_visits(load):
    """Twice the experts take twice their weights and the same activations; twice as many visited, more activations."""
    small = replace(MODEL, parameters=10_000_000, intermediate_size=512, experts_per_token=2)
    large, wide = replace(small, parameters=20_000_000), replace(small, intermediate_size=1024, experts_per_token=4)
    whole, more, visiting = (student_memory(load(), model) for model in (small, large, wide))
    assert (more.weights, more.activations) == (2 * whole.weights, whole.activations)
    assert visiting.weights == whole.weights
    # Two more experts of 256 features, whose gate, up, activation and product are kept, and input and output of each.
    assert visiting.activations - whole.activations == 2 * 128 * 4 * 4 * (4 * 512 + 2 * 2 * 256)


def test_experts_are_on_every_tensor_parallel_rank(load):
    """Of 10M parameters 6M are experts: with tp 2 a rank has them and half of the rest, which FSDP2 shards over dp 2."""
    mixture = replace(MODEL, expert_parameters=6_000_000, experts_per_token=2)
    worker = student_memory(load("student.parallel={dp: 2, tp: 2}"), mixture)
    assert worker.weights == 4 * 4_000_000
    assert worker.accumulated == 4 * 8_000_000
    config = load("teachers.0.parallel.tp=2")
    assert teacher_memory(config, config.teachers[0], mixture).weights == 4 * 8_000_000


def test_longer_rows_and_larger_micro_batches_cost_memory(load):
    small, long, wide = (
        student_memory(load(*overrides), MODEL).total
        for overrides in ([], ["data.max_length=256"], ["train.micro_batch_size=4"])
    )
    assert small < long == wide


@pytest.mark.parametrize(
    ("workers", "gpus", "cpus", "expected"),
    [
        (None, 0, 2, 1),
        (None, 8, 64, 2),
        (None, 2, 64, 1),
        (None, 8, 7, 1),
        (0, 8, 64, 0),
        (5, 0, 1, 5),
    ],
)
def test_aligner_pool_is_half_the_gpus_and_at_most_the_free_cores(load, workers, gpus, cpus, expected):
    overrides = [] if workers is None else [f"aligner.workers={workers}"]
    config = load("student.parallel.dp=4", "teachers.0.parallel.tp=2", *overrides)
    assert aligner_workers(config, gpus=gpus, cpus=cpus) == expected


def test_configurable_losses_and_exports_match_the_losses_package():
    from typing import get_args

    from distill_rl.config.schema import CrossTokenizerLoss, TeacherLoss
    from distill_rl.losses import METHODS

    assert {method: (*exports, "hidden") for method, exports in METHODS.items()} == EXPORTS
    assert set(get_args(CrossTokenizerLoss)) == set(METHODS)
    assert set(get_args(TeacherLoss)) == {"same", *METHODS}


def test_engines_of_vllm_are_one_actor_each_and_share_no_several_gpus(load):
    in_vllm = "teachers.0.backend=vllm"
    config = load(in_vllm, "teachers.0.parallel={dp: 2, tp: 4}")
    assert compute_groups(config)[1] == 2
    assert gpu_groups(config)[1] == 8
    assert gpus_of_ranks(config) == compute_groups(config)[0] + 8
    single = load(in_vllm, "teachers.0.parallel={dp: 2, tp: 1}", "student.parallel.dp=2")
    assert gpus_of_ranks(single) == 2 * single.student.parallel.tp
    assert sizes(config, Facts(gpus=8)).world["big"] == "dp 2 = 2 vLLM engines, each with 4 GPUs"
    assert sizes(single, Facts(gpus=2)).world["big"] == "dp 2 = 2 vLLM engines, each with 0.4 of a GPU"
    alone = load(in_vllm, "teachers.0.parallel={dp: 1, tp: 1}", "ray.placement=disaggregated")
    assert sizes(alone, Facts(gpus=2)).world["big"] == "dp 1 = 1 vLLM engine, each with a GPU"
    assert sizes(alone, Facts()).world["big"] == "dp 1 = 1 vLLM engine"


def test_memory_of_a_teacher_in_vllm_is_not_estimated(load):
    known = Facts(student=MODEL, teachers=(TeacherFacts(MODEL, 32000),), vocabulary_size=32000)
    assert [worker.worker for worker in sizes(load(), known).memory] == ["student", "big"]
    assert [worker.worker for worker in sizes(load("teachers.0.backend=vllm"), known).memory] == ["student"]


@pytest.mark.parametrize(("epochs", "batch"), [(1.0, 12), (2.5, 6), (1.0, 15), (0.5, 16), (3.0, 4), (None, 5)])
def test_the_epochs_of_a_run_are_those_that_the_loader_gives(tmp_path, epochs, batch):
    """The last batch of a run may be shorter than the others."""
    (tmp_path / "16.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(16)))
    config = Config()
    config.train.global_batch_size, config.train.epochs = batch, epochs
    config.train.steps = 7 if epochs is None else None
    source = open_source(DataConfig(path=str(tmp_path / "16.jsonl")))
    loader = Loader(source, config, TrainState())
    read = sum(len(each.documents) for each in loader)
    assert sizes(config, Facts(num_documents=16)).epochs == read / 16
