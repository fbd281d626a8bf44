"""The promise that a new strategy, rule or length policy is small: at most 80 lines of code.

Of a strategy its file is counted, imports included; of a rule or policy, which share files, its class or function."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

import specdec

MOST = 80
PACKAGE = Path(specdec.__file__).parent
SHARED = {"base", "draft", "chain", "costs", "length", "suffix_index", "branching"}
SHARED |= {"tree_plan", "best_tree", "planned_tree"}
# Strategies that are ports or families: llama.cpp's n-gram strategies, and those that bring a model's passes or forms.
LARGE = {"suffix", "policies", "draft_model", "eagle3", "ngram", "self_speculation"}
DEFINITIONS = (ast.ClassDef, ast.FunctionDef)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines that hold code: no comment, no docstring, not blank."""
    texts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - {line for n in texts for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)})


def test_what_is_counted_is_code() -> None:
    assert (
        code_lines('"""Doc.\n\nMore."""\n\n# why\nx = [\n    1,\n]  # here\n\ndef f():\n    """Doc."""\n    return 1\n')
        == 5
    )


def strategies() -> list[Path]:
    drafters = PACKAGE / "drafters"
    return [
        f for f in sorted(drafters.rglob("*.py")) if not {*f.relative_to(drafters).parts, f.stem} & (SHARED | LARGE)
    ]


@pytest.mark.parametrize("file", strategies(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_strategy_has_at_most_80_lines_of_code(file: Path) -> None:
    assert code_lines(file.read_text(encoding="utf-8")) <= MOST


def test_the_strategies_of_papers_are_among_them() -> None:
    names = {f.stem if f.parent.name == "drafters" else f.parent.name for f in strategies()}
    assert names >= {"recycling", "lookahead", "rest", "mtp", "dflash", "prompt_lookup"}


SHARING = ["drafters/policies", "decoding/block_verification", "decoding/lossy_rules", "decoding/multi_draft"]


@pytest.mark.parametrize("name", SHARING)
def test_a_rule_or_policy_has_at_most_80_lines_of_code(name: str) -> None:
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    parts = [ast.get_source_segment(source, n) for n in ast.parse(source).body if isinstance(n, DEFINITIONS)]
    assert parts
    assert max(code_lines(part) for part in parts if part) <= MOST
