"""What the documentation site is made of: the files of `docs/`, and pages made from the code.

mkdocs calls `docs/hook.py`, which only hands on to these functions; they know nothing of mkdocs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from bench.pages.datasets import dataset_pages
from bench.pages.methods import method_pages

TREE = Path(__file__).resolve().parents[2]
COPIED = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "results/README.md": "results.md",
}
"""Files of the tree outside `docs/` that are pages of the site, and where they are there."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def generated_pages() -> dict[str, str]:
    """Return every page that is not a file of `docs/`, by path in the site."""
    copied = {
        target: site_links((TREE / source).read_text(encoding="utf-8"), source)
        for source, target in COPIED.items()
    }
    return method_pages() | dataset_pages() | copied


def site_links(text: str, source: str) -> str:
    """Return Markdown of a file of the tree with its links as they are in the site.

    A link to a file that is no page of the site becomes that file's path: it is in the repository.

    Args:
        text: the Markdown.
        source: where its file is in the tree.
    """
    place = COPIED.get(source, source.removeprefix("docs/"))

    def replaced(found: re.Match[str]) -> str:
        words, link = found.group(1), found.group(2)
        if "://" in link or link.startswith(("#", "mailto:")):
            return found.group(0)
        path, mark, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in COPIED:
            page = COPIED[target]
        elif target.startswith("docs/"):
            page = target.removeprefix("docs/")
        else:
            return words if words.strip("`") == target else f"{words} (`{target}`)"
        relative = posixpath.relpath(page, posixpath.dirname(place) or ".")
        return f"[{words}]({relative}{mark}{anchor})"

    def picture(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found.group(2)))
        if not path.startswith("docs/"):
            return ""
        relative = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(place) or ".")
        return f"![{found.group(1)}]({relative})"

    return LINK.sub(replaced, PICTURE.sub(picture, text))


def navigation(nav: list[object], pages: Mapping[str, str]) -> list[object]:
    """Return the site's navigation with the generated pages under `Methods` and `Datasets`."""
    filled: list[object] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, target),) = entry.items()
            if isinstance(target, str) and target.endswith("/"):
                inside = [path for path in pages if path.startswith(target)]
                filled.append({title: inside})
                continue
        filled.append(entry)
    return filled
