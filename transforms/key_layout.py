"""Which static graph is built, and where its past keys lie."""

from enum import Enum


class Branch(Enum):
    """The two static graphs of a language model. In both, the real rows of a block are its last ones.

    PREFILL: past and block form one right-aligned run of slots that ends with the newest token.
    GENERATE: the past lies in slots [0, C), the block of new tokens in the fixed slots [C, C + S).
    """

    PREFILL = "prefill"
    GENERATE = "generate"


class KeyLayout(Enum):
    """Where the past rows of a GENERATE branch lie in their C slots; P tokens are stored, W is the window.

    LINEAR: position p in slot p.
    ROLLING: the newest L positions in order, position P - L + h in slot h. L = P while P <= C; beyond,
    L = P - gap * ceil((P - C) / gap) with gap = C - W + 1: rows move once in gap tokens, by gap slots. It is
    ONNX Runtime's rule for sliding_window_cache=1; C >= W.
    RING: position p in slot p mod C; C >= W - 1, and what is read must not have been overwritten since.
    GATHERED: linear slots, of which the graph gathers the W - 1 newest before it attends.
    """

    LINEAR = "linear"
    ROLLING = "rolling"
    RING = "ring"
    GATHERED = "gathered"
