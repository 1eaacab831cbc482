"""Every setting with its default, which is defined nowhere else.

`docs/configuration.md` is generated from this package: the string under a field is its documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal, Optional

from distill_rl.config.schema.backends import VllmConfig
from distill_rl.config.schema.data import DataConfig
from distill_rl.config.schema.data import SourceConfig as SourceConfig
from distill_rl.config.schema.data import ValidationConfig as ValidationConfig
from distill_rl.config.schema.fields import FRACTION, NOT_EMPTY, NOT_NEGATIVE, POSITIVE, POSITIVE_FRACTION
from distill_rl.config.schema.fields import MISSING as MISSING
from distill_rl.config.schema.models import CrossTokenizerLoss, StudentConfig, TeacherConfig
from distill_rl.config.schema.models import LoraConfig as LoraConfig
from distill_rl.config.schema.models import ParallelConfig as ParallelConfig
from distill_rl.config.schema.models import TeacherLoss as TeacherLoss
from distill_rl.config.schema.slurm import SlurmConfig

# OmegaConf reads these annotations at run time and knows Optional[...], not `X | None`.
# ruff: noqa: UP045


@dataclass
class RunConfig:
    name: str = field(default="", metadata=NOT_EMPTY)
    """Name of the run and of its directory. Empty: the name of the YAML file without its extension."""
    dir: str = field(default="runs", metadata=NOT_EMPTY)
    """Folder that contains the run directories."""
    seed: int = field(default=0, metadata=NOT_NEGATIVE)
    """Seed of the data order, the validation split, dropout and every other random draw."""


MIXED = ("jsd", "skewed_forward_kl", "skewed_reverse_kl")
"""The divergences with a mixture weight, `loss.beta`."""


@dataclass
class LossConfig:
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd"] = (
        "forward_kl"
    )
    """Divergence between the next-token distributions of teacher and student; docs/losses.md compares the choices."""
    beta: float = field(default=0.5, metadata=FRACTION)
    """Mixture weight from 0 to 1: of the teacher's distribution in jsd and skewed_forward_kl, of the student's in skewed_reverse_kl. The other divergences ignore it."""
    top_k: int = field(default=64, metadata=POSITIVE)
    """Number of the teacher's most likely tokens that are kept per position. The total probability of all other tokens is kept as one number."""
    draws: int = field(default=50, metadata=POSITIVE)
    """Number of tokens that a teacher with export sampled draws from its distribution at every position, at most 32767; a token that is drawn several times is sent once, with its count. More draws make the loss less noisy and the targets larger, by 6 bytes each."""
    tail: Literal["bucket", "truncate", "renormalize"] = "bucket"
    """What happens to the probability outside the top k. bucket: all other tokens are compared together, as one more outcome. truncate: it is ignored. renormalize: both distributions are rescaled to sum to 1 over the top k."""
    temperature: float = field(default=1.0, metadata=POSITIVE)
    """Softmax temperature of both models. The KD loss is multiplied by its square."""
    kd_weight: float = field(default=1.0, metadata=NOT_NEGATIVE)
    """Weight of the distillation loss. 0: no teacher is started, and the student is trained on the data alone."""
    ce_weight: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Weight of the cross-entropy with the data. 0: the student learns from the teachers alone."""
    router_weight: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Weight of the load-balancing loss of a student that is a mixture of experts (docs/losses.md). It is 1 if all experts get the same number of tokens, and grows with the imbalance; usual weights are 0.0001 to 0.01. 0: it is only measured, as train/router_balance."""
    dynamic_scale: Literal["off", "on", "exact"] = "off"
    """Minimise r KD + CE with r = CE / KD instead of the sum weighted by kd_weight and ce_weight. off: never. on: with r from the previous step. exact: with r from the current step, which takes a second pass over the batch."""
    cross_tokenizer: Optional[CrossTokenizerLoss] = "hybrid"
    """Loss for a teacher whose tokenizer differs from the student's; docs/losses.md compares the choices. null: such a teacher is an error."""
    chunk_average: Literal["mean", "chain"] = "mean"
    """How `xtoken`, `gold`, `hkl` and `uld` combine the predictions of a chunk's tokens into one. mean: their mean. chain: the prediction of the first token, times the probability of the chunk's other tokens. `xtoken` and `uld` teach more with chain, `gold` with mean (docs/results.md)."""
    uncommon_top_k: int = field(default=8192, metadata=POSITIVE)
    """Number of columns that `gold`, `hkl` and `uld` compare by rank, that is, after sorting."""
    gold_relaxed: bool = False
    """Also accept vocabulary matches with a weight of at least 0.6 in `gold` and `hkl`."""
    alm_tau: float = field(default=100.0, metadata=POSITIVE)
    """Temperature τ of the likelihoods P and Q of whole chunks, which `alm` compares, and `hybrid` for chunks that are not one token on both sides. The loss is τ · D(P^(1/τ), Q^(1/τ)). 100: text that the teacher finds unlikely is taught, too. 1: it teaches next to nothing, which is better if many labels are wrong (docs/losses.md)."""
    fused: Literal["auto", "on", "off"] = "auto"
    """Compute the student's logits a few rows at a time, inside the loss, so that they never exist as a whole. The result is the same but for rounding. auto: if the logits of a micro-batch would take more than 256 MiB on a rank. With n teachers the output layer is computed n times."""
    backend: Literal["auto", "eager", "triton"] = "auto"
    """Implementation of the loss. eager: torch. triton: the Triton kernels, which need a GPU; what has no kernel is an error. auto: the kernels where Triton works and has one, otherwise torch. The teacher's top k is computed in the same way, but by torch where there is no kernel."""


