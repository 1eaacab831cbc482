"""What is known about a run before it starts: the contents of its files, and which of its teachers run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from math import lcm

from distill_rl.config.schema import Config, TeacherConfig

TOKENS, UNKNOWN = "same", "?"
"""How a teacher with the student's tokenizer is compared, token by token; and one whose tokenizer is not known yet."""
GPU_WIDTH_MULTIPLE = 128
"""On GPUs the width of rows is a multiple of this: attention kernels get whole tiles, and few widths occur. At
S % 128 == 64, cuDNN's backward gives NaN gradients on H100 and H200 (pytorch#196678)."""
CPU_WIDTH_MULTIPLE = 8
"""The same on CPUs, where every position of padding costs time."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a student with adapters trains, in numbers of parameters."""

    layers: int
    """Layers with an adapter."""
    trained: int
    """Of the adapters and of modules that are trained whole."""
    frozen: int
    """Of the model, without those modules."""
    narrow: int = 0
    """Of the layers, those with fewer features than the rank."""

    def __str__(self) -> str:
        share = 100 * self.trained / max(self.trained + self.frozen, 1)
        of = f"{self.trained:,} of {self.trained + self.frozen:,} parameters, {share:.2g} %"
        narrow = f", {self.narrow} of them with fewer features than the rank" if self.narrow else ""
        return f"student: {of}; adapters of {self.layers} layers{narrow}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model, read from its folder."""

    family: str
    parameters: int
    """Tied embeddings are counted once."""
    hidden_size: int
    intermediate_size: int
    """Of the MLP of a layer; in a mixture of experts, of all experts together that a token visits."""
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    vocabulary_columns: int
    """Rows of the embedding table, padding included."""
    tied: bool
    bytes_on_disk: int
    num_experts: int = 0
    """Of a layer that is a mixture of experts; 0 for a dense model."""
    head_dim: int | None = None
    """Features per attention head; None: as many as make up the hidden size."""
    known_head: bool = False
    """Whether it is known how the family makes logits of hidden states, scales and caps included."""
    experts_per_token: int = 0
    """Routed experts that a token visits; 0 for a dense model."""
    expert_parameters: int = 0
    """Parameters of all routed experts, which tensor parallelism does not split."""
    tensors: int = 0
    """In the files; a tied output layer is not counted. 0: not known."""
    decayed: int = 0
    """Those of them to which weight decay applies."""
    adapters: AdapterFacts | None = None
    """Of a student with adapters; None: all parameters of a student are trained."""

    @property
    def head_size(self) -> int:
        """Features per attention head."""
        return self.head_dim or self.hidden_size // max(self.num_heads, 1)

    @property
    def key_size(self) -> int:
        """Features of all keys of a token, and of all values."""
        return self.head_size * self.num_key_value_heads

    @property
    def tables(self) -> int:
        """Parameters of the input embedding and the output layer."""
        return self.vocabulary_columns * self.hidden_size * (1 if self.tied else 2)

    @property
    def trained(self) -> int:
        """Parameters that a student trains."""
        return self.parameters if self.adapters is None else self.adapters.trained

    @property
    def frozen(self) -> int:
        """Parameters that it does not."""
        return 0 if self.adapters is None else self.adapters.frozen


