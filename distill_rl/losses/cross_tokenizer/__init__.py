"""Losses between two tokenizers: one entry, `chunk_kd_loss`, and a file for each method."""

from distill_rl.losses.cross_tokenizer.loss import METHODS, chunk_kd_loss

__all__ = ["METHODS", "chunk_kd_loss"]
