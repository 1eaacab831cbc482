"""From the entries of an answer to `Scores`: k per position, most likely first, none of them taken on trust."""

from __future__ import annotations

import numpy as np

from distill_rl.errors import NumericsError, WorkerError
from distill_rl.teacher.backends.scores import MASS_TOLERANCE, Scores

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
    """Ids and log-probs by position, int64 and fp64 [L − 1, most]; −1 and −inf behind the entries of a position.

    Raises:
        WrongAnswer: impossible ids, or one twice at a position.
        NumericsError: as for `scores_of`.
    """
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
    return WrongAnswer("the server", rule, f"another one at position {position}", "see teachers[].api and tokenizer")


def _require_logprobs(values: np.ndarray) -> None:
    """Raises NumericsError for what is no logarithm of a probability."""
    if np.isnan(values).any():
        raise NumericsError("the server", "log-probs must not be NaN", "NaN", "see the server's log and weights")
    if (values > MASS_TOLERANCE).any():
        remedy = "the server may give logits (vLLM: --logprobs-mode raw_logprobs)"
        raise NumericsError("the server", "log-probs must not be positive", f"{values.max():.4g}", remedy)
