"""Asks the servers of teachers that are served whether they can do what the run needs (`teacher.endpoint.probe`)."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from distill_rl.config.schema import Config
from distill_rl.errors import first_line, problem
from distill_rl.models.families import engine_length_problem, length_limit
from distill_rl.run.opened import OpenedRun, OpenedTeacher, RunFindings
from distill_rl.system.redact import in_text

if TYPE_CHECKING:
    import numpy as np

    from distill_rl.teacher.endpoint import Probed

_DOCUMENTS, _TOKENS = 8, 512
"""Documents that are scored to measure, and most tokens of each."""


def check_endpoints(
    run: OpenedRun, documents: Sequence[Mapping[str, Any]], findings: RunFindings, *, ask: bool
) -> None:
    """Adds to the findings what served teachers cannot do, and a note on what each does.

    Args:
        documents: a sample of the training data; may be empty.
        ask: False: the servers need not run yet. They are then asked when the run starts, which a note says.
    """
    config = run.config
    for opened in run.teachers:
        settings, key = opened.settings, f"{opened.key}.endpoint"
        if not settings.origin.is_served:
            continue
        if not ask:
            findings.notes.append(f"{key}.url: the server is asked when the run starts")
            continue
        # Without a usable address nothing can be asked; without a tokenizer, whether the server answers.
        unusable = tuple(f"{key}.{name}" for name in ("url", "api", "token_env"))
        if any(text.startswith(unusable) for text in settings.origin.problems(opened.key, settings, config)):
            continue
        probed = findings.attempt(f"{key}.url", partial(_probe, config, opened, documents))
        if probed is None:
            continue
        probed.problems += _length_problems(config, opened, probed)
        findings.problems += probed.problems
        if not probed.problems:
            findings.notes.append(_note(config, opened, probed))


def _probe(config: Config, opened: OpenedTeacher, documents: Sequence[Mapping[str, Any]]) -> Probed:
    from distill_rl.teacher.base import token_of
    from distill_rl.teacher.endpoint import Probed, probe, sample_of_ids

    settings, tokenizer = opened.settings, opened.tokenizer
    length = config.length_of(settings)
    try:
        token = token_of(settings)
    except Exception as error:
        return Probed([problem(f"{opened.key}.endpoint.token_env", first_line(error))])
    try:
        ssl.create_default_context(cafile=settings.endpoint.ca_file)
    except OSError as error:
        rule, remedy = "must be a file with certificates (PEM)", "name that of the server's authority"
        found = f"{settings.endpoint.ca_file}: {first_line(error)}"
        return Probed([problem(f"{opened.key}.endpoint.ca_file", rule, found, remedy)])
    ids = None
    if tokenizer is not None and opened.vocabulary_size:
        ids = sample_of_ids(opened.vocabulary_size, tokenizer.all_special_ids, length)
    prompts = [] if tokenizer is None else list(_prompts(tokenizer, documents, min(length, _TOKENS)))
    k = config.loss.top_k if opened.vocabulary_size is None else min(config.loss.top_k, opened.vocabulary_size)
    return probe(opened.key, settings, token, ids=ids, documents=prompts, k=k, length=length)


def _length_problems(config: Config, opened: OpenedTeacher, probed: Probed) -> Iterator[str]:
    """Yields at most one line: the servers' context is not that for which the model's frequencies are right."""
    from distill_rl.models.files import read_config

    if opened.folder is None or not (opened.folder / "config.json").is_file():
        return
    model, length = read_config(opened.folder, quantized=True), config.length_of(opened.settings)
    if broken := engine_length_problem(model, "an inference server", length, max(length + 1, probed.context or 0)):
        limit = length_limit(model)
        assert limit is not None
        remedy = "serve the teacher with backend hf"
        if limit.kind == "longrope":
            start = f"start the server with a context of {limit.length} tokens"
            remedy = f"{start} and use data.max_length={limit.length - 1}, or {remedy}"
        yield problem(f"{opened.key}.endpoint.url", broken, None, remedy)


def _prompts(tokenizer: Any, documents: Sequence[Mapping[str, Any]], length: int) -> Iterator[np.ndarray]:
    """Yields a few documents as ids, int32 [≤ length]; of chats, what is said in them."""
    import numpy as np

    found = 0
    for document in documents:
        text = document.get("text")
        if text is None:
            text = "\n".join(str(turn.get("content") or "") for turn in document.get("messages") or ())
        ids = np.array(tokenizer(text[: 16 * length], add_special_tokens=False)["input_ids"][:length], np.int32)
        if len(ids) > 1:
            yield ids
            found += 1
        if found == _DOCUMENTS:
            return


def _note(config: Config, opened: OpenedTeacher, probed: Probed) -> str:
    settings = opened.settings
    parts = [f"raw log-probs of the top {config.loss.top_k} and of every id that was tried"]
    if probed.context is not None:
        parts.append(f"a context of {probed.context:,} tokens")
    if probed.mass is not None and probed.tokens_per_s is not None:
        parts.append(f"{100 * probed.mass:.4g} % of the probability in the top k of a sample")
        parts.append(f"about {probed.tokens_per_s:,.0f} tokens/s")
    endpoint = settings.endpoint
    where = ", ".join(map(in_text, endpoint.url))
    line = f"{opened.key}.endpoint.url: {settings.model} is served by {endpoint.api} at {where}: {', '.join(parts)}"
    if endpoint.token_env is not None and any(url.startswith("http:") for url in endpoint.url):
        line += "; its token is sent unencrypted, as the address is not https"
    return line
