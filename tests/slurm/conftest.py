"""A real SLURM on this machine, and a method whose runs are slow, or fail, as a test wants it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import MARK, one_machine_slurm
from desk import REPOSITORY, Desk, wait_until

from datasets import standins

PLUG_IN = '''
"""ERM that pauses before every epoch, and that fails for chosen seeds in chosen ways."""

import os
import time
from dataclasses import dataclass

import torch

from methods.backbones import FittedClassifier, build_classifier
from methods.base import Method, register
from methods.optimisation import TrainConfig
from methods.training import Training


@dataclass(frozen=True)
class SlowConfig(TrainConfig):
    epochs: int = 6
    pause: float = 0.0
    trouble: tuple[str, ...] = ()

    def quick(self):
        return self


class Loss(torch.nn.Module):
    def __init__(self, diverges):
        super().__init__()
        self.diverges = diverges

    def forward(self, model, batch):
        value = torch.nn.functional.cross_entropy(model(batch.images), batch.y)
        return value * float("nan") if self.diverges else value


@register("slow", version=1, config=SlowConfig)
class Slow(Method):
    def fit(self, task, config, ctx):
        trouble = dict(entry.split(":") for entry in config.trouble)
        kind = trouble.get(str(ctx.settings.seed))
        if kind == "error":
            raise RuntimeError("made to fail")
        if kind == "memory":
            torch.empty(10**16)
        if kind == "die":
            os.kill(os.getpid(), 9)
        if kind == "once":  # fails the first time, and leaves a note of it
            note = ctx.settings.stages / f"tried-{ctx.settings.run_id}"
            if not note.exists():
                note.parent.mkdir(exist_ok=True)
                note.touch()
                raise RuntimeError("made to fail once")
        model = build_classifier(task, ctx, "slow")

        def order(epoch, generator):
            time.sleep(config.pause)
            return torch.randperm(len(task.train), generator=generator)

        loss = Loss(kind == "diverge")
        training = Training(model, task, config, ctx, name="slow", sampler=order, objective=loss)
        return FittedClassifier(model, selection=training.run())

    def search_space(self, trial, task):
        return SlowConfig(lr=trial.suggest_float("lr", 1e-2, 1e-1, log=True))
'''


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which a one-machine SLURM answers; started here unless there is one."""
    with contextlib.ExitStack() as started:
        try:
            settings = started.enter_context(one_machine_slurm())
        except subprocess.CalledProcessError as refused:
            if os.environ.get("CI"):
                pytest.fail(f"CI must run these: {refused.stderr}")
            pytest.skip(f"no SLURM can be started here (it needs root and apt): {refused.stderr}")
        yield settings


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in, as pip would install it."""
    folder = tmp_path_factory.mktemp("site")
    facts = folder / "slow_method-1.0.dist-info"
    facts.mkdir()
    (folder / "slow_method.py").write_text(PLUG_IN)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-method\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[bench.methods]\nslow = slow_method\n")
    return folder


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for MNIST."""
    root = tmp_path_factory.mktemp("digits")
    standins.write("mnist", root, size=600)
    return root


@pytest.fixture
def desk(cluster: dict[str, str], digits: Path, site: Path, tmp_path: Path) -> Iterator[Desk]:
    """A fresh results folder; whatever it left on the cluster is cancelled afterwards."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    paths = os.pathsep.join([str(REPOSITORY), str(site)])
    environment = {**inherited, **cluster, "PYTHONPATH": paths, MARK: str(tmp_path)}
    user = Desk(tmp_path / "results", digits, environment)
    yield user
    for process in user.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    user.slurm("scancel", "--user", "root")
    wait_until(lambda: not user.slurm("squeue", "--noheader"))
