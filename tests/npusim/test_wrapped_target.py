"""A target around another one: what is asked of it reaches the one inside."""

from model_files import READABLE
from toy_target import ToyTarget

import npusim
from npusim.speculative.target import KnowsRewinds
from npusim.speculative.wrapped import WrappedTarget


def test_whether_blocks_can_be_taken_back_is_asked_of_the_inner_target() -> None:
    for commit, expected in (("EAGER", False), ("DEFERRED", True)):
        config = {"NPUSIM_KV_LAYOUT": "ROLLING", "NPUSIM_COMMIT": commit, "NPUW_LLM_MAX_PROMPT_LEN": 24}
        inner = npusim.compile_model(READABLE["phi3_window8"], config).create_infer_request()
        wrapped = WrappedTarget(inner)
        assert isinstance(wrapped, KnowsRewinds)
        assert wrapped.takes_back_blocks(block_size=3, num_tokens=20) is expected
        assert WrappedTarget(wrapped).takes_back_blocks(block_size=3, num_tokens=20) is expected


def test_a_target_that_cannot_say_is_taken_at_its_word() -> None:
    target = ToyTarget()
    assert not isinstance(target, KnowsRewinds)
    assert WrappedTarget(target).takes_back_blocks(block_size=3, num_tokens=20)