@dataclass
class ProjectionConfig:
    path: Optional[str] = None
    """File with the vocabulary projection for the one teacher that has another tokenizer. null: the projection is built, and kept in run.dir/.projections."""
    learnable: bool = False
    """Train the values of the projection; which of them are not zero stays fixed. Needs the loss `xtoken`."""


@dataclass
class OptimizerConfig:
    lr: float = field(default=2e-5, metadata=POSITIVE)
    """Peak learning rate of AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's decay rates of the first and the second moment."""
    eps: float = field(default=1e-8, metadata=POSITIVE)
    """AdamW's epsilon, which is added to the denominator of the update."""
    weight_decay: float = field(default=0.01, metadata=NOT_NEGATIVE)
    """Decoupled weight decay. Not applied to norms and biases."""


@dataclass
class ScheduleConfig:
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = field(default=0, metadata=NOT_NEGATIVE)
    """Optimizer steps of linear warm-up. 0: none. If schedule.steps is null and the run is shorter than this, a tenth of the run, which is said."""
    min_lr_ratio: float = field(default=0.0, metadata=FRACTION)
    """Learning rate at the end of the schedule, as a fraction of the peak."""
    hold_steps: int = field(default=0, metadata=NOT_NEGATIVE)
    """Optimizer steps at the peak rate, between the warm-up and the fall of the rate."""
    steps: Optional[int] = field(default=None, metadata=POSITIVE)
    """Optimizer step at which the schedule ends. null: the last step of the run. Set it for a run that you will extend later."""


