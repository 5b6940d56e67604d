"""A strategy is one file, one line, one row: nothing outside `strategies/` goes by its name."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import Field

from paceline import strategies
from paceline.cli.recipes import _keys_of
from paceline.config.schema import AttentionConfig, StrategyConfig
from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.machine.launchers import LAUNCHERS
from paceline.plan.planner import make_plan
from paceline.records import Finding
from paceline.run.resume import Change
from paceline.strategies import aliases, all_strategies, find_strategy, strategy_section
from paceline.sweep.flow import plan_sweep
from paceline.sweep.spec import read_spec
from tests.toy_strategy import Toy

ROOT = Path(__file__).parents[2]
ASKING = ("startswith", "endswith", "removeprefix", "removesuffix", "find_strategy", "get")
CPU = ["launch.device=cpu", "launch.nproc=2"]


def _forget() -> None:
    all_strategies.cache_clear()
    strategy_section.cache_clear()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One line more in the registry."""
    monkeypatch.setattr(strategies, "REGISTRY", (*strategies.REGISTRY, "tests.toy_strategy:TOY"))
    _forget()
    yield
    _forget()


def decisions(tree: ast.AST) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """Everything that takes one way or another by a value: comparisons, tables, questions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield node, [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            yield node, [key for key in node.keys if key is not None]
        elif isinstance(node, ast.MatchValue):
            yield node, [node.value]
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            if (called if isinstance(called, str) else ast.unparse(called)) in ASKING:
                yield node, list(node.args)


def named_in(source: str) -> list[str]:
    """Decisions of `source` that name a strategy, as `line: text`."""
    names = {*all_strategies(), *aliases()}
    found = []
    for node, operands in decisions(ast.parse(source)):
        words = {
            part.value
            for operand in operands
            for part in ast.walk(operand)
            if isinstance(part, ast.Constant)
        }
        text = ast.unparse(node)
        hits = words & names
        if "strategy" not in text:  # deepspeed is a launcher, too
            hits -= set(LAUNCHERS)
        if hits:
            found.append(f"{getattr(node, 'lineno', 0)}: {text}")
    return found


@pytest.mark.parametrize(
    "line",
    [
        'x = plan.strategy.value == "zero3"',
        'x = name in ("ddp", "zero1")',
        'x = plan.strategy.value.startswith(("zero2", "zero3"))',
        'x = {"single": 0, "ddp": 0}',
        'x = find_strategy("pipeline")',
        'x = plan.strategy.value != "deepspeed"',
        'match name:\n    case "fsdp":\n        pass',
    ],
)
def test_a_line_that_names_a_strategy_is_found(line: str) -> None:
    assert len(named_in(line)) == 1


def test_a_launcher_is_not_taken_for_a_strategy() -> None:
    assert named_in('x = crew.launcher.value == "deepspeed"') == []


def test_no_file_outside_decides_by_a_strategys_name() -> None:
    outside = [p for p in (ROOT / "paceline").rglob("*.py") if "strategies" not in p.parts]
    found = {str(p.relative_to(ROOT)): named_in(p.read_text()) for p in outside}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_settings_are_read_without_torch() -> None:
    places = ", ".join({place.partition(":")[0] for place in strategies.REGISTRY})
    code = f"import sys, {places}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, "a strategy loads torch"


def findings(*words: str) -> dict[str, Finding]:
    plan = make_plan(load_job("lm_tiny", [*CPU, *words]), probe())
    return {finding.where: finding for finding in plan.findings}


def test_a_key_of_another_strategy_says_whose_it_is() -> None:
    found = findings("strategy.name=fsdp", "strategy.schedule=zbv", "strategy.bucket_mb=5")
    what = "is set but has no effect: pipeline reads it, and strategy.name is zero3"
    assert found["strategy.schedule"].what == what
    what = "is set but has no effect: ddp, zero1, pipeline read it, and strategy.name is zero3"
    assert found["strategy.bucket_mb"].what == what
    assert "strategy.bucket_mb" not in findings("strategy.bucket_mb=5")


def test_what_no_strategy_has_is_refused_with_the_nearest_and_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_job("lm_tiny", ["strategy.name=zero33", "strategy.shedule=zbv", "strategy.stages=x"])
    key, name, stages = caught.value.problems
    assert "unknown key strategy.shedule" in key and "did you mean strategy.schedule?" in key
    assert "it wants single|ddp|" in name and "did you mean zero3?" in name
    assert "strategy.stages=x" in stages and "auto, or whole number" in stages


def test_equal_runs_have_equal_fingerprints_whoever_else_is_installed(
    request: pytest.FixtureRequest,
) -> None:
    plain = load_job("lm_tiny", []).fingerprint
    assert load_job("lm_tiny", ["strategy.bucket_mb=5"]).fingerprint != plain
    assert load_job("lm_tiny", ["strategy.schedule=zbv"]).fingerprint == plain
    request.getfixturevalue("toy")
    assert load_job("lm_tiny", []).fingerprint == plain


def test_a_toy_in_one_file_is_planned(toy: None) -> None:
    plan = make_plan(load_job("lm_tiny", [*CPU, "strategy.name=plaything"]), probe())
    assert (plan.strategy.value, plan.strategy.because) == (
        "toy",
        "plaything is another name for it",
    )
    assert plan.exchange.because == "one gradient after another" and not plan.problems()
    found = findings("strategy.name=toy", "strategy.toy_pieces=3", "strategy.bucket_mb=5")
    assert "strategy.toy_pieces" not in found and "strategy.bucket_mb" in found
    assert "toy reads it" in findings("strategy.toy_pieces=3")["strategy.toy_pieces"].what


def test_a_toy_is_swept(toy: None) -> None:
    spec = read_spec("lm_tiny", CPU, ["strategy.name=ddp,toy"], {})
    assert [(cell.name, cell.refusal) for cell in plan_sweep(spec).cells] == [
        ("name=ddp", ""),
        ("name=toy", ""),
    ]


def test_a_toy_is_documented(toy: None) -> None:
    keys = {key["path"]: key for key in _keys_of("lm_tiny")}
    assert keys["strategy.toy_pieces"]["read_by"] == ("toy",)
    assert keys["strategy.toy_pieces"]["meaning"] == "In how many pieces a gradient is sent."
    assert (
        "toy, plaything: replicas, one all-reduce after another" in keys["strategy.name"]["meaning"]
    )


class Another(StrategyConfig):
    stages: str = Field("many", description="Not what a pipeline means by it.")


class Clashing(Toy):
    Settings = Another


CLASHING = Clashing()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("tests.unit.test_strategy_seam:CLASHING", "strategy.stages is one thing in"),
        ("paceline.strategies.ddp:DDP", "are both a strategy 'ddp'"),
        ("tests.no_such_file:TOY", "cannot be loaded"),
        ("tests.toy_strategy:Toy", "is not a Strategy"),
    ],
)
def test_what_cannot_stand_beside_the_others_is_refused(
    place: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", (*strategies.REGISTRY, place))
    _forget()
    try:
        with pytest.raises(ConfigError, match=said):
            load_job("lm_tiny", [])
    finally:
        _forget()


def test_the_pages_name_every_strategy() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "docs/strategies.md").read_text().splitlines()
            if line.startswith("| `")]  # fmt: skip
    named = {word.strip(" `") for row in rows for word in row.split(",")}
    assert {*all_strategies(), *aliases()} <= named
    proven = [name for name, known in all_strategies().items() if name != "single"]
    assert f"`strategy.name={'|'.join(proven)}`" in (ROOT / "README.md").read_text()


def test_the_page_has_the_defaults_of_the_keys() -> None:
    text, fields = (ROOT / "docs/strategies.md").read_text(), strategy_section().model_fields
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `strategy.")]
    told = {key.strip(" `"): default.strip() for keys, default in rows for key in keys.split(",")}
    del told["strategy.name"]  # of the table of strategies
    for key, default in told.items():
        found = fields[key.removeprefix("strategy.")].default
        assert default == (str(found).lower() if isinstance(found, bool) else str(found)), key
    assert {"strategy.exchange", "strategy.bucket_mb"} <= told.keys()


def test_the_page_names_every_kernel_of_attention() -> None:
    text = (ROOT / "docs/strategies.md").read_text()
    values = get_args(AttentionConfig.model_fields["impl"].annotation)
    assert values and [value for value in values if f"`{value}`" not in text] == ["auto", "sdpa"]


def test_what_changes_the_gradients_is_another_run() -> None:
    assert not Change("strategy.comm_hook", "none", "bf16").is_free
    assert not Change("strategy.powersgd_rank", 1, 2).is_free
    assert Change("strategy.bucket_mb", 25, 5).is_free and Change("strategy.name", 0, 1).is_free


@pytest.mark.parametrize(("name", "lost"), [("ddp", 1), ("zero1", 1), ("zero2", 0)])
def test_what_no_checkpoint_holds_is_said(name: str, lost: int) -> None:
    config = load_job("lm_tiny", [f"strategy.name={name}", "strategy.comm_hook=powersgd"]).config
    assert len(find_strategy(name).lost_on_resume(config)) == lost
