"""Every setting and its default; nothing else holds one.

`docs/configuration.md` is generated from this file: the string under a field is its documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional

# OmegaConf reads these annotations at run time and knows Optional[...], not `X | None`.
# ruff: noqa: UP045

MISSING = "???"
"""A value that must be given, as OmegaConf marks it; the engines must not need OmegaConf to be installed."""


CrossTokenizerLoss = Literal["hybrid", "xtoken", "gold", "hkl", "uld", "alm", "strict"]
"""Losses over chunks of text, for a teacher with another tokenizer than the student's."""
TeacherLoss = Literal["same", "hybrid", "xtoken", "gold", "hkl", "uld", "alm", "strict"]
Attention = Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2"]


@dataclass
class RunConfig:
    name: str = ""
    """Name of the run and of its directory; empty: the name of the YAML file."""
    dir: str = "runs"
    """Folder that holds run directories."""
    seed: int = 0
    """Seed of the data order, of dropout and of everything else that is drawn."""


@dataclass
class ParallelConfig:
    dp: int = 1
    """Data-parallel size: FSDP2 shards for the student, replicas for a teacher."""
    tp: int = 1
    """Tensor-parallel size."""
    replicas: int = 1
    """Student only: keep so many copies of its parameters, each sharded over dp / replicas neighbouring ranks (hybrid sharding); with one copy per node only gradients travel between nodes. 1: one copy, sharded over all of dp."""


@dataclass
class StudentConfig:
    model: str = MISSING
    """Folder of a Hugging Face causal LM (safetensors), or its name on the hub."""
    tokenizer: Optional[str] = None
    """Folder or hub name of the tokenizer; null: the model's."""
    revision: Optional[str] = None
    """Hub revision of the model; null: the newest."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of forward and backward; master weights and optimizer state are always fp32."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpointing: bool = False
    """Recompute each decoder layer in backward instead of keeping its activations."""
    attention: Attention = "auto"
    """auto: on GPUs without masks, packed rows by variable-length kernels (of flash_attn if it is installed, else of torch) where the model allows; otherwise sdpa, or eager for a model that caps attention scores. varlen: these kernels, or an error. The others: implementations of transformers."""
    compile: bool = False
    """torch.compile each decoder layer."""
    kernels: Literal["torch", "liger"] = "torch"
    """Kernels of the norms, the rotary embedding and the MLP: transformers' own, or those of liger-kernel (needs the `liger` extra, a GPU and parallel.tp 1; llama, mistral, qwen2, qwen3)."""
    gradient_sync: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are reduced over data-parallel ranks: once per step, which keeps a whole fp32 gradient on every rank (4 bytes per parameter / tp), or after every micro-batch, which keeps shards only; auto: once per step where that gradient takes at most 16 GiB."""


@dataclass
class TeacherConfig:
    name: str = "teacher"
    """Name in logs, metrics and actor names; unique among the teachers."""
    model: str = MISSING
    """Folder of a Hugging Face causal LM (safetensors), or its name on the hub."""
    tokenizer: Optional[str] = None
    """Folder or hub name of the tokenizer; null: the model's."""
    revision: Optional[str] = None
    """Hub revision of the model; null: the newest."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of weights and forward."""
    weight: float = 1.0
    """Share of this teacher in the KD loss, relative to the sum over teachers."""
    score: Literal["static", "ce", "entropy"] = "static"
    """How teachers are weighed against each other: by `weight` alone, or times the softmax of their negative CE or entropy on the batch; one way for all teachers."""
    loss: Optional[TeacherLoss] = None
    """null: token by token where the tokenizer is the student's, else loss.cross_tokenizer. `same`: the tokenizer must be the student's. A method of loss.cross_tokenizer: by that one, over chunks, whatever the tokenizers."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_size: Optional[int] = None
    """Rows per forward; null: train.micro_batch_size."""
    attention: Attention = "auto"
    """auto: on GPUs without masks, packed rows by variable-length kernels (of flash_attn if it is installed, else of torch) where the model allows; otherwise sdpa, or eager for a model that caps attention scores. varlen: these kernels, or an error. The others: implementations of transformers."""
    backend: Literal["hf", "vllm"] = "hf"
    """Engine that runs the teacher."""
    export: Literal["topk", "hidden", "logits"] = "topk"
    """What the teacher hands to the student: its top_k log-probs; its last hidden states, of which the student makes all logits with the teacher's output layer; or all logits. Some losses across tokenizers need one of the latter two."""
    wire_dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Dtype in which log-probs and logits travel; auto: fp16 on GPUs, fp32 on CPUs. Rest and label log-probs are always fp32, hidden states always of the teacher's dtype."""


@dataclass
class ValidationConfig:
    path: Optional[str] = None
    """Data of its own for validation, in the format of data.path."""
    fraction: float = 0.0
    """Share of data.path held out for validation when validation.path is null; drawn by run.seed."""
    max_documents: int = 512
    """Validation stops after this many documents."""


