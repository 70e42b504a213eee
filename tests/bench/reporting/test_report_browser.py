"""The page in a real browser: sorting, filtering, a run, a node of its tree; nothing fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_records import collection, given, jobs, record

from bench.reporting import Reference, build
from bench.store import Store

pytestmark = pytest.mark.browser

DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Path:
    folder = tmp_path_factory.mktemp("page")
    store = Store(folder / "results")
    history = pd.DataFrame(
        {"stage": "fit", "iteration": 2, "phase": 1, "epoch": range(5), "loss": [5, 4, 3, 2, 1]}
    ).astype({"iteration": "Int64", "phase": "Int64"})
    history = history.assign(selection=0.5, audit_val_wga=50.0, audit_test_wga=60.0)
    made = [
        record(job, wga + job.seed)
        for method, wga in (("nct", 90.0), ("erm", 80.0), ("jtt", 85.0), ("dfr", 86.0))
        for job in jobs(method, "umnist", 2)
    ]
    made += [record(jobs("cnc", "umnist", 1)[0], 70.0, method="<b>cnc</b>", standin=True)]
    for one in made:
        store.write(one, history)
    runs = collection(*made, folder=store.runs)
    return build(folder / "report", given(runs, reference), formats=("svg",))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=arguments)
        yield started
        started.close()


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
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


def first_column(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        "#main_results tbody tr:not([hidden]) th:first-child",
        "cells => cells.map(c => c.innerText)",
    )
    return found


def test_main_table_sorts_both_ways_and_back(page: Any) -> None:
    before = first_column(page)
    head = page.locator("#main_results thead tr:last-child th").nth(12)
    assert head.inner_text().startswith("WGA")  # UMNIST
    values = "#main_results tbody tr:not(.section) td:nth-child(13)"
    read = "cells => cells.map(c => c.dataset.v).filter(Boolean).map(Number)"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    falling = page.eval_on_selector_all(values, read)
    assert len(falling) >= 5 and falling == sorted(falling, reverse=True)
    head.locator("button").click()
    rising = page.eval_on_selector_all(values, read)
    assert rising == falling[::-1]
    head.locator("button").click()
    assert first_column(page) == before


def test_main_table_filters(page: Any) -> None:
    box = page.locator("#main_results [data-filter]")
    box.fill("nct 93.5")
    assert first_column(page) == ["NCT"]
    assert page.locator("#main_results .count").inner_text().startswith("1 of")
    box.fill("no such method")
    assert first_column(page) == []
    box.fill("")
    assert len(first_column(page)) > 10


def test_a_cell_leads_to_its_runs(page: Any) -> None:
    cell = page.locator("#main_results td[data-runs]").first
    cell.click()
    tip = page.locator("#tip")
    assert "mean" in tip.inner_text() and "n 2" in tip.inner_text()
    tip.locator("a").first.click()
    assert page.locator("dialog[open] #run-title").inner_text() in cell.get_attribute("data-runs")


def test_a_run_and_a_node_of_its_tree_open(page: Any) -> None:
    page.locator("#run-list a", has_text="nct-umnist").first.click()
    dialog = page.locator("dialog[open]")
    dialog.get_by_role("heading", name="Stages", exact=True).wait_for()
    for part in ("Metrics", "Tree", "History", "Configuration", "Environment", "Stages"):
        assert dialog.get_by_role("heading", name=part, exact=True).count() == 1, part
    assert dialog.locator("svg.chart polyline").count() >= 3
    node = dialog.locator(".node", has_text="5-9:H").first
    node.click()
    assert node.get_attribute("aria-pressed") == "true"
    told = dialog.locator("#node").inner_text()
    assert "Node 5-9:H" in told and "digit_8" in told and "training samples" in told
    dialog.locator("#close").click()
    assert page.locator("dialog[open]").count() == 0


def test_nothing_is_wider_than_the_screen_and_the_theme_changes(page: Any) -> None:
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen
    look = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(look)
    page.locator("#theme").click()
    assert page.evaluate(look) != light
    assert page.locator("#theme").inner_text() == "Light"
