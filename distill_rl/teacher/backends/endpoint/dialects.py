"""What each kind of server is asked for the log-probs of a prompt, and how it answers.

Answers are read by msgspec into the few fields that count, which checks their types on the way and skips the rest, such
as the text of every token (docs/decisions/0035-served-teachers.md has the figures).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np

from distill_rl.errors import NumericsError
from distill_rl.teacher.backends.endpoint.answers import WrongAnswer, require_model, require_prompt, scores_of
from distill_rl.teacher.backends.endpoint.client import Damaged
from distill_rl.teacher.backends.scores import Scores

_NO_NUMBER = re.compile(rb"[\[:,]\s*(-?Infinity|NaN)\b")
_TOKEN_ID = "token_id:"
# Whatever the model's generation_config.json says, which some servers apply to requests that leave these out.
_PLAIN = {"temperature": 0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Dialect(Protocol):
    """One kind of server."""

    path: str
    """Of scoring requests."""
    names_model: bool
    """Whether every answer names its model."""

    def request(self, model: str, prompt: Sequence[int], k: int, **changes: Any) -> bytes:
        """The body of a request for the log-probs of a prompt's tokens and of the k most likely ones at each position.

        Args:
            changes: sampling parameters, which must not change log-probs; for the probe.
        """
        ...

    def scores(self, body: bytes, model: str, prompt: np.ndarray, k: int) -> Scores:
        """Reads an answer.

        Raises:
            Damaged: it is no JSON.
            WrongAnswer: it is not about this prompt and model, or has another form.
            NumericsError: it has log-probs that are none.
        """
        ...


class _VllmEntry(msgspec.Struct):
    logprob: float


class _VllmChoice(msgspec.Struct):
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, _VllmEntry] | None]


class _VllmAnswer(msgspec.Struct):
    model: str
    choices: list[_VllmChoice]


class Vllm:
    """`vllm serve`: /v1/completions with its parameter `prompt_logprobs`.

    The log-probs are the model's own, at temperature 1: sampling parameters do not act on prompts.
    """

    path, names_model = "/v1/completions", True

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_VllmAnswer)

    def request(self, model: str, prompt: Sequence[int], k: int, **changes: Any) -> bytes:
        asked = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": k, "return_token_ids": True}
        return msgspec.json.encode(asked | _PLAIN | changes)

    def scores(self, body: bytes, model: str, prompt: np.ndarray, k: int) -> Scores:
        answer = _decoded(self._decoder, body)
        require_model(model, answer.model)
        choice = _only(answer.choices)
        require_prompt(prompt, np.array(choice.prompt_token_ids))
        positions = _after_first(choice.prompt_logprobs)
        counts, total = _counts(positions)
        ids = np.fromiter(chain.from_iterable(positions), np.int64, total)
        entries = [entry.logprob for position in positions for entry in position.values()]
        return scores_of(prompt, ids, np.array(entries, np.float64), counts, k, None)


class _SglangEntry(msgspec.Struct, array_like=True):
    logprob: float | None
    id: int


class _SglangMeta(msgspec.Struct):
    input_token_logprobs: list[_SglangEntry]
    input_top_logprobs: list[list[_SglangEntry] | None]


class _SglangAnswer(msgspec.Struct):
    meta_info: _SglangMeta


class Sglang:
    """SGLang's own interface, /generate. Its answers do not name the model, so that /v1/models is asked before every batch."""

    path, names_model = "/generate", False

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_SglangAnswer)

    def request(self, model: str, prompt: Sequence[int], k: int, **changes: Any) -> bytes:
        asked = {
            "input_ids": prompt,
            "sampling_params": _PLAIN | {"max_new_tokens": 1} | changes,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
            "return_text_in_logprobs": False,
        }
        return msgspec.json.encode(asked)

    def scores(self, body: bytes, model: str, prompt: np.ndarray, k: int) -> Scores:
        meta = _decoded(self._decoder, body).meta_info
        require_prompt(prompt, np.array([entry.id for entry in meta.input_token_logprobs]))
        following = _numbers([entry.logprob for entry in meta.input_token_logprobs[1:]])
        positions = _after_first(meta.input_top_logprobs)
        counts, total = _counts(positions)
        ids = np.fromiter((entry.id for position in positions for entry in position), np.int64, total)
        logprobs = _numbers([entry.logprob for position in positions for entry in position])
        return scores_of(prompt, ids, logprobs, counts, k, following)


class _OpenAiLogprobs(msgspec.Struct):
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class _OpenAiChoice(msgspec.Struct):
    logprobs: _OpenAiLogprobs


class _OpenAiAnswer(msgspec.Struct):
    model: str
    choices: list[_OpenAiChoice]