@dataclass
class DataConfig:
    path: str = MISSING
    """Arrow folder (`save_to_disk`), an .arrow, .parquet, .json or .jsonl file, a glob of such files, or a hub name."""
    split: str = "train"
    """Split to read where the data has splits."""
    format: Literal["auto", "text", "messages"] = "auto"
    """What a row holds: text, or chat messages; auto: messages where data.messages_key is a column."""
    text_key: str = "text"
    """Column that holds the text."""
    messages_key: str = "messages"
    """Column that holds the chat: a list of {role, content}."""
    loss_on: Literal["all", "assistant"] = "all"
    """Train on all tokens, or on the assistant turns of a chat only."""
    max_length: int = 1024
    """Tokens per row; a longer document is cut and counted. Rows are then padded to a multiple of 128 positions for GPUs, of 8 for CPUs."""
    packing: bool = True
    """Put several documents into one row (first fit); attention never crosses from one to another. With a teacher of another tokenizer rows are padded instead."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)


@dataclass
class LossConfig:
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd"] = (
        "forward_kl"
    )
    """Divergence between teacher and student."""
    beta: float = 0.5
    """Mixture weight of jsd and of the skewed divergences."""
    top_k: int = 64
    """Teacher entries kept per token; the mass of all others travels as one rest bucket."""
    tail: Literal["bucket", "truncate", "renormalize"] = "bucket"
    """What becomes of the mass outside the top k."""
    temperature: float = 1.0
    """Softmax temperature of both models; the KD loss is scaled by its square."""
    kd_weight: float = 1.0
    """Weight of the distillation loss; 0: train on the data alone, without teachers."""
    ce_weight: float = 0.0
    """Weight of the cross-entropy with the data."""
    dynamic_scale: Literal["off", "on", "exact"] = "off"
    """Minimise r KD + CE instead of the weighted sum, r = CE / KD of the previous step (on), or of this step by a second sweep (exact)."""
    cross_tokenizer: Optional[CrossTokenizerLoss] = "hybrid"
    """Loss for a teacher with another tokenizer; null: all must share the student's."""
    chunk_average: Literal["mean", "chain"] = "mean"
    """How the predictions of a chunk's tokens become one, in `xtoken`, `gold`, `hkl` and `uld`: their mean, or the first one's times the chance of the chunk's other tokens."""
    uncommon_top_k: int = 8192
    """Columns of the sorted parts of `gold`, `hkl` and `uld`."""
    gold_relaxed: bool = False
    """Admit vocabulary matches of weight 0.6 and more in `gold` and `hkl`."""
    alm_tau: float = 1.0
    """Temperature of the chunk likelihoods of `alm` and of the longer chunks of `hybrid`: they are raised to 1 / alm_tau."""


@dataclass
class ProjectionConfig:
    path: Optional[str] = None
    """File of the vocabulary projection of the one teacher with another tokenizer; null: built, and kept in run.dir/.projections."""
    learnable: bool = False
    """Train the projection's values on their fixed support (xtoken)."""


@dataclass
class OptimizerConfig:
    lr: float = 2e-5
    """Peak learning rate of AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay; not applied to vectors (norms and biases)."""


@dataclass
class ScheduleConfig:
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    steps: Optional[int] = None
    """Step at which the schedule ends; null: the last step of the run. A run that is to be extended sets it."""


@dataclass
class TrainConfig:
    steps: Optional[int] = None
    """Optimizer steps; the run ends at train.steps or train.epochs, whichever comes first."""
    epochs: Optional[float] = None
    """Passes over the data, reshuffled for each."""
    global_batch_size: int = 32
    """Documents per optimizer step."""
    micro_batch_size: int = 4
    """Rows per forward and backward of one data-parallel rank."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0: never."""
    deterministic: bool = False
    """torch.use_deterministic_algorithms on GPUs. On CPUs a run is always bit-reproducible."""


@dataclass
class DPConfig:
    backend: Literal["numba", "numpy", "cuda"] = "numba"
    """Engine of the dynamic-programming fallback; cuda needs aligner.num_gpus."""
    band: int = 64
    """Half-width of the band it searches."""


@dataclass
class AlignerConfig:
    method: Literal["auto", "bytes", "offsets", "dp"] = "auto"
    """How two tokenizations are matched; auto: the first of bytes, offsets and dp that is exact."""
    workers: Optional[int] = None
    """Actors that tokenise, align and pack; null: half the job's GPUs, at least 1, at most the free cores; 0: none, the driver does it."""
    num_gpus: float = 0.0
    """Share of a GPU that each of them gets, for dp.backend cuda."""
    deadline_s: float = 120.0
    """Seconds that one batch may take, and one row of a batch that failed twice."""
    max_bad_rows: int = 10
    """Rows that a run may leave out because an aligner fails or hangs on them; they are listed in bad_rows.jsonl."""
    fast_ids: bool = True
    """Compare bytes in compiled code, and make the tables of canonical ids that dp needs once; false: neither, with the same answers."""
    dp: DPConfig = field(default_factory=DPConfig)


