"""What runs keep in memory: little for digits, and for files a batch, however many there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datasets import standins

RUNS = Path(__file__).parents[2] / "results" / "runs"
RECORDS = sorted(RUNS.glob("*/record.json"))
TWO_GIGABYTES = 2 * 10**9
FEW, MANY = 100, 800
# Not getrusage: its peak starts from that of the process that started this one.
EPOCHS = """
import sys
from pathlib import Path
import torch
from bench.perf.subject import context
from bench.provenance import PeakMemory
from datasets.base import BackboneSpec
from datasets.catalogue import get_dataset
from methods import prediction
from methods.optimisation import TrainConfig
from methods.training import Training

torch.set_num_threads(1)
prediction.RESIDENT_BYTES = 4 * 2**20  # what is kept of a small split, so that both are above it
root, folder = map(Path, sys.argv[1:])
dataset = get_dataset("waterbirds")
data = dataset.load(root, dataset.config_type(resolution=112))
task = data.task(BackboneSpec("lenet5"), train_groups=False, val_groups=False)
layers = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2)
training = Training(
    torch.nn.Sequential(*layers), task, TrainConfig(epochs=2, batch_size=16), context(folder)
)
memory = PeakMemory(torch.device("cpu"))
before = memory.read()
assert training.run().epochs_run == 2
print(memory.read() - before, task.train.images.nbytes)
"""


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_run_on_digits_stays_below_two_gigabytes(path: Path) -> None:
    record: dict[str, Any] = json.loads(path.read_text())
    if record["dataset"] not in ("umnist", "cmnist"):
        pytest.skip("not on digits")
    assert 0 < record["peak_memory_bytes"] < TWO_GIGABYTES


def test_there_are_published_runs() -> None:
    assert RECORDS, "nothing was checked"


@pytest.mark.slow
def test_memory_does_not_grow_with_a_dataset_of_files(tmp_path: Path) -> None:
    """Two epochs over eight times the photos: their pixels do not gather in memory."""
    peaks, sizes = [], []
    for count in (FEW, MANY):
        root = tmp_path / str(count)
        standins.write("waterbirds", root, size=count)
        words = [sys.executable, "-c", EPOCHS, str(root), str(tmp_path / f"work-{count}")]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peak, size = map(int, done.stdout.split())
        peaks.append(peak)
        sizes.append(size)
    more = sizes[1] - sizes[0]
    assert more > 6 * sizes[0]
    assert peaks[1] - peaks[0] < more / 2, (peaks, sizes)
