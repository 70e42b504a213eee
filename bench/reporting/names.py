"""How the report spells and orders what the store calls by short names.

Titles and order are the registries'; names that are no longer registered stay as they are, last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.reporting.table import Column, columns
from datasets.catalogue import load_datasets
from methods.base import load_methods


def method_title(name: str) -> str:
    """Return how tables and figures spell a method."""
    method = load_methods().get(name)
    return method.title if method is not None else name


def in_main_table(method: str, dataset: str) -> bool:
    """Return whether the main table has both; what is no longer registered counts as its own."""
    entries = load_methods().get(method), load_datasets().get(dataset)
    return not any(entry is not None and entry.extended for entry in entries)


def methods_in_order(names: Iterable[str] = ()) -> list[str]:
    """Return the given methods, or else those of the main table, in the order of tables."""
    registered = sorted(load_methods().values(), key=lambda method: (method.order, method.name))
    order = {method.name: place for place, method in enumerate(registered)}
    chosen = set(names) or {method.name for method in registered if not method.extended}
    return sorted(chosen, key=lambda name: (order.get(name, len(order)), name))


def all_methods() -> list[str]:
    """Return every registered method, in the order of tables."""
    return methods_in_order(load_methods())


def dataset_names() -> tuple[str, ...]:
    """Return the main table's datasets in the order of tables."""
    return tuple(name for name, dataset in load_datasets().items() if not dataset.extended)


def all_datasets() -> tuple[str, ...]:
    """Return every registered dataset, in the order of tables."""
    return tuple(load_datasets())


def dataset_title(name: str, metric: str = "") -> str:
    """Return how tables and figures spell a dataset, and in brackets what is measured on it."""
    dataset = load_datasets().get(name)
    title = dataset.title if dataset is not None else name
    return f"{title} ({metric_words(name, metric)})" if metric else title


def dataset_columns(names: Iterable[str], *titles: str) -> tuple[Column, ...]:
    """Return a column for each dataset, or the titled ones below the name of each."""
    spelt = list(map(dataset_title, names))
    return columns(spelt, titles) if titles else tuple(map(Column, spelt))


def table_metrics(name: str) -> tuple[str, ...]:
    """Return the metrics that tables show of a dataset, the headline first."""
    dataset = load_datasets().get(name)
    return dataset.table_metrics if dataset is not None else ("wga", "avg")


def headline(name: str) -> str:
    """Return the one metric by which a dataset is judged."""
    return table_metrics(name)[0]


def metric_title(dataset: str, metric: str) -> str:
    """Return how a column of a dataset spells a metric."""
    known = load_datasets().get(dataset)
    return known.metric_title(metric) if known is not None else metric


def metric_words(dataset: str, metric: str) -> str:
    """Return how a metric is spelt where no column header says that it is an AUROC."""
    title = metric_title(dataset, metric)
    return f"{title} AUROC" if metric.startswith("auroc") else title


def headline_exceptions() -> dict[str, str]:
    """Return, for each dataset that is not judged by its worst group, what it is judged by."""
    others = [name for name in dataset_names() if headline(name) != "wga"]
    words = {dataset_title(name): metric_words(name, headline(name)) for name in others}
    return {title: metric[:1].lower() + metric[1:] for title, metric in words.items()}


def group_title(name: str) -> str:
    """Return how a group is spelt: identifiers become words, and a range has a dash."""
    return re.sub(r"(?<=\d)_(?=\d)", "-", name).replace("_", " ")
