"""Knowledge-distillation losses for logits that are whole, sharded over the vocabulary, or never made.

A library of its own: it needs torch and nothing else of this package. See docs/losses.md.
"""

from distill_rl.losses.kd import KDOutput, kd_loss
from distill_rl.losses.targets import DenseLogits, TeacherHidden, TopKLogprobs
from distill_rl.losses.topk import vocab_parallel_topk

__all__ = ["DenseLogits", "KDOutput", "TeacherHidden", "TopKLogprobs", "kd_loss", "vocab_parallel_topk"]
