"""Kinds of input that ask for something: configs, overrides, sweeps, bench targets, hostfiles and
expectations. All of them are planned for a machine of each sort, and none of them runs."""

import json
import random
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from fuzzing.ground import Case, Content, Ground
from fuzzing.mutate import (
    ODD_FILES,
    TEXTS,
    change_bytes,
    change_text,
    change_tree,
    odd,
    to_json,
    to_yaml,
)
from paceline import cli
from paceline.bench.expectations import (
    Expectations,
    StoredArm,
    StoredPair,
    check_rows,
    config_of,
    hardware_of,
    key_of,
)
from paceline.bench.pairs import Pair, plan_pair
from paceline.bench.records import ArmResult, PairResult
from paceline.bench.target import load_targets, parse_target, parse_words
from paceline.config.describe import Key, iter_keys
from paceline.job import job_schema
from paceline.records import Env, Fingerprints, Gpu
from paceline.sweep.spec import SweepSpec
from paceline.workloads.base import find_workload

GIB = 1 << 30
# What is printed of a plan: mostly as JSON, for tables take longer to draw than to plan.
WAYS = ((), ("--json",), ("--launch",), ("--launch", "--json"), ("--launch", "--json"))
# What is planned under overrides, sweeps and targets: a model that is built in no time.
RECIPE = """
name: small
workload: lm
model: {vocab_size: 320, dim: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1}
data: {seq_len: 16}
train: {eval_every: 10, eval_samples: 8}
launch: {overcommit: true}
"""


def recipe_in(ground: Ground) -> str:
    ground.add("small.yaml", RECIPE.encode())
    return str(ground.root / "small.yaml")


def with_gpus(env: Env, count: int) -> Env:
    """Return the same machine with GPUs in it, which plans may then ask for."""
    gpus = [
        Gpu(
            index=n, name="NVIDIA H200", uuid=f"GPU-{n}", compute_capability="9.0",
            memory_bytes=141 * GIB,
        )
        for n in range(count)
    ]  # fmt: skip
    return env.model_copy(update={"gpus": gpus, "cuda": "13.0", "driver": "580"})


def paceline(*words: str) -> None:
    """Run the program in this process; it leaves by `SystemExit`."""
    sys.argv = ["paceline", *words]
    cli.main()


def planned(*words: str) -> Case:
    return Case(("paceline", *words), lambda: paceline(*words))


def draw(words: str, rng: random.Random) -> Any:
    """Return a value that fits a type as `paceline recipes --keys` says it."""
    one = rng.choice(words.split(", or "))
    if one == "true|false":
        return rng.random() < 0.5
    if "|" in one:
        return rng.choice(one.split("|"))
    if one.startswith("whole number"):
        usual = (1, 2, 3, 4, 8, 16, rng.randint(0, 300))
        return rng.choice(usual) if rng.random() < 0.97 else rng.choice((10**7, 2**31, 10**18))
    if one.startswith("number"):
        return rng.choice((0.5, 1.0, 1e-4, 30.0, round(rng.uniform(0, 2), 4)))
    if one.startswith("list of"):
        return [draw(one.removeprefix("list of "), rng) for _ in range(rng.randint(0, 3))]
    if one == "a map of keys":
        return {f"A{rng.randint(0, 9)}": "1"}
    return one if one in ("auto", "off", "all") else rng.choice(("a", "b c", "run", "synthetic"))


def lm_keys() -> list[Key]:
    """Return the keys of a language model's run. Its size stays small: planning builds it."""
    return list(iter_keys(job_schema(find_workload("lm", typed=False))))


