"""Whether a rejected draft can always be taken back, asked of a layout before anything runs."""

from npusim.layout.layouts import Layout


def takes_back_blocks(layout: Layout, *, block_size: int, num_tokens: int) -> bool:
    """Whether a trim to the first row of a newest block is exact at every length up to num_tokens.

    block_size: rows of the largest block, of which at least one is kept.
    """
    if layout.resident(num_tokens).start == 0:
        return True  # nothing is ever evicted
    # Evictions repeat within `capacity` tokens, so these lengths stand for all.
    lengths = range(max(block_size, num_tokens - layout.capacity), num_tokens + 1)
    return all(layout.can_trim(length, length, length - block_size + 1) for length in lengths)
