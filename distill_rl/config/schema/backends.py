"""Where a teacher's targets come from: for each backend its settings, what follows from them, and their rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Optional
from urllib.parse import urlsplit

from distill_rl.config.schema.fields import NOT_EMPTY, NOT_NEGATIVE, POSITIVE, POSITIVE_FRACTION
from distill_rl.errors import problem
from distill_rl.system.redact import in_text

if TYPE_CHECKING:
    from distill_rl.config.schema import Config
    from distill_rl.config.schema.models import TeacherConfig

# OmegaConf reads these annotations at run time and knows Optional[...], not `X | None`.
# ruff: noqa: UP045

SHARED_ENGINE = 0.4
"""Fraction of a GPU that an engine gets beside other ranks, unless `gpu_share` says otherwise."""
STORED = ("topk", "sampled")
"""Values of `teachers[].export` that a store can hold."""
TOKEN_NAMES = re.compile(r"DISTILL_RL_(\w+_)?TOKEN")
"""Variables that `token_env` may name. A configuration of someone else must not be able to send any other secret of the
environment, such as a cloud key, to a server of its choice."""


@dataclass
class Origin:
    """What is asked of every backend, with the answers of `hf`: this package computes the targets, in transformers.

    `hf` has no settings of its own. Those of its weights (dtype, quantization, attention) hold for every model that this
    package runs, that of a store with `missing: live` included.
    """

    engine: ClassVar[str] = ""
    """The program that runs the model with attention, parallel plans, batches and quantised weights of its own, by name."""
    package: ClassVar[str] = ""
    """The package that it needs, and the extra that has it; empty: none."""
    is_served: ClassVar[bool] = False
    """Whether a server runs the model."""
    is_store: ClassVar[bool] = False
    """Whether targets are read from a store."""

    @property
    def folder(self) -> str | None:
        """The folder of that store."""
        return None

    @property
    def teacher_folder(self) -> str | None:
        """The folder in it with the files that describe its teacher: all that a model's folder has but weights."""
        return str(Path(self.folder) / "teacher") if self.folder else None

    @property
    def only_reads(self) -> bool:
        """Whether all targets are read from a store."""
        return False

    @property
    def skips_missing(self) -> bool:
        """Whether documents whose targets the store lacks are left out."""
        return False

    @property
    def runs_model(self) -> bool:
        """Whether the run loads the model: not if all of its targets are read from a store, or a server has it."""
        return not (self.is_served or self.only_reads)

    def share_of_gpu(self, *, shared: bool) -> float:
        """Fraction of the memory of its GPUs that an engine takes.

        Args:
            shared: whether other ranks use the same GPU.
        """
        return 1.0

    def takes(self, *, on_gpu: bool) -> str:
        """What an engine takes of the memory, in words."""
        return ""

    def processes(self, clients: str) -> str:
        """What the teacher's processes do, in words, if they run no model.

        Args:
            clients: their number in words.
        """
        return ""

    def no_effect(self, teacher: TeacherConfig) -> Iterator[tuple[str, ...]]:
        """Yields a reason, and settings of a teacher that have no effect because it has this backend."""
        for section in (teacher.endpoint, teacher.store):
            if section is not self:
                yield section.unused

    unused: ClassVar[tuple[str, ...]] = ()
    """Why settings of this section have no effect for a teacher with another backend, and these settings; others are refused (`misplaced`)."""

    def problems(self, key: str, teacher: TeacherConfig, config: Config) -> Iterator[str]:
        """Yields what is against a teacher that has this backend, one line each.

        Args:
            key: of the teacher, such as `teachers.0`.
        """
        yield from ()

    def misplaced(self, key: str) -> Iterator[str]:
        """Yields settings of this backend that a teacher with another one must not have, one line each."""
        yield from ()

    def of_run(self, teacher: TeacherConfig, config: Config) -> Iterator[str]:
        """Yields what the rest of the run has against this backend, one line each.

        Args:
            teacher: the first running one that has it.
        """
        yield from ()


