"""The ImageNet weights of ResNet-50: torchvision's first recipe, from either of two hosts.

Only these weights make the published numbers comparable (torchvision's later default is another
recipe). A file the user put in place is checked and used, because compute nodes see neither host.
Both hosts' files are known by their SHA-256.
"""

from __future__ import annotations

import contextlib
import shutil
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from datasets.errors import DataCorrupt, DataMissing
from datasets.fetch import Log, describe_sum, download, get_command, sha256_of

FETCHED_BACKBONES = ("resnet50", "resnet50.tv_in1k")
"""The networks whose weights `bench data get weights` fetches."""

WEIGHTS_REPOSITORY = "timm/resnet50.tv_in1k"
WEIGHTS_FILE = "resnet50.tv_in1k.safetensors"
WEIGHTS_SHA256 = "5d061a3c593d795bfe682d9b152bafbcf550579873492def3515b46db1189888"
TORCHVISION_WEIGHTS_FILE = "resnet50-0676ba61.pth"
TORCHVISION_WEIGHTS_URL = f"https://download.pytorch.org/models/{TORCHVISION_WEIGHTS_FILE}"
TORCHVISION_WEIGHTS_SHA256 = "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a"
WEIGHTS_STEPS = """get them by hand:
  1. on a machine with a network, download {url}
  2. put it, under that name, in {folder}
  3. run: {command}
  Or point to a file you have: --set backbone.weights=FILE"""


def find_weights(root: Path) -> Path | None:
    """Find checked weights under `root`; nothing is written."""
    folder = root / "weights"
    known = {WEIGHTS_FILE: WEIGHTS_SHA256, TORCHVISION_WEIGHTS_FILE: TORCHVISION_WEIGHTS_SHA256}
    for name, sha256 in known.items():
        if (folder / name).is_file():
            return _checked(folder / name, sha256)
    return None


def fetch_weights(root: Path, log: Log) -> Path:
    """Fetch the weights from the first host that gives them."""
    folder = root / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    reasons: list[str] = []
    for fetch in (_weights_from_hub, _weights_from_torchvision):
        try:
            found = fetch(folder)
            log(f"weights: {describe_sum(found, 'SHA-256')}")
            return found
        except (DataMissing, DataCorrupt) as error:
            reasons.append(error.message)
            log(f"weights: {error.message}")
    raise DataMissing(
        "the ImageNet weights of ResNet-50 could not be fetched:\n    " + "\n    ".join(reasons),
        WEIGHTS_STEPS.format(
            url=TORCHVISION_WEIGHTS_URL, folder=folder, command=get_command("weights", root)
        ),
    )


def _weights_from_hub(folder: Path) -> Path:
    """Copy from Hugging Face's own cache, which its client fills if it is empty.

    Offline the client retries for half a minute, so the cache and one short call come first.
    """
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(WEIGHTS_REPOSITORY, "model.safetensors")
        if not isinstance(cached, str):
            with contextlib.suppress(urllib.error.HTTPError):  # any answer means it is reachable
                urllib.request.urlopen(constants.ENDPOINT, timeout=5).close()
            cached = hf_hub_download(WEIGHTS_REPOSITORY, "model.safetensors")
    except Exception as error:  # the errors of the client and of its HTTP library share no base
        reason = " ".join(str(error).split())[:200]
        raise DataMissing(f"{WEIGHTS_REPOSITORY} (Hugging Face): {reason}") from error
    partial = folder / f"{WEIGHTS_FILE}.part"
    shutil.copyfile(cached, partial)
    try:
        return _checked(partial, WEIGHTS_SHA256).replace(folder / WEIGHTS_FILE)
    finally:
        partial.unlink(missing_ok=True)


def _weights_from_torchvision(folder: Path) -> Path:
    target = folder / TORCHVISION_WEIGHTS_FILE
    return download(TORCHVISION_WEIGHTS_URL, target, sha256=TORCHVISION_WEIGHTS_SHA256)


def _checked(path: Path, sha256: str) -> Path:
    """Return a file that has the known sum; raise `DataCorrupt` otherwise."""
    now = path.stat()
    if (actual := _sum_of(path, now.st_size, now.st_mtime_ns)) != sha256:
        raise DataCorrupt(
            f"{path} is not the released ResNet-50: its SHA-256 is {actual}, expected {sha256}",
            "delete it and run `python -m bench data get weights`, or use it on purpose with "
            "--set backbone.weights=FILE",
        )
    return path


@cache
def _sum_of(path: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file; every plan asks, and once is enough while it is the same."""
    return sha256_of(path)
