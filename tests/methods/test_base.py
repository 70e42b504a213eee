"""The registry of methods, plug-ins from outside, supervision, and what a stage may see."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import methods.base
from bench.context import RunContext
from datasets.base import GroupLabelsHidden, Task
from datasets.errors import UsageError
from methods.base import (
    METHODS,
    Context,
    Method,
    Stage,
    StageResult,
    Supervision,
    get_method,
    load_methods,
    register,
)
from methods.erm import ErmConfig, erm_stage, train_erm

MakeContext = Callable[..., RunContext]
load_methods()


@pytest.fixture
def registry() -> Iterator[None]:
    """The registry as it was, once the test is over."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def some_method(name: str, **facts: Any) -> type[Method]:
    @register(name, version=1, config=ErmConfig, **facts)
    class Some(Method):
        def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Any: ...

        def search_space(self, trial: Any, task: Task) -> Any: ...

    return Some


@pytest.mark.usefixtures("registry")
class TestRegister:
    @pytest.mark.parametrize(
        "name",
        ["", "ERM", "my-method", "2nd", "a.b", "a b", "_a", "erm\n", "a/b", "..", "all", "x" * 41],
    )
    def test_names_that_ids_and_settings_could_not_carry(self, name: str) -> None:
        with pytest.raises(UsageError, match="cannot be the name of a method"):
            some_method(name)
        assert name not in METHODS

    def test_facts_have_defaults(self) -> None:
        some_method("some_2")
        method = get_method("some_2")
        assert (method.title, method.order, method.reference) == ("some_2", 100, "")
        assert (method.tree, method.distribution) == (False, type(method).__module__.split(".")[0])
        assert method.version_of(ErmConfig()) == 1
        assert method.stages(ErmConfig()) == ()
        assert method.selection_rules(ErmConfig(selection="val_loss")) == ("val_loss",)

    def test_a_name_has_one_method(self) -> None:
        with pytest.raises(UsageError, match=r"two methods: in methods\.erm and in .*test_base"):
            some_method("erm")


def test_papers_order_and_titles() -> None:
    """Those of the main table first, then the rest of the field."""
    own = [method for method in METHODS.values() if method.distribution is None]
    ordered = sorted(own, key=lambda method: method.order)
    assert [method.title for method in ordered if not method.extended] == [
        *("Group DRO", "JTT", "CnC", "EIIL", "DFR", "ERM", "GEORGE", "ExMap", "NCT", "NCT+")
    ]
    assert [method.title for method in ordered if method.extended] == [
        *("RWY", "SUBY", "RWG", "SUBG", "AFR", "XRM", "SELF", "CB-LLR", "LfF", "EVaLS", "DPE")
    ]
    assert [method.name for method in own if method.tree] == ["nct", "nct_plus"]
    assert all(method.reference for method in own if method.name != "nct_plus")


PLUG_IN = """
from methods.base import Method, register

@register("{name}", version=3, config=dict, title="Theirs")
class Theirs(Method):
    def fit(self, task, config, ctx): ...
    def search_space(self, trial, task): ...
"""


