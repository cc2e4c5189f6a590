"""NumPy references, written from the definition of the op and not from its lowering.

They know absolute positions only: no slots, no frames, no padding. Nothing in here is fast, and nothing in
here shares a helper with `transforms` or with the KV manager, so that the two can be held against each other.
"""

from npusim.reference.attention import AttentionHistory, attend
from npusim.reference.options import AttentionOptions, Rotary, rotate

__all__ = ["AttentionHistory", "AttentionOptions", "Rotary", "attend", "rotate"]
