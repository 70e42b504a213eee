"""What runs keep in memory: little for digits, and for files a batch, however many there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.resources import published_folder
from bench.store import Store
from datasets import standins

DIGITS = ("umnist", "cmnist")
TWO_GIGABYTES = 2 * 10**9
FEW, MANY = 100, 800
# Not getrusage: its peak starts from that of the process that started this one.
EPOCHS = """
import contextlib
import sys
from pathlib import Path
import torch
from bench.perf.workload import EpochClock
from bench.process import peak_memory_bytes
from datasets.base import BackboneSpec
from datasets.catalogue import get_dataset
from methods import prediction
from methods.optimisation import TrainConfig
from methods.training import Training

torch.set_num_threads(1)
prediction.BATCH_BYTES["cpu"] = 2**20  # so that either split has more than one batch
root, folder = map(Path, sys.argv[1:])
dataset = get_dataset("waterbirds")
data = dataset.load(root, dataset.config_type(resolution=112))
task = data.task(BackboneSpec("lenet5"), train_groups=False, val_groups=False)
layers = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2)
training = Training(
    torch.nn.Sequential(*layers), task, TrainConfig(epochs=2, batch_size=16), EpochClock(folder)
)
with contextlib.suppress(OSError):
    Path("/proc/self/clear_refs").write_text("5")  # decoding had a peak of its own
before = peak_memory_bytes(torch.device("cpu"))
assert training.run().epochs_run == 2
test = prediction.EvalImages(data.splits["test"].images, data.facts.eval_transform)
for look in range(2):  # as the audit does
    prediction.predict_with(training.model, test)
print(peak_memory_bytes(torch.device("cpu")) - before, task.train.images.nbytes)
"""


def test_published_runs_on_digits_stay_below_two_gigabytes() -> None:
    peaks = {
        record.run_id: record.cost.peak_memory_bytes or 0
        for record in Store(published_folder()).records()
        if record.job.dataset in DIGITS
    }
    assert peaks, "nothing was checked"
    assert not {run: peak for run, peak in peaks.items() if not 0 < peak < TWO_GIGABYTES}


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
