"""Which cases there are: training, evaluation and growing a tree, for every dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.perf import limit, ordinary, ours
from bench.perf.measure import Case, Contender
from bench.perf.subject import Effort, Subject, takes_photos

LENET_EFFORT = Effort(split=20_000, trained=3_840, evaluated=4_000, grown=1_920)
PHOTO_EFFORT = Effort(split=24, trained=8, evaluated=8, grown=8)  # a core does 3 images a second
PHOTO_REPEATS = 2
BATCHES = {"umnist": (128, 64), "cmnist": (32, 64)}  # the authors' own first
PHOTO_BATCH = 8
NCT_BATCH = 64


def cases_of(dataset: str) -> list[Case]:
    """List the cases of a dataset; nothing is made or measured yet."""
    photos = takes_photos(dataset)
    subject = Subject(dataset, PHOTO_EFFORT if photos else LENET_EFFORT)
    return [
        *(training_case(subject, batch) for batch in BATCHES.get(dataset, (PHOTO_BATCH,))),
        evaluation_case(subject),
        nct_case(subject, PHOTO_BATCH if photos else NCT_BATCH),
    ]


def training_case(subject: Subject, batch: int) -> Case:
    """Compare ways to train."""

    def build() -> list[Contender]:
        return [
            limit.training(subject, batch),
            ours.training(subject, batch),
            *([] if subject.is_photo else [ours.stacked_training(subject, batch)]),
            *(ordinary.training(subject, batch, workers) for workers in ordinary.WORKERS),
        ]

    return _case(subject, f"training, batch {batch}", build)


def evaluation_case(subject: Subject) -> Case:
    """Compare ways to evaluate."""

    def build() -> list[Contender]:
        return [
            limit.evaluation(subject),
            ours.evaluation(subject),
            *(ordinary.evaluation(subject, workers) for workers in ordinary.WORKERS),
        ]

    return _case(subject, "evaluation", build)


def nct_case(subject: Subject, batch: int) -> Case:
    """Compare the steps of NCT's phases with a step of ERM."""

    def build() -> list[Contender]:
        return [
            limit.training(subject, batch),
            ours.erm_beside_nct(subject, batch),
            ours.growing(subject, batch),
        ]

    case = _case(subject, f"NCT, batch {batch}", build)
    return replace(case, most_repeats=1) if subject.is_photo else case  # a turn takes 25 seconds


def _case(subject: Subject, work: str, build: Callable[[], list[Contender]]) -> Case:
    name = f"{subject.dataset}: {work}"
    return Case(name, build, PHOTO_REPEATS) if subject.is_photo else Case(name, build)
