"""`npusim run`: tokens, text, drafts, settings."""

from cli_driving import DRAFT, LLAMA, PROMPT, TARGET, native_greedy

from npusim import byte_vocabulary
from npusim.cli import run as run_command
from npusim.cli.main import main


def test_tokens_are_those_of_the_native_model(run_json):
    prompt_ids = [257, 72, 105, 33, 7]
    result = run_json("run", LLAMA, "--prompt-ids", "257,72,105,33,7", "--max-new-tokens", "11")
    assert result["prompt_ids"] == prompt_ids
    assert result["tokens"] == native_greedy(LLAMA, prompt_ids, 11)
    assert result["finish_reason"] == "length"
    assert result["num_stored_tokens"] == len(prompt_ids) + 10
    assert result["config"]["NPUW_LLM_MAX_PROMPT_LEN"] == 64
    assert result["config"]["NPUW_LLM_MIN_RESPONSE_LEN"] == 11
    assert result["capacity"] == 64 + 11 - 1
    assert result["kv_nbytes"] == 4 * 2 * result["capacity"] * 2 * 16 * 4  # layers, K+V, C, heads, D, f32


def test_drafts_change_the_steps_but_no_token(run_json):
    arguments = ("run", TARGET, "--prompt", PROMPT, "--max-new-tokens", "40")
    plain = run_json(*arguments)
    drafted = run_json(*arguments, "--draft", DRAFT, "--num-draft", "3")
    looked_up = run_json(*arguments, "--draft", "lookup", "--num-draft", "2")
    assert plain["tokens"] == drafted["tokens"] == looked_up["tokens"]
    assert plain["tokens"] == native_greedy(TARGET, byte_vocabulary.encode(PROMPT), 40)
    assert len(plain["steps"]) == 39
    assert len(drafted["steps"]) < 20
    assert {step["proposed"] for step in drafted["steps"]} >= {3}
    assert drafted["config"]["NPUW_LLM_MAX_GENERATION_TOKEN_LEN"] == 4
    assert looked_up["config"]["NPUW_LLM_MAX_GENERATION_TOKEN_LEN"] == 3
    assert drafted["acceptance_rate"] > 0.3 > plain["acceptance_rate"]


def test_drafts_over_a_rolling_layout_take_no_setting(run_json):
    arguments = ("run", TARGET, "--prompt", PROMPT, "--max-new-tokens", "40")
    plain = run_json(*arguments)
    rolling = run_json(*arguments, "--draft", "lookup", "-c", "NPUSIM_KV_LAYOUT=ROLLING")
    assert plain["tokens"] == rolling["tokens"]
    assert rolling["config"]["NPUSIM_COMMIT"] == "DEFERRED"
    assert 0 < rolling["acceptance_rate"] < 1


def test_a_run_may_use_the_last_position_of_the_model(run_json):
    """512 rows of rotary tables: a prompt rounded up to 64 would need more."""
    result = run_json("run", LLAMA, "--prompt-ids", "1,2,3", "--max-new-tokens", "510")
    assert result["capacity"] == 512
    assert len(result["tokens"]) == 510 or result["finish_reason"] == "eos"


def test_text_is_printed_for_the_byte_vocabulary(capsys):
    assert main(["run", TARGET, "--prompt", PROMPT, "--max-new-tokens", "20"]) == 0
    printed = capsys.readouterr().out
    text = byte_vocabulary.decode(native_greedy(TARGET, byte_vocabulary.encode(PROMPT), 20))
    assert f"continuation  {text}\n" in printed
    assert "length after 20 new tokens" in printed


def test_the_end_token_ends(run_json):
    tokens = native_greedy(LLAMA, [5, 6, 7], 9)
    end = next(token for token in tokens if tokens.index(token) >= 2)
    kept = tokens[: tokens.index(end) + 1]
    result = run_json("run", LLAMA, "--prompt-ids", "5,6,7", "--max-new-tokens", "9", "--eos", str(end))
    assert (result["tokens"], result["finish_reason"]) == (kept, "eos")


def test_sampling_repeats_with_its_seed(run_json):
    arguments = ("run", LLAMA, "--prompt-ids", "9,8", "--max-new-tokens", "12", "--temperature", "1.5")
    first, again = (run_json(*arguments, "--seed", "3")["tokens"] for _ in range(2))
    cut = run_json(*arguments, "--seed", "4", "--top-k", "1")["tokens"]
    assert first == again != cut
    assert cut == native_greedy(LLAMA, [9, 8], 12)


def test_settings_reach_the_model(run_json):
    result = run_json(
        *("run", LLAMA, "--prompt-ids", "1,2,3,4,5,6,7", "--max-new-tokens", "6"),
        *("-c", "NPUW_LLM_MAX_PROMPT_LEN=9", "-c", "NPUW_LLM_PREFILL_CHUNK_SIZE = 3"),
        *("--config", "NPUSIM_KV_PRECISION=F16"),
    )
    assert result["capacity"] == 9 + 6 - 1
    assert result["kv_nbytes"] == 4 * 2 * 14 * 2 * 16 * 2
    assert result["tokens"] == native_greedy(LLAMA, [1, 2, 3, 4, 5, 6, 7], 6)


def test_control_characters_of_a_model_do_not_reach_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(run_command.byte_vocabulary, "decode", lambda _: "a\x1b[31m[bold]b\tc")
    assert main(["run", LLAMA, "--prompt-ids", "1", "--max-new-tokens", "2"]) == 0
    assert "continuation  a\\x1b[31m[bold]b\\tc\n" in capsys.readouterr().out


def test_text_goes_through_the_byte_vocabulary_and_back():
    text = "Zähle bis 3 – ok"
    tokens = byte_vocabulary.encode(text)
    assert tokens[0] == 257
    assert len(tokens) == 1 + len(text.encode())
    assert byte_vocabulary.decode([*tokens, 258]) == text
    assert byte_vocabulary.decode([0xC3, 65]) == "�A"