@dataclass
class VllmConfig(Origin):
    gpu_share: Optional[float] = field(default=None, metadata=POSITIVE_FRACTION)
    """Fraction of the memory of each of its GPUs that a teacher with backend vllm may use. null: all of it, or 0.4 of a GPU that it shares with other ranks, which are limited to the rest."""

    engine = "vLLM"
    package = "vllm"

    def no_effect(self, teacher: TeacherConfig) -> Iterator[tuple[str, ...]]:
        yield from super().no_effect(teacher)
        yield "vLLM chooses its attention itself", "attention"

    def share_of_gpu(self, *, shared: bool) -> float:
        if self.gpu_share is not None:
            return self.gpu_share
        return SHARED_ENGINE if shared else 1.0

    def takes(self, *, on_gpu: bool) -> str:
        share = "its share of the GPU" if on_gpu else "weights, a step, and VLLM_CPU_KVCACHE_SPACE GiB (default 1)"
        return f"vLLM takes {share}"

    def problems(self, key: str, teacher: TeacherConfig, config: Config) -> Iterator[str]:
        if teacher.export != "topk":
            rule = "must be topk with backend vllm, which gives the most likely tokens of a position only"
            yield problem(f"{key}.export", rule, teacher.export, f"set {key}.export=topk, or {key}.backend=hf")
        if teacher.quantization is not None:
            rule = "is a setting of backend hf; vllm reads a quantised checkpoint as its config.json says"
            yield problem(f"{key}.quantization", rule, teacher.quantization, f"leave it out, or set {key}.backend=hf")

    def misplaced(self, key: str) -> Iterator[str]:
        if self.gpu_share is not None:
            rule = "is a setting of backend vllm, which takes its share of a GPU at the start"
            yield problem(f"{key}.vllm.gpu_share", rule, self.gpu_share, "leave it out")

    def of_run(self, teacher: TeacherConfig, config: Config) -> Iterator[str]:
        if config.loss.temperature != 1:
            rule = f"must be 1: vLLM gives the log-probs of teacher {teacher.name} at temperature 1, and those of a top k do not say what they are at another one"
            yield problem("loss.temperature", rule, config.loss.temperature, "set it to 1, or the backend to hf")
        if config.transport == "cuda_ipc":
            rule = f"cuda_ipc shares GPU memory, and the targets of teacher {teacher.name} (backend vllm) are in host memory"
            yield problem("transport", rule, None, "set transport=auto")


@dataclass
class EndpointConfig(Origin):
    url: list[str] = field(default_factory=list, metadata={"one": True})
    """Address of the server, such as http://host:8000. A list: servers of the same model, which share the work; while one of them does not answer, the others do its part."""
    api: Optional[Literal["vllm", "sglang", "openai"]] = None
    """Interface of the server. vllm, sglang: of these programs. openai: any server whose /v1/completions gives log-probs of the prompt (`echo`) with tokens as `token_id:N`."""
    token_env: Optional[str] = field(default=None, metadata=NOT_EMPTY)
    """Name of the environment variable that holds the server's token (API key): DISTILL_RL_TOKEN, or a name such as DISTILL_RL_BIG_TOKEN. null: none is sent."""
    ca_file: Optional[str] = field(default=None, metadata=NOT_EMPTY)
    """PEM file with the certificate authority of an https server. null: those that the machine trusts."""
    concurrency: int = field(default=16, metadata=POSITIVE)
    """Most documents for which one teacher process waits at each url at a time."""
    request_timeout_s: float = field(default=120.0, metadata=POSITIVE)
    """Seconds that one request may take."""
    retry_s: float = field(default=300.0, metadata=NOT_NEGATIVE)
    """Seconds for which a document's request is repeated while no server gives an answer, for instance because it restarts; then the run ends."""

    is_served = True

    unused = (
        "the teacher is not behind a server (backend: endpoint)",
        "endpoint.concurrency", "endpoint.request_timeout_s", "endpoint.retry_s",
    )  # fmt: skip

    def processes(self, clients: str) -> str:
        return f"{clients} to ask {', '.join(map(in_text, self.url))}"

    def problems(self, key: str, teacher: TeacherConfig, config: Config) -> Iterator[str]:
        section = f"{key}.endpoint"
        if not self.url:
            remedy = f"add {section}.url=http://HOST:PORT"
            yield problem(f"{section}.url", "backend endpoint needs a server", "null", remedy)
        if self.api is None:
            rule, remedy = "backend endpoint needs the server's interface", f"add {section}.api=vllm, sglang or openai"
            yield problem(f"{section}.api", rule, "null", remedy)
        if not (teacher.tokenizer or "").strip():
            rule, remedy = "backend endpoint needs the tokenizer of the served model", f"add {key}.tokenizer=FOLDER"
            yield problem(f"{key}.tokenizer", rule, "null", remedy)
        for i, url in enumerate(self.url):
            yield from _of_url(f"{section}.url.{i}" if len(self.url) > 1 else f"{section}.url", url)
        for url, count in Counter(url.rstrip("/") for url in self.url).items():
            if count > 1:
                yield problem(f"{section}.url", "names a server twice", in_text(url), "name each server once")
        if self.token_env is not None and not TOKEN_NAMES.fullmatch(self.token_env):
            rule = "must be DISTILL_RL_TOKEN or DISTILL_RL_<NAME>_TOKEN, so that no other secret is ever sent"
            yield problem(f"{section}.token_env", rule, self.token_env, "export the token under such a name")
        if self.ca_file is not None and self.url and not any(url.startswith("https:") for url in self.url):
            yield problem(f"{section}.ca_file", "is used with https only", self.ca_file, "leave it out, or use https")
        if teacher.export != "topk":
            rule = "a server gives the most likely tokens (topk)"
            remedy = f"set {key}.export=topk, or run the teacher (backend=hf)"
            yield problem(f"{key}.export", rule, teacher.export, remedy)
        if teacher.quantization is not None:
            rule = "is a setting of backend hf; the server of an endpoint has loaded its model already"
            yield problem(f"{key}.quantization", rule, teacher.quantization, "leave it out")
        if teacher.parallel.tp > 1:
            rule = "no model is divided here; the server has it"
            yield problem(f"{key}.parallel.tp", rule, teacher.parallel.tp, "leave it at 1; dp clients share the rows")
        if self.retry_s >= config.ray.step_timeout_s:
            limit = f"{config.ray.step_timeout_s:g}"
            rule = f"must be less than ray.step_timeout_s={limit}, which ends a step that waits longer"
            yield problem(f"{section}.retry_s", rule, self.retry_s, "raise ray.step_timeout_s, or lower it")

    def misplaced(self, key: str) -> Iterator[str]:
        # The other settings have defaults, and no effect.
        for name in ("url", "api", "token_env", "ca_file"):
            if value := getattr(self, name):
                value = ", ".join(map(in_text, value)) if isinstance(value, list) else in_text(value)
                remedy = f"add {key}.backend=endpoint, or leave it out"
                yield problem(f"{key}.endpoint.{name}", "is a setting of backend endpoint only", value, remedy)

    def of_run(self, teacher: TeacherConfig, config: Config) -> Iterator[str]:
        if config.loss.temperature != 1:
            rule = f"must be 1: a server gives the log-probs of teacher {teacher.name} at temperature 1, and a top k cannot be taken to another one"
            yield problem("loss.temperature", rule, config.loss.temperature, "set loss.temperature=1")