class OpenAi:
    """OpenAI's /v1/completions with `echo`, as far as a server gives tokens as `token_id:N`: texts are ambiguous.

    One token is generated, because many servers refuse to generate none; its log-probs are ignored.
    """

    path, names_model = "/v1/completions", True

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_OpenAiAnswer)

    def request(self, model: str, prompt: Sequence[int], k: int, **changes: Any) -> bytes:
        asked = {"model": model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": k}
        return msgspec.json.encode(asked | {"return_tokens_as_token_ids": True} | _PLAIN | changes)

    def scores(self, body: bytes, model: str, prompt: np.ndarray, k: int) -> Scores:
        answer = _decoded(self._decoder, body)
        require_model(model, answer.model)
        logprobs = _only(answer.choices).logprobs
        length = len(prompt)
        if not length <= len(logprobs.tokens) <= length + 1:
            rule = f"must give log-probs of the prompt's {length} tokens (echo)"
            raise WrongAnswer("the server", rule, len(logprobs.tokens), "use api: vllm or sglang for such a server")
        require_prompt(prompt, _ids(logprobs.tokens[:length]))
        positions = _after_first(logprobs.top_logprobs[:length])
        counts, total = _counts(positions)
        ids = _ids([token for position in positions for token in position])
        values = np.fromiter(chain.from_iterable(position.values() for position in positions), np.float64, total)
        return scores_of(prompt, ids, values, counts, k, None)


DIALECTS: dict[str, type[Vllm] | type[Sglang] | type[OpenAi]] = {"vllm": Vllm, "sglang": Sglang, "openai": OpenAi}
"""By `teachers[].api`."""


class ModelCard(msgspec.Struct):
    """An entry of /v1/models."""

    id: str
    max_model_len: int | None = None
    """Most tokens of a request, generated ones included; None: the server does not say."""


class _Models(msgspec.Struct):
    data: list[ModelCard]


def models_of(body: bytes) -> list[ModelCard]:
    """Reads an answer of /v1/models.

    Raises:
        WrongAnswer: it is none.
    """
    try:
        return msgspec.json.decode(body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise WrongAnswer("/v1/models", "must list the server's models", str(error), "see teachers[].url") from None


def _decoded(decoder: Any, body: bytes) -> Any:
    """An answer as the decoder's type.

    Raises:
        Damaged, NumericsError, WrongAnswer: as for `Dialect.scores`.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        if "logprob" in text and "got `null`" in text and "Expected `float`" in text:
            raise _not_a_number("null") from None
        remedy = "see teachers[].api; an older server may lack what is needed"
        raise WrongAnswer("the server", "answers in another form", text, remedy) from None
    except msgspec.MsgspecError as error:
        if found := _NO_NUMBER.search(body):
            raise _not_a_number(found[1].decode()) from None
        raise Damaged(f"an answer of {len(body):,} bytes that is no JSON: {error}") from None


def _not_a_number(found: str) -> NumericsError:
    return NumericsError("the server", "log-probs must be numbers", found, "see the server's log and weights")


def _only(choices: list[Any]) -> Any:
    """The one choice of an answer."""
    if len(choices) != 1:
        raise WrongAnswer("the server", "must answer with one choice", len(choices))
    return choices[0]


def _after_first(positions: Sequence[Any]) -> list[Any]:
    """The entries of all positions but the first, which nothing precedes.

    Raises:
        WrongAnswer: there are none at some position.
    """
    rest = list(positions[1:])
    if None in rest:
        raise WrongAnswer("the server", "must give log-probs of every token of the prompt", "none of some")
    return rest


def _counts(positions: Sequence[Any]) -> tuple[np.ndarray, int]:
    """Entries of each position, and of all."""
    counts = np.fromiter(map(len, positions), np.int64, len(positions))
    return counts, int(counts.sum())


def _numbers(values: list[float | None]) -> np.ndarray:
    """fp64 of values that must not be null."""
    if None in values:
        raise _not_a_number("null")
    return np.array(values, np.float64)


def _ids(tokens: Sequence[str]) -> np.ndarray:
    """int64 ids of tokens that are written `token_id:N`.

    Raises:
        WrongAnswer: they are texts, from which no id follows.
    """
    start = len(_TOKEN_ID)
    try:
        if not all(token.startswith(_TOKEN_ID) for token in tokens):
            raise ValueError
        return np.fromiter((int(token[start:]) for token in tokens), np.int64, len(tokens))
    except ValueError:
        found = next((token for token in tokens if not token[start:].isdecimal()), "")
        rule = "must give tokens by their ids (token_id:N), because texts are ambiguous"
        remedy = "start vLLM with --return-tokens-as-token-ids, or use api: vllm or sglang"
        raise WrongAnswer("the server", rule, repr(found[:40]), remedy) from None
