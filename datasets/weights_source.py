"""The ImageNet weights of ResNet-50: torchvision's first recipe, from either of two hosts.

Only these weights make the published numbers comparable (torchvision's later default is another
recipe). A file the user put in place is checked and used, because compute nodes see neither host.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

from datasets.errors import DataCorrupt, DataMissing
from datasets.fetch import Log, download, get_command

FETCHED_BACKBONES = ("resnet50", "resnet50.tv_in1k")
"""The networks whose weights `bench data get weights` fetches."""

WEIGHTS_REPOSITORY = "timm/resnet50.tv_in1k"
WEIGHTS_FILE = "resnet50.tv_in1k.safetensors"
TORCHVISION_WEIGHTS_FILE = "resnet50-0676ba61.pth"
TORCHVISION_WEIGHTS_URL = f"https://download.pytorch.org/models/{TORCHVISION_WEIGHTS_FILE}"
TORCHVISION_WEIGHTS_SHA256 = "0676ba61"  # the eight digits in its name are all that is published
WEIGHTS_STEPS = """get them by hand:
  1. on a machine with a network, download {url}
  2. put it, under that name, in {folder}
  3. run: {command}
  Or point to a file you have: --set backbone.weights=FILE"""


def find_weights(root: Path) -> Path | None:
    """Find checked weights under `root`; nothing is written."""
    folder = root / "weights"
    if (folder / WEIGHTS_FILE).is_file():
        return _whole_safetensors(folder / WEIGHTS_FILE)
    there = (folder / TORCHVISION_WEIGHTS_FILE).is_file()
    return _weights_from_torchvision(folder) if there else None


def fetch_weights(root: Path, log: Log) -> Path:
    """Fetch the weights from the first host that gives them."""
    folder = root / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    reasons: list[str] = []
    for fetch in (_weights_from_hub, _weights_from_torchvision):
        try:
            return fetch(folder)
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
    return _whole_safetensors(partial).replace(folder / WEIGHTS_FILE)


def _weights_from_torchvision(folder: Path) -> Path:
    target = folder / TORCHVISION_WEIGHTS_FILE
    return download(TORCHVISION_WEIGHTS_URL, target, sha256=TORCHVISION_WEIGHTS_SHA256)


def _whole_safetensors(path: Path) -> Path:
    """Check that a file is whole and holds a ResNet: no published sum exists to compare with."""
    try:
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(min(length, 10_000_000)))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        whole = "conv1.weight" in header and path.stat().st_size == 8 + length + max(ends)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        remedy = "delete it and run `python -m bench data get weights`"
        raise DataCorrupt(f"{path} is not a complete ResNet-50 safetensors file", remedy)
    return path
