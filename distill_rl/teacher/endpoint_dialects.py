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

from distill_rl.errors import NumericsError, WorkerError
from distill_rl.teacher.base import MASS_TOLERANCE, Scores
from distill_rl.teacher.endpoint_client import Damaged

# From the entries of an answer to `Scores`: k per position, most likely first, none of them taken on trust.

ABSENT = -9999.0
"""What servers write for the log-prob of a token that is impossible, because JSON has no −inf."""
_TIE = 1e-3
"""How much less likely than a token that was left out the k-th may be: log-probs may have been rounded."""


class WrongAnswer(WorkerError):
    """An answer that is not about what was asked."""


def scores_of(
    prompt: np.ndarray,
    ids: np.ndarray,
    logprobs: np.ndarray,
    counts: np.ndarray,
    k: int,
    next_logprobs: np.ndarray | None,
) -> Scores:
    """Checks an answer and brings it into order.

    Servers differ in whether the token that follows is among the entries: vLLM always puts it there, as one more than k
    if it is not one of the k most likely. It is then left out.

    Args:
        prompt: int32 [L], what was sent.
        ids: int [M], the entries' ids, position after position.
        logprobs: fp64 [M]
        counts: int [L − 1], entries of each position: k, or k + 1.
        next_logprobs: fp64 [L − 1], of the token that follows, or None: it is one of the entries.

    Raises:
        WrongAnswer: entries are missing or of impossible ids, or the answer is about another prompt.
        NumericsError: a log-prob is NaN or positive.
    """
    rows, following = len(prompt) - 1, prompt[1:]
    if len(counts) != rows:
        raise WrongAnswer("the server", f"must answer for {rows} positions", len(counts))
    most = k if next_logprobs is not None else k + 1
    if ((counts < k) | (counts > most)).any():
        wrong = counts[(counts < k) | (counts > most)][0]
        remedy = "see whether the server limits log-probs, or drops some"
        raise WrongAnswer("the server", f"must give {k} log-probs per token (loss.top_k)", int(wrong), remedy)
    table, values = _table(ids, logprobs, counts, most)
    if next_logprobs is None:
        is_next = table == following[:, None]
        if not is_next.any(1).all():
            raise _other_tokens(int(np.flatnonzero(~is_next.any(1))[0]) + 1)
        next_logprobs = values[is_next]
        extra = is_next & (counts > k)[:, None]
        left_out = np.where(counts > k, next_logprobs, -np.inf)
        table[extra], values[extra] = -1, -np.inf
    else:
        _require_logprobs(next_logprobs)
        left_out = np.where((table == following[:, None]).any(1), -np.inf, next_logprobs)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    table, values = np.take_along_axis(table, order, 1), np.take_along_axis(values, order, 1)
    if (left_out > values[:, -1] + _TIE).any():
        raise WrongAnswer("the server", "must give the most likely tokens; one that it left out is more likely")
    absent = values <= ABSENT
    table[absent], values[absent] = -1, -np.inf
    return Scores(
        table.astype(np.int32),
        np.minimum(values, 0).astype(np.float32),
        np.minimum(next_logprobs, 0).astype(np.float32),
    )


def _table(ids: np.ndarray, logprobs: np.ndarray, counts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs by position, int64 and fp64 [L − 1, most]; −1 and −inf behind the entries of a position."""
    _require_logprobs(logprobs)
    if (impossible := (ids < 0) | (ids > np.iinfo(np.int32).max)).any():
        raise WrongAnswer("the server", "must give ids of tokens", int(ids[impossible][0]))
    there = np.arange(most) < counts[:, None]
    table = np.full((len(counts), most), -1, np.int64)
    values = np.full((len(counts), most), -np.inf)
    table[there], values[there] = ids, logprobs
    in_order = np.sort(table, axis=1)
    if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any():
        raise WrongAnswer("the server", "must give each token once per position", "a token twice")
    return table, values


def require_prompt(prompt: np.ndarray, echoed: np.ndarray) -> None:
    """Compares the ids that a server says it has scored with those that were sent.

    Raises:
        WrongAnswer: they differ.
    """
    if len(echoed) != len(prompt):
        raise WrongAnswer("the server", f"must score the {len(prompt)} tokens that it was sent", len(echoed))
    if (differs := np.flatnonzero(echoed != prompt)).size:
        raise _other_tokens(int(differs[0]))


def require_model(expected: str, found: str) -> None:
    """Compares the name of the model in an answer.

    Raises:
        WrongAnswer: it is another one.
    """
    if found != expected:
        rule = f"must serve {expected} (teachers[].model)"
        raise WrongAnswer("the server", rule, found, "another model may have been started at this address")


def _other_tokens(position: int) -> WrongAnswer:
    rule = "must score the tokens that it was sent"
    return WrongAnswer(
        "the server", rule, f"another one at position {position}", "see teachers[].endpoint.api and tokenizer"
    )


def _require_logprobs(values: np.ndarray) -> None:
    """Raises NumericsError for what is no logarithm of a probability."""
    if np.isnan(values).any():
        raise NumericsError("the server", "log-probs must not be NaN", "NaN", "see the server's log and weights")
    if (values > MASS_TOLERANCE).any():
        remedy = "the server may give logits (vLLM: --logprobs-mode raw_logprobs)"
        raise NumericsError("the server", "log-probs must not be positive", f"{values.max():.4g}", remedy)


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
"""By `teachers[].endpoint.api`."""


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
        raise WrongAnswer(
            "/v1/models", "must list the server's models", str(error), "see teachers[].endpoint.url"
        ) from None


def _decoded(decoder: Any, body: bytes) -> Any:
    """An answer as the decoder's type."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        if "logprob" in text and "got `null`" in text and "Expected `float`" in text:
            raise _not_a_number("null") from None
        remedy = "see teachers[].endpoint.api; an older server may lack what is needed"
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
    """The entries of all positions but the first, which nothing precedes."""
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
    """int64 ids of tokens that are written `token_id:N`."""
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
