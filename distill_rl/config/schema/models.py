"""The settings of student and teachers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional

from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema.backends import SECTIONS, STORED, EndpointConfig, Origin, StoreConfig, VllmConfig
from distill_rl.config.schema.fields import FRACTION, MISSING, NOT_EMPTY, NOT_NEGATIVE, POSITIVE
from distill_rl.errors import problem

if TYPE_CHECKING:
    from distill_rl.config.schema import Config

# OmegaConf reads these annotations at run time and knows Optional[...], not `X | None`.
# ruff: noqa: UP045


@dataclass
class LoraConfig:
    rank: int = field(default=16, metadata=POSITIVE)
    """Rank of the update of each layer: W + alpha / rank · B A, with A [rank, in] and B [out, rank]."""
    alpha: Optional[float] = field(default=None, metadata=POSITIVE)
    """Scale of the update; it is divided by the rank. null: twice the rank."""
    dropout: float = field(default=0.0, metadata=FRACTION)
    """Share of a layer's input that is dropped, for its update only, at random in training."""
    targets: Optional[list[str]] = None
    """Linear layers that get an update, by the end of their names: [q_proj, v_proj], or [mlp.down_proj]. null: all but the output layer."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole, by the end of their names: [embed_tokens, lm_head]. Naming one of two tied embeddings trains both, which are one table."""

    @property
    def scale(self) -> float:
        """By which B A is multiplied."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


CrossTokenizerLoss = Literal["hybrid", "xtoken", "gold", "hkl", "uld", "alm", "strict"]
"""Losses over chunks of text, for a teacher whose tokenizer differs from the student's."""
TeacherLoss = Literal["same", CrossTokenizerLoss]
Attention = Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2"]


@dataclass
class ParallelConfig:
    dp: int = field(default=1, metadata=POSITIVE)
    """Data-parallel size. Student: number of ranks that share the parameters as FSDP2 shards (see replicas). Teacher: number of copies of the model, each on its own ranks."""
    tp: int = field(default=1, metadata=POSITIVE)
    """Tensor-parallel size: number of ranks that every layer is split over. A teacher with backend vllm has one rank per copy, which takes this many GPUs, or this many processes on CPUs."""
    replicas: int = field(default=1, metadata=POSITIVE)
    """Number of copies of the student's parameters (hybrid sharding). Each copy is sharded over dp / replicas x sp neighbouring ranks; with one copy per node, only gradients travel between nodes. 1: a single copy, sharded over all dp x sp ranks. Must be 1 for teachers."""
    sp: int = field(default=1, metadata=POSITIVE)
    """Sequence-parallel size, for long rows: number of ranks that divide the positions of every row, so that each keeps 1 / sp of the activations and logits. Attention exchanges positions for heads, so sp must divide the attention heads (of a tensor-parallel rank). The student's parameters are sharded over dp x sp ranks; a teacher's are whole on every one. For teachers with backend hf."""

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows: each on a part of the positions, or of every layer."""
        return self.sp * self.tp


@dataclass
class StudentConfig:
    model: str = field(default=MISSING, metadata=NOT_EMPTY)
    """Folder of a Hugging Face causal LM (safetensors), or its name on the hub."""
    tokenizer: Optional[str] = None
    """Folder or hub name of the tokenizer. null: the model's own."""
    revision: Optional[str] = None
    """Revision of the model on the hub. null: the newest."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of the forward and backward pass. The weights that are trained, and the optimizer state, are always fp32."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpointing: bool = False
    """Recompute the activations of each decoder layer in the backward pass instead of storing them, which saves memory and costs time."""
    activation_offload: bool = False
    """Keep in host memory what activation_checkpointing still keeps, the input of every decoder layer, from the forward to the backward pass. Needs activation_checkpointing, and has an effect on GPUs only."""
    attention: Attention = "auto"
    """Attention implementation. auto: on GPUs without masks, with the variable-length kernels of flash_attn (if it is installed) or of torch for packed rows, where the model supports them; otherwise sdpa, or eager for a model that caps attention scores, or for which transformers has no sdpa. varlen: always the variable-length kernels, and an error where they cannot be used. sdpa, eager, flash_attention_2: the implementation of that name in transformers; refused where it does not compute what the model asks of attention, such as a soft cap."""
    compile: bool = False
    """Compile each decoder layer with torch.compile; with parallel.tp anew for each width of the rows."""
    kernels: Literal["torch", "liger"] = "torch"
    """Implementation of the norms, the rotary embedding and the MLP. torch: that of transformers. liger: the fused kernels of liger-kernel, which need the `liger` extra, a GPU, parallel.tp 1 and a llama, mistral, qwen2 or qwen3 model."""
    gradient_sync: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are reduced over the data-parallel ranks. step: once per optimizer step; every rank then keeps a whole fp32 gradient (4 bytes per parameter / tp). micro_batch: after every micro-batch; every rank then keeps only its shard. auto: step if that whole gradient takes at most 16 GiB, otherwise micro_batch."""
    lora: Optional[LoraConfig] = None
    """Train low-rank updates of linear layers (LoRA) and leave the weights as they are, in `dtype`; `lora: {}` takes the defaults below (docs/models.md). null: all weights are trained."""
    quantization: Optional[Literal["int8", "int4", "fp8"]] = None
    """Hold the decoder layers' weights that student.lora does not train as numbers of 8 or 4 bits (QLoRA), made when the model is loaded, from which each pass makes them again in `dtype`; every data-parallel rank holds all of them. Needs student.lora and the `quantization` extra. null: in `dtype`."""

    origin: ClassVar = Origin()
    """A student is trained by this package."""
    may_be_quantized: ClassVar = False
    """A student is trained from weights that are not quantised."""

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.lora is not None


