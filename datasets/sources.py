"""What `bench data get` knows about each dataset: where it comes from and how it is arranged.

MNIST, CIFAR-10 (for Dominoes), Waterbirds and the weights can be fetched without a person. CelebA
and ISIC ask for an account, so for them `get` arranges what the user downloaded, or prints the
exact steps.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from datasets.archives import unpack
from datasets.catalogue import load_datasets
from datasets.cifar_source import FOLDER as CIFAR10
from datasets.cifar_source import ensure_cifar10, holds_cifar10, verify_cifar10
from datasets.errors import DataCorrupt, DataMissing, UsageError, did_you_mean
from datasets.fetch import (
    Log,
    check_sums,
    describe_sum,
    download,
    fetch_lock,
    get_command,
    sha256_of,
)
from datasets.files import DATA, storage_errors
from datasets.mnist_source import ensure_mnist, find_mnist, verify_mnist
from datasets.standins.marker import refuse_marked
from datasets.weights_source import fetch_weights, find_weights

WATERBIRDS = "waterbird_complete95_forest2water2"
WATERBIRDS_URL = f"https://nlp.stanford.edu/data/dro/{WATERBIRDS}.tar.gz"
WATERBIRDS_METADATA_SHA256 = "2f023b9dc371f6fbb82c7cb810ff0f03e19c54c8055a2e37517ae7bb56644362"

CELEBA_IMAGES = "img_align_celeba"
CELEBA_LISTS = ("list_attr_celeba", "list_eval_partition")
CELEBA_ARCHIVES = ("archive.zip", "celeba-dataset.zip", "img_align_celeba.zip")
CELEBA_MD5 = {"img_align_celeba.zip": "00d2c5bc6d35e252742224ab0c1e8fcb"}  # as torchvision has it
CELEBA_STEPS = """get it by hand:
  1. log in at https://www.kaggle.com/datasets/jessicali9530/celeba-dataset and press Download
     (or run: kaggle datasets download jessicali9530/celeba-dataset)
  2. move the zip, as it is, to {folder}/archive.zip
  3. run: {command}
  Or, from the authors' Google Drive: img_align_celeba.zip, list_attr_celeba.txt and
  list_eval_partition.txt, all three into {folder}, then step 3."""

ISIC_STEPS = """get it by hand:
  1. take data/isic/labels.csv from GEORGE's repository (HazyResearch/hidden-stratification) and
     put it at {folder}/labels.csv. It needs the columns 'Image Index' (file name below images/),
     'benign_malignant' (benign, malignant or empty), 'fold' (train, val or test), 'patch' (1 if
     the image is of the SONIC study, whose benign images show coloured patches) and
     'diagnosis_confirm_type' (histopathology or other)
  2. download the images it names from the ISIC Archive (https://www.isic-archive.com), resize
     them to 224 x 224 and put them in {folder}/images/
  3. run: {command}"""


def get(name: str, root: Path, log: Log) -> Path:
    """Make `name` available under `root` and return its folder (or its file, for the weights).

    Where it is there already, nothing is written and no lock is taken, so that a read-only shared
    root works.
    """
    if name not in NAMES:
        return _get_plug_in(name, root, log)
    if name not in SOURCES:
        return ensure_mnist(root, log)
    find, fetch = SOURCES[name]
    found = find(root)
    if found is None:
        with fetch_lock(root, name):
            found = find(root)  # another process may have fetched it meanwhile
            if found is None:
                with storage_errors(root / name, DATA):
                    found = fetch(root, log)
                log(f"{name}: ready: {found}")
                return found
    log(f"{name}: already there: {found}")
    return found


def _get_plug_in(name: str, root: Path, log: Log) -> Path:
    """Have a dataset from outside this package fetch itself."""
    datasets = load_datasets()
    if name not in datasets:
        known = tuple(dict.fromkeys((*NAMES, *datasets)))
        hint = did_you_mean(name.lower(), known)
        raise UsageError(f"there is no '{name}' to get{hint}", f"known: {', '.join(known)}")
    dataset = datasets[name]
    if dataset.locate(root) is None and not dataset.fetch(root, log):
        folders = " or ".join(str(root / path) for path in dataset.search_paths)
        raise DataMissing(f"{name} has to be downloaded by hand", f"put its files in {folders}")
    return dataset.require(root).folder


def _find_waterbirds(root: Path) -> Path | None:
    folder = root / "waterbirds" / WATERBIRDS
    refuse_marked(folder)
    metadata = folder / "metadata.csv"
    if not metadata.is_file():
        return None
    if (actual := sha256_of(metadata)) != WATERBIRDS_METADATA_SHA256:
        raise DataCorrupt(
            f"{metadata} is not the released one: its SHA-256 is {actual}, expected "
            f"{WATERBIRDS_METADATA_SHA256} (a regenerated copy has other splits and groups)",
            f"move {folder} away and run `{get_command('waterbirds', root)}`",
        )
    return folder


def _fetch_waterbirds(root: Path, log: Log) -> Path:
    folder = root / "waterbirds" / WATERBIRDS
    archive = folder.with_name(f"{WATERBIRDS}.tar.gz")
    log(f"waterbirds: {'using' if archive.exists() else 'downloading'} {archive}")
    download(WATERBIRDS_URL, archive, progress=_percent("waterbirds", log))
    log(f"waterbirds: {describe_sum(archive)}")
    staging = _unpack_beside(archive)
    if not (staging / WATERBIRDS / "metadata.csv").is_file():
        shutil.rmtree(staging)
        raise DataCorrupt(
            f"{archive} holds no {WATERBIRDS}/metadata.csv",
            f"delete it and run `{get_command('waterbirds', root)}`",
        )
    (staging / WATERBIRDS).replace(folder)
    shutil.rmtree(staging)
    return _find_waterbirds(root) or folder


def _percent(name: str, log: Log) -> Callable[[int, int | None], None]:
    """Log a large download at every tenth of it."""
    logged = [-1]

    def progress(done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else done // 2**28
        if tenth > logged[0]:
            logged[0] = tenth
            log(f"{name}: {done / 2**20:,.0f} MB" + (f" of {total / 2**20:,.0f}" if total else ""))

    return progress


def _unpack_beside(archive: Path) -> Path:
    """Unpack into a folder of its own; one left by an interrupted run is thrown away first."""
    staging = archive.with_name("unpacked")
    shutil.rmtree(staging, ignore_errors=True)
    unpack(archive, staging)
    return staging


def _find_celeba(root: Path) -> Path | None:
    folder = root / "celeba"
    refuse_marked(folder)
    if _celeba_lacks(folder):
        return None
    partition = _celeba_list(folder, "list_eval_partition")
    # Every form of the list (comma or blank separated, with or without a header) has one per line.
    named = partition.read_text(encoding="utf-8").count(".jpg") if partition else 0
    if (images := _count_jpegs(folder / CELEBA_IMAGES)) != named:
        raise DataCorrupt(
            f"{folder / CELEBA_IMAGES} has {images:,} images, but the partition names {named:,}",
            f"delete {folder / CELEBA_IMAGES}, put the archive in {folder}, and run "
            f"`{get_command('celeba', root)}`",
        )
    return folder


def _celeba_lacks(folder: Path) -> list[str]:
    """Return what CelebA's folder still needs."""
    images = [] if _count_jpegs(folder / CELEBA_IMAGES) else [f"{CELEBA_IMAGES}/*.jpg"]
    return images + [f"{stem}.csv" for stem in CELEBA_LISTS if not _celeba_list(folder, stem)]


def _celeba_list(folder: Path, stem: str) -> Path | None:
    """Return the list as .csv (Kaggle) or .txt (the authors' own)."""
    candidates = (folder / f"{stem}{suffix}" for suffix in (".csv", ".txt"))
    return next((path for path in candidates if path.is_file()), None)


def _count_jpegs(folder: Path) -> int:
    return sum(name.endswith(".jpg") for name in os.listdir(folder)) if folder.is_dir() else 0


def _fetch_celeba(root: Path, log: Log) -> Path:
    folder = root / "celeba"
    _arrange_celeba(folder, folder)
    for archive in (folder / name for name in CELEBA_ARCHIVES):
        if archive.is_file() and _celeba_lacks(folder):
            md5 = CELEBA_MD5.get(archive.name)
            check_sums(archive, "the authors' Google Drive", None, md5)
            log(f"celeba: {describe_sum(archive, 'MD5' if md5 else '')}")
            log(f"celeba: unpacking {archive}")
            staging = _unpack_beside(archive)
            _arrange_celeba(staging, folder)
            shutil.rmtree(staging)
    if lacking := _celeba_lacks(folder):
        raise DataMissing(
            f"CelebA needs a person to download it; {folder} lacks {', '.join(lacking)}",
            CELEBA_STEPS.format(folder=folder, command=get_command("celeba", root)),
        )
    return _find_celeba(root) or folder


def _arrange_celeba(where: Path, folder: Path) -> None:
    """Move images and lists found anywhere below `where` to their places in `folder`.

    Kaggle nests img_align_celeba/img_align_celeba, and the authors' copy has Anno/ and Eval/.
    Nothing that is already in its place is replaced.
    """
    target = folder / CELEBA_IMAGES
    for current, _, files in list(os.walk(where)):
        here = Path(current)
        for stem in CELEBA_LISTS:
            for name in {f"{stem}.csv", f"{stem}.txt"} & set(files):
                if _celeba_list(folder, stem) is None:
                    (here / name).replace(folder / name)
        if here.name == CELEBA_IMAGES and _count_jpegs(here) and not _count_jpegs(target):
            aside = here.replace(folder / "images-found")
            if target.is_dir():
                target.rmdir()  # the outer one of two nested folders, now empty
            aside.replace(target)


def _find_isic(root: Path) -> Path | None:
    for folder in (root / "isic", root / "isic" / "processed"):
        refuse_marked(folder)
        images = folder / "images"
        if (folder / "labels.csv").is_file() and images.is_dir() and any(images.iterdir()):
            return folder
    return None


def _fetch_isic(root: Path, log: Log) -> Path:
    folder = root / "isic"
    raise DataMissing(
        f"ISIC needs a person to download it; {folder} lacks labels.csv or images/",
        ISIC_STEPS.format(folder=folder, command=get_command("isic", root)),
    )


def _find_dominoes(root: Path) -> Path | None:
    folder, digits = root / CIFAR10, find_mnist(root)
    refuse_marked(folder)
    if digits is None or not holds_cifar10(folder):
        return None
    refuse_marked(digits)
    verify_cifar10(folder)
    verify_mnist(digits)
    return folder


def _fetch_dominoes(root: Path, log: Log) -> Path:
    ensure_mnist(root, log)
    return ensure_cifar10(root, log)


SOURCES: dict[str, tuple[Callable[[Path], Path | None], Callable[[Path, Log], Path]]] = {
    "waterbirds": (_find_waterbirds, _fetch_waterbirds),
    "celeba": (_find_celeba, _fetch_celeba),
    "isic": (_find_isic, _fetch_isic),
    "dominoes": (_find_dominoes, _fetch_dominoes),
    "weights": (find_weights, fetch_weights),
}
"""By name, the function that only looks (the root may be read-only) and the one that fetches."""

NAMES = ("mnist", "umnist", "cmnist", "cmnist_irm", *SOURCES)