@dataclass
class TrainConfig:
    steps: Optional[int] = field(default=None, metadata=POSITIVE)
    """Maximum number of optimizer steps. null: no limit but train.epochs and train.minutes. The run ends at train.steps, train.epochs or train.minutes, whichever comes first; one of them must be set."""
    epochs: Optional[float] = field(default=None, metadata=POSITIVE)
    """Maximum number of passes over the data, each in a new order; need not be whole. null: no limit but train.steps and train.minutes."""
    minutes: Optional[float] = field(default=None, metadata=POSITIVE)
    """Minutes that the training steps are to take, without starting and ending the workers. The first steps are timed; from their speed the run chooses train.steps, and so the end of the schedule, which it says and writes to config.yaml. Until then the learning rate stays at its peak (schedule.hold_steps). A run that is resumed with this setting takes as long again; one that is resumed with the steps of its own file (RUN/config.yaml) ends where it would have. null: no limit."""
    global_batch_size: int = field(default=32, metadata=POSITIVE)
    """Documents per optimizer step."""
    micro_batch_size: int = field(default=4, metadata=POSITIVE)
    """Rows per forward and backward pass of one student rank."""
    max_grad_norm: float = field(default=1.0, metadata=NOT_NEGATIVE)
    """Maximum norm of the global gradient; larger gradients are clipped to it. 0: no clipping."""
    deterministic: bool = False
    """Use torch.use_deterministic_algorithms on GPUs, and let nothing depend on how much of their memory is free. On CPUs a run is always bit-reproducible."""


@dataclass
class DPConfig:
    backend: Literal["numba", "numpy", "cuda"] = "numba"
    """Implementation of the dynamic-programming fallback. numba: compiled for the CPU. numpy: on the CPU, not compiled. cuda: on a GPU; needs aligner.num_gpus."""
    band: int = field(default=64, metadata=POSITIVE)
    """Half-width, in tokens, of the band that the dynamic programme searches."""


