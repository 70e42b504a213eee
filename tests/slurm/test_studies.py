"""A study whose workers run on a real SLURM."""

from __future__ import annotations

import json

import pytest
from desk import Desk, wait_until

pytestmark = pytest.mark.slurm


def test_workers_on_a_cluster_make_the_trials_and_the_preset(desk: Desk) -> None:
    words = ["tune", "--method", "jtt", "--dataset", "umnist", "--trials", 3, "--quick"]
    places = ["--data-root", desk.digits, "--results", desk.results]
    _, told = desk.bench(*words, *places, "--workers", 2, "--cluster", desk.profile())
    assert "submitted array" in told and "2 workers" in told
    preset = desk.results / "presets" / "jtt-umnist-standin-quick.toml"
    wait_until(preset.is_file)
    wait_until(lambda: not desk.slurm("squeue", "--noheader"))
    shown, _ = desk.bench(*words, *places, "--show", "--json")
    summary = json.loads(shown)
    trials = summary["trials"]
    assert (trials.pop("asked"), trials.pop("finished")) == (3, 3)
    assert not any(trials.values()), "nothing was pruned, diverged, failed or interrupted"
    assert len({json.dumps(trial["params"]) for trial in summary["history"]}) == 3
    desk.run(
        "--methods", "jtt", "--datasets", "umnist", "--seeds", 1, "--quick", "--preset", "tuned"
    )
