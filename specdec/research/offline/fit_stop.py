"""Train the stop classifier of `length_policy="classifier"` from a trace (drafters/policies.py).

    trace = record(dec, prompts, top=2, temperature=1.0, strategies=["draft-model:n_max=8"])
    dec.generate(prompts, temperature=1.0, length_policy=fit_stop(trace))

Logistic regression of "accepted" on what is known of q before a token is sampled, over tested tokens: those after a
rejection were not judged. The rule sees q at temperature 1 without processors: record at temperature 1.
"""

from __future__ import annotations

import numpy as np
import torch

from specdec.drafters.policies import Classifier, features
from specdec.errors import SpecdecError
from specdec.research.traces.trace import Trace

RIDGE = 1.0  # keeps weights finite where classes can be told apart without error


def fit_stop(trace: Trace, stop: float = 0.7) -> Classifier:
    """Return the policy with trained weights. Raises SpecdecError for a trace without both outcomes, or without q."""
    best: list[list[float]] = []
    accepted: list[bool] = []
    for r in trace.rounds:
        if r.details is None or r.details.draft_top is None or r.parents is not None:
            continue
        tested = min(r.accepted + 1, len(r.draft))
        best += [top[:2] for top in r.details.draft_top[:tested]]
        accepted += [i < r.accepted for i in range(tested)]
    if not best or min(map(len, best)) < 2 or len(set(accepted)) < 2:
        raise SpecdecError(
            "fit_stop needs accepted and rejected tokens of drafts with a q: record(..., top=2, temperature=1.0) with "
            "a draft model"
        )
    x = torch.stack(features(torch.tensor(best)), dim=-1).double().numpy()  # [n, 3]
    return Classifier(tuple(logistic(x, np.array(accepted, np.float64))), stop)


def logistic(x: np.ndarray, y: np.ndarray, steps: int = 30) -> list[float]:
    """Return the weights of a logistic regression of y [n] on x [n, d], by Newton's method with a small ridge."""
    weights = np.zeros(x.shape[1])
    for _ in range(steps):
        p = 1.0 / (1.0 + np.exp(-np.clip(x @ weights, -30.0, 30.0)))
        curvature = (x * (p * (1.0 - p))[:, None]).T @ x + RIDGE * np.eye(len(weights))
        weights += np.linalg.solve(curvature, x.T @ (y - p) - RIDGE * weights)
    return [float(w) for w in weights]