@dataclass
class AlignerConfig:
    method: Literal["auto", "bytes", "offsets", "dp"] = "auto"
    """How the two tokenizations of a text are matched: by the bytes that the tokens spell, by the tokenizers' character offsets, or by dynamic programming. auto: the first of these that is exact."""
    workers: Optional[int] = field(default=None, metadata=NOT_NEGATIVE)
    """Number of actors that tokenise, align and pack. null: half the number of GPUs that the run uses, but at least 1 and at most the number of free cores. 0: no actors; the driver does the work."""
    num_gpus: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Fraction of a GPU for each aligner actor; needed by dp.backend cuda. 0: none."""
    deadline_s: float = field(default=120.0, metadata=POSITIVE)
    """Seconds that an aligner may take for its part of a batch, for the rows of a batch, and, after either has failed twice, for each document."""
    max_bad_rows: int = field(default=10, metadata=NOT_NEGATIVE)
    """Number of rows that a run may leave out because an aligner fails or hangs on them; one more ends the run. They are listed in bad_rows.jsonl."""
    fast_ids: bool = True
    """Compare the bytes of ids without a text in compiled code, and build the tables of canonical ids for dp only once. false: neither, with the same results."""
    dp: DPConfig = field(default_factory=DPConfig)


@dataclass
class PrefetchConfig:
    depth: int = field(default=1, metadata=NOT_NEGATIVE)
    """Number of batches that the aligners and the teachers may run ahead of the student. 0: no look-ahead. Does not change one bit of the result."""
    slots: Optional[int] = field(default=None, metadata=POSITIVE)
    """Number of micro-batches of targets that the ring of a teacher rank holds. null: enough for depth + 1 batches; for a teacher that exports logits, enough for two sub-batches of the fewest rows that the student and all teachers divide evenly, unless loss.dynamic_scale or teachers[].score needs the whole batch at once. If the ring holds fewer than two batches, each batch is processed in sub-batches of half a ring."""


@dataclass
class CheckpointConfig:
    every: int = field(default=0, metadata=NOT_NEGATIVE)
    """Optimizer steps between checkpoints. 0: only when the run ends or is stopped."""
    keep_last: int = field(default=2, metadata=POSITIVE)
    """Number of newest checkpoints that are kept."""
    keep_best: int = field(default=0, metadata=NOT_NEGATIVE)
    """Number of best checkpoints, by checkpoint.best_by, that are kept in addition to the newest. 0: none."""
    best_by: str = field(default="validation/kl_loss", metadata=NOT_EMPTY)
    """Metric by which checkpoints are compared for keep_best: validation/kl_loss or validation/nll_loss, lower is better; validation/top1_agreement, validation/acceptance (not with export topk, which tells bounds only) or eval/SUITE, the score of a suite during training, higher is better. With several teachers, validation/kl_loss/NAME is that of one, and agreement and acceptance always are. A checkpoint of a step at which it is not measured is not compared."""
    async_save: bool = True
    """Write checkpoints while training continues, from a copy in host memory. An error ends the run at the next save or at the end. false: training waits until a checkpoint is written."""
    resume: Optional[str] = None
    """Checkpoint to resume from. null: none, start afresh. latest: the newest checkpoint. auto: the newest checkpoint if there is one, otherwise start afresh. Any other value: the path of a step folder (.../step-100)."""


@dataclass
class FaultsConfig:
    student_restarts: int = field(default=3, metadata=NOT_NEGATIVE)
    """Number of times that a run may restart the student, all its ranks together, after one of them died or did not answer in time. The time of train.minutes then begins anew, unless the last step has been chosen. Training goes on from the newest checkpoint (checkpoint.every), with the same losses; the teachers are kept. 0: the run ends."""
    teacher_restarts: int = field(default=3, metadata=NOT_NEGATIVE)
    """Number of times that a run may restart a teacher replica after one of its processes died. Unfinished batches are repeated, with the same losses."""
    lost_teacher: Literal["fail", "drop_and_reweight"] = "fail"
    """What to do when a teacher cannot be restarted. fail: end the run. drop_and_reweight: continue with the other teachers, whose weights are scaled up."""
    aligner_restarts: int = field(default=10, metadata=NOT_NEGATIVE)
    """Number of times that a run may restart an aligner that died or hung."""
    skipped_steps: int = field(default=3, metadata=NOT_NEGATIVE)
    """Number of consecutive steps that may be skipped because their loss or gradient is NaN, Inf or a spike (see spike_window); one more ends the run. 0: the first ends the run."""
    spike_window: int = field(default=0, metadata=NOT_NEGATIVE)
    """Also skip a step whose loss or gradient norm exceeds spike_factor times the median of this many previous steps. 0: never."""
    spike_factor: float = field(default=10.0, metadata=POSITIVE)
    """Multiple of the median above which a loss or gradient norm is a spike; see spike_window. Not of a loss whose median is not positive."""
    report_after_s: float = field(default=60.0, metadata=POSITIVE)
    """Seconds after which a wait is reported with the state of every worker involved; it is reported again each time the same interval has passed."""
    stopped_s: float = field(default=10.0, metadata=POSITIVE)
    """Seconds after which a worker whose process is stopped (SIGSTOP) counts as dead."""


@dataclass
class EvaluateParallelConfig:
    tp: int = field(default=1, metadata=POSITIVE)
    """Tensor-parallel size: number of GPUs, or of processes on CPUs, that every layer of an evaluated model is split over. They share the GPUs of the ranks (evaluate.gpu_share) unless as many are free; the backend vllm needs free ones."""


@dataclass
class EvaluateConfig:
    every: int = field(default=0, metadata=NOT_NEGATIVE)
    """Optimizer steps between validation passes, which measure KD and CE on held-out text. 0: only at the end of the run."""
    suites: list[str] = field(default_factory=list)
    """Names of evaluation suites, or paths of .py files with suites of your own. They run on the exported student at the end and on copies of the student during training, which they do not change by one bit."""
    at_start: bool = False
    """Also measure the untrained student, as step 0: the validation pass, if there are validation data, and the suites. Not repeated when a run is resumed."""
    suites_every: Optional[int] = field(default=None, metadata=NOT_NEGATIVE)
    """Optimizer steps between evaluations on the suites. null: evaluate.every. 0: only at the end of the run."""
    data: Optional[str] = None
    """File or folder with the data of the suites; required if evaluate.suites is set."""
    backend: Literal["hf", "vllm"] = "hf"
    """Engine that runs the suites. hf: transformers. vllm: vLLM, which needs the `vllm` extra."""
    parallel: EvaluateParallelConfig = field(default_factory=EvaluateParallelConfig)
    limit: Optional[int] = field(default=None, metadata=POSITIVE)
    """Maximum number of items per suite during training. null: all. They are among the items of any larger limit."""
    final_limit: Optional[int] = field(default=None, metadata=POSITIVE)
    """Maximum number of items per suite when the exported student is evaluated at the end. null: all."""
    num_fewshot: Optional[int] = field(default=None, metadata=NOT_NEGATIVE)
    """Number of worked examples, for the suites that take any. null: each suite's default."""
    max_new_tokens: Optional[int] = field(default=None, metadata=POSITIVE)
    """Maximum number of tokens of a completion, for the suites that generate. null: each suite's default."""
    samples: int = field(default=4, metadata=NOT_NEGATIVE)
    """Number of items per suite whose completions are added to samples.jsonl at every evaluation, always the same items. 0: none."""
    teachers: bool = False
    """Also evaluate every teacher once, when training begins, on the items that are used during training. The evaluator needs the memory for it."""
    batch_size: int = field(default=64, metadata=POSITIVE)
    """Number of prompts that are run together, for backend hf."""
    gpu_share: float = field(default=0.2, metadata=POSITIVE_FRACTION)
    """Fraction of the first GPU, and of its memory, that the evaluator gets if no GPU is free for it; with tensor parallelism, of each of the first GPUs. The ranks on that GPU are limited to the rest."""
    timeout_s: float = field(default=7200.0, metadata=POSITIVE)
    """Seconds that one evaluation may take."""

    @property
    def engine(self) -> str:
        """The program that runs the suites, with batches and processes of its own, by name; empty: this package."""
        return VllmConfig.engine if self.backend == "vllm" else ""


