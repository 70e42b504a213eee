"""Tensors without data stand for a GPU's: code that reads one of them would wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.context import RunContext

DEVICE = torch.device("meta")
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,  # item, float, int, bool, tolist
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
"""What cannot be told, or has no shape, before the device is done."""


class DeviceSyncs(TorchDispatchMode):
    """Notes each call for which the processor has to wait: reads, and copies from the device.

    There being no data, such a call then fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._waits(func.overloadpacket, args, kwargs):
            self.calls.append(str(func.overloadpacket))
        return func(*args, **kwargs)

    @staticmethod
    def _waits(called: Any, args: Any, kwargs: Any) -> bool:
        if called in READS:
            return any(isinstance(own, torch.Tensor) and own.device == DEVICE for own in args)
        if called is aten.index:  # by a mask: how many there are is the result's shape
            return any(own is not None and own.dtype == torch.bool for own in args[1])
        if called is aten._to_copy:
            target, source = kwargs.get("device"), args[0]
            return target is not None and source.device == DEVICE and target != DEVICE
        if called is aten.copy_:
            target, source = args[:2]
            return bool(source.device == DEVICE and target.device != DEVICE)
        return False


class DeviceGenerator(torch.Generator):
    """A tensor that claims to be on the device, but holds no data."""

    device = DEVICE  # type: ignore[assignment]


class DeviceContext(RunContext):
    """The harness's context, with a run on the device."""

    def generator(self, *names: str | int) -> torch.Generator:
        """Make a generator."""
        return DeviceGenerator().manual_seed(self.seed(*names))
