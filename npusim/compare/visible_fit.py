"""Read off an attention output which keys it averaged.

With weights e_k = exp(score_k) of the keys, x_k = 1 for those that are visible and 0 for the others, the
answer of one head is o = sum(x_k e_k v_k) / (sum(x_k e_k) + y e_sink), so

    sum over k of x_k e_k (v_k - o) = y e_sink o,

linear in x and y, with H * D equations for the keys that all heads share. The row sees itself: its x is 1.
"""

import numpy as np
import numpy.typing as npt

from npusim.compare.evidence import AttentionRow, Visible
from npusim.reference.options import AttentionOptions, rotate

Matrix = npt.NDArray[np.float64]


def fit_visible(row: AttentionRow, options: AttentionOptions, enough: float) -> Visible | None:
    """The keys that the other side averaged, the sink being as it should.

    None where no choice of keys comes within `enough` of the answer, or where the answer has too few numbers
    to tell them apart. A key whose weight is nearly 0 may be on either side.
    """
    keys = Visible(positions=tuple(range(row.stop)), stale=row.stale_key.shape[2])
    count = row.stop + keys.stale
    if count >= len(row.theirs):
        return None
    system, sink = _equations(row, keys, options)
    others = np.arange(count) != row.position
    solved = np.linalg.lstsq(system[:, others], sink - system[:, row.position], rcond=None)[0]
    chosen = np.ones(count, bool)
    chosen[others] = solved > 0.5
    stale = chosen[row.stop :]
    visible = Visible(positions=tuple(np.flatnonzero(chosen[: row.stop]).tolist()), stale=int(stale.sum()))
    if not stale[: visible.stale].all():
        return None  # not those right behind the stored tokens
    found = np.abs(row.attention(visible, options) - row.theirs).max()
    return visible if found <= enough else None


def _equations(row: AttentionRow, keys: Visible, options: AttentionOptions) -> tuple[Matrix, Matrix]:
    """Columns e_k (v_k - o), [H * D, keys], and the right side e_sink o, [H * D]."""
    key, value, positions = row.pool(keys)
    query = row.query
    if options.rotary is not None:
        query = rotate(query, options.rotary, [row.position])
        key = rotate(key, options.rotary, positions)
    num_heads, head_size = query.shape[1], query.shape[3]
    group = num_heads // key.shape[1]
    key, value = (np.repeat(rows[0], group, axis=0) for rows in (key, value))  # [H, keys, D]
    scores = np.einsum("hd,hkd->hk", query[0, :, 0], key) * (options.scale or head_size**-0.5)
    answer = row.theirs.reshape(num_heads, head_size).astype(np.float64)
    sink = _sink_logits(options, num_heads)
    top = np.maximum(scores.max(axis=1), sink)
    weights = np.exp(scores - top[:, None])  # [H, keys]
    columns = weights[..., None] * (value - answer[:, None, :])  # [H, keys, D]
    right = np.exp(sink - top)[:, None] * answer  # [H, D]
    return columns.transpose(0, 2, 1).reshape(num_heads * head_size, -1), right.reshape(-1)


def _sink_logits(options: AttentionOptions, num_heads: int) -> Matrix:
    if options.head_sink is not None:
        return np.asarray(options.head_sink, np.float64)
    return np.full(num_heads, 0.0 if options.smooth_softmax else -np.inf)