@dataclass
class ObserveConfig:
    every: Optional[int] = field(default=None, metadata=POSITIVE)
    """Optimizer steps between records in metrics.jsonl, TensorBoard and trackers; a record has the metrics of all steps since the last. null: every step, or in a run of more than 20,000 steps every n-th, so that there are at most 20,000 records."""
    table_every: int = field(default=50, metadata=NOT_NEGATIVE)
    """Optimizer steps between tables in driver.log that show where the time of a step went. 0: never."""
    timeline: bool = False
    """Write timeline.json beside driver.log: a Chrome trace of what every worker did, for chrome://tracing or ui.perfetto.dev."""
    tensorboard: bool = True
    """Write TensorBoard files to logs/tensorboard/."""
    wandb: bool = False
    """Also log to Weights & Biases. Needs the `wandb` extra; reads WANDB_API_KEY, WANDB_PROJECT and WANDB_MODE."""
    mlflow: bool = False
    """Also log to MLflow, at MLFLOW_TRACKING_URI or else in files in the run directory. Needs the `mlflow` extra."""


@dataclass
class RayConfig:
    address: Optional[str] = None
    """Address of the Ray cluster to join. null: start Ray on this machine and stop it at the end of the run."""
    num_cpus: Optional[int] = field(default=None, metadata=POSITIVE)
    """Number of logical CPUs of a Ray that the run starts. null: one per actor, but at least as many as the machine has."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """How actors are placed on GPUs. colocated: teachers and student share GPUs by fractions, except teachers that vLLM divides over several GPUs. disaggregated: every rank has a GPU of its own, and teachers and student have nodes of their own if there are enough."""
    placement_timeout_s: float = field(default=60.0, metadata=POSITIVE)
    """Seconds to wait for the requested resources before the run ends with a table of what was requested and what is available. Time in which other runs of this package are in the way does not count."""
    queue_timeout_s: float = field(default=86400.0, metadata=NOT_NEGATIVE)
    """Seconds that a run waits for others on the cluster that it joins. Whoever came first goes first; the place in the queue is printed, and shown by distill-rl status. 0: it does not wait."""
    relays: Literal["auto", "on", "off"] = "auto"
    """Whether the driver calls neighbouring ranks of a student or of a teacher through a process beside them, at most eight ranks through one, and eight of these processes through another one. It takes time off the driver and changes no result. auto: in a run of more than 4 of these ranks."""
    start_timeout_s: float = field(default=300.0, metadata=POSITIVE)
    """Seconds that all workers together may take to load their models."""
    step_timeout_s: float = field(default=900.0, metadata=POSITIVE)
    """Seconds that each stage of a step may take; if a batch is processed in sub-batches, each stage of a sub-batch."""
    dashboard: bool = False
    """Start Ray's dashboard on 127.0.0.1, with a Ray that the run starts. Needs the `dashboard` extra."""


