"""Top-k targets whose ids and log-probabilities resemble those of a language model, without one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def teacher_and_student(n: int, vocabulary: int, *, noise: float, seed: int = 0) -> tuple[np.ndarray, Tensor, Tensor]:
    """(tokens int32 [n], teacher's logits, student's logits), fp64 [n, V].

    Each token has its own logits, with a Zipf-like share for every id; every row adds something of its own, and the
    student adds `noise` to that.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    tokens = torch.randint(0, max(n // 6, 1), (n,), generator=draw)
    unigram = -1.1 * torch.arange(1, vocabulary + 1, dtype=torch.float64).log()
    unigram = unigram[torch.randperm(vocabulary, generator=draw)]
    teacher = unigram + 1.5 * normal(int(tokens.max()) + 1, vocabulary)[tokens] + 0.7 * normal(n, vocabulary)
    return tokens.int().numpy(), teacher, teacher + noise * normal(n, vocabulary)


def top_k(logits: Tensor, k: int, labels: Tensor | None = None) -> dict[str, np.ndarray]:
    """The k most likely ids of each row in the wire form; the label is the first id where none is given."""
    logprobs = logits.log_softmax(1)
    values, ids = logprobs.topk(k)
    rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
    label = logprobs.gather(1, ids[:, :1] if labels is None else labels[:, None].long())[:, 0]
    named = {"ids": ids.int(), "logprobs": values.float(), "rest_logprob": rest.float(), "label_logprob": label.float()}
    return {name: tensor.numpy() for name, tensor in named.items()}


def realistic(n: int, vocabulary: int, k: int, *, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(tokens, targets) of the teacher above; labels are the next tokens."""
    tokens, teacher, _ = teacher_and_student(n, vocabulary, noise=0, seed=seed)
    return tokens, top_k(teacher, k, torch.from_numpy(np.roll(tokens, -1)))
