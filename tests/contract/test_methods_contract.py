"""The contract on every registered method: the built-in ones, and each installed plug-in."""

from __future__ import annotations

import pytest

from bench.testing import MethodContract
from datasets.catalogue import load_datasets
from methods.base import load_methods
from methods.presets import preset_config, read_presets

METHODS = dict(load_methods())
BUILT_IN = [name for name, m in METHODS.items() if m.distribution is None]

# Every run costs seconds. Methods outside the main table are run on one dataset, and where a file
# has several that differ in one switch, the first stands for the others but in the long tests.
_seen: set[str] = set()
for _name, _method in METHODS.items():
    _known: dict[str, object] = {"method": _name}
    if _method.extended:
        _known["datasets"] = ("cmnist",)
    _class = type(f"Test_{_name}", (MethodContract,), _known)
    if _method.extended and type(_method).__module__ in _seen:
        _class = pytest.mark.slow(_class)
    _seen.add(type(_method).__module__)
    # One xdist group a method: the runs its tests share are made in one process.
    globals()[f"Test_{_name}"] = pytest.mark.xdist_group(_name)(_class)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("dataset", load_datasets())
def test_preset_names_the_source_of_every_value(name: str, dataset: str) -> None:
    preset = read_presets(dataset).get(name)
    assert preset, f"methods/presets/{dataset}.toml has no [{name}]"
    for knob, entry in preset.items():
        assert entry.source.strip(), f"{dataset}.toml: {name}.{knob} has no source"
    config = preset_config(METHODS[name], dataset)
    assert isinstance(config, METHODS[name].config_type)
