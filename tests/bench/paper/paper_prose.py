"""The numbers of the paper's text, read from its LaTeX source."""

from __future__ import annotations

import re

from paper_tex import DATASETS, Rows, number

RATE = re.compile(r"\\approx (\d+)\\%|([\d.]+)(?: \\pm ([\d.]+))?\\%")


def capture_rates(tex: str) -> set[tuple[str, str, str, str]]:
    """Return dataset, iteration, rate and spread of every rate in the two sections of prose."""
    sections = {
        "2": tex.split(r"\label{fig:node_dynamics}")[1].split("For datasets with only three")[0],
        "3": tex.split(r"\label{fig:node_dynamics_iter3}")[1].split(r"\end{document}")[0],
    }
    found = set()
    for iteration, section in sections.items():
        for title, text in re.findall(r"\\textbf\{(\w+)\.\}(.*)", section):
            for about, mean, std in RATE.findall(text):
                found.add((title.lower(), iteration, about or mean, std))
    return found


def depth_choice(tex: str) -> Rows:
    """Read how the seeds split between iterations 2 and 3."""
    prose = tex.split("adapts \\emph{per seed}")[1].split("all without consulting")[0]
    seeds = {}
    for many, few, favoured, dataset in re.findall(
        r"(\d)-(\d) in favor of iteration~(\d) on \\gls\{(\w+)\}", prose
    ):
        seeds[dataset] = {favoured: many, str(5 - int(favoured)): few}
    three = re.search(r"picks iteration~3 for four of five seeds on \\gls\{(\w+)\}", prose)
    assert three is not None
    seeds[three[1]] = {"2": "1", "3": "4"}
    return [
        {"dataset": dataset, "iteration": iteration, "seeds": seeds[dataset][iteration]}
        for dataset in DATASETS
        for iteration in ("2", "3")
    ]


def cmnist_calibration(tex: str) -> Rows:
    """Read the two sentences about the heads of CMNIST."""
    stats = re.search(
        r"iter-1 head means span \$\[(.*?),\\,(.*?)\]\$ with an average within-head std of "
        r"\$(.*?)\$, and the iter-2 head means span \$\[(.*?),\\,(.*?)\]\$ with an average "
        r"within-head std of \$(.*?)\$",
        tex,
    )
    margins = re.search(
        r"5 iter-1 heads is \$(.*?)\$, and the minimum across the 10 iter-2 heads is \$(.*?)\$", tex
    )
    assert stats is not None and margins is not None
    names = ("logit_mean_lowest", "logit_mean_highest", "logit_std_average")
    rows = [
        {"quantity": name, "iteration": iteration, "value": number(value)}
        for iteration, values in (("1", stats.groups()[:3]), ("2", stats.groups()[3:]))
        for name, value in zip(names, values, strict=True)
    ]
    return rows + [
        {"quantity": "margin_mean_lowest", "iteration": iteration, "value": value}
        for iteration, value in zip(("1", "2"), margins.groups(), strict=True)
    ]


TABLES = {"depth_choice": depth_choice, "cmnist_calibration": cmnist_calibration}