@dataclass(frozen=True, slots=True)
class TeacherFacts:
    """What the files of a teacher contain; None for what could not be read."""

    model: ModelFacts | None = None
    vocabulary_size: int | None = None
    """Number of ids of its tokenizer or, token by token, of those that the run compares."""
    cross_tokenizer_loss: str | None = None
    """None if it is compared token by token."""
    advice: str = ""
    """Which cross-tokenizer loss suits it, by a sample of the training data; empty if there is no such sample."""
    tokens_apart: str = ""
    """Of a teacher that is compared token by token: which tokens at the end of the vocabulary only one side has, as a
    clause; empty if there are none."""


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What a sample of a source's documents says of all of them."""

    tokens_per_document: float
    """Of the student's tokenizer, before anything is cut off."""
    too_long: float
    """Share of the documents that are longer than a row, from 0 to 1; of joined texts, if texts are joined."""
    split: bool
    """Whether these are split; otherwise they are cut."""
    padding: float
    """Share of positions that are padding in steps of this source alone."""

    def __str__(self) -> str:
        long = f"{100 * self.too_long:.3g} % of the documents {'split' if self.split else 'cut'}"
        return f"{long}, {100 * self.padding:.2g} % padding"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What an optimizer step is expected to compute."""

    positions: int
    """Of the student, padding included."""
    used: float
    """Share of them that hold a token."""

    def __str__(self) -> str:
        return f"about {self.positions:,} positions per step, {100 * self.used:.3g} % of them with a token"


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What one source of the data holds."""

    name: str
    format: str
    """As `data.format`, but never `auto`."""
    documents: int | None
    """Rows to train on; None: not known before the run converts the files."""
    share: float
    """Of all documents that the run reads, from 0 to 1."""
    recognised: bool = False
    """Whether `data.format` left the format open."""
    sample: SampleFacts | None = None

    def __str__(self) -> str:
        rows = f"{'an unknown number of' if self.documents is None else f'{self.documents:,}'} rows"
        chats = {"sharegpt": "chats in ShareGPT's form", "alpaca": "chats in Alpaca's form", "messages": "chats"}
        how = " (data.format=auto)" if self.recognised else ""
        parts = [rows, f"{chats.get(self.format, 'text')}{how}", f"{100 * self.share:.4g} % of the documents"]
        if self.sample is not None:
            tokens = self.sample.tokens_per_document
            whole = "" if self.documents is None else f"about {_rounded(tokens * self.documents)} tokens, "
            parts.append(f"{whole}{tokens:,.0f} per document; of a sample: {self.sample}")
        return f"{self.name}: {', '.join(parts)}"


def _rounded(count: float) -> str:
    """A large number in words, with three digits."""
    for size, unit in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the files contain; None for what could not be read."""

    vocabulary_size: int | None = None
    """Number of ids of the student's tokenizer that the run compares: without those that some teacher which is compared
    token by token does not have."""
    num_documents: int | None = None
    """Training documents, without those held out for validation."""
    data_kind: str | None = None
    """`text` or `messages`, as found in the data."""
    sources: tuple[SourceFacts, ...] = ()
    """Of the training data."""
    step: StepFacts | None = None
    """From a sample of the training data."""
    total_steps: int | None = None
    student: ModelFacts | None = None
    teachers: tuple[TeacherFacts, ...] = ()
    """Per running teacher, in the order of the configuration."""
    gpus: int = 0
    """GPUs visible on this machine."""
    cpus: int = 1
    """Cores of this machine that this process may use."""

    def by_teacher(self, config: Config) -> list[tuple[TeacherConfig, TeacherFacts]]:
        """The running teachers with what is known about them: nothing, if their files were not read."""
        return list(zip(config.running_teachers, chain(self.teachers, repeat(TeacherFacts()))))

    def comparisons(self, config: Config) -> list[str]:
        """How each running teacher is compared: TOKENS, or the cross-tokenizer loss; UNKNOWN if that is not known yet."""
        found: list[str] = []
        for teacher, known in self.by_teacher(config):
            is_known = None not in (known.vocabulary_size, self.vocabulary_size)
            by_tokenizers = (known.cross_tokenizer_loss or TOKENS) if is_known else UNKNOWN
            found.append(teacher.loss or by_tokenizers)
        return found


def width_multiple(divisor: int, *, on_gpu: bool) -> int:
    """The width of rows is a multiple of this.

    Args:
        divisor: `Config.width_divisor`.
    """
    return lcm(GPU_WIDTH_MULTIPLE if on_gpu else CPU_WIDTH_MULTIPLE, divisor)


def row_width(longest: int, *, on_gpu: bool, divisor: int = 1) -> int:
    """Positions per row of a batch whose longest row has `longest` tokens; the positions beyond them are padding.

    The widest row of a run is therefore that of `data.max_length`, which it may exceed.

    Args:
        divisor: `Config.width_divisor`.
    """
    multiple = width_multiple(divisor, on_gpu=on_gpu)
    return -(-max(longest, 1) // multiple) * multiple
