"""Removes secrets from text and settings before they are written or printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"
_NAME = re.compile(
    r"(?:^|[_.\-]|(?-i:(?<=[a-z])(?=[A-Z])))(token|secret|password|passwd|key|apikey|credentials?)$", re.IGNORECASE
)
_COLUMN_NAMES = frozenset({"text_key", "messages_key", "tools_key"})
_IN_URL = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
_IN_QUERY = re.compile(r"(?<=[?&])([\w.-]*(?:token|secret|passw(?:or)?d|key|signature|(?<![a-z0-9])sig|credential)=)[^&#\s]+", re.IGNORECASE)  # fmt: skip
# Some can begin ordinary words, so at least one digit is required after them.
_BY_SHAPE = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"(?:hf_|gh[pousr]_|glpat-|github_pat_|sk-(?:proj|ant|svcacct|admin|or)-|xox[abeoprs]-|pypi-AgE)[A-Za-z0-9_-]{16,}"
    r"|(?:sk-|nvapi-|xai-|pplx-)(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}"
    r"|(?:gsk_|npm_|r8_)[A-Za-z0-9]{32,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[A-Za-z0-9_-]{35}"
    r"|eyJ[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]*){2,4})"  # JSON Web Tokens: {" in base64
)
_BEARER = re.compile(r"(?i:(?<![a-z0-9])(bearer|authorization: *basic) +)[A-Za-z0-9._~+/-]{16,}=*")


def in_text(text: str) -> str:
    """The text with `<redacted>` in place of every secret that can be recognised in it.

    These are users and passwords in URLs, the values of secrets in their queries, JSON Web Tokens, what follows
    `Bearer` or `Authorization: Basic` (16 characters or more), and what has the form of a token of the Hugging Face hub,
    GitHub, GitLab, Slack, AWS, PyPI, npm, Google (API keys), OpenAI, Anthropic, OpenRouter, NVIDIA, Groq, xAI, Perplexity
    or Replicate. Other secrets are not recognised.
    """
    if "://" in text:
        text = _IN_QUERY.sub(rf"\1{REDACTED}", _IN_URL.sub(REDACTED, text))
    return _BEARER.sub(rf"\1 {REDACTED}", _BY_SHAPE.sub(REDACTED, text))


def redact(tree: Any, name: str = "") -> Any:
    """A copy of nested dicts and lists with `<redacted>` in place of every secret.

    Secrets are all values under a key like `token` or `hub_password`, however deeply nested, and those that `in_text`
    finds inside a text. `text_key`, `messages_key` and `tools_key` name columns, not secrets. Tuples become lists; None and empty
    texts stay.

    Args:
        name: the key under which the tree stands, which may itself mark it as a secret.
    """
    secret = bool(_NAME.search(name)) and name not in _COLUMN_NAMES
    if isinstance(tree, dict):
        return {key: redact(value, name if secret else str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact(value, name) for value in tree]
    if secret and tree not in (None, ""):
        return REDACTED
    return in_text(tree) if isinstance(tree, str) else tree


# What child processes may see of this one's environment.

_ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHON.*|VIRTUAL_ENV|XDG_.*|OMP_.*|MKL_.*|MALLOC_.*"
    r"|VLLM_(?!API_KEY).*|CUDA_.*|NVIDIA_.*|NUMBA_.*|NCCL_.*|GLOO_.*|TORCH.*|PYTORCH_.*|TRITON_.*|TOKENIZERS_PARALLELISM|RAY_.*|DISTILL_RL_.*"
    r"|HF_.*|HUGGINGFACE_.*|TRANSFORMERS_.*|DISABLE_TELEMETRY|DO_NOT_TRACK|SSL_CERT_(?:FILE|DIR)"
)
"""The only variables of the driver's environment that its actors see."""
SECRET = re.compile(
    r"(?!HF_HUB_DISABLE_IMPLICIT_TOKEN$).*(KEY|TOKEN|SECRET|PASSW(OR)?D|CREDENTIALS?)(_ID)?", re.IGNORECASE
)
"""Variables among them that hold a secret all the same, like NVIDIA_API_KEY. Ray's token is passed as a file."""


def allowed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that Ray's processes may see: those on an allow-list, without those that hold a secret."""
    allowed = {name: value for name, value in environment.items() if _ALLOWED.fullmatch(name)}
    return {name: value for name, value in allowed.items() if not SECRET.fullmatch(name) and not _IN_URL.search(value)}