@pytest.mark.usefixtures("registry")
class TestPlugIns:
    @pytest.fixture
    def install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[[str, str], None]]:
        """Install a distribution with one module as an entry point."""
        installed = []

        def install(module: str, content: str) -> None:
            (tmp_path / f"{module}.py").write_text(content)
            facts = tmp_path / f"{module}-1.0.dist-info"
            facts.mkdir()
            (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-of-{module}\n")
            (facts / "entry_points.txt").write_text(f"[bench.methods]\ntheirs = {module}\n")
            monkeypatch.syspath_prepend(tmp_path)
            methods.base._plug_ins.cache_clear()
            installed.append(module)

        yield install
        methods.base._plug_ins.cache_clear()
        for module in installed:
            sys.modules.pop(module, None)

    def test_is_known_by_its_distribution(self, install: Callable[[str, str], None]) -> None:
        install("plug_in_one", PLUG_IN.format(name="theirs"))
        method = get_method("theirs")
        assert (method.title, method.version) == ("Theirs", 3)
        assert method.distribution == "dist-of-plug_in_one"
        assert get_method("erm").distribution is None

    def test_is_known_by_it_also_where_it_was_imported_before(
        self, install: Callable[[str, str], None]
    ) -> None:
        install("plug_in_two", PLUG_IN.format(name="theirs"))
        __import__("plug_in_two")
        assert get_method("theirs").distribution == "dist-of-plug_in_two"

    @pytest.mark.parametrize(
        ("content", "cause"),
        [
            ("import a_module_that_is_missing", "a_module_that_is_missing"),
            (PLUG_IN.format(name="Their's"), "cannot be the name of a method"),
            (PLUG_IN.format(name="erm"), "'erm' is the name of two methods"),
        ],
    )
    def test_one_that_fails_is_not_lost_in_silence(
        self, install: Callable[[str, str], None], content: str, cause: str
    ) -> None:
        install("plug_in_bad", content)
        with pytest.raises(UsageError, match="plug-in 'theirs'") as raised:
            load_methods()
        assert cause in raised.value.message
        assert "dist-of-plug_in_bad" in raised.value.message
        assert "pip uninstall dist-of-plug_in_bad" in raised.value.remedy


def test_supervision_covers_what_it_grants() -> None:
    none, val, both = Supervision(), Supervision(val_groups=True), Supervision(True, True)
    assert both.covers(val) and val.covers(none) and none.covers(none)
    assert not none.covers(val) and not val.covers(both)
    assert not val.covers(Supervision(train_groups=True))
    assert none.covers(Supervision(interpretable=True))  # which grants no label


@dataclass(frozen=True)
class Nothing:
    """A stage without settings."""


class TestStages:
    @pytest.mark.parametrize("name", ["", "..", "../up", "a/b", "Upper", "x" * 61])
    def test_names_that_could_be_no_folder(self, name: str) -> None:
        with pytest.raises(UsageError, match="cannot be the name of a stage"):
            Stage(name, Nothing(), 1)

    @pytest.mark.parametrize("needs", [Supervision(), Supervision(val_groups=True)])
    def test_task_shows_what_is_needed_and_no_more(
        self, granted_task: Task, make_context: MakeContext, needs: Supervision
    ) -> None:
        def compute(task: Task, ctx: Context) -> StageResult:
            with pytest.raises(GroupLabelsHidden):
                _ = task.train.groups
            if needs.val_groups:
                return StageResult({"groups": task.val.groups.clone()})
            with pytest.raises(GroupLabelsHidden):
                _ = task.val.groups
            return StageResult({})

        make_context().stage(Stage("some", Nothing(), 1, needs), granted_task, compute)

    @pytest.mark.parametrize(
        ("rule", "reads"),
        [("val_avg", False), ("last", False), ("val_wga", True), ("val_worst_auroc", True)],
    )
    def test_erm_needs_groups_where_it_selects_by_them(self, rule: Any, reads: bool) -> None:
        assert erm_stage(ErmConfig(selection=rule)).needs == Supervision(val_groups=reads)

    def test_a_first_stage_that_needs_more_than_the_tier_is_refused(
        self,
        toy_task: Task,
        selecting_task: Task,
        make_context: MakeContext,
        small_networks: object,
    ) -> None:
        config = ErmConfig(epochs=1, selection="val_wga")
        with pytest.raises(GroupLabelsHidden):
            train_erm(toy_task, config, make_context("none"))
        fitted = train_erm(selecting_task, config, make_context("val"))
        assert fitted.selection is not None and fitted.selection.rule == "val_wga"

    @pytest.mark.parametrize("name", ["eiil", "george"])
    def test_a_stage_needs_what_the_one_inside_it_needs(self, name: str) -> None:
        method = get_method(name)
        config = method.config_type()
        outer = method.stages(config)[-1]
        assert outer.needs == Supervision()
        config = replace(config, erm=replace(config.erm, selection="val_wga"))
        assert method.stages(config)[-1].needs == Supervision(val_groups=True)
