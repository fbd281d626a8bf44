"""Checks of options that need no model, so that a grid of hours does not fail at its last cell.

The engine checks the same things again when it runs; here they are refused when a config is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin

from specdec.config import UNSET, GenerationSettings, PairConfig
from specdec.decoding.acceptance import AcceptanceRule, find_rule
from specdec.decoding.shard import Shard
from specdec.drafters import make_drafters, tree_makers
from specdec.drafters.costs import as_costs, check_costs
from specdec.drafters.length import automatic
from specdec.drafters.policies import LengthPolicy, draft_length, find_policy
from specdec.errors import SpecdecError
from specdec.files.texts import first_line
from specdec.models.attention import check_attention
from specdec.models.kv_cache import kv_dtype
from specdec.models.loading import Source, check_dtype, parse_device, pick_device
from specdec.sampling.sampling import build_sampling

_END = 0  # in place of the model's end token


class _NoModel(GenerationMixin):
    """The part of a model that transformers looks at when it makes processors."""

    config: Any = SimpleNamespace(is_encoder_decoder=False)


@contextmanager
def naming_processors(settings: GenerationSettings) -> Iterator[None]:
    """Turn what transformers raises while it makes processors into one line that names them."""
    try:
        yield
    except SpecdecError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError) as error:
        named = ", ".join(f"{name}={value!r}" for name, value in settings.processors.items())
        refused = named or "the sampling options"
        raise SpecdecError(f"transformers refuses {refused}: {first_line(error)}") from error


def check_generation(options: Mapping[str, Any]) -> GenerationSettings:
    """Check generation options: names, values, acceptance rule, cost tables, and transformers' processors, made on
    trial. Raises SpecdecError."""
    settings = GenerationSettings.parse(options)
    find_rule(settings.acceptance)
    Shard.parse(settings.shard)
    as_costs(settings.costs)
    draft_length(find_policy(settings.length_policy), settings.draft_length)
    settings.check_ids()
    if settings.ignore_eos and settings.eos_token_id not in (UNSET, None):
        raise SpecdecError(
            f"eos_token_id={settings.eos_token_id!r} has no effect with ignore_eos=True: leave one of them out"
        )
    if settings.processors:
        with naming_processors(settings):
            made = build_sampling(
                _NoModel(), settings.fields, settings.temperature, [_END], [], None, torch.device("cpu")
            )
            if made.row_processors is not None:
                made.row_processors(0, [_END], settings.max_new_tokens)
    return settings


def check_chain(strategies: Sequence[Any], has_draft: bool, settings: GenerationSettings) -> None:
    """Check a chain with the options of its calls. Raises SpecdecError if they do not go together on any models."""
    drafters = make_drafters(list(strategies), has_draft)
    if not has_draft and any(d.uses_draft_model for d in drafters):
        raise SpecdecError("strategy 'draft-model' needs a draft model, and the pair has none")
    trees = tree_makers(drafters)
    if trees and settings.exact is True:
        raise SpecdecError(f"exact=True does not cover trees, which strategy {trees[0]!r} can make")
    check_rule(find_rule(settings.acceptance), drafters)
    policy = find_policy(settings.length_policy)
    lengths = automatic(drafters, draft_length(policy, settings.draft_length), default_chain=False)
    if not isinstance(policy, LengthPolicy):
        check_costs(drafters, lengths, as_costs(settings.costs))


def check_rule(rule: AcceptanceRule, drafters: Sequence[Any]) -> None:
    """Raise SpecdecError for a strategy that can make trees with a rule that judges chains only."""
    trees = tree_makers(drafters)
    if trees and rule.pick_child is None:
        raise SpecdecError(f"acceptance {rule.name!r} judges chains only, and strategy {trees[0]!r} can make trees")


def check_loading(models: PairConfig) -> None:
    """Check the form of a pair's loading options; `check_places` looks for models and devices. Raises SpecdecError."""
    for role, name in (("target", models.target), ("draft", models.draft)):
        needed = role == "target" or name is not None
        if needed and (not isinstance(name, (str, Path)) or not str(name)):
            raise SpecdecError(f"{role}: expected a hub id, a folder or a GGUF file, got {name!r}")
    for name in ("device", "draft_device"):
        if getattr(models, name) is not None:
            parse_device(getattr(models, name))
    for name in ("dtype", "draft_dtype"):
        check_dtype(getattr(models, name), name)
    for name in ("revision", "draft_revision"):
        if not isinstance(getattr(models, name), (str, type(None))):
            raise SpecdecError(f"{name} must be a text, got {getattr(models, name)!r}")
    if not isinstance(models.trust_remote_code, bool):
        raise SpecdecError(f"trust_remote_code must be true or false, got {models.trust_remote_code!r}")
    check_attention(models.attn_implementation)
    kv_dtype(models.kv_cache_dtype)
    unused = [f"{k}={v!r}" for k, v in vars(models).items() if k.startswith("draft_") and v is not None]
    if models.draft is None and unused:
        raise SpecdecError(f"{unused[0]} has no effect on a pair without a draft")


def check_places(models: PairConfig) -> None:
    """Raise SpecdecError if this machine lacks the pair's devices or local files."""
    for name in (models.target, models.draft):
        if name is not None:
            Source.parse(name)
    for device in (models.device, models.draft_device):
        pick_device(device)
