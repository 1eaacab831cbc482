"""The rules of student and teachers by feature, as far as they can be checked without opening a file or asking a server.

Teachers in vLLM, behind a server, from a store, chosen by row; quantised weights, adapters, long rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from distill_rl.config.facts import TOKENS, UNKNOWN, Facts
from distill_rl.config.paths import teacher_folder
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import problem
from distill_rl.system.redact import in_text


def engine_problems(config: Config) -> Iterator[str]:
    """Yields problems of teachers with backend vllm, and of its settings elsewhere, one line each."""
    for i, teacher in enumerate(config.teachers):
        key = f"teachers.{i}"
        if teacher.backend == "vllm" and teacher.export != "topk":
            rule = "must be topk with backend vllm, which gives the most likely tokens of a position only"
            yield problem(f"{key}.export", rule, teacher.export, f"set {key}.export=topk, or {key}.backend=hf")
        if teacher.backend != "vllm" and teacher.gpu_share is not None:
            rule = "is a setting of backend vllm, which takes its share of a GPU at the start"
            yield problem(f"{key}.gpu_share", rule, teacher.gpu_share, "leave it out")
    engines = [teacher.name for teacher in config.running_teachers if teacher.backend == "vllm"]
    if engines and config.loss.temperature != 1:
        rule = f"must be 1: vLLM gives the log-probs of teacher {engines[0]} at temperature 1, and those of a top k "
        rule += "do not say what they are at another one"
        yield problem("loss.temperature", rule, config.loss.temperature, "set it to 1, or the backend to hf")
    if engines and config.transport == "cuda_ipc":
        rule = f"cuda_ipc shares GPU memory, and the targets of teacher {engines[0]} (backend vllm) are in host memory"
        yield problem("transport", rule, None, "set transport=auto")


# Teachers that a server runs.

TOKEN_NAMES = re.compile(r"DISTILL_RL_(\w+_)?TOKEN")
"""Variables that `teachers[].token_env` may name. A configuration of someone else must not be able to send any other
secret of the environment, such as a cloud key, to a server of its choice."""
_ONLY_FOR = ("url", "api", "token_env", "ca_file")
"""Settings that only an endpoint has. The others have defaults, and no effect elsewhere."""


def endpoint_problems(config: Config) -> Iterator[str]:
    """Yields problems of teachers with backend endpoint, and of such settings elsewhere, one line each."""
    for i, teacher in enumerate(config.teachers):
        key = f"teachers.{i}"
        if teacher.backend == "endpoint":
            yield from _endpoint_problems(config, key, teacher)
            continue
        for name in _ONLY_FOR:
            if value := getattr(teacher, name):
                value = ", ".join(map(in_text, value)) if isinstance(value, list) else in_text(value)
                remedy = f"add {key}.backend=endpoint, or leave it out"
                yield problem(f"{key}.{name}", "is a setting of backend endpoint only", value, remedy)
    served = [teacher for teacher in config.running_teachers if teacher.backend == "endpoint"]
    if served and config.loss.temperature != 1:
        rule = f"must be 1: a server gives the log-probs of teacher {served[0].name} at temperature 1, and a top k cannot be taken to another one"
        yield problem("loss.temperature", rule, config.loss.temperature, "set loss.temperature=1")


def _endpoint_problems(config: Config, key: str, teacher: TeacherConfig) -> Iterator[str]:
    """Yields the problems of one teacher that a server runs."""
    if not teacher.url:
        yield problem(f"{key}.url", "backend endpoint needs a server", "null", f"add {key}.url=http://HOST:PORT")
    if teacher.api is None:
        rule, remedy = "backend endpoint needs the server's interface", f"add {key}.api=vllm, sglang or openai"
        yield problem(f"{key}.api", rule, "null", remedy)
    if not (teacher.tokenizer or "").strip():
        rule, remedy = "backend endpoint needs the tokenizer of the served model", f"add {key}.tokenizer=FOLDER"
        yield problem(f"{key}.tokenizer", rule, "null", remedy)
    for i, url in enumerate(teacher.url):
        yield from _of_url(f"{key}.url.{i}" if len(teacher.url) > 1 else f"{key}.url", url)
    for url, count in Counter(url.rstrip("/") for url in teacher.url).items():
        if count > 1:
            yield problem(f"{key}.url", "names a server twice", in_text(url), "name each server once")
    if teacher.token_env is not None and not TOKEN_NAMES.fullmatch(teacher.token_env):
        rule = "must be DISTILL_RL_TOKEN or DISTILL_RL_<NAME>_TOKEN, so that no other secret is ever sent"
        yield problem(f"{key}.token_env", rule, teacher.token_env, "export the token under such a name")
    if teacher.ca_file is not None and teacher.url and not any(url.startswith("https:") for url in teacher.url):
        yield problem(f"{key}.ca_file", "is used with https only", teacher.ca_file, "leave it out, or use https")
    if teacher.export != "topk":
        rule = "a server gives the most likely tokens (topk)"
        yield problem(f"{key}.export", rule, teacher.export, f"set {key}.export=topk, or run the teacher (backend=hf)")
    if teacher.parallel.tp > 1:
        rule = "no model is divided here; the server has it"
        yield problem(f"{key}.parallel.tp", rule, teacher.parallel.tp, "leave it at 1; dp clients share the rows")
    if teacher.retry_s >= config.ray.step_timeout_s:
        rule = (
            f"must be less than ray.step_timeout_s={config.ray.step_timeout_s:g}, which ends a step that waits longer"
        )
        yield problem(f"{key}.retry_s", rule, teacher.retry_s, "raise ray.step_timeout_s, or lower it")


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
        yield problem(
            key, "is the address in front of /v1", shown, f"use {in_text(url.rstrip('/').removesuffix('/v1'))}"
        )


# Teachers whose targets are read or stored.

STORED = ("topk", "sampled")
"""Values of `teachers[].export` that a store can hold."""


def store_problems(config: Config) -> Iterator[str]:
    """Yields problems of stores and caches, one line each."""
    for i, teacher in enumerate(config.teachers):
        yield from _store_problems(f"teachers.{i}", teacher)
    folders = [teacher.targets_store for teacher in config.teachers if teacher.targets_store is not None]
    if len(set(folders)) < len(folders):
        rule = "every teacher needs a store of its own"
        yield problem("teachers", rule, ", ".join(folders), "name another folder for each of them")
    if (
        config.evaluate.teachers
        and config.evaluate.suites
        and not all(teacher.runs_model for teacher in config.teachers)
    ):
        rule = "evaluates the teachers, and the run does not load the model of one: it is read from a store, or served"
        yield problem("evaluate.teachers", rule, "true", "leave it out")


def _store_problems(key: str, teacher: TeacherConfig) -> Iterator[str]:
    """Yields the problems of one teacher."""
    if teacher.backend == "store" and teacher.store is None:
        yield problem(f"{key}.store", "backend store needs the folder of a store", "null", f"add {key}.store=FOLDER")
    if teacher.backend != "store" and teacher.store is not None:
        remedy = f"add {key}.backend=store to read from it, or use {key}.cache to fill it"
        yield problem(f"{key}.store", "is read with backend store only", teacher.store, remedy)
    if teacher.backend == "store" and teacher.cache is not None:
        yield problem(f"{key}.cache", "is filled by a teacher that computes", teacher.cache, "leave it out")
    if teacher.targets_store is not None and teacher.export not in STORED:
        rule = f"a store holds {' or '.join(STORED)}, and this teacher exports {teacher.export}"
        name = "store" if teacher.backend == "store" else "cache"
        remedy = (
            f"set {key}.export=topk and a loss that works with it (docs/losses.md), or run the teacher without {name}"
        )
        yield problem(f"{key}.{name}", rule, teacher.targets_store, remedy)
    if teacher.only_reads and teacher.parallel.tp > 1:
        rule = "a store is read, and no model is divided"
        yield problem(f"{key}.parallel.tp", rule, teacher.parallel.tp, "leave it at 1; dp readers share the rows")
    if (
        teacher.backend == "store"
        and teacher.runs_model
        and teacher.store
        and teacher.model == teacher_folder(teacher.store)
    ):
        rule = "missing: live runs the teacher for what the store lacks"
        yield problem(
            f"{key}.model", rule, "missing value", f"add {key}.model=PATH, or set {key}.missing to skip or fail"
        )


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
        if teacher.backend == "vllm":
            rule = "is a setting of backend hf; vllm reads a quantised checkpoint as its config.json says"
            yield problem(f"{key}.quantization", rule, value, f"leave it out, or set {key}.backend=hf")
        if teacher.backend == "endpoint":
            rule = "is a setting of backend hf; the server of an endpoint has loaded its model already"
            yield problem(f"{key}.quantization", rule, value, "leave it out")
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
        if teacher.parallel.sp > 1 and (teacher.in_vllm or not teacher.runs_model):
            rule = "divides the positions of a teacher with backend hf only"
            yield problem(f"teachers.{i}.parallel.sp", rule, teacher.parallel.sp, "leave it at 1")
    if student.parallel.sp > 1 and student.compile:
        rule = f"layers that exchange positions for heads (student.parallel.sp={student.parallel.sp}) are not compiled"
        yield problem("student.compile", rule, "true", "leave it out, or set student.parallel.sp=1")
    if student.activation_offload and not student.activation_checkpointing:
        rule = "moves what activation checkpointing keeps"
        remedy = "add student.activation_checkpointing=true"
        yield problem("student.activation_offload", rule, "true", remedy)


def chunk_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yields teachers that are compared by chunks of text although the student's rows are divided, one line each.

    A chunk may lie on both sides of a border between ranks, and then no rank has its tokens.
    """
    sp = config.student.parallel.sp
    if sp == 1:
        return
    for teacher, method in zip(config.running_teachers, facts.comparisons(config)):
        if method not in (TOKENS, UNKNOWN):
            rule = f"must be 1: teacher {teacher.name} is compared by chunks of text ({method}), which may cross the border between two ranks"
            yield problem(
                "student.parallel.sp", rule, sp, "set student.parallel.tp or activation_checkpointing instead"
            )
