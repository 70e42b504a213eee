"""Critical-difference diagram: average ranks over datasets, and which of them differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.report.figures.drawing import WIDTH, Drawn, NotDrawn, View, new_figure, plain
from bench.report.names import HEADLINE, method_name

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 3
LEVEL = 0.05


def draw(view: View) -> Drawn | NotDrawn:
    """Draw the diagram over the datasets on which all of its methods have a number."""
    table = scores(view)
    datasets, methods = table.shape
    if datasets < FEWEST or methods < FEWEST:
        return NotDrawn(
            f"ranks need at least {FEWEST} methods measured on at least {FEWEST} common datasets; "
            f"there are {methods} methods on {datasets}"
        )
    import scikit_posthocs
    from scipy.stats import friedmanchisquare

    ranks = table.rank(axis=1, ascending=False).mean()
    overall = float(friedmanchisquare(*(table[name] for name in table)).pvalue)
    pairs = scikit_posthocs.posthoc_nemenyi_friedman(table.to_numpy())
    pairs.index = pairs.columns = table.columns
    figure = new_figure(WIDTH, 0.9 + 0.22 * methods)
    axes = figure.subplots()
    axes.grid(False)
    scikit_posthocs.critical_difference_diagram(
        ranks,
        pairs,
        ax=axes,
        label_fmt_left="{label}  ({rank:.1f})  ",
        label_fmt_right="  ({rank:.1f})  {label}",
        label_props={"fontsize": 8},
        crossbar_props={"color": "0.3", "marker": "", "linewidth": 2.5},
        text_h_margin=0.02,
    )
    return Drawn(
        figure,
        f"Average rank over {datasets} datasets (1 is best) by mean worst-group accuracy (ISIC: "
        f"overall AUROC); methods under one bar do not differ at the {LEVEL:.0%} level "
        "(Friedman test, then Nemenyi's).",
        (
            f"Friedman p = {overall:.3f} over {datasets} datasets and {methods} methods. With so "
            "few datasets the test has little power: a common bar is no sign of equality.",
            f"Datasets: {', '.join(table.index)}.",
        ),
    )


def scores(view: View) -> pd.DataFrame:
    """Tabulate datasets x methods, keeping the methods that every dataset has."""
    import pandas as pd

    rows: dict[str, dict[str, list[float]]] = {}
    for label, runs in view.by_dataset().items():
        for run in runs:
            value = run.record["metrics"]["test"].get(HEADLINE.get(run.record["dataset"], "wga"))
            if value is not None:
                method = plain(method_name(str(run.record["method"])))
                rows.setdefault(label, {}).setdefault(method, []).append(float(value))
    means = {
        label: {method: sum(values) / len(values) for method, values in own.items()}
        for label, own in rows.items()
    }
    table = pd.DataFrame(means).T
    return table.dropna(axis=1) if len(table) else table
