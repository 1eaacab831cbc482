"""A teacher behind a program that scores prompts: token ids in, log-probabilities of each next token out.

Rows → documents → prompts → top-k targets at the places of the documents:

1. Every document with a label becomes a prompt, without the tokens after its last labelled one. Padding and documents
   without a label are never sent.
2. A `PromptScorer` gives, for every position of a prompt, the k most likely next tokens and the log-probability of the
   token that follows.
3. The rest, the probability of all other tokens, is the complement: log(1 − Σ exp(logprobs)), taken in fp64.
4. Targets are written to the documents' positions. All other positions keep a target that is valid and unused.

The answers are checked, because a wrong target is worse than none: each is about the tokens that were sent, nothing is
NaN, and no distribution has a mass above one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from distill_rl.config.derive import target_bytes_per_token
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import NumericsError
from distill_rl.losses.targets import TopKLogprobs
from distill_rl.models.forward import micro_batches
from distill_rl.parallel.mesh import World
from distill_rl.teacher.base import MASS_TOLERANCE, PromptScorer, Scores
from distill_rl.teacher.engine import CHUNK_TOKENS, score_of, unused_targets, wire_dtype
from distill_rl.transport.base import Layout
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows

_LEAST_REST = 2.0**-24
"""The smallest mass of the rest: a sum of fp32 numbers near one does not tell a smaller complement from zero."""


class ScoredTeacher:
    """Top-k targets from a `PromptScorer`, on one rank.

    Args:
        config: the run's settings; `loss.temperature` must be 1.
        teacher: one of `config.teachers`, with export topk.
        world: this rank of the teacher's mesh.
        vocabulary_size: ids of the tokenizer. An entry of another id is absent, and its mass is part of the rest.
        scorer: what is asked.
    """

    def __init__(
        self, config: Config, teacher: TeacherConfig, world: World, *, vocabulary_size: int, scorer: PromptScorer
    ):
        self.config, self.teacher, self.world, self.scorer = config, teacher, world, scorer
        self.micro_batch_size = config.rows_of(teacher)
        self.wire_dtype = wire_dtype(teacher, world.device)
        self.score = 0.0
        self._vocabulary_size, self._k = vocabulary_size, config.loss.top_k
        self.bytes_per_token = target_bytes_per_token("topk", self._k, self.wire_dtype.itemsize)

    def forward(self, batch: RankBatch) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
        """As of `TeacherBackend`. All prompts of the batch are sent before the first answer is awaited.

        Raises:
            NumericsError: an answer that is NaN, or that has more than the whole probability.
            DistillError: as for `PromptScorer.score`.
        """
        waiting = list(micro_batches(batch, self.micro_batch_size))
        places, prompts = _prompts_of([rows for _, rows in waiting])
        # A valid target at every position, which those that no prompt has keep.
        targets = [unused_targets("topk", rows.input_ids.size, self._k, torch.float32) for _, rows in waiting]
        missing = np.bincount([micro_batch for micro_batch, _ in places], minlength=len(waiting))
        answers = iter(self.scorer.score(prompts, self._k)) if prompts else iter(())
        total = 0.0
        for i, (first_row, rows) in enumerate(waiting):
            while missing[i]:
                prompt, scores = next(answers)
                micro_batch, start = places[prompt]
                self._write(targets[micro_batch], start, scores)
                missing[micro_batch] -= 1
            target = TopKLogprobs.from_tensors(targets[i], 1.0)
            if self.teacher.score != "static":
                labels = torch.from_numpy(rows.labels.astype(np.int64)).flatten()
                total += float(score_of(self.teacher.score, target, None, labels, 1.0, CHUNK_TOKENS))
            yield Layout(first_row, *rows.shape), target.to_tensors(self.wire_dtype)
        self.score = total

    def unused_targets(self, positions: int) -> dict[str, Tensor]:
        """As of `TeacherBackend`."""
        return unused_targets("topk", positions, self._k, self.wire_dtype)

    def close(self) -> None:
        self.scorer.close()

    def _write(self, targets: Mapping[str, Tensor], start: int, scores: Scores) -> None:
        """Checks the scores of a prompt and writes them from position `start` on."""
        ids, logprobs = scores.ids, scores.logprobs
        if (unknown := ids >= self._vocabulary_size).any():
            ids, logprobs = _without(ids, logprobs, unknown)
        if np.isnan(logprobs).any() or np.isnan(scores.next_logprobs).any():
            raise NumericsError(f"teacher {self.teacher.name}", "log-probs must not be NaN", "NaN", "see its server")
        mass = np.exp(logprobs.astype(np.float64)).sum(1)
        if (mass > 1 + MASS_TOLERANCE).any():
            rule = "the probabilities of its top k must not exceed 1 together"
            raise NumericsError(f"teacher {self.teacher.name}", rule, f"{mass.max():.4f}", "see its server")
        rest = np.log(np.maximum(1 - mass, _LEAST_REST))
        columns = {"ids": ids, "logprobs": logprobs, "rest_logprob": rest, "label_logprob": scores.next_logprobs}
        for name, column in columns.items():
            targets[name].numpy()[start : start + len(ids)] = column


def _prompts_of(micro_batches: Sequence[TokenRows]) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """Where the documents that have labels are, and their tokens, each up to its last labelled one.

    A place is the micro-batch and the first position, counted over the rows of the micro-batch one after the other.
    """
    places, prompts = [], []
    for i, rows in enumerate(micro_batches):
        width = rows.shape[1]
        for row in range(rows.shape[0]):
            starts = np.flatnonzero(rows.position_ids[row] == 0)
            for start, stop in zip(starts, [*starts[1:], width]):
                labelled = np.flatnonzero(rows.labels[row, start:stop] != IGNORE_INDEX)
                if len(labelled):
                    places.append((i, row * width + int(start)))
                    prompts.append(rows.input_ids[row, start : start + labelled[-1] + 2])
    return places, prompts


def _without(ids: np.ndarray, logprobs: np.ndarray, dropped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both [n, k], without the entries `dropped`: the others keep their order, and absent ones stand at the end."""
    order = np.argsort(dropped, axis=1, kind="stable")
    ids, logprobs = np.where(dropped, -1, ids), np.where(dropped, -np.inf, logprobs)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1).astype(np.float32)
