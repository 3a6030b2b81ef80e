"""A job's progress as a Beta distribution, learned from the logs of jobs that have ended.

alpha is the number of epochs done, beta is 1 + ReLU of a small network of five features. Source: ONES (SC 2021, arXiv:2108.03645).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from patrickstar.cluster.job_view import JobView, Numbers

HIDDEN, STEPS, BATCH, RATE, DECAY, MOST_LINES = 64, 100, 64, 3e-3, 1e-4, 2000
"""ONES takes 60 passes in batches of 8 at a rate of 1e-4; larger batches and steps come as far in a hundredth of the time."""


def features(job: JobView) -> tuple[float, ...]:
    """Log of the data set's size, first loss, epochs done, how far the loss has fallen, accuracy: for fitting and for asking alike."""
    first, last = job.losses
    return float(np.log(job.epoch_samples)), min(first, 100.0), float(job.epochs), 1 - last / first, job.accuracy


@dataclass(frozen=True, slots=True)
class BetaModel:
    """Weights of the network, [features, hidden], [hidden], [hidden] and one number; as they are before anything is known."""

    inner: Numbers = field(default_factory=lambda: np.zeros((5, HIDDEN)))
    inner_bias: Numbers = field(default_factory=lambda: np.zeros(HIDDEN))
    outer: Numbers = field(default_factory=lambda: np.zeros(HIDDEN))
    bias: float = 3.0

    def beta(self, lines: Numbers) -> Numbers:
        """The second parameter for each of these lines of features. [lines]"""
        return 1 + np.maximum(np.tanh(lines @ self.inner + self.inner_bias) @ self.outer + self.bias, 0)


def fit(lines: Numbers, progress: Numbers, rng: np.random.Generator) -> BetaModel:
    """A model from scratch, by Adam on the likelihood of what jobs that have ended had done at each line.

    Args:
        lines: [lines, features]; progress: the share of all samples that was done, in (0, 1). [lines]
    """
    if len(lines) > MOST_LINES:
        kept = rng.choice(len(lines), MOST_LINES, replace=False)
        lines, progress = lines[kept], progress[kept]
    weights = [rng.normal(0, 0.3, (5, HIDDEN)), np.zeros(HIDDEN), rng.normal(0, 0.3, HIDDEN), np.array(3.0)]
    first, second = ([np.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(1, STEPS + 1):
        rows = rng.integers(0, len(lines), min(BATCH, len(lines)))
        for at, slope in enumerate(_slopes(weights, lines[rows], progress[rows])):
            grad = slope + DECAY * weights[at]
            first[at] = 0.9 * first[at] + 0.1 * grad
            second[at] = 0.999 * second[at] + 0.001 * grad * grad
            scale = np.sqrt(second[at] / (1 - 0.999**step)) + 1e-8
            weights[at] = weights[at] - RATE * first[at] / (1 - 0.9**step) / scale
    return BetaModel(weights[0], weights[1], weights[2], float(weights[3]))


def slope_by_beta(alpha: Numbers, beta: Numbers, progress: Numbers) -> Numbers:
    """Slope of each line's negative log-likelihood by its own beta. [lines] each"""
    assert alpha.shape == beta.shape == progress.shape  # another shape would pair every line with every other
    return digamma(beta) - digamma(alpha + beta) - np.log1p(-progress)


def digamma(x: Numbers) -> Numbers:
    """Slope of log-gamma, for x from 1 on: raised by recurrence to where the asymptotic series is good to 1e-10."""
    below: Numbers = (1 / (x + np.arange(6)[:, None])).sum(axis=0)
    x = x + 6
    series: Numbers = np.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6) + 1 / (240 * x**8)
    return series - below


def _slopes(weights: list[Numbers], lines: Numbers, progress: Numbers) -> list[Numbers]:
    """Gradients of the mean loss by each of the weights."""
    inner, inner_bias, outer, bias = weights
    hidden = np.tanh(lines @ inner + inner_bias)  # [lines, hidden]
    raw = hidden @ outer + bias
    by_raw = np.where(raw > 0, slope_by_beta(lines[:, 2], 1 + np.maximum(raw, 0), progress), 0) / len(lines)
    by_hidden = by_raw[:, None] * outer * (1 - hidden**2)
    return [lines.T @ by_hidden, by_hidden.sum(axis=0), hidden.T @ by_raw, by_raw.sum()]
