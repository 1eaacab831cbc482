"""The rules of teachers that a server runs, as far as they can be checked without asking it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import problem
from distill_rl.system.redact import in_text

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
            yield from _of_teacher(config, key, teacher)
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


def _of_teacher(config: Config, key: str, teacher: TeacherConfig) -> Iterator[str]:
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