@dataclass
class TeacherConfig:
    name: str = field(default="teacher", metadata=NOT_EMPTY)
    """Name of the teacher in logs, metrics and actor names; unique among the teachers."""
    model: str = field(default=MISSING, metadata=NOT_EMPTY | {"unless": "store.path"})
    """Folder of a Hugging Face causal LM (safetensors), or its name on the hub. Not needed with backend store; if it is given, the store must be of this model. With backend endpoint: the name under which the server serves the model."""
    tokenizer: Optional[str] = None
    """Folder or hub name of the tokenizer. null: the model's own. Required with backend endpoint."""
    revision: Optional[str] = None
    """Revision of the model on the hub. null: the newest."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of the weights and the forward pass."""
    quantization: Optional[Literal["int8", "int4", "fp8", "as_stored"]] = None
    """How the weights are held, for backend hf (docs/teachers.md). int8, int4, fp8: those of the decoder layers as numbers of 8 or 4 bits, made when the model is loaded, from which each forward pass makes them again in `dtype`; needs the `quantization` extra. as_stored: the checkpoint is quantised already (GPTQ, AWQ, FP8, bitsandbytes, compressed-tensors, torchao, …), and is loaded as Transformers loads it, with parallel.tp 1. null: in `dtype`."""
    weight: float = field(default=1.0, metadata=NOT_NEGATIVE)
    """Weight of this teacher in the KD loss, relative to the sum of all teachers' weights."""
    score: Literal["static", "ce", "entropy"] = "static"
    """How the teachers' weights adapt to each batch. static: they do not. ce, entropy: each `weight` is multiplied by the softmax over the teachers of their negative cross-entropy with the batch, or of their negative entropy on it. All teachers must have the same value."""
    where: dict[str, Any] = field(default_factory=dict)
    """Rows that this teacher is asked for: a value, or a list of values, for one or more columns of the data, all of which must match. {domain: [maths, physics]} asks it for the rows whose column `domain` holds maths or physics. Other rows are trained on without it (docs/losses.md). {}: all rows."""
    weight_column: Optional[str] = field(default=None, metadata=NOT_EMPTY)
    """Column of the data with the weight of each row for this teacher, a number of 0 or more, by which its KD is multiplied; it is not asked for rows of weight 0. With `where`, read for the rows that match. null: all rows have weight 1."""
    loss: Optional[TeacherLoss] = None
    """Loss between this teacher and the student. null: token by token if both have the same tokenizer (added tokens at the end of one do not count), otherwise loss.cross_tokenizer. same: token by token, and an error if the tokenizers differ. Any other value: that cross-tokenizer loss over chunks of text, even if the tokenizers are the same."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_size: Optional[int] = field(default=None, metadata=POSITIVE)
    """Rows per forward pass of one teacher rank. null: train.micro_batch_size."""
    max_length: Optional[int] = field(default=None, metadata=POSITIVE)
    """Maximum number of tokens per row of a teacher with another tokenizer, at least data.max_length. Raise it for a tokenizer that needs more tokens than the student's: otherwise this teacher's rows are full before the student's. null: data.max_length."""
    attention: Attention = "auto"
    """Attention implementation. auto: on GPUs without masks, with the variable-length kernels of flash_attn (if it is installed) or of torch for packed rows, where the model supports them; otherwise sdpa, or eager for a model that caps attention scores, or for which transformers has no sdpa. varlen: always the variable-length kernels, and an error where they cannot be used. sdpa, eager, flash_attention_2: the implementation of that name in transformers; refused where it does not compute what the model asks of attention, such as a soft cap."""
    backend: Literal["hf", "vllm", "endpoint", "store"] = "hf"
    """Where the targets come from; a section `vllm`, `endpoint` or `store` chooses that backend, too, if this is left out. hf: the teacher runs in transformers. vllm: it runs in vLLM, which needs the `vllm` extra, export topk and loss.temperature 1 (docs/teachers.md). endpoint: a server that runs already is asked for them over HTTP (docs/teachers.md). store: they are read from a folder that `distill-rl capture` has filled (docs/store.md), and no teacher runs."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    cache: Optional[str] = field(default=None, metadata=NOT_EMPTY)
    """Folder of a store that this run fills and reads: targets are computed the first time that a document comes, and read afterwards. Made if it does not exist. For export topk or sampled."""
    export: Literal["topk", "sampled", "hidden", "logits"] = "topk"
    """What the teacher sends to the student. topk: the log-probs of the loss.top_k most likely tokens. sampled: loss.draws tokens drawn from its distribution, which estimate forward_kl without bias. hidden: its last hidden states, from which the student computes all logits with a copy of the teacher's output layer. logits: all logits. The cross-tokenizer losses `xtoken`, `gold`, `hkl`, `uld` and `strict` need hidden or logits, `hybrid` and `alm` do not take sampled."""
    wire_dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Dtype in which log-probs and logits are sent. auto: fp16 on GPUs, fp32 on CPUs. The mass outside the top k and the label's log-prob are always sent as fp32, hidden states always in the teacher's dtype, draws as integers."""

    @property
    def is_chosen_by_row(self) -> bool:
        """Whether the columns of a row say if, or how much, the teacher is asked for it."""
        return bool(self.where) or self.weight_column is not None

    @property
    def origin(self) -> Origin:
        """Where its targets come from: the section of its backend."""
        return getattr(self, self.backend, StudentConfig.origin)

    @property
    def may_be_quantized(self) -> bool:
        """Whether the weights in its folder may be quantised: the run does not read them, or reads them as they are."""
        return bool(self.origin.engine) or self.quantization == "as_stored" or not self.origin.runs_model

    @property
    def targets_store(self) -> str | None:
        """The folder of the store that the run reads its targets from, or writes them to; None without one."""
        return self.origin.folder if self.origin.is_store else self.cache

    @property
    def ranks_per_replica(self) -> int:
        """Actors that hold one copy, or work on the same rows with one each. An engine has processes of its own."""
        return 1 if self.origin.engine else self.parallel.ranks_per_row

    @property
    def ranks(self) -> int:
        """Actors of all of its copies."""
        return self.parallel.dp * self.ranks_per_replica

    @property
    def gpus_per_rank(self) -> int:
        """GPUs that one of its actors uses where there are any; 0 if it loads no model."""
        if not self.origin.runs_model:
            return 0
        return self.parallel.tp if self.origin.engine else 1

    def sent_dtype(self, *, on_gpu: bool) -> Literal["fp32", "fp16", "bf16"]:
        """The dtype in which its log-probabilities or logits are sent.

        Args:
            on_gpu: whether the run uses GPUs, which decides `auto`.
        """
        if self.wire_dtype == "auto":
            return "fp16" if on_gpu else "fp32"
        return self.wire_dtype


# What is refused, as far as it shows without opening a file or asking a server. The rules of a backend stand beside its settings.


def backend_problems(config: Config) -> Iterator[str]:
    """Yields problems of the teachers' backends and of their settings elsewhere, one line each."""
    for i, teacher in enumerate(config.teachers):
        key = f"teachers.{i}"
        yield from teacher.origin.problems(key, teacher, config)
        for section in (getattr(teacher, name) for name in SECTIONS):
            if section is not teacher.origin:
                yield from section.misplaced(key)
        if teacher.targets_store is not None and teacher.export not in STORED:
            rule = f"a store holds {' or '.join(STORED)}, and this teacher exports {teacher.export}"
            name = "store" if teacher.origin.is_store else "cache"
            remedy = f"set {key}.export=topk and a loss that works with it (docs/losses.md), or run the teacher without {name}"
            yield problem(f"{key}.{name}", rule, teacher.targets_store, remedy)
    first = {teacher.backend: teacher for teacher in reversed(config.running_teachers)}
    for teacher in first.values():
        yield from teacher.origin.of_run(teacher, config)
    folders = [teacher.targets_store for teacher in config.teachers if teacher.targets_store is not None]
    if len({Path(folder).absolute() for folder in folders}) < len(folders):
        rule = "every teacher needs a store of its own"
        yield problem("teachers", rule, ", ".join(folders), "name another folder for each of them")
    evaluate = config.evaluate
    if evaluate.teachers and evaluate.suites and not all(teacher.origin.runs_model for teacher in config.teachers):
        rule = "evaluates the teachers, and the run does not load the model of one: it is read from a store, or served"
        yield problem("evaluate.teachers", rule, "true", "leave it out")