def _of_url(key: str, url: str) -> Iterator[str]:
    """Yields at most one problem of an address."""
    shown = in_text(url)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        yield problem(key, f"must be an address such as http://host:8000 ({error})", shown)
        return
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
        yield problem(key, "must be an address such as http://host:8000", shown)
    elif parts.username is not None or parts.password is not None:
        yield problem(key, "must not hold a password", shown, "put a token in a variable and name it in token_env")
    elif parts.query or parts.fragment:
        yield problem(key, "must end with the host, the port or a path", shown, "leave out what begins with ? or #")
    elif parts.path.rstrip("/").endswith("/v1"):
        address = in_text(url.rstrip("/").removesuffix("/v1"))
        yield problem(key, "is the address in front of /v1", shown, f"use {address}")


@dataclass
class StoreConfig(Origin):
    path: Optional[str] = field(default=None, metadata=NOT_EMPTY)
    """Folder of the store; `store: FOLDER` is short for it."""
    missing: Literal["fail", "skip", "live"] = "fail"
    """What to do about documents that the store does not have. fail: refuse to start. skip: train without them. live: run the teacher for their pieces, which needs its model."""

    is_store = True

    unused = "the teacher is not read from a store (backend: store)", "store.missing"

    def no_effect(self, teacher: TeacherConfig) -> Iterator[tuple[str, ...]]:
        yield from super().no_effect(teacher)
        if self.only_reads:
            # Without a model of its own, the teacher is described by the store and by its tokenizer.
            described = ["tokenizer"] if teacher.model != self.teacher_folder else []
            yield "its targets are read from a store, as they were captured", "wire_dtype", "quantization", *described

    @property
    def folder(self) -> str | None:
        return self.path

    @property
    def only_reads(self) -> bool:
        return self.missing != "live"

    @property
    def skips_missing(self) -> bool:
        return self.missing == "skip"

    def processes(self, clients: str) -> str:
        return f"{clients} to read {self.path}" if self.only_reads else ""

    def problems(self, key: str, teacher: TeacherConfig, config: Config) -> Iterator[str]:
        if self.path is None:
            remedy = f"add {key}.store=FOLDER"
            yield problem(f"{key}.store.path", "backend store needs the folder of a store", "null", remedy)
        if teacher.cache is not None:
            yield problem(f"{key}.cache", "is filled by a teacher that computes", teacher.cache, "leave it out")
        if self.only_reads and teacher.parallel.tp > 1:
            rule = "a store is read, and no model is divided"
            yield problem(f"{key}.parallel.tp", rule, teacher.parallel.tp, "leave it at 1; dp readers share the rows")
        if not self.only_reads and self.path and teacher.model == self.teacher_folder:
            rule = "missing: live runs the teacher for what the store lacks"
            remedy = f"add {key}.model=PATH, or set {key}.store.missing to skip or fail"
            yield problem(f"{key}.model", rule, "missing value", remedy)

    def misplaced(self, key: str) -> Iterator[str]:
        if self.path is not None:
            remedy = f"add {key}.backend=store to read from it, or use {key}.cache to fill it"
            yield problem(f"{key}.store", "is read with backend store only", self.path, remedy)


SECTIONS: dict[str, type[Origin]] = {"vllm": VllmConfig, "endpoint": EndpointConfig, "store": StoreConfig}
"""The backends that have settings of their own, and where these are."""
FLAT = {
    "store" if entry.name == "path" else entry.name: f"{section}.{entry.name}"
    for section, kind in SECTIONS.items()
    for entry in fields(kind)
}
"""Key of a teacher → the setting of a section that it was before there were sections; `store` is short for store.path."""
