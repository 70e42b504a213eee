"""The paper's two results as formulas: minority enrichment, and the gap of a single classifier."""

from __future__ import annotations

from scipy.stats import norm


def enrichment(aligned: float, error: float) -> float:
    """Share of minority samples among the errors of iteration 1 (Theorem 1).

    For C classes the paper replaces `aligned` by the probability of the majority attribute within
    one class and claims enrichment whenever that exceeds 1 / C; what the formula needs is a small
    error, below 1/2: `enrichment(0.9, 0.6)` is less than the minority's share of 0.1.

    Args:
        aligned: rho, the probability that the spurious attribute agrees with the class.
        error: epsilon, the probability that the prediction differs from the attribute.

    Returns:
        P(a != y | prediction wrong).
    """
    _check_shares(aligned, error)
    minority = (1 - error) * (1 - aligned)
    return minority / (error * aligned + minority)


def class_enrichment(aligned: float, error: float, classes: int) -> float:
    """Minority share among one class's errors where misread attributes fall on any other class.

    With C classes a prediction that differs from a minority sample's attribute is still right with
    probability 1 / (C - 1), so the minority's error rate is 1 - error / (C - 1); C = 2 gives
    `enrichment`.
    """
    _check_shares(aligned, error)
    if classes < 2:
        raise ValueError(f"classes must be at least 2 but got {classes}")
    minority = (1 - error / (classes - 1)) * (1 - aligned)
    return minority / (error * aligned + minority)


def approximation_gap(spurious: float, core: float) -> float:
    """Worst-group risk a single linear classifier pays over two specialists (closed form).

    Args:
        spurious: mu_s, magnitude of the spurious feature.
        core: mu_c, magnitude of the core feature.

    Returns:
        Phi(-mu_c) - Phi(-sqrt(mu_s^2 + mu_c^2)).
    """
    if spurious < 0 or core <= 0:
        raise ValueError(f"need spurious >= 0 and core > 0, got {spurious} and {core}")
    return float(norm.cdf(-core) - norm.cdf(-((spurious**2 + core**2) ** 0.5)))


def _check_shares(aligned: float, error: float) -> None:
    if not (0 < aligned < 1 and 0 <= error < 1):
        raise ValueError(f"need 0 < aligned < 1 and 0 <= error < 1, got {aligned} and {error}")