# Teachers that are chosen by row.


def routing_problems(config: Config) -> Iterator[str]:
    """Yields problems of `teachers[].where` and `teachers[].weight_column`, and of settings that do not go with them."""
    chosen = [i for i, teacher in enumerate(config.teachers) if teacher.is_chosen_by_row]
    for i in chosen:
        for column, values in config.teachers[i].where.items():
            key = f"teachers.{i}.where"
            if not column.strip():
                yield problem(key, "must name columns of the data", repr(column))
            if values == []:
                yield problem(f"{key}.{column}", "must have at least one value", "[]", "leave the teacher out instead")
        if config.teachers[i].score != "static":
            rule = "compares the teachers on the same tokens, and where or weight_column gives each tokens of its own"
            yield problem(f"teachers.{i}.score", rule, config.teachers[i].score, "use score=static, or no such column")
    if not chosen:
        return
    key = f"teachers.{chosen[0]}.{'where' if config.teachers[chosen[0]].where else 'weight_column'}"
    if config.data.concatenate:
        rule = f"joins texts into one, and {key} may ask different teachers for them"
        yield problem("data.concatenate", rule, "true", "leave it out; data.packing puts several texts into a row")
    if config.projection.learnable:
        rule = f"needs chunks on every rank in every step, and with {key} a rank may have no row of the teacher"
        yield problem("projection.learnable", rule, "true", "leave one of them out")