def set_key(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        inside = tree.setdefault(part, {})
        if not isinstance(inside, dict):
            return
        tree = inside
    tree[last] = value


def change_yaml(tree: dict[str, Any], rng: random.Random) -> Content:
    """Turn a valid tree into the content of a YAML file, changed in one to three places."""
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        tree = change_tree(tree, rng)
    raw, how = to_yaml(tree), rng.random()
    if how < 0.03:
        return rng.choice(ODD_FILES)
    for _ in range(rng.choice((1, 1, 2)) if how < 0.3 else 0):
        raw = change_text(raw, rng)
    return raw


class Configs:
    """A run's YAML file: recipes of ours, keys drawn from the schema, then changed."""

    name, refusals = "configs", frozenset({2, 3, 4})

    def __init__(self, root: Path, env: Env) -> None:
        self.ground, self.keys = Ground(root), lm_keys()
        recipes = resources.files("paceline.config") / "recipes"
        texts = [(recipes / f"{name}.yaml").read_text() for name in ("lm_tiny", "lm_125m", "lm_1b")]
        self.texts = [to_yaml(self._small(yaml.safe_load(text))) for text in texts]

    def _small(self, tree: dict[str, Any]) -> dict[str, Any]:
        small = yaml.safe_load(RECIPE)
        return tree | {"model": small["model"], "launch": small["launch"]}

    def make(self, rng: random.Random) -> Case:
        tree = yaml.load(rng.choice(self.texts), yaml.CSafeLoader)
        for key in rng.sample(self.keys, rng.randint(0, 6)):
            if not key.path.startswith("model."):
                set_key(tree, key.path, draw(key.type, rng))
        file = self.ground.change("run.yaml", change_yaml(tree, rng))
        return planned("plan", str(file), *rng.choice(WAYS))


class Overrides:
    """Words after a recipe: keys of the schema with fitting, near and odd values."""

    name, refusals = "overrides", frozenset({2, 3, 4})

    def __init__(self, root: Path, env: Env) -> None:
        self.ground, self.keys = Ground(root), lm_keys()
        self.recipe = recipe_in(self.ground)

    def make(self, rng: random.Random) -> Case:
        words = [self._word(rng) for _ in range(rng.randint(1, 4))]
        return planned("plan", self.recipe, *rng.choice(WAYS), "--", *words)

    def _word(self, rng: random.Random) -> str:
        key = rng.choice(self.keys)
        sign = rng.choice(("",) * 12 + ("++", "+", "~", "~~", "=", "--"))
        path, value = key.path, draw(key.type, rng)
        if rng.random() < 0.25:
            value = odd(rng)
        if rng.random() < 0.08:
            path = rng.choice((path.upper(), path.partition(".")[0], f"{path}.x", f".{path}", ""))
        text = value if isinstance(value, str) else json.dumps(value)
        word = f"{sign}{path}={text}"
        if rng.random() < 0.1:
            raw = change_bytes(word.encode(errors="surrogatepass"), rng)
            word = raw.decode(errors="surrogateescape")
        # What nobody can type: the system ends a word at a zero byte.
        return word.replace("\0", "").replace("workload=", "workloads=")


class Sweeps:
    """A sweep's YAML file, planned as `paceline sweep FILE --dry-run` does."""

    name, refusals = "sweeps", frozenset({2, 3, 4})

    def __init__(self, root: Path, env: Env) -> None:
        self.ground, self.keys = Ground(root), lm_keys()
        self.words = list(iter_keys(SweepSpec))
        self.recipe = recipe_in(self.ground)

    def make(self, rng: random.Random) -> Case:
        axes = {}
        for key in rng.sample(self.keys, rng.choice((1, 1, 2))):
            if not key.path.startswith("model."):
                values = {str(draw(key.type, rng)): 0 for _ in range(rng.choice((1, 2, 3)))}
                axes[key.path] = [yaml.safe_load(text) if text else "" for text in values]
        tree: dict[str, Any] = {
            "recipe": self.recipe,
            "overrides": ["train.grad_accum=1"],
            "axes": axes or {"train.micro_batch_size": [1, 2]},
        }
        for word in rng.sample(self.words[3:], rng.randint(0, 3)):
            tree[word.path] = draw(word.type, rng)
        file = self.ground.change("sweep.yaml", change_yaml(tree, rng))
        more = [rng.choice(("sweep.margin=0.1", "--phases", "--axis=train.seed=1,2"))]
        more = more if rng.random() < 0.2 else []
        return planned("sweep", str(file), "--dry-run", *more)


class Targets:
    """A target of `paceline bench`: read, and its pair planned, as `bench list` does."""

    name, refusals = "targets", frozenset({2, 3, 4})

    def __init__(self, root: Path, env: Env) -> None:
        self.ground, self.env = Ground(root), env
        folder = resources.files("paceline.bench") / "targets"
        texts = [file.read_text() for file in sorted(folder.iterdir(), key=lambda f: f.name)]
        self.recipe = recipe_in(self.ground)
        self.trees = [json.dumps(self._small(yaml.safe_load(text))) for text in texts]
        self.names = list(load_targets())

    def _small(self, tree: dict[str, Any]) -> dict[str, Any]:
        for work in tree["work"].values():
            asked = work.get("overrides", [])
            work["overrides"] = [word for word in asked if not word.startswith("model.")]
            work["recipe"] = self.recipe
        return tree

    def make(self, rng: random.Random) -> Case:
        if rng.random() < 0.15:
            words = [self._word(rng) for _ in range(rng.randint(1, 4))]
            return Case(("bench", "run", *words), lambda: parse_words(words))
        content = change_yaml(json.loads(rng.choice(self.trees)), rng)
        raw = content if isinstance(content, bytes) else b""
        self.ground.change("target.yaml", raw)
        text = raw.decode(errors="replace")
        return Case(("target.yaml",), lambda: self._plan(text))

    def _plan(self, text: str) -> Pair:
        return plan_pair(parse_target("target", text), self.env)

    def _word(self, rng: random.Random) -> str:
        name = rng.choice((*self.names, *TEXTS))
        return rng.choice((name, f"{name}:train.seed=1", f"train.steps={name}", f"{name}=1"))


class Hostfiles:
    """Machines by name, planned for a launcher that reads them."""

    name, refusals = "hostfiles", frozenset({2, 3, 4})

    def __init__(self, root: Path, env: Env) -> None:
        self.ground = Ground(root)
        self.recipe = recipe_in(self.ground)

    def make(self, rng: random.Random) -> Case:
        lines = [self._line(rng, n) for n in range(rng.randint(1, 6))]
        raw, how = "\n".join(lines).encode(errors="surrogatepass") + b"\n", rng.random()
        content: Content = rng.choice(ODD_FILES) if how < 0.04 else raw
        for _ in range(rng.choice((1, 1, 2)) if 0.04 <= how < 0.4 else 0):
            content = change_text(content, rng) if isinstance(content, bytes) else content
        file = self.ground.change("hosts", content)
        launcher = rng.choice(("mpi", "deepspeed", "torchrun", "slurm", "mpi", "deepspeed", "auto"))
        launch = [f"launch.launcher={launcher}", f"launch.hostfile={file}", "launch.nproc=2"]
        return planned("plan", self.recipe, *launch, *rng.choice(WAYS[2:]))

    def _line(self, rng: random.Random, number: int) -> str:
        slots = rng.choice((" slots=2",) * 9 + ("", " slots=0", " slots = 4", " slots=-1", "\t#x"))
        odd_name = rng.random() < 0.04
        return f"{rng.choice(TEXTS) if odd_name else f'node{number}'}{slots}"


class ExpectationFiles:
    """What a machine measured before: found, compared with planned pairs, held against results."""

    name, refusals = "expectations", frozenset({2, 3, 4})

    def __init__(self, root: Path, env: Env) -> None:
        self.ground, self.env = Ground(root, made=("saved.json",)), env
        self.pairs = [self._pair("fused_adamw"), self._pair("zero3")]
        self.results = [self._result(pair) for pair in self.pairs]
        stored = {pair.target.name: self._stored(pair) for pair in self.pairs}
        made = Expectations(hardware_key=key_of(env), hardware=hardware_of(env), pairs=stored)
        self.text = made.to_json()

    def _pair(self, name: str) -> Pair:
        words = ["launch.device=cpu", "launch.overcommit=true", "train.micro_batch_size=2"]
        return plan_pair(load_targets()[name], self.env, words)

    def _prints(self) -> Fingerprints:
        return Fingerprints(config="c", code="k", data="d", hardware="h")

    def _stored(self, pair: Pair) -> StoredPair:
        arms = {
            arm.name: StoredArm(
                config=config_of(pair, arm.name), rates=[10.0, 10.1, 9.9], peak_bytes=[9, 9, 9],
                fingerprints=self._prints(),
            )
            for arm in pair.arms
        }  # fmt: skip
        return StoredPair(
            saved_at="2026-01-01T00:00:00Z", version="0.6.0", torch="2", metric="tokens_per_s",
            baseline=pair.baseline.name, steps=60, arms=arms,
        )  # fmt: skip

    def _result(self, pair: Pair) -> PairResult:
        arms = [
            ArmResult(
                name=arm.name, status="ok", rates=[10.0, 10.2, 9.8], peak_bytes=[8, 9, 9],
                fingerprints=self._prints(),
            )
            for arm in pair.arms
        ]  # fmt: skip
        return PairResult(
            target=pair.target.name, title="t", goal="speed", status="ok", device="cpu",
            baseline=pair.baseline.name, arms=arms, metric="tokens_per_s",
        )  # fmt: skip

    def make(self, rng: random.Random) -> Case:
        tree = json.loads(self.text)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            tree = change_tree(tree, rng)
        raw, how = to_json(tree), rng.random()
        content: Content = rng.choice(ODD_FILES) if how < 0.04 else raw
        if 0.04 <= how < 0.3:
            content = change_text(raw, rng)
        file = self.ground.change("expectations_x.json", content)
        return Case(("bench", "run", "--check-expectations", str(file)), lambda: self._hold(file))

    def _hold(self, file: Path) -> Sequence[object]:
        expected = Expectations.find(file, self.env)
        expected.require_same_work(self.pairs, 3)
        rows = check_rows(expected, self.results)
        Expectations.merge(file, self.env, self.results[:1], self.pairs)
        return [str(row) for row in rows]
