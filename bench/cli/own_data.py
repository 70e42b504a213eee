"""`bench data add`, `show` and `remove`: a user's own data."""

from __future__ import annotations

import base64
import html
import io
from argparse import Namespace
from pathlib import Path

import numpy as np
from PIL import Image

from bench.cli.output import log, print_json, print_table
from bench.launch.progress import preparation_bar
from datasets.base import SPLITS, Facts
from datasets.catalogue import get_dataset
from datasets.config import as_plain
from datasets.decode import decode, decode_all
from datasets.errors import DataCorrupt, DataMissing, UsageError
from datasets.files import DATA, atomic_file, storage_errors
from datasets.intake import AddOptions, add, remove
from datasets.own import Description, Own
from datasets.pixels import spread
from methods.backbones import check_backbone, check_input

SMALL_SET = 2000  # training samples up to which the preset for small sets is suggested
ON_A_SHEET, ACROSS, THUMBNAIL, GAP = 40, 10, 96, 6  # pictures, pictures in a row, pixels
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px/1.5 system-ui;max-width:62rem;margin:2rem auto;padding:0 1rem}}
img{{max-width:100%;height:auto}}h2{{margin:2rem 0 .3rem}}</style>
<h1>{title}</h1><p>{about}</p>
{sheets}</html>
"""
SHEET = '<h2>{name}</h2><p>{counts}</p><img src="data:image/png;base64,{png}" alt="{alt}">\n'


def run_add(arguments: Namespace) -> None:
    """Register data, and print what was found."""
    options = AddOptions(
        groups=tuple(name.strip() for name in arguments.groups.split(",") if name.strip()),
        split_seed=arguments.split_seed,
        skip_bad=arguments.skip_bad,
        backbone=arguments.backbone,
        resolution=arguments.resolution,
        scratch=arguments.scratch,
    )
    with preparation_bar() as bar:
        where = arguments.path, arguments.data_root
        added = add(arguments.name, *where, options, bar, _check_network)
    if arguments.json:
        content = as_plain(added.description) | {"folder": str(added.folder), "notes": added.notes}
        print_json(content)
        return
    _print(added.description, added.notes)
    print(f"written to {added.folder}; no image was copied")
    preset = " --preset small" if added.description.counts["train"] <= SMALL_SET else ""
    words = f"--methods erm,nct --datasets {arguments.name} --seeds 1{preset}"
    log(f"next: python -m bench run {words}")


def _check_network(name: str, rows: bool) -> None:
    check_backbone(name)
    check_input(name, rows=rows, data="this data")


def run_remove(arguments: Namespace) -> None:
    """Take a registration away."""
    folder = remove(arguments.name, arguments.data_root)
    if arguments.json:
        print_json({"removed": str(folder)})
    else:
        print(f"{arguments.name} is no longer registered; its files and finished runs stay")


def run_show(arguments: Namespace) -> None:
    """Print what was registered, and draw a sheet of pictures for each group or class."""
    dataset = get_dataset(arguments.name)
    if not isinstance(dataset, Own):
        raise UsageError(
            f"{arguments.name} is not data of your own", "python -m bench list shows the others"
        )
    known, found = dataset.description, dataset.require(arguments.data_root)
    out = arguments.out or Path(f"{arguments.name}-sheets")
    files = [] if known.length else write_sheets(dataset, found.folder, out)
    if arguments.json:
        content = as_plain(known) | {"folder": str(found.folder)}
        print_json(content | {"sheets": [str(file) for file in files]})
        return
    _print(known, [])
    print(f"described in {found.folder}")
    if files:
        print(f"pictures of each {'group' if known.group_splits else 'class'}: {files[0]}")


def _print(known: Description, notes: list[str]) -> None:
    """Print counts by group, or by class where no group is known, and what else is known."""
    rows = []
    for place, name in enumerate(known.groups):
        counts = (known.group_counts.get(split) for split in SPLITS)
        rows.append(
            (name, *("not labelled" if own is None else f"{own[place]:,}" for own in counts))
        )
    rows.append(("all", *(f"{known.counts[split]:,}" for split in SPLITS)))
    what = "group" if known.group_splits else "class"
    print_table(f"{known.title or known.name}: {known.form}", (what, *SPLITS), rows)
    if known.group_splits:
        by = ", ".join(known.attributes)
        print(f"groups: class and {by}, known in {', '.join(known.group_splits)}")
    else:
        print("groups: none, so that runs report classes (--groups COLUMN names what forms them)")
    if known.drawn:
        print(f"drawn, stratified, by --split-seed {known.split_seed}: {' and '.join(known.drawn)}")
    start = "ImageNet weights" if known.pretrained else "random weights"
    size = f" at {known.resolution} x {known.resolution}" if known.resolution else ""
    print(f"trained by default: {known.backbone}{size}, from {start}")
    for note in notes:
        print(note)


def write_sheets(dataset: Own, folder: Path, out: Path) -> list[Path]:
    """Write a sheet of pictures for each group, and a page with all of them; return the files."""
    facts = dataset.facts(dataset.config_type())
    table = dataset.table(folder, dataset.config_type())
    column, names = ("group", facts.groups) if facts.group_splits else ("y", facts.classes)
    sheets, files = [], []
    with storage_errors(out, DATA):
        out.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(names):
        own = table[table[column] == place]
        chosen = [Path(own["file"].iloc[i]) for i in spread(len(own), ON_A_SHEET)]
        png = io.BytesIO()
        contact_sheet(chosen).save(png, "PNG", optimize=True)
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
        with atomic_file(out / f"{place:02d}-{safe}.png") as draft:
            draft.write_bytes(png.getvalue())
        files.append(out / f"{place:02d}-{safe}.png")
        counts = ", ".join(f"{s} {int((own['split'] == n).sum()):,}" for n, s in enumerate(SPLITS))
        encoded = base64.b64encode(png.getvalue()).decode()
        alt = html.escape(f"{len(chosen)} images of {name}", quote=True)
        sheets.append(SHEET.format(name=html.escape(name), counts=counts, png=encoded, alt=alt))
    page = out / "index.html"
    with atomic_file(page) as draft:
        draft.write_text(_page(dataset, facts, sheets), encoding="utf-8")
    return [page, *files]


def _page(dataset: Own, facts: Facts, sheets: list[str]) -> str:
    what = "group" if facts.group_splits else "class"
    about = f"Up to {ON_A_SHEET} images of each {what}, evenly spread over {facts.name}."
    title = html.escape(dataset.title)
    return PAGE.format(title=title, about=html.escape(about), sheets="".join(sheets))


def contact_sheet(files: list[Path]) -> Image.Image:
    """Put images side by side, each amid a square; one that cannot be read stays grey."""
    rows = max(1, -(-len(files) // ACROSS))
    sheet = Image.new("RGB", (ACROSS * THUMBNAIL, rows * THUMBNAIL), "white")
    for place, array in enumerate(decode_all(files, _pixels)):
        image = Image.fromarray(array)
        scale = (THUMBNAIL - GAP) / max(image.size)
        small = image.resize([max(1, round(side * scale)) for side in image.size])
        left, top = ((THUMBNAIL - side) // 2 for side in small.size)
        row, column = divmod(place, ACROSS)
        sheet.paste(small, (column * THUMBNAIL + left, row * THUMBNAIL + top))
    return sheet


def _pixels(file: Path) -> np.ndarray:
    try:
        return decode(file)
    except (DataCorrupt, DataMissing):
        return np.full((THUMBNAIL, THUMBNAIL, 3), 200, dtype=np.uint8)
