"""Photos of one's own from `data add` to predictions, by one command that is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from datasets.dataset import Dataset
from datasets.fetch import use_data_root

pytestmark = pytest.mark.slow

WaitUntil = Callable[[Callable[[], Any]], Any]
COUNT, EPOCHS = 160, 25
SLOWLY = """
import sys, time
import bench
from datasets import decode
real = decode._decode
decode.CHECKPOINT_SECONDS = 0.0
decode._decode = lambda *what: (time.sleep(0.02), real(*what))[1]
from bench.cli import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
NETWORK = ("--set", "backbone.name=test_resnet", "backbone.pretrained=false")
SETTINGS = (*NETWORK, "shapes.resolution=32", f"erm.epochs={EPOCHS}", "erm.batch_size=32")


def write_photos(folder: Path) -> None:
    """Write JPEGs that differ in size, in two classes that differ in brightness."""
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        size = (90 + number % 30, 70 + number % 20)
        low = 80 * (number % 2)
        pixels = rng.integers(low, low + 150, (*size, 3), dtype=np.uint8)
        place = folder / ("bright" if number % 2 else "dark")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:03}.jpg")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    (tmp_path / "slowly.py").write_text(SLOWLY)
    return tmp_path


def command(root: str) -> list[str]:
    words = ("run", "--methods", "erm", "--datasets", "shapes", "--seeds", "100,", *SETTINGS)
    places = ("--data-root", f"{root}/data", "--results", f"{root}/results")
    how = ("--preset", "small", "--audit", "off", "--workers", "1", "--keep-models")
    return [sys.executable, "slowly.py", *words, *places, *how]


def kill_when(ready: Callable[[], Any], wait_until: WaitUntil) -> None:
    """Start the command, and kill it with all that it has started."""
    process = subprocess.Popen(command("b"), start_new_session=True, stderr=subprocess.PIPE)
    wait_until(lambda: ready() or process.poll() is not None)
    assert process.poll() is None, process.stderr and process.stderr.read().decode()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_three_times_it_ends_with_the_same_predictions(
    home: Path, cli: Any, wait_until: WaitUntil
) -> None:
    for root in ("a", "b"):
        added = cli("data", "add", "shapes", "photos", "--scratch", "--data-root", f"{root}/data")
        assert added.code == 0, added.err
    subprocess.run(command("a"), check=True)

    decoded = home / "b/data/own/shapes/.decoded"

    def journal(split: str) -> list[str]:
        found = list(decoded.glob(f"*-{split}-*.journal"))
        return found[0].read_text().splitlines() if found else []

    kill_when(lambda: len(journal("train")) > 20, wait_until)
    first = journal("train")
    kill_when(lambda: len(journal("train")) > len(first) + 20, wait_until)
    assert journal("train")[: len(first)] == first, "it went on where it was killed"

    def epoch() -> int:
        found = list(home.glob("b/results/work/*/progress.json"))
        text = found[0].read_text() if found else ""
        return int(json.loads(text).get("epoch", 0)) if text else 0

    kill_when(lambda: epoch() > 2, wait_until)
    assert not list(decoded.glob("*.journal")) + list(decoded.glob("*.building"))
    subprocess.run(command("b"), check=True)

    (ours,), (theirs,) = (list(home.glob(f"{root}/results/runs/erm-*")) for root in "ab")
    assert ours.name == theirs.name
    records = [json.loads((run / "record.json").read_text()) for run in (ours, theirs)]
    for name in ("metrics", "selection", "pixel_digest", "label_digest"):
        assert records[0][name] == records[1][name]
    tables = [pd.read_parquet(run / "predictions.parquet") for run in (ours, theirs)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)

    # A kept model reads the files as training did: scaled down first.
    told = cli("predict", ours.name, "photos", "--results", "a/results", "--json")
    assert told.code == 0, told.err
    labelled = {Path(row["file"]).name: row for row in told.json["predictions"]}
    use_data_root(Path("a/data"))
    table = dataset_of("shapes").samples(home / "a/data/own/shapes")  # type: ignore[attr-defined]
    names = {row.id: Path(row.file).name for row in table.itertuples()}
    scores = tables[0][["score_0", "score_1"]].to_numpy(dtype=np.float64)
    likely = 1 / (1 + np.exp(-np.abs(scores[:, 1] - scores[:, 0])))
    for row, probability in zip(tables[0].itertuples(), likely, strict=True):
        found = labelled[names[row.id]]
        assert found["class"] == ("bright", "dark")[row.pred]
        assert found["probability"] == pytest.approx(probability, abs=2e-3)


def dataset_of(name: str) -> Dataset:
    from datasets.catalogue import get_dataset

    return get_dataset(name)