# Quantised weights.


def quantization_problems(config: Config) -> Iterator[str]:
    """Yields problems of `teachers[].quantization`, and of settings that do not go with it, one line each."""
    for i, teacher in enumerate(config.teachers):
        key, value = f"teachers.{i}", teacher.quantization
        if value is None:
            continue
        if value == AS_STORED and teacher.parallel.tp > 1:
            rule = "must be 1 with quantization as_stored: weights that are stored quantised are not split over ranks"
            yield problem(f"{key}.parallel.tp", rule, teacher.parallel.tp, "set it to 1, or use the original weights")
        if value == AS_STORED and teacher.export == "hidden":
            rule = "hidden needs the output layer of unquantised weights, which the student reads from the teacher's folder"
            yield problem(f"{key}.export", rule, None, f"set {key}.export=topk, or use the original weights")
        if config.evaluate.teachers and config.evaluate.suites:
            rule = f"evaluates teachers with all of their weights; {key}.quantization is {value}"
            yield problem("evaluate.teachers", rule, "true", "leave one of them out")


# Adapters (`student.lora`).


def adapter_problems(config: Config) -> Iterator[str]:
    """Yields problems of the adapters' settings, one line each.

    An input that is dropped as a whole, lists of layers that are empty or hold an empty name, a name in both, and
    quantised weights without adapters.
    """
    lora, key = config.student.lora, "student.lora"
    if lora is None:
        if (quantization := config.student.quantization) is not None:
            rule = "is for the weights that adapters leave as they are, and all weights of this student are trained"
            yield problem("student.quantization", rule, quantization, "add student.lora={}, or leave it out")
        return
    if lora.dropout == 1:
        yield problem(f"{key}.dropout", "must be less than 1: the adapters would never see their input", lora.dropout)
    if lora.targets is not None and not lora.targets:
        yield problem(f"{key}.targets", "must name a layer", "[]", "leave it out: all linear layers get an adapter")
    for name in ("targets", "modules_to_save"):
        for i, target in enumerate(getattr(lora, name) or ()):
            if not target.strip(". "):
                yield problem(f"{key}.{name}.{i}", "must be the end of a name, such as q_proj", repr(target))
    for both in sorted({*(lora.targets or ())} & {*lora.modules_to_save}):
        rule = f"must not be in {key}.targets too: a module that is trained whole needs no adapter"
        yield problem(f"{key}.modules_to_save", rule, both, "leave one of the two out")


# Rows whose positions are divided over ranks (`parallel.sp`), and activations in host memory.


def long_row_problems(config: Config) -> Iterator[str]:
    """Yields what is wrong without opening a file, one line each.

    A teacher with sp that this package does not compute itself, compiled layers with sp, and activation offload without
    checkpointing. Whether sp divides the heads is checked where the models are opened.
    """
    student = config.student
    for i, teacher in enumerate(config.teachers):
        if teacher.parallel.sp > 1 and (teacher.origin.engine or not teacher.origin.runs_model):
            rule = "divides the positions of a teacher with backend hf only"
            yield problem(f"teachers.{i}.parallel.sp", rule, teacher.parallel.sp, "leave it at 1")
    if student.parallel.sp > 1 and student.compile:
        rule = f"layers that exchange positions for heads (student.parallel.sp={student.parallel.sp}) are not compiled"
        yield problem("student.compile", rule, "true", "leave it out, or set student.parallel.sp=1")
    if student.activation_offload and not student.activation_checkpointing:
        rule = "moves what activation checkpointing keeps"
        remedy = "add student.activation_checkpointing=true"
        yield problem("student.activation_offload", rule, "true", remedy)
