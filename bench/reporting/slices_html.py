"""The page of a run's slices: one file with everything in it, that asks nothing of a network.

Its first screen answers which slice is worst, how bad it is, whether that is more than chance, and
what it is; all else is below, one section a slice.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

from markupsafe import Markup

from bench.job import shown_split
from bench.reporting.html import TEMPLATES
from bench.reporting.latex import TemplateFolder
from bench.reporting.names import dataset_title, group_title, method_title
from bench.slice_accuracy import ALPHA, LEVEL, Accuracy
from bench.slice_report import SPLIT_WORDS, SliceReport
from bench.slices import LABELS, Slice, Trait
from datasets.base import SPLITS

MANY_GROUPS = 12  # of which a table of overlaps shows the most frequent
CHART_WIDTH = 180.0
LARGEST_UNLIKELY_P = 0.0001


@dataclass(frozen=True)
class Scale:
    """Where accuracies lie on a strip; it begins below the lowest interval shown."""

    low: float

    @staticmethod
    def over(slices: tuple[Slice, ...]) -> Scale:
        """Return a scale that holds every slice."""
        lowest = min((one.accuracy.interval[0] for one in slices if one.accuracy), default=0.0)
        return Scale(max(0.0, int(10 * lowest) / 10 - 0.05) if lowest >= 0.1 else 0.0)

    def x(self, share: float) -> float:
        """Return how far to the right a share lies."""
        return round(CHART_WIDTH * (share - self.low) / (1.0 - self.low), 1)


def slices_page(report: SliceReport) -> str:
    """Return the page."""
    environment = TemplateFolder(autoescape=True)
    environment.filters |= {
        **{"percent": percent, "p_value": p_value, "spelt": group_title, "gap": gap},
        **{"in_words": in_words, "number": "{:,}".format, "signed": signed},
    }
    found, job = report.analysis, report.record.job
    hidden = ("test",) if shown_split(job.seed) == "val" else ()
    script = (TEMPLATES / "slices.js").read_text("utf-8")
    styles = ((TEMPLATES / f"{name}.css").read_text("utf-8") for name in ("page", "slices"))
    content: dict[str, object] = {
        "script": Markup(script),
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": Markup("\n".join(styles)),
        "report": report,
        "found": found,
        "job": job,
        "method": method_title(job.method),
        "dataset": dataset_title(job.dataset),
        "words": SPLIT_WORDS,
        "splits": [split for split in SPLITS if split in found.assigned],
        "without": [s for s in SPLITS if s not in (*found.assigned, *hidden)],
        "unseen": not getattr(job.supervision, f"{found.split}_groups", False),
        "scale": Scale.over(found.slices),
        "chart_width": CHART_WIDTH,
        "level": round(100 * LEVEL),
        "alpha": ALPHA,
        "many": MANY_GROUPS,
        "smoke": smoke(report),
    }
    return environment.get_template("slices.html.j2").render(content)


def smoke(report: SliceReport) -> str:
    """Return what makes a run say nothing of its method, if anything does."""
    job = report.record.job
    found = {"synthetic stand-in data": job.standin, "a quick smoke run": job.quick}
    return " and ".join(what for what, holds in found.items() if holds)


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent."""
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def signed(difference: float) -> str:
    """Return a difference of shares in points, with its sign."""
    return f"{100 * difference:+.1f}".replace("-", "\u2212")


def p_value(p: float | None) -> str:
    """Return how likely chance is, without figures that nobody can tell apart."""
    if p is None:
        return "-"
    return f"p < {LARGEST_UNLIKELY_P}" if p < LARGEST_UNLIKELY_P else f"p = {p:.2g}"


def gap(accuracy: Accuracy | None) -> str:
    """Return a difference to the rest with its interval, as better or worse by so many points."""
    if accuracy is None or accuracy.difference is None:
        return "nothing to compare with"
    bounds = accuracy.difference_interval
    assert bounds is not None
    sign = 1 if accuracy.difference >= 0 else -1
    low, high = sorted(100 * sign * bound for bound in bounds)
    word, other = ("better", "worse") if sign > 0 else ("worse", "better")
    if round(100 * accuracy.difference, 1) == 0:
        return f"no difference ({-low:.1f} points {other} to {high:.1f} {word})"
    reach = f"{low:.1f} to {high:.1f}" if low >= 0 else f"{-low:.1f} {other} to {high:.1f} {word}"
    return f"{100 * abs(accuracy.difference):.1f} points {word} ({reach})"


def in_words(trait: Trait) -> str:
    """Return a trait as one reads it."""
    if trait.column in LABELS:
        return f"{trait.column} {group_title(trait.value)}"
    return f"{trait.column} = {trait.value}"
