"""From a folder to the page, as a stranger goes: the worst slice holds what was planted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.append(str(Path(__file__).parents[2]))
from planted import write_planted

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def bench(*words: str, folder: Path) -> str:
    """Run a command in a folder; return what it printed."""
    environment = {**os.environ, "BENCH_DATA": str(folder / "data")}
    command = [sys.executable, "-m", "bench", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_worst_slice_holds_the_planted_minority(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    minority = write_planted(tmp_path / "shapes", count=900)
    bench("data", "add", "shapes", "shapes", folder=tmp_path)
    words = ("--datasets", "shapes", "--preset", "small", "--seeds", "1", "--audit", "off")
    bench("run", "--methods", "erm,nct,george", *words, folder=tmp_path)
    samples = pd.read_parquet(tmp_path / "data/own/shapes/samples.parquet")
    planted = samples.set_index("id")["file"].isin(minority)
    share = planted[samples.set_index("id")["split"] == 1].mean()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    runs = tmp_path / "results/runs"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=arguments)
        for method in ("nct", "george"):
            (run,) = [folder.name for folder in runs.iterdir() if folder.name.startswith(method)]
            bench("slices", run, "--out", f"page-{method}", folder=tmp_path)
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            page.goto((tmp_path / f"page-{method}/index.html").as_uri())
            worst = page.locator("#worst").inner_text()
            assert page.locator("#all tbody th a").first.inner_text() == worst
            bench("slices", run, "--export", worst, "members.csv", folder=tmp_path)
            members = pd.read_csv(tmp_path / "members.csv")
            held = planted[members["id"][members["split"] == "val"]].mean()
            assert held >= 3 * share, (method, worst, held, share)
            titles = page.eval_on_selector_all(".hero img", "all => all.map(one => one.title)")
            shown = {int(title.removeprefix("sample ").split(",")[0]) for title in titles}
            assert shown and shown <= set(members["id"])
            answers = page.locator(".answers").inner_text()
            assert ("by the first model" in answers) == (method == "george")
        browser.close()
