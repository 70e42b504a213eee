"""The page of slices in a real browser: the answers first, sorting, keyboard, nothing fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from report_records import jobs, record

from bench.reporting.html import data_url
from bench.reporting.slices_html import slices_page
from bench.slice_report import SliceReport
from bench.slices import Names, analyse

pytestmark = pytest.mark.browser

DESKTOP, TABLET, PHONE = (1440, 1000), (1024, 1000), (360, 780)
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def report() -> SliceReport:
    """Six slices, of which one has the planted minority and most errors; a hostile column."""
    draw, size = np.random.default_rng(0), 900
    frame = pd.DataFrame({"id": range(2 * size), "split": ["val"] * size + ["test"] * size})
    frame["slice"] = draw.choice(6, 2 * size, p=[0.4, 0.3, 0.1, 0.1, 0.06, 0.04])
    planted = draw.random(2 * size) < np.where(frame["slice"] == 4, 0.7, 0.02)
    frame["y"] = draw.integers(0, 2, 2 * size)
    frame["group"] = np.where(planted, 2, frame["y"])
    wrong = draw.random(2 * size) < np.where(planted, 0.7, 0.03)
    frame["pred"] = np.where(wrong, 1 - frame["y"], frame["y"])
    frame["confidence"] = draw.uniform(0.5, 1, 2 * size)
    columns = pd.DataFrame({"camera": np.where(planted, HOSTILE, "plain")}, index=frame["id"])
    names = Names(("digits_0_4", "digits_5_9"), ("digits_0_4", "digits_5_9", "digit_8"))
    found = analyse(frame, names, "val", again="test", columns=columns)
    one = record(jobs("nct", "umnist", 1)[0], 90.0)
    images = torch.from_numpy(draw.integers(0, 255, (8, 1, 28, 28), dtype=np.uint8))
    urls = [data_url(image) for image in images]
    shown = [s.id for own in found.slices for s in (*own.wrong, *own.typical)]
    pictures = {sample: urls[sample % len(urls)] for sample in shown}
    how = "A slice is a leaf."
    return SliceReport(one, found, frame, how, again="test", pictures=pictures, notes=("A note.",))


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, report: SliceReport) -> Path:
    path = tmp_path_factory.mktemp("slices") / "index.html"
    path.write_text(slices_page(report), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=arguments)
        yield started
        started.close()


@pytest.fixture(params=[DESKTOP, TABLET, PHONE], ids=["desktop", "tablet", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, page_file: Path) -> Iterator[Any]:
    width, height = request.param
    context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
    opened = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda sent: asked.append(sent.url))
    opened.goto(page_file.as_uri())
    yield opened
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()


def order(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        "#all tbody th a", "links => links.map(link => link.innerText)"
    )
    return found


def test_the_first_screen_answers(page: Any, report: SliceReport) -> None:
    """Which slice, how bad, more than chance, what it is: without scrolling."""
    worst = report.analysis.worst
    assert worst is not None and worst.name == "slice 4"
    assert page.locator("#worst").inner_text() == "slice 4"
    answers = page.locator(".answers")
    text = answers.inner_text()
    assert worst.accuracy is not None and f"{100 * worst.accuracy.share:.1f}% right" in text
    assert "points worse" in text and "Yes" in text and "Test samples" in text and "agree" in text
    assert "group digit 8" in text and "times as frequent as overall" in text
    what = page.locator(".answers dd").nth(2).bounding_box()
    assert what["y"] + what["height"] <= page.viewport_size["height"]
    sizes = page.eval_on_selector_all(".hero img", "all => all.map(one => one.naturalWidth)")
    assert sizes == [28] * len(worst.wrong)


def test_the_table_sorts_and_comes_back(page: Any, report: SliceReport) -> None:
    ranked = [one.name for one in report.analysis.slices]
    assert order(page) == ranked
    head = page.locator("#all th", has_text="Validation")
    sizes = {one.name: one.sizes["val"] for one in report.analysis.slices}
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert order(page) == sorted(ranked, key=lambda name: -sizes[name])
    head.locator("button").click()
    assert order(page) == sorted(ranked, key=lambda name: sizes[name])
    head.locator("button").click()
    assert order(page) == ranked


def test_a_slice_opens_from_the_keyboard(page: Any, report: SliceReport) -> None:
    last = report.analysis.slices[-1]
    section = page.locator(f"#slice-{last.number}")
    assert section.get_attribute("open") is None
    page.locator("#all tbody a", has_text=last.name).focus()
    page.keyboard.press("Enter")
    section.locator("h4").first.wait_for(state="visible")
    assert page.evaluate("document.activeElement.closest('details').id") == section.get_attribute(
        "id"
    )
    page.keyboard.press("Enter")
    assert section.get_attribute("open") is None
    page.goto(page.url.split("#")[0])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_what_distinguishes_a_slice_is_text(page: Any) -> None:
    traits = page.get_by_role("region", name="What distinguishes slice 4")
    assert HOSTILE in traits.inner_text()
    assert page.locator("img[src='x']").count() == 0


def test_nothing_is_wider_than_the_screen_and_the_theme_changes(page: Any) -> None:
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen
    look = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(look)
    page.locator("#theme").click()
    assert page.evaluate(look) != light
    assert page.locator("#theme").inner_text() == "Light"


def test_every_picture_has_words_and_headings_come_in_order(page: Any) -> None:
    assert page.locator("img:not([alt])").count() == 0
    levels = page.eval_on_selector_all(
        "h1, h2, h3, h4", "all => all.map(one => Number(one.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
