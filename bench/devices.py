"""Which device runs are for, and how workers share the GPUs of a machine: one each.

A worker is shown its own GPU alone (CUDA_VISIBLE_DEVICES), so that nothing in it, a library's own
allocation included, can land on another's.
"""

from __future__ import annotations

import os
import re

from datasets.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_device(asked: str | None) -> str:
    """Return the device of a request: the GPUs where there are any, unless one is asked for.

    `cuda` means all GPUs, one for each worker, and `cuda:1` the second of them for every worker.
    """
    import torch  # slow to import, and a wrong request needs no answer

    if asked is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", asked):
        raise UsageError(f"--device must be cpu, cuda or cuda:N but got '{asked}'", "e.g. cuda:0")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is None:
        return "cuda" if found else "cpu"
    if asked != "cpu" and not found:
        built = torch.backends.cuda.is_built()
        raise UsageError(
            f"there is no GPU for --device {asked}: torch "
            + ("finds none" if built else f"{torch.__version__} is built without CUDA"),
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
            if built
            else "install torch with CUDA, or use --device cpu",
        )
    _, _, number = asked.partition(":")
    if number and int(number) >= found:
        have = "only cuda:0" if found == 1 else f"cuda:0 to cuda:{found - 1}"
        raise UsageError(f"there is no {asked} on this machine", f"it has {have}")
    return asked


def gpus_of(device: str) -> tuple[str, ...]:
    """Return the GPUs that a device stands for, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if not device.startswith("cuda"):
        return ()
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    every = named or [str(number) for number in range(torch.cuda.device_count())]
    _, _, number = device.partition(":")
    return (every[int(number)],) if number else tuple(every)


def show_one_gpu(name: str) -> None:
    """Hide all other GPUs from this process and its children; it must not have used any yet."""
    os.environ[VISIBLE] = name
