"""Knowledge-distillation losses for logits that are whole, sharded over the vocabulary, or never made.

A library of its own: it needs torch and nothing else of this package. See docs/losses.md.
"""

from distill_rl.losses import reference
from distill_rl.losses.agreement import Agreement, token_agreement
from distill_rl.losses.core.logits import StudentHidden
from distill_rl.losses.cross_tokenizer import METHODS, chunk_kd_loss
from distill_rl.losses.cross_tokenizer import reference as reference_chunks
from distill_rl.losses.cross_tokenizer.chunks import ChunkOutput, Chunks
from distill_rl.losses.cross_tokenizer.projection import LearnableProjection, VocabularyProjection
from distill_rl.losses.kd import (
    KDLoss,
    KDOutput,
    fused_linear_kd_loss,
    fused_linear_logprobs,
    kd_loss,
    vocab_parallel_logprobs,
)
from distill_rl.losses.sampling import context_keys, vocab_parallel_sample
from distill_rl.losses.targets import DenseLogits, HiddenStates, SampledTokens, TeacherHidden, TopKLogprobs
from distill_rl.losses.topk import vocab_parallel_topk

Bridge = VocabularyProjection
"""Its former name."""

__all__ = [
    "METHODS",
    "Agreement",
    "Bridge",
    "ChunkOutput",
    "Chunks",
    "DenseLogits",
    "HiddenStates",
    "KDLoss",
    "KDOutput",
    "LearnableProjection",
    "SampledTokens",
    "StudentHidden",
    "TeacherHidden",
    "TopKLogprobs",
    "VocabularyProjection",
    "chunk_kd_loss",
    "context_keys",
    "fused_linear_kd_loss",
    "fused_linear_logprobs",
    "kd_loss",
    "reference",
    "reference_chunks",
    "token_agreement",
    "vocab_parallel_logprobs",
    "vocab_parallel_sample",
    "vocab_parallel_topk",
]
