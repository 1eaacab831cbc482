"""The `compact` format: a teacher's top-k targets for one piece of text in about a byte per entry.

`levels` quantises log-probabilities, `coder` is the entropy coder with its `models`, `encoder` and `decoder` say what is
coded, in which `context`, and `codec` makes and reads whole blocks. docs/store-compact.md has the format to the byte.
"""

from distill_rl.store.compact.codec import decode, encode
from distill_rl.store.compact.levels import error_bound

__all__ = ["decode", "encode", "error_bound"]
