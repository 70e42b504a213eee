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
from bench.reporting.collection import Collection, Run
from bench.store import Store

pytestmark = pytest.mark.browser

DESKTOP, PHONE = (1280, 900), (390, 844)
SCREENS = ((360, 800), (1024, 768), (1440, 900), (2560, 1440))
METHODS = ("nct", "nct_plus", "erm", "jtt", "dfr", "groupdro", "cnc", "eiil", "george", "exmap")
PUBLISHED, MANY = 214, 2000
VISIBLE = """() => [...document.querySelectorAll("td.measured")].filter((cell) => {
  const box = cell.getBoundingClientRect();
  return box.width > 0 && box.top >= 0 && box.bottom <= innerHeight && box.left >= 0
    && box.right <= innerWidth && !isNaN(parseFloat(cell.innerText));
}).length"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Path:
    folder = tmp_path_factory.mktemp("page")
    store = Store(folder / "results")
    history = pd.DataFrame(
        {"stage": "fit", "iteration": 2, "phase": 1, "epoch": range(5), "loss": [5, 4, 3, 2, 1]}
    ).astype({"iteration": "Int64", "phase": "Int64"})
    history = history.assign(selection=0.5, audit_val_wga=50.0, audit_test_wga=60.0)
    predictions = pd.DataFrame(
        {"id": range(8), "split": ["val", "test"] * 4, "y": [0, 1] * 4, "group": [0, 2] * 4}
    ).assign(pred=[0, 1, 1, 0, 0, 1, 0, 1], leaf=[0, 1, 2, 3] * 2)
    made = [
        record(job, 60.0 + 3 * place + job.seed)
        for place, method in enumerate(METHODS)
        for dataset in ("umnist", "cmnist")
        for job in jobs(method, dataset, 2)
    ]
    made += [record(jobs("cnc", "umnist", 1)[0], 70.0, method="<b>cnc</b>", standin=True)]
    for one in made:
        store.write(one, history, predictions)
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


def opened(browser: Any, file: Path, width: int, height: int, **more: Any) -> Any:
    view = {"width": width, "height": height}
    page = browser.new_context(viewport=view, offline=True, **more).new_page()
    page.goto(file.as_uri())
    return page


@pytest.mark.parametrize(("width", "height"), SCREENS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_first_screen_has_the_answer(
    browser: Any, page_file: Path, width: int, height: int, theme: str
) -> None:
    page = opened(browser, page_file, width, height, color_scheme=theme)
    assert page.evaluate(VISIBLE) >= 10
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    first = page.locator(".findings li").first.bounding_box()
    assert first["y"] + first["height"] < height
    assert "is first with" in page.locator(".findings li").first.inner_text()
    page.context.close()


def test_boards_are_in_order_and_name_what_methods_see(page: Any) -> None:
    numbers = page.eval_on_selector_all(
        "section.board:first-of-type td.measured", "cells => cells.map(c => Number(c.innerText))"
    )
    assert len(numbers) == len(METHODS) and numbers == sorted(numbers, reverse=True)
    assert page.locator("section.board").first.locator("tr", has_text="Group DRO").inner_text()
    key = page.locator("p.key").first.inner_text()
    assert "validation group labels" in key and "95% interval" in key and "own number" in key


def open_section(page: Any, name: str) -> None:
    page.evaluate("name => { document.getElementById(name).open = true; }", name)
    page.wait_for_function("name => document.getElementById(name).open", arg=name)
    page.wait_for_timeout(100)  # its script prepares it on `toggle`


def first_column(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        "#main_results tbody tr:not([hidden]) th:first-child",
        "cells => cells.map(c => c.innerText)",
    )
    return found


def test_main_table_sorts_both_ways_and_back(page: Any) -> None:
    open_section(page, "main_results")
    before = first_column(page)
    head = page.locator("#main_results thead tr:last-child th").nth(12)
    assert head.inner_text().startswith("WGA")  # UMNIST
    values = "#main_results tbody tr:not(.section) td:nth-child(13)"
    read = "cells => cells.map(c => c.dataset.v).filter(Boolean).map(Number)"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    falling = page.eval_on_selector_all(values, read)
    assert len(falling) >= 10 and falling == sorted(falling, reverse=True)
    head.locator("button").click()
    rising = page.eval_on_selector_all(values, read)
    assert rising == falling[::-1]
    head.locator("button").click()
    assert first_column(page) == before


def test_main_table_filters(page: Any) -> None:
    open_section(page, "main_results")
    box = page.locator("#main_results [data-filter]")
    box.fill("nct 93.5")
    assert first_column(page) == ["NCT"]
    assert page.locator("#main_results .count").inner_text().startswith("1 of")
    box.fill("no such method")
    assert first_column(page) == []
    box.fill("")
    assert len(first_column(page)) > 10


def test_a_cell_leads_to_its_runs(page: Any) -> None:
    cell = page.locator("section.board td.measured").first
    cell.click()
    tip = page.locator("#tip")
    assert "mean" in tip.inner_text() and "n 2" in tip.inner_text()
    link = tip.locator("a").first
    name = link.inner_text()
    link.click()
    page.locator("dialog[open]").wait_for()
    assert page.locator("#run-title").inner_text() == name
    assert tip.is_hidden()


def test_a_run_and_a_node_of_its_tree_open(page: Any) -> None:
    open_section(page, "runs")
    page.locator("#run-filter").fill("nct-umnist")
    page.locator("#run-list a").first.click()
    dialog = page.locator("dialog[open]")
    dialog.get_by_role("heading", name="Stages", exact=True).wait_for()
    for part in ("Command", "Metrics", "Tree", "History", "Configuration", "Environment"):
        assert dialog.get_by_role("heading", name=part, exact=True).count() == 1, part
    assert "worst group" in dialog.locator(".headline").inner_text()
    assert "--seeds 0," in dialog.locator(".copy code").inner_text()
    assert dialog.get_by_role("heading", name="Slices").count() == 1
    assert dialog.locator("svg.chart polyline").count() >= 3
    node = dialog.locator(".node", has_text="5-9:H").first
    node.click()
    assert node.get_attribute("aria-pressed") == "true"
    told = dialog.locator("#node").inner_text()
    assert "Node 5-9:H" in told and "digit_8" in told and "training samples" in told
    dialog.locator("#close").click()
    assert page.locator("dialog[open]").count() == 0
    assert page.evaluate("document.activeElement.closest('#run-list') !== null")


def test_nothing_is_wider_than_the_screen_and_the_theme_changes(page: Any) -> None:
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen
    look = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(look)
    page.locator("#theme").click()
    assert page.evaluate(look) != light
    assert page.locator("#theme").inner_text() == "Light"


def test_names_of_sections_are_read_without_scrolling(page: Any) -> None:
    open_section(page, "main_results")
    ends = page.eval_on_selector_all(
        "#main_results tr.section span",
        """names => names.map(name => {
          name.innerText = "a claim of many words ".repeat(8);
          return name.getBoundingClientRect().right;
        })""",
    )
    assert ends and max(ends) <= page.evaluate("innerWidth")


def test_datasets_without_runs_are_one_line_until_asked_for(page: Any) -> None:
    open_section(page, "main_results")
    column = page.locator("#main_results thead tr:last-child th").nth(5)  # Waterbirds
    button = page.locator("#main_results [data-unfold]")
    assert column.is_hidden() and "Waterbirds" in button.inner_text()
    button.click()
    assert column.is_visible() and button.get_attribute("aria-pressed") == "true"


def test_heads_of_columns_stay_in_sight(page: Any) -> None:
    open_section(page, "main_results")
    page.evaluate("document.querySelector('#main_results .scroll').style.maxHeight = '200px'")
    box = page.locator("#main_results .scroll")
    box.evaluate("box => { box.scrollTop = 300; }")
    head, area = (
        one.bounding_box()
        for one in (page.locator("#main_results thead tr:last-child th").first, box)
    )
    assert 0 <= head["y"] - area["y"] < 60


def test_a_drawing_and_a_tree_are_made_when_they_are_opened(page: Any) -> None:
    assert page.locator(".drawing img").count() == 0
    open_section(page, "figure-pareto")
    image = page.locator("#figure-pareto img")
    image.wait_for()
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    open_section(page, "trees")
    page.locator("#tree-shown .node").first.wait_for()
    assert page.locator("#tree-runs button").count() >= 4
    page.locator("#tree-runs button").nth(1).click()
    page.locator("#tree-shown .node").nth(2).click()
    assert "training samples" in page.locator("#tree-shown #node").inner_text()


def test_a_link_opens_the_section_it_leads_to(page: Any) -> None:
    page.locator(".findings a").first.click()
    page.locator("#main_results table").wait_for()
    assert page.locator("#main_results").get_attribute("open") is not None


def test_everything_can_be_reached_by_keyboard(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    cell = page.locator("section.board td[tabindex='0']").first
    cell.focus()
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.innerText")
    assert second == page.locator("section.board td.measured").nth(1).inner_text()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('#tip') !== null")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    assert page.evaluate("document.activeElement.innerText") == second
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_barrier(browser: Any, page_file: Path, theme: str) -> None:
    """What axe-core finds serious or critical, with every section and a run open."""
    package = pytest.importorskip("axe_playwright_python")
    checker = (Path(package.__file__).parent / "axe.min.js").read_text("utf-8")
    page = opened(browser, page_file, *DESKTOP, color_scheme=theme, bypass_csp=True)
    page.evaluate(checker)
    found = problems(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.locator("#tree-shown .node").first.wait_for()
    found += problems(page)
    page.locator("#run-list a").first.click()
    page.locator("dialog[open] .copy").wait_for()
    found += problems(page)
    assert found == []
    page.context.close()


def problems(page: Any) -> list[str]:
    serious = page.evaluate("axe.run().then((found) => found.violations)")
    return [
        f"{one['id']}: {node['html'][:160]}"
        for one in serious
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]


def test_two_thousand_runs_open_nearly_as_fast_as_the_published_ones(
    browser: Any, tmp_path: Path, reference: Reference
) -> None:
    files = {}
    for count in (PUBLISHED, MANY):
        seeds = range(count // (2 * len(METHODS)) + 1)
        made = [
            record(job, 60.0 + job.seed % 30, seed=seed, run_id=f"{job.method}-{dataset}-s{seed}")
            for method in METHODS
            for dataset in ("umnist", "cmnist")
            for job in jobs(method, dataset, 1)
            for seed in seeds
        ][:count]
        runs = [Run(one, tmp_path / one.run_id, "published") for one in made]
        shown = given(Collection(tuple(runs)), reference)
        files[count] = build(tmp_path / str(count), shown, formats=("svg",))
        assert files[count].stat().st_size < 10_000 * count + 200_000
    best = {
        count: min(seconds_to_open(browser, file) for _ in range(5))
        for count, file in files.items()
    }
    assert best[MANY] <= 3 * best[PUBLISHED], best


def seconds_to_open(browser: Any, file: Path) -> float:
    page = opened(browser, file, *DESKTOP)
    seconds = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
    page.context.close()
    return float(seconds)


def test_print_is_dark_on_white_and_shows_what_is_open(browser: Any, page_file: Path) -> None:
    page = opened(browser, page_file, *DESKTOP, color_scheme="dark")
    open_section(page, "main_results")
    page.emulate_media(media="print")
    look = "getComputedStyle(document.body).{}"
    assert page.evaluate(look.format("backgroundColor")) == "rgb(255, 255, 255)"
    assert page.evaluate(look.format("color")) == "rgb(0, 0, 0)"
    shown = {name: page.locator(name).first.is_visible() for name in ("#main_results", ".board")}
    assert shown == {"#main_results": True, ".board": True}
    for name in ("header.top", "#contents", "#paired_tests", "#main_results .tools"):
        assert page.locator(name).is_hidden(), name
    page.context.close()
