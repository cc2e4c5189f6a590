"""Each rule of the choice at its boundary."""

from dataclasses import replace

import pytest

from transforms.form_choice import AttentionForm, AttentionSizes, choose_form

# G = 4: the boundary of copied scores against copied keys, 2 G S = D, is at S = 8. Keys and values of
# 4 x 64 floats are 2 KiB a position: 6 MiB are 3072 positions.
PLAIN = AttentionSizes(num_heads=16, kv_num_heads=4, head_size=64, sequence_length=8, key_lengths=(4088, 8))


def test_sizes_count_rows_keys_and_bytes() -> None:
    sizes = replace(PLAIN, sequence_length=3, key_lengths=(1024, 3))
    assert (sizes.rows, sizes.num_keys) == (12, 1027)
    assert sizes.kv_bytes == 2 * 4 * 64 * 1027 * 4


@pytest.mark.parametrize(
    ("rows", "form"), [(1, AttentionForm.SPLIT), (8, AttentionForm.SPLIT), (9, AttentionForm.JOINED)]
)
def test_many_rows_copy_keys_rather_than_scores(rows: int, form: AttentionForm) -> None:
    assert choose_form(replace(PLAIN, sequence_length=rows)) is form


@pytest.mark.parametrize(
    ("past", "form"), [(126, AttentionForm.JOINED), (3064, AttentionForm.JOINED), (3065, AttentionForm.SPLIT)]
)
def test_keys_that_stay_in_the_caches_are_copied(past: int, form: AttentionForm) -> None:
    assert choose_form(replace(PLAIN, key_lengths=(past, 8))) is form


@pytest.mark.parametrize("keys", [1024, 100_000])
def test_a_single_range_has_nothing_to_split(keys: int) -> None:
    assert choose_form(replace(PLAIN, key_lengths=(keys,))) is AttentionForm.JOINED
