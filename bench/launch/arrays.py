"""From jobs to arrays: who shares a task, who makes a stage, and who waits for it.

A stage that several jobs share is made by one of them. The others are submitted with a dependency
on its task, so that no GPU waits for another. The dependency is on the end of that task, not on its
success: should it fail, the next job makes the stage itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.context import stage_meaning
from bench.files import digest
from bench.fitting import stage_scope
from bench.launch.profile import Resources
from bench.plan import Job
from datasets.config import build_config
from methods.base import get_method

Item = TypeVar("Item")


@dataclass(frozen=True)
class Draft:
    """An array before it is submitted.

    Attributes:
        tasks: the jobs of each task.
        makes: shared stages, and the number of the task that makes each.
        waits_for: the stages that have to be made first.
    """

    resources: Resources
    tasks: tuple[tuple[Job, ...], ...]
    makes: Mapping[str, int]
    waits_for: tuple[str, ...]


def shared_stage(job: Job, label_digest: str) -> str | None:
    """Name the stage that a job will ask for and that others may share."""
    method = get_method(job.method)
    stage = method.shared_stage(build_config(method.config_type, job.config["method"], job.method))
    if stage is None:
        return None
    meaning = stage_meaning(stage_scope(job, label_digest), stage, job.seed)
    return f"{stage.name}-{digest(meaning)}"


def draft_arrays(
    jobs: Sequence[Job],
    resources: Callable[[Job], Resources],
    stages: Mapping[str, str],
    being_made: Mapping[str, str],
    largest: int,
) -> list[Draft]:
    """Sort jobs into arrays, those that make stages first.

    Args:
        jobs: what to submit.
        resources: what a job asks for.
        stages: by run id, the stage that a job needs and that is not on disk, if there is one.
        being_made: stages that tasks submitted earlier make.
        largest: how many tasks an array may have.
    """
    needs = {job.run_id: stages.get(job.run_id) for job in jobs}
    makers: dict[str, str] = {}
    # A job that is nothing but the stage is done with it soonest, so it goes first.
    for job in sorted(jobs, key=lambda job: not str(needs[job.run_id]).startswith(job.method)):
        stage = needs[job.run_id]
        if stage is not None and stage not in being_made:
            makers.setdefault(stage, job.run_id)
    kinds: dict[tuple[Resources, str], list[Job]] = {}
    for job in jobs:
        stage = needs[job.run_id]
        waits = stage is not None and makers.get(stage) != job.run_id
        # Those that wait do so by dataset: its stages take about as long as each other.
        kinds.setdefault((resources(job), job.dataset if waits else ""), []).append(job)
    drafts = []
    for (asked, waiting), members in sorted(kinds.items(), key=lambda kind: bool(kind[0][1])):
        for tasks in _chunks(_chunks(members, asked.pack), largest):
            needed = {
                stage: number
                for number, packed in enumerate(tasks)
                for job in packed
                if (stage := needs[job.run_id]) is not None
            }
            makes, waits_for = ({}, tuple(needed)) if waiting else (needed, ())
            drafts.append(Draft(asked, tasks, makes, waits_for))
    return drafts


def _chunks(items: Sequence[Item], size: int) -> tuple[tuple[Item, ...], ...]:
    return tuple(tuple(items[start : start + size]) for start in range(0, len(items), size))
