"""Workers of a study on a cluster: an array whose tasks all draw from the same journal."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

from bench.launch.dispatch import require_cluster
from bench.launch.ledger import Array, new_launch_id
from bench.launch.profile import Profile
from bench.launch.snapshot import take_snapshot
from bench.tune import Say, Tuning, work
from bench.tuned import finish


class StudyTask:
    """One worker; stopped and started again it takes up what it, or another, has left."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def __call__(self) -> None:
        """Make trials until the study has all; every worker then writes the same preset."""

        def say(text: str) -> None:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

        work(self.tuning, say)
        finish(self.tuning)

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Let submitit bring us back as we are: journal and checkpoints are on disk already."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self, *args, **kwargs)


def submit_workers(tuning: Tuning, workers: int, profile: Profile, say: Say) -> str:
    """Submit the workers of a study, and give SLURM's number of their array."""
    import submitit

    from bench.launch.slurm import parameters

    require_cluster()
    asked = profile.resources(tuning.job())
    name = f"bench-tune-{tuning.name}-{new_launch_id()}"
    code = take_snapshot(tuning.folder / "launches" / name / "code")
    array = Array(name, asdict(asked), tuple((f"worker {n}",) for n in range(workers)))
    executor = submitit.AutoExecutor(
        folder=tuning.folder / "launches" / name / "tasks",
        cluster="slurm",
        slurm_max_num_timeout=asked.requeues,
    )
    executor.update_parameters(**parameters(asked, array, str(code or "")))
    task = StudyTask(replace(tuning, device=asked.device, threads=asked.cpus))
    with executor.batch():
        sent = [executor.submit(task) for _ in range(workers)]
    number = str(sent[0].job_id).split("_")[0]
    say(f"submitted array {number}: {workers} worker{'s' * (workers != 1)}; scancel {number} stops")
    return number
