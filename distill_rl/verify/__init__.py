"""Sanity checks for a user's own tokenizers and rows: `distill-rl align --verify`."""

from distill_rl.verify.alignment import check_alignment, check_chats
from distill_rl.verify.check import Check
from distill_rl.verify.losses import check_losses
from distill_rl.verify.stops import check_stops

__all__ = ["Check", "check_alignment", "check_chats", "check_losses", "check_stops"]
