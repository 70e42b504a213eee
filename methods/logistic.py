"""Sparse logistic regressions by liblinear, one after another or shared out among processes.

Processes, since liblinear draws from one generator for the whole of a process: in threads, fits
would disturb each other's draws. Started as programs, since workers may have no children of
multiprocessing's kind. Nothing here needs torch, so that they start soon.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Layer = tuple[Floats, Floats]
"""Weights, one row a class, and intercepts."""
TOLERANCE = 1e-2  # of liblinear; its own 1e-4 takes five times as long for 0.05% less loss
ROUNDING = 1e-12  # spread of a constant's own copies, relative to it, once their mean is rounded
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Standardiser:
    """Shifts and scales features; one that never varies is only shifted."""

    mean: Floats
    std: Floats

    @classmethod
    def of(cls, features: Floats) -> Standardiser:
        """Measure mean and spread of some features."""
        std = features.std(axis=0)
        varies = std > ROUNDING * np.abs(features).max(axis=0)
        return cls(features.mean(axis=0), np.where(varies, std, 1.0))

    def __call__(self, features: Floats) -> Floats:
        """Standardise."""
        scaled: Floats = (features - self.mean) / self.std
        return scaled

    def folded(self, layer: Layer) -> Layer:
        """Rewrite a layer on standardised features as one on the features themselves."""
        weights = layer[0] / self.std
        return weights, layer[1] - weights @ self.mean


@dataclass(frozen=True)
class Samples:
    """What fits choose their samples from."""

    features: Floats
    y: Ints
    classes: int


@dataclass(frozen=True)
class LogisticFit:
    """One fit: on which samples, standardised how, with which C, and liblinear's seed."""

    rows: Ints
    scale: Standardiser
    penalty: float
    seed: int

    def layer(self, samples: Samples) -> Layer:
        """Carry it out."""
        scaled = self.scale(samples.features[self.rows])
        return fit_layer(scaled, samples.y[self.rows], samples.classes, self.penalty, self.seed)


def fit_layer(features: Floats, y: Ints, classes: int, penalty: float, seed: int) -> Layer:
    """Fit L1 logistic regression with liblinear: one fit for two classes, else one a class.

    liblinear penalises the intercept too and sums the loss over samples, so that the right C
    depends on how many there are.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    rows = []
    for positive in range(1 if classes == 2 else 0, classes):
        model = LogisticRegression(
            l1_ratio=1.0, C=penalty, solver="liblinear", tol=TOLERANCE, random_state=seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the authors' iterations, too
            model.fit(features, y == positive)
        rows.append((model.coef_[0], model.intercept_[0]))
    if classes == 2:  # the first class scores 0, so that the margin is the fit's own
        rows.insert(0, (np.zeros_like(rows[0][0]), 0.0))
    return np.stack([row[0] for row in rows]), np.array([row[1] for row in rows])


def fit_layers(samples: Samples, fits: Sequence[LogisticFit], cores: int = 1) -> list[Layer]:
    """Carry out fits, on as many cores as are given; the layers do not depend on how many."""
    shares = [fits[first::cores] for first in range(cores)]
    helpers = [_Helper(samples, share) for share in shares[1:] if share]
    try:
        for helper in helpers:  # all of them are starting by now
            helper.send()
        parts = [[fit.layer(samples) for fit in shares[0]]]
        parts += [helper.layers() for helper in helpers]
    finally:
        for helper in helpers:
            helper.end()
    return [parts[number % cores][number // cores] for number in range(len(fits))]


class _Helper:
    """A process that does a share of the fits and ends."""

    def __init__(self, samples: Samples, fits: Sequence[LogisticFit]) -> None:
        self.samples, self.fits = samples, fits
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from methods.logistic import help_out; help_out()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **paths, **ONE_THREAD},
        )

    def send(self) -> None:
        """Send its share, and of the samples those it needs."""
        assert self.process.stdin is not None
        needed = np.unique(np.concatenate([fit.rows for fit in self.fits]))
        samples = Samples(
            self.samples.features[needed], self.samples.y[needed], self.samples.classes
        )
        fits = [replace(fit, rows=np.searchsorted(needed, fit.rows)) for fit in self.fits]
        with suppress(BrokenPipeError), self.process.stdin as share:
            pickle.dump((os.getpid(), samples, fits), share)

    def layers(self) -> list[Layer]:
        """Wait for what it found; should it have died, its share is done here."""
        assert self.process.stdout is not None
        content = self.process.stdout.read()
        if self.process.wait() == 0:
            found: list[Layer] = pickle.loads(content)
            return found
        return [fit.layer(self.samples) for fit in self.fits]

    def end(self) -> None:
        """Stop it, should it still be there, and count its time as this process's children's."""
        self.process.kill()
        self.process.wait()


def help_out() -> None:
    """Do the share that comes by standard input, unless the process that gave it has died."""
    with suppress(AttributeError, OSError, TypeError):  # Linux: be killed when the parent dies
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    parent, samples, fits = pickle.load(sys.stdin.buffer)
    if os.getppid() != parent:
        return
    sys.stdout.buffer.write(pickle.dumps([fit.layer(samples) for fit in fits]))
