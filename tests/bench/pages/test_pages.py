"""The generated pages of the documentation: one for whatever is registered; links lead."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from bench.pages import site
from bench.pages.docstrings import attributes, describe
from bench.pages.methods import mean_text, method_page, published_runs
from datasets.catalogue import load_datasets
from methods.base import METHODS, Fitted, Method, load_methods, register
from methods.presets import read_presets

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
BLOCK = re.compile(r"```.*?```", re.DOTALL)


@cache
def pages() -> dict[str, str]:
    """Every page of the site, as mkdocs gets it."""
    files = {p.name: p.read_text(encoding="utf-8") for p in (site.TREE / "docs").glob("*.md")}
    mended = {name: site.site_links(text, f"docs/{name}") for name, text in files.items()}
    return mended | site.generated_pages()


def test_everything_registered_has_a_page() -> None:
    for name, method in load_methods().items():
        page = pages()[f"methods/{name}.md"]
        assert page.startswith(f"# {method.title}\n")
        assert f"]({name}.md)" in pages()["methods/index.md"]
        for dataset in load_datasets():
            for entry in read_presets(dataset).get(name, {}).values():
                assert entry.source.replace("|", "\\|") in page
    for name in load_datasets():
        assert pages()[f"datasets/{name}.md"].startswith("# ")
        assert f"]({name}.md)" in pages()["datasets/index.md"]


def test_a_methods_page_has_its_tier_its_deviations_and_our_numbers() -> None:
    page = pages()["methods/groupdro.md"]
    assert "Sees the groups of training images: **yes**" in page
    assert "without overflow" in page.partition("## What differs")[2]
    runs = published_runs()
    own = runs[(runs["method"] == "groupdro") & (runs["dataset"] == "cmnist")]
    assert f"| CMNIST | 1 | {len(own)} | {mean_text(own['test_wga'])} |" in page


def test_a_datasets_page_has_its_counts() -> None:
    page = pages()["datasets/waterbirds.md"]
    facts = load_datasets()["waterbirds"].facts(load_datasets()["waterbirds"].config_type())
    for group, count in zip(facts.groups, facts.group_counts["train"], strict=True):
        assert f"| {group} | {count:,} |" in page


def test_a_method_without_docstring_presets_or_runs_has_a_page() -> None:
    @dataclass(frozen=True)
    class Config:
        knob: float = 0.5

    @register("bare", version=1, config=Config, title="Bare")
    class Bare(Method):
        def fit(self, task: Any, config: Any, ctx: Any) -> Fitted:
            raise NotImplementedError

        def search_space(self, trial: Any, task: Any) -> Any:
            raise NotImplementedError

    try:
        page = method_page(METHODS["bare"])
    finally:
        METHODS.pop("bare")
    assert "No published runs yet." in page and "| `bare.knob` | 0.5 |" in page


@pytest.mark.parametrize("path", sorted(pages()))
def test_links_lead_somewhere(path: str) -> None:
    text = BLOCK.sub("", pages()[path])
    for words, link in site.LINK.findall(text):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        page = (
            posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path
        )
        assert page in pages(), f"{path}: [{words}]({link})"
        if anchor:
            headings = (re.sub(r"[^\w\- ]", "", h).strip() for h in HEADING.findall(pages()[page]))
            known = {re.sub(r"[ -]+", "-", heading.lower()) for heading in headings}
            assert anchor in known, f"{path}: [{words}]({link})"
    for _, picture in site.PICTURE.findall(text):
        assert (site.TREE / "docs" / posixpath.dirname(path) / picture).is_file()


def test_links_out_of_the_docs_become_pages_or_paths() -> None:
    there = site.site_links(
        "[how](../CONTRIBUTING.md#a-method), [it](../bench/api.py)", "docs/a.md"
    )
    assert there == "[how](contributing.md#a-method), it (`bench/api.py`)"
    back = site.site_links(
        "[notes](../docs/lab-notes.md), ![](published/x.svg)", "results/README.md"
    )
    assert back == "[notes](lab-notes.md), "


def test_generated_pages_are_in_the_navigation() -> None:
    nav: list[object] = [{"Start": "index.md"}, {"Methods": "methods/"}]
    filled = site.navigation(nav, {"methods/a.md": "", "datasets/b.md": ""})
    assert filled == [{"Start": "index.md"}, {"Methods": ["methods/a.md"]}]


def test_a_docstring_is_taken_apart() -> None:
    found = describe(
        """JTT: just train twice.

        Paper: Liu et al. 2021; authors' code a/b. Supervision: groups of validation
            (T no, V yes).
        Deviations: none that matter.
        Version 2, only there: another sum.

        How it
        works.
        """
    )
    assert found.summary == "Just train twice."
    assert found.parts["Paper"] == "Liu et al. 2021; authors' code a/b."
    assert found.parts["Deviations"] == "None that matter."
    assert found.parts["Version 2, only there"] == "Another sum."
    assert found.body == ("How it works.",)
    assert describe(None).summary == ""


def test_attributes_of_a_docstring() -> None:
    text = """Knobs.

    Attributes:
        lr, rate: how fast,
            in short.
        more: x.

    Not one: y.
    """
    assert attributes(text) == {
        "lr": "how fast, in short.",
        "rate": "how fast, in short.",
        "more": "x.",
    }
    assert attributes("Nothing.") == {}
