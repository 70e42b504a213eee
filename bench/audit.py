"""The audit: the harness's one-way look at the model after each epoch.

It needs the test split and every group label while `fit` runs, and `fit` must not be able to reach
either. So they live in local variables of a thread of their own: what the context holds is a pair
of queues, and no reference leads from a queue into another thread's stack. The caller waits while
the audit looks, so that the model is not changed under it, and subtracts the time.
"""

from __future__ import annotations

import copy
import threading
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from bench.evaluate import evaluate
from bench.files import append_line
from datasets.base import LoadedData
from methods.metrics import class_scores
from methods.prediction import EvalImages, predict_with

AUDITED = ("wga", "avg", "auroc", "auroc_nonpatch")


class AuditLink:
    """The way in: models go through it, nothing but 'done' comes back."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self.replies: SimpleQueue[BaseException | None] = SimpleQueue()

    def look(
        self,
        record: str,
        where: dict[str, Any],
        val_outputs: Tensor,
        module: nn.Module,
    ) -> None:
        """Wait until the audit has looked at the model as it is now."""
        self.requests.put((record, where, val_outputs, module))
        failure = self.replies.get()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the audit's thread."""
        self.requests.put(None)


def start_audit(data: LoadedData, folder: Path, threads: int) -> AuditLink:
    """Start the audit; its rows go to `<folder>/<record>.jsonl`."""
    link = AuditLink()
    handover = [(data, folder)]

    def work() -> None:
        torch.set_num_threads(threads)
        everything, sink = handover.pop()  # from here on only this stack frame knows the data
        test = EvalImages(everything.splits["test"].images, everything.facts.eval_transform)
        link.replies.put(None)
        while (request := link.requests.get()) is not None:
            try:
                record, where, val_outputs, module = request
                row = dict(where)
                seen = {"val": val_outputs, "test": predict_with(_detached(module), test)}
                for split, outputs in seen.items():
                    scores = class_scores(outputs, len(everything.facts.classes))
                    metrics = evaluate(everything, split, scores)
                    row |= {
                        f"audit_{split}_{name}": metrics[name]
                        for name in AUDITED
                        if name in metrics
                    }
                append_line(sink / f"{record}.jsonl", row)
            except BaseException as failure:
                link.replies.put(_without_frames(failure))
            else:
                link.replies.put(None)

    threading.Thread(target=work, name="audit", daemon=True).start()
    link.replies.get()
    return link


def _detached(module: nn.Module) -> nn.Module:
    """Copy a module without its hooks: whatever they or it collect of the test set is dropped."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return twin


def _without_frames(failure: BaseException) -> BaseException:
    """Keep a failure's traceback as text: its frames lead to the data, and `fit` may catch it."""
    failure.add_note("in the audit:\n" + "".join(traceback.format_exception(failure)))
    failure.__cause__ = failure.__context__ = None
    return failure.with_traceback(None)
