"""Element types of KV buffers: how numpy holds them, and what the sanitizer writes into them."""

from dataclasses import dataclass

import numpy as np
import openvino as ov


@dataclass(frozen=True, kw_only=True)
class CacheElement:
    """One element of a KV buffer.

    dtype: numpy's; types that it does not know are held as their bytes. least: the smallest float above 0,
    which is how far storing may move one near 0. zero: an element that is read as 0.
    loud: one that is read as a large number, for floats so large that it shows whatever its weight. is_code:
    whether elements are codes of a quantized cache, which are read as numbers no larger than honest ones are.

    Padded rows see no key, so they average the loud values in and carry them through the layers. Nothing
    that comes of them, squares and scores included, may overflow: infinity in a masked slot is NaN.
    """

    dtype: np.dtype[np.generic]
    zero: float
    loud: float
    least: float = 0.0
    is_code: bool = False


CACHE_ELEMENTS: dict[ov.Type, CacheElement] = {
    ov.Type.f32: CacheElement(dtype=np.dtype(np.float32), zero=0.0, loud=1e12, least=2.0**-149),
    ov.Type.f16: CacheElement(dtype=np.dtype(np.float16), zero=0.0, loud=6e4, least=2.0**-24),
    ov.Type.i8: CacheElement(dtype=np.dtype(np.int8), zero=0, loud=127, is_code=True),
    # Two 4-bit codes, each stored with 8 added.
    ov.Type.u8: CacheElement(dtype=np.dtype(np.uint8), zero=0x88, loud=0xFF, is_code=True),
    # 0x7e is 448, the largest e4m3; 0x7f would be NaN.
    ov.Type.f8e4m3: CacheElement(dtype=np.dtype(np.uint8), zero=0x00, loud=0x7E, is_code=True),
}
"""Every type a KV cache may have."""
