"""Explanations of one attention layer, from rows whose other side is computed here, key by key."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from npusim.compare.calls import Call
from npusim.compare.evidence import AttentionRow, LayerRows, Visible, collect_rows
from npusim.compare.explain import Explanation, explain
from npusim.reference.options import AttentionOptions, Rotary

HEADS, KV_HEADS, SIZE, LENGTH, WINDOW = 6, 2, 8, 23, 5
RNG = np.random.default_rng(11)
ANGLES = RNG.uniform(0, 6, (40, SIZE // 2))
ROTARY = Rotary(cos=np.cos(ANGLES), sin=np.sin(ANGLES))
PLAIN = AttentionOptions(causal=False, scale=0.41, rotary=ROTARY)
SINK = replace(PLAIN, head_sink=RNG.normal(size=HEADS) + 1)
SMOOTH = replace(PLAIN, smooth_softmax=True)

QUERY = RNG.normal(size=(LENGTH, HEADS, SIZE))
KEY, VALUE = RNG.normal(size=(2, LENGTH, KV_HEADS, SIZE))
STALE_KEY, STALE_VALUE = RNG.normal(size=(2, 3, KV_HEADS, SIZE))

# Start and end of the blocks that the rows looked at belong to; the last row of each, and one from its midst.
BLOCKS = ((9, 12), (12, 17), (17, 18), (18, 22))

LIMIT = 1e-5
NO_KEY: tuple[()] = ()


def turned(row: np.ndarray, position: int, *, interleaved: bool = False) -> np.ndarray:
    """[heads, D] rotated by the angles of a position."""
    cos, sin = np.cos(ANGLES[position]), np.sin(ANGLES[position])
    first, second = (row[:, 0::2], row[:, 1::2]) if interleaved else np.split(row, 2, axis=1)
    pair = first * cos - second * sin, second * cos + first * sin
    return np.stack(pair, axis=2).reshape(row.shape) if interleaved else np.concatenate(pair, axis=1)


def answer(
    position: int,
    start: int,
    seen: Sequence[int],
    *,
    sink: np.ndarray | None = None,
    stale: int = 0,
    empty: int = 0,
    rotate: Callable[[np.ndarray, int], np.ndarray] = turned,
    scale: float = 0.41,
) -> np.ndarray:
    """What a row answers that sees these keys, [H * D]."""
    query = rotate(QUERY[position], position)
    keys = [(rotate(KEY[at], at), VALUE[at]) for at in seen]
    keys += [(rotate(STALE_KEY[i], start + i), STALE_VALUE[i]) for i in range(stale)]
    keys += [(np.zeros((KV_HEADS, SIZE)),) * 2] * empty
    heads = []
    for head in range(HEADS):
        of = head // (HEADS // KV_HEADS)
        weights = [np.exp(query[head] @ key[of] * scale) for key, _ in keys]
        total = sum(weights) + (0 if sink is None else np.exp(sink[head]))
        heads.append(sum(w * value[of] for w, (_, value) in zip(weights, keys, strict=True)) / total)
    return np.concatenate(heads)


def in_window(position: int, window: int = WINDOW) -> range:
    return range(max(0, position - window + 1), position + 1)


def rows_of(
    ours: Callable[[int, int, int], np.ndarray], theirs: Callable[[int, int, int], np.ndarray]
) -> list[AttentionRow]:
    """Rows whose answers are functions of (position, start, end of the block); the most different first."""
    rows = []
    for start, stop in BLOCKS:
        for position in {start, stop - 1}:
            stale = slice(0, 3)
            rows.append(
                AttentionRow(
                    position=position,
                    start=start,
                    stop=stop,
                    query=QUERY[position][None, :, None],
                    key=KEY[:stop].transpose(1, 0, 2)[None],
                    value=VALUE[:stop].transpose(1, 0, 2)[None],
                    stale_key=STALE_KEY[stale].transpose(1, 0, 2)[None],
                    stale_value=STALE_VALUE[stale].transpose(1, 0, 2)[None],
                    ours=ours(position, start, stop),
                    theirs=theirs(position, start, stop),
                )
            )
    return sorted(rows, key=lambda row: row.difference, reverse=True)


def explained(
    theirs: Callable[[int, int, int], np.ndarray],
    *,
    options: AttentionOptions = PLAIN,
    window: int = WINDOW,
) -> Explanation:
    sink = options.head_sink if not options.smooth_softmax else np.zeros(HEADS)

    def ours(position: int, start: int, _stop: int) -> np.ndarray:
        seen = in_window(position, window) if window > 0 else range(position + 1)
        return answer(position, start, seen, sink=sink)

    return explain(rows_of(ours, theirs), options, window, LIMIT)


def test_window_dropped() -> None:
    found = explained(lambda q, p, _: answer(q, p, range(q + 1)))
    assert found.verdict == "the other side behaves as if local_window_size (5) were dropped"
    q = found.position
    assert found.ours == Visible(positions=tuple(range(q - 4, q + 1)))
    assert found.theirs == Visible(positions=tuple(range(q + 1)))
    assert found.residual < 1e-9 < found.difference


@pytest.mark.parametrize(("other", "window", "words"), [(4, 5, "were 4, not 5"), (6, 5, "were 6, not 5")])
def test_window_off_by_one(other: int, window: int, words: str) -> None:
    found = explained(lambda q, p, _: answer(q, p, in_window(q, other)), window=window)
    assert found.verdict.endswith(f"local_window_size {words}")


def test_an_explanation_holds_for_every_row() -> None:
    """At position 9 a window of 10 looks like none, further on it does not."""
    rows = rows_of(lambda q, p, _: answer(q, p, in_window(q)), lambda q, p, _: answer(q, p, in_window(q, 10)))
    rows.sort(key=lambda row: row.position)
    assert explain(rows, PLAIN, WINDOW, LIMIT).verdict.endswith("local_window_size were 10, not 5")
    assert explain(rows[:1], PLAIN, WINDOW, LIMIT).verdict.endswith("local_window_size (5) were dropped")


def test_rows_are_collected_as_the_calls_left_them() -> None:
    """Three tokens, then five of which the last three are taken back, then one."""
    calls = [
        Call(tokens=(0,) * (stop - start), position=start, proposed=0, accepted=0, logits=np.zeros((1, 1)))
        for start, stop in ((0, 3), (3, 8), (5, 6))
    ]
    fed = [np.arange(3), np.arange(3, 8), np.array([50])]
    layer = [
        LayerRows(
            query=x[:, None] + np.zeros((1, 4)),
            key=x[:, None] + np.zeros((1, 2)),
            value=-x[:, None] - np.zeros((1, 2)),
        )
        for x in fed
    ]
    answers = [(np.full((len(x), 4), 1.0), np.full((2 if len(x) > 2 else 1, 4), 7.0)) for x in fed]
    answers[1][1][0] = 8.0
    rows = collect_rows(calls, layer, answers, [(2, 5), (1, 6)], head_size=2)
    midst, last = rows
    assert (midst.position, midst.start, midst.stop) == (6, 3, 8)
    assert midst.theirs[0] == 8.0  # the newest two of five came back
    np.testing.assert_array_equal(midst.query[0, :, 0], np.full((2, 2), 6))
    assert midst.stale_key.shape == (1, 1, 0, 2)
    np.testing.assert_array_equal(midst.key[0, 0, :, 0], range(8))
    assert (last.position, last.start, last.stop) == (5, 5, 6)
    np.testing.assert_array_equal(last.key[0, 0, :, 0], [0, 1, 2, 3, 4, 50])
    np.testing.assert_array_equal(last.value[0, 0, :, 0], [0, -1, -2, -3, -4, -50])
    np.testing.assert_array_equal(last.stale_key[0, 0, :, 0], [5, 6, 7])
    np.testing.assert_array_equal(last.stale_value[0, 0, :, 0], [-5, -6, -7])


def test_window_added() -> None:
    found = explained(lambda q, p, _: answer(q, p, in_window(q, 7)), window=-1)
    assert found.verdict.endswith("as if there were a window of 7")
    assert str(found.theirs) == f"{found.position - 6}-{found.position}"


@pytest.mark.parametrize("num_slots", [25, 40])
@pytest.mark.parametrize("sees_empty", [False, True])
def test_slot_distance(num_slots: int, sees_empty: bool) -> None:
    """In a graph of `num_slots` the past lies at its positions, the block ends at the last slot."""

    def theirs(position: int, start: int, stop: int) -> np.ndarray:
        own = num_slots - stop + position
        past = [slot for slot in range(start) if own - slot < WINDOW]
        block = [at for at in range(start, position + 1) if position - at < WINDOW]
        first_of_block = num_slots - (stop - start)
        empty = [slot for slot in range(start, first_of_block) if own - slot < WINDOW]
        return answer(position, start, [*past, *block], empty=len(empty) if sees_empty else 0)

    found = explained(theirs)
    assert "as if slot distance were used as window" in found.verdict
    assert found.verdict.endswith("empty slots were visible") == sees_empty
    assert found.theirs is not None
    assert bool(found.theirs.empty) == sees_empty
    assert ("empty slots" in str(found.theirs)) == sees_empty


@pytest.mark.parametrize(
    ("options", "name"), [(SINK, "head_sink"), (SMOOTH, "smooth_softmax")], ids=["head_sink", "smooth"]
)
def test_sink_dropped(options: AttentionOptions, name: str) -> None:
    found = explained(lambda q, p, _: answer(q, p, in_window(q)), options=options)
    assert found.verdict.endswith(f"as if the sink ({name}) were dropped")
    assert found.theirs == found.ours
    both = explained(lambda q, p, _: answer(q, p, range(q + 1)), options=options)
    assert both.verdict.endswith(f"local_window_size (5) and the sink ({name}) were both dropped")


def test_sink_of_another_kind() -> None:
    zero = np.zeros(HEADS)
    found = explained(lambda q, p, _: answer(q, p, in_window(q), sink=zero), options=SINK)
    assert found.verdict.endswith("as if head_sink were 0 for every head")
    found = explained(lambda q, p, _: answer(q, p, in_window(q), sink=zero))
    assert found.verdict.endswith("as if there were a sink (smooth_softmax)")


def test_rows_of_a_rejected_draft() -> None:
    found = explained(lambda q, p, _: answer(q, p, in_window(q), stale=3))
    assert found.verdict.endswith("as if rows of a rejected draft were still visible")
    assert str(found.theirs).endswith("and 3 rows of a rejected draft")


def test_not_causal() -> None:
    found = explained(lambda q, p, t: answer(q, p, [*in_window(q), *range(q + 1, t)]))
    assert found.verdict.endswith("as if the mask were not causal")


def test_rotary_and_scale() -> None:
    found = explained(lambda q, p, _: answer(q, p, in_window(q), rotate=lambda row, _: row))
    assert found.verdict.endswith("as if rotary embedding were dropped")
    found = explained(
        lambda q, p, _: answer(q, p, in_window(q), rotate=lambda row, at: turned(row, at, interleaved=True))
    )
    assert found.verdict.endswith("as if rotary_interleaved were 1")
    found = explained(lambda q, p, _: answer(q, p, in_window(q), scale=SIZE**-0.5))
    assert found.verdict.endswith("as if scale were 1/sqrt(head size), not 0.41")


@pytest.mark.parametrize("options", [PLAIN, SINK], ids=["plain", "sink"])
def test_a_mask_without_a_name_is_read_off_the_numbers(options: AttentionOptions) -> None:
    def seen(position: int) -> list[int]:
        return [at for at in range(position + 1) if at % 3 != 1 or at == position]

    found = explained(lambda q, p, _: answer(q, p, seen(q), sink=options.head_sink), options=options)
    assert found.verdict == "the other side has another mask, by no fault that has a name"
    assert found.theirs == Visible(positions=tuple(seen(found.position)))
    assert str(found.theirs).startswith("0, 2-3, 5-6, 8-9")


def test_an_answer_that_no_keys_give() -> None:
    found = explained(lambda q, p, _: 3 * answer(q, p, in_window(q)))
    assert found.theirs is None
    assert "look at what enters its attention" in found.verdict
    assert found.residual == found.difference


def test_nan_is_said() -> None:
    found = explained(lambda *_: np.full(HEADS * SIZE, np.nan))
    assert found.verdict == "the other side answers with NaN or infinity"
    assert found.theirs is None
    assert found.difference == np.inf


def test_a_fault_of_the_simulator_is_not_blamed_on_the_other_side() -> None:
    rows = rows_of(lambda q, p, _: answer(q, p, range(q + 1)), lambda q, p, _: answer(q, p, in_window(q)))
    found = explain(rows, PLAIN, WINDOW, LIMIT)
    assert found.verdict == "the other side does what the model says; the simulator does not"


def test_nothing_is_visible_in_words() -> None:
    assert str(Visible(positions=NO_KEY)) == "nothing"
    assert str(Visible(positions=(4,), stale=1, empty=2)) == (
        "4 and 1 rows of a rejected draft and 2 empty slots"
    )