@dataclass
class PrefetchConfig:
    depth: int = 1
    """Batches that the aligner and the teachers may run ahead of the student; changes no bit of the result."""
    slots: Optional[int] = None
    """Micro-batches of targets that the ring of a teacher rank holds; null: those of depth + 1 batches, or where it exports logits twice the fewest that student and teachers divide evenly. With fewer than two batches hold, a batch is taught and trained on in sub-batches of half a ring."""


@dataclass
class CheckpointConfig:
    every: int = 0
    """Steps between checkpoints; 0: only when the run ends or is stopped."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_best: int = 0
    """Best checkpoints kept besides, by validation/kl_loss."""
    async_save: bool = True
    """Write checkpoints beside the training, from a copy in host memory; an error ends the run at the next save or at the end."""
    resume: Optional[str] = None
    """null: start afresh; latest: go on from the newest checkpoint; auto: the same where there is one; or a step folder."""


@dataclass
class FaultsConfig:
    teacher_restarts: int = 3
    """Teacher replicas that a run may start again after one of their processes died; their batches are done again, to the same losses."""
    lost_teacher: Literal["fail", "drop_and_reweight"] = "fail"
    """When a teacher cannot be started again: end the run, or go on with the other teachers, whose weights are scaled up."""
    aligner_restarts: int = 10
    """Aligners that a run may start again after they died or hung."""
    skipped_steps: int = 3
    """Steps in a row that may be skipped because their loss or gradient is NaN or Inf (or a spike); one more ends the run. 0: the first ends it."""
    spike_window: int = 0
    """Also skip steps whose loss or gradient norm is more than spike_factor times the median of so many steps before; 0: never."""
    spike_factor: float = 10.0
    """See spike_window."""
    report_after_s: float = 60.0
    """Seconds after which a wait is reported, with the state of every worker that is waited for, and again after as many more."""
    stopped_s: float = 10.0
    """Seconds after which a worker whose process is stopped (SIGSTOP) counts as dead."""


@dataclass
class EvaluateConfig:
    every: int = 0
    """Steps between validation passes (KD and CE on held-out text); 0: only at the end of the run."""
    suites: list[str] = field(default_factory=list)
    """Evaluation suites, or paths of .py files with suites of your own. They run at the end on the exported student, and before on copies of it, beside the training, which they do not change by one bit."""
    suites_every: Optional[int] = None
    """Steps between evaluations on the suites; null: evaluate.every; 0: only at the end of the run."""
    data: Optional[str] = None
    """File or folder of the suites' data."""
    backend: Literal["hf", "vllm"] = "hf"
    """Engine that runs the suites: Transformers, or vLLM (needs the `vllm` extra)."""
    limit: Optional[int] = None
    """Items per suite while training; null: all. At the end it is always all."""
    batch_size: int = 64
    """Prompts that are run together (hf)."""
    gpu_share: float = 0.2
    """Share of the first GPU, and of its memory, that the evaluator gets where no GPU is left over for it; the ranks there are held to the rest."""
    timeout_s: float = 7200.0
    """Seconds in which an evaluation must end."""


@dataclass
class ObserveConfig:
    every: int = 1
    """Steps between records in metrics.jsonl and TensorBoard."""
    table_every: int = 50
    """Steps between tables of where the time of a step went, in driver.log; 0: never."""
    timeline: bool = False
    """Write timeline.json beside driver.log, a Chrome trace of what every worker did (chrome://tracing or ui.perfetto.dev)."""
    tensorboard: bool = True
    """Write TensorBoard files to logs/tensorboard/."""
    wandb: bool = False
    """Log to Weights & Biases besides (needs the `wandb` extra; WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE are read)."""
    mlflow: bool = False
    """Log to MLflow besides (needs the `mlflow` extra): at MLFLOW_TRACKING_URI, or in files in the run directory."""


@dataclass
class RayConfig:
    address: Optional[str] = None
    """Cluster to join; null: start Ray on this machine and stop it at the end."""
    num_cpus: Optional[int] = None
    """Logical CPUs of a Ray started here; null: one per actor, at least the machine's."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: teachers and student share GPUs by fractions; disaggregated: every rank has a GPU of its own, teachers and student nodes of their own where there are enough."""
    placement_timeout_s: float = 60.0
    """Seconds to wait for the asked resources before giving up with a table of asked and available."""
    start_timeout_s: float = 300.0
    """Seconds in which all workers must have loaded their models."""
    step_timeout_s: float = 900.0
    """Seconds in which each stage of a step (of each of its sub-batches) must end."""
    dashboard: bool = False
    """Start Ray's dashboard on 127.0.0.1 with a Ray started here (needs the `dashboard` extra)."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    teachers: list[TeacherConfig] = field(default_factory=list)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    projection: ProjectionConfig = field(default_factory=ProjectionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    aligner: AlignerConfig = field(default_factory=AlignerConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    transport: Literal["auto", "local", "object_store", "shared_memory", "cuda_ipc"] = "auto"
    """How targets travel from teacher to student; auto: chosen at the start, and said in the log and by check."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    ray: RayConfig = field(default_factory=RayConfig)
