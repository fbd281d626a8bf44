"""Strategy `draft-model`: chains, trees, pipelined drafting, and drafts through text."""

from specdec.drafters.draft_model.strategy import DEFAULTS, PRESETS, DraftModel

__all__ = ["DEFAULTS", "PRESETS", "DraftModel"]
