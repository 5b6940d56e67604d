"""A launcher is one file and one row: a toy is added here, and nothing else knows any by name."""

import ast
from pathlib import Path

import pytest
from pydantic import Field

from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.launch import find_launcher
from paceline.launch.base import LaunchOrder, Task, draw_plan
from paceline.launch.command import member_argv, run_command
from paceline.launch.ending import Ending
from paceline.machine import launchers
from paceline.machine.launchers import LAUNCHERS, Allocation, LauncherConfig, LauncherFacts
from paceline.machine.topology import Topology
from paceline.plan.crew import check_crew
from paceline.plan.planner import make_plan
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir
from paceline.run.flow import order_for
from tests.unit.test_plan import env as machine

PACKAGE = Path(__file__).parents[2] / "paceline"
OWNERS = {PACKAGE / "machine" / "launchers.py", PACKAGE / "machine" / "topology.py"}


class ToyConfig(LauncherConfig):
    toy_colour: str = Field("red", description="What a toy looks like.")


class ToyLauncher:
    def require_ready(self, order: LaunchOrder) -> None:
        pass

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        colour = ToyConfig.of(order.settings).toy_colour
        argv = ["toyrun", "--colour", colour, *member_argv(order)]
        return draw_plan(order, argv, [f"box{n}" for n in range(order.crew.num_nodes)])

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        return run_command(launch, run)


TOY = LauncherFacts(f"{__name__}:ToyLauncher", ToyConfig, allocation=Allocation("toy box", "TOYS"))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAUNCHERS, "toy", TOY)


def findings(asked: list[str], **variables: str) -> str:
    job = load_job("lm_tiny", ["launch.device=cpu", *asked])
    env = machine().model_copy(update={"variables": variables})
    plan = make_plan(job, env)
    found = check_crew(job.config.launch, env, plan.crew, Topology())
    return "\n".join(str(finding) for finding in [*plan.findings, *found])


@pytest.mark.usefixtures("toy")
def test_a_toy_launcher_plans_with_keys_of_its_own() -> None:
    asked = ["launch.launcher=toy", "launch.nproc=2", "launch.toy_colour=blue"]
    job = load_job("lm_tiny", [*asked, "launch.device=cpu"])
    env = machine().model_copy(update={"variables": {"TOYS": "3"}})
    plan = make_plan(job, env)
    assert (plan.crew.num_nodes, plan.world_size) == (3, 6), "as many nodes as its allocation has"
    launch = find_launcher("toy").plan(order_for(job, env, plan, "DIR"))
    assert launch.argv[:3] == ["toyrun", "--colour", "blue"]
    assert launch.argv[-3:] == ["-m", "paceline.run", "DIR"] and launch.launcher == "toy"
    assert [place.host for place in launch.ranks[::2]] == ["box0", "box1", "box2"]
    assert plan.problems() == []


@pytest.mark.usefixtures("toy")
def test_everybody_hears_of_a_toy_launcher() -> None:
    idle = findings(["launch.launcher=local", "launch.nproc=2", "launch.toy_colour=blue"])
    assert "launch.toy_colour: is set but has no effect: local starts the ranks" in idle
    assert "set launch.launcher=torchrun, slurm, mpi, deepspeed or toy" in findings(
        ["launch.nnodes=2"]
    )
    assert "this toy box has 3 nodes" in findings([], TOYS="3")
    with pytest.raises(ConfigError, match="auto.local.torchrun.slurm.mpi.deepspeed.toy"):
        load_job("lm_tiny", ["launch.launcher=tor"])


def test_without_it_there_is_no_toy() -> None:
    with pytest.raises(ConfigError, match="toy_colour"):
        load_job("lm_tiny", ["launch.toy_colour=blue"])


def names_compared(tree: ast.AST, names: set[str]) -> list[str]:
    """Comparisons with the name of a launcher. `deepspeed` is a strategy and a program as well: it
    counts where the other side speaks of a launcher."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        text = ast.unparse(node)
        words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)} & names
        if words - {"deepspeed"} or (words and "launcher" in text):
            found.append(text)
    return found


def test_nobody_else_compares_launchers_by_name() -> None:
    files = [f for f in PACKAGE.rglob("*.py") if f.parent != PACKAGE / "launch" and f not in OWNERS]
    compared = {
        str(file.relative_to(PACKAGE)): found
        for file in files
        if (found := names_compared(ast.parse(file.read_text()), set(LAUNCHERS)))
    }
    assert compared == {}, "ask machine/launchers.py what the launcher is"
    assert names_compared(ast.parse("if crew.launcher.value != 'slurm': pass"), set(LAUNCHERS))


def test_every_launcher_has_code_and_one_is_the_default() -> None:
    for name in LAUNCHERS:
        assert find_launcher(name) is not None
    assert [name for name, facts in LAUNCHERS.items() if facts.is_local] == [launchers.DEFAULT]