@dataclass
class CaptureConfig:
    format: Literal["exact", "compact"] = "exact"
    """How `distill-rl capture` writes targets. exact: as they are sent, so that training has the bits of a live run. compact: ids entropy-coded and log-probs quantised, in about a tenth of the bytes (docs/store.md). A cache is always exact."""
    mass: Optional[float] = field(default=None, metadata=POSITIVE_FRACTION)
    """For format compact: keep only the fewest entries of a token whose probability adds up to this. null: keep all loss.top_k."""
    write_every_s: float = field(default=30.0, metadata=POSITIVE)
    """Seconds after which targets that were computed are written, for `distill-rl capture` and teachers[].cache. A process that is killed loses at most these seconds of work. They are also written whenever 64 MiB have come together."""


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
    """How targets travel from teacher to student. auto: chosen at the start, and named in the log and by `distill-rl check`. object_store: through Ray's object store. shared_memory, cuda_ipc: through host or GPU memory, within one node. local: within one process, for tests and notebooks; refused for a run."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def running_teachers(self) -> list[TeacherConfig]:
        """The teachers that the run starts: none if loss.kd_weight is 0."""
        return list(self.teachers) if self.loss.kd_weight > 0 else []

    def without_student(self) -> Config:
        """This configuration for a run that starts teachers only: the student has no ranks, whatever it says of rows."""
        parallel = replace(self.student.parallel, dp=0, replicas=1)
        return replace(self, student=replace(self.student, parallel=parallel))

    def rows_of(self, teacher: TeacherConfig) -> int:
        """Rows per forward pass of one rank of the teacher."""
        return self.train.micro_batch_size if teacher.micro_batch_size is None else teacher.micro_batch_size

    def length_of(self, teacher: TeacherConfig) -> int:
        """Most document tokens in a row of a teacher, if it has its own tokenizer."""
        return self.data.max_length if teacher.max_length is None else teacher.max_length

    @property
    def repeats_documents(self) -> bool:
        """Whether every epoch of the run has the documents of the first one.

        Not if texts are joined, which depends on the batch that they are in, nor if sources are mixed, some of which an
        epoch may read in part.
        """
        return not self.data.concatenate and len(self.data.sources) < 2

    @property
    def wants_whole_batch(self) -> bool:
        """Whether the first gradient of a batch depends on all targets of the batch.

        It does with loss.dynamic_scale, or with teachers that are weighted by a score other than `static`.
        """
        return self.loss.dynamic_scale != "off" or any(teacher.score != "static" for teacher in self.running_teachers)

    def splits_documents(self, kind: str) -> bool:
        """Whether documents that are longer than a row become several pieces; otherwise they are cut.

        Args:
            kind: of the data, `text` or `messages`.
        """
        if self.data.long_documents == "auto":
            return kind == "text" and not self.wants_whole_batch
        return self.data.long_documents == "split"

    @property
    def width_divisor(self) -> int:
        """What divides the width of every row, so that student and teachers can divide it over their ranks (parallel.sp)."""
        return lcm(self.student.parallel.sp, *(teacher.parallel.sp for teacher in self.running_teachers))
