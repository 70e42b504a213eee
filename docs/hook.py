"""Called by mkdocs: adds the pages that are made from the code, and mends links out of `docs/`."""

from typing import Any

from bench.pages import site

PAGES: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Make the pages, and put them into the navigation."""
    PAGES.update(site.generated_pages())
    config.nav = site.navigation(config.nav, PAGES)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File

    for path, content in PAGES.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Mend the links of a file of `docs/` that lead out of it."""
    path = page.file.src_uri
    return markdown if path in PAGES else site.site_links(markdown, f"docs/{path}")
