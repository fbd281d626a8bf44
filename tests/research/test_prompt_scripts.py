"""Prompts to train with: none is measured on, and pieces of a text are in its order."""

from __future__ import annotations

from specdec.research.prompts.datasets import load_prompts
from tests.helpers.scripts import load_script


def test_no_prompt_to_train_with_is_spec_benchs() -> None:
    """80 questions of GSM8K are in Spec-Bench, where no instruction follows them."""
    script = load_script("write_chat_prompts")
    questions = [prompt.text for prompt in load_prompts("gsm8k")]
    measured = [turn for prompt in load_prompts("spec-bench", turns="all") for turn in prompt.turns]
    assert not set(questions) & set(measured)  # as they stand, none is
    kept = script.without(questions, measured)
    assert 80 <= len(questions) - len(kept) <= 90
    beginnings = {turn[:50] for turn in measured}
    assert not any(text[:50] in beginnings for text in kept)


def test_pieces_begin_in_the_first_column_or_at_their_limit() -> None:
    pieces = load_script("write_demo_prompts").pieces
    text = "".join(f"class C{i}:\n    one = 1\n    two = 2\n" for i in range(4)) + "end"
    assert pieces(text, 3) == [f"class C{i}:\n    one = 1\n    two = 2\n" for i in range(4)]
    short = pieces(text, 3, 20)
    assert "".join(short) == text[: len("".join(short))]
    assert all(20 <= len(piece) < 34 for piece in short[:-1])
