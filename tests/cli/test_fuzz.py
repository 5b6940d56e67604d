"""scripts/fuzz: it notices what it looks for, and finds none of it in what the program reads."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.program import environment

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz"
KINDS = 10
# Cases that do what no case may, run by the same code as real ones.
CASES = """
import importlib.machinery, importlib.util, os, pickle, runpy, subprocess, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
loader = importlib.machinery.SourceFileLoader("fuzz", sys.argv[1])
fuzz = importlib.util.module_from_spec(importlib.util.spec_from_loader("fuzz", loader))
sys.modules["fuzz"] = fuzz
loader.exec_module(fuzz)
from fuzzing.ground import Case, Ground
from paceline.errors import ConfigError

folder, elsewhere = Path(sys.argv[2]), sys.argv[3]
fuzz.LIMIT_S = 0.3
watch = fuzz.prepare(folder)
os.mkfifo(folder / "fifo")
pickled = pickle.dumps(os.getpid)


def refuse():
    raise ConfigError("run.yaml:3: it is odd")


def spin():
    while True:
        pass


def import_by_name():
    sys.path.insert(0, str(folder))
    import paceline_canary


cases = {
    "accepted": lambda: None,
    "refused": refuse,
    "traceback divide": lambda: 1 / 0,
    "hang fifo": lambda: open(folder / "fifo").read(),
    "hang spin": spin,
    "execution system": lambda: os.system("true"),
    "execution popen": lambda: subprocess.run(["true"]),
    "execution file": lambda: runpy.run_path(str(folder / "CANARY.py")),
    "execution text": lambda: exec((folder / "CANARY.py").read_text()),
    "execution module": import_by_name,
    "execution pickle": lambda: pickle.loads(pickled),
    "written outside": lambda: open(elsewhere, "w").close(),
    "wrong exit": lambda: sys.exit(5),
    "no word": lambda: sys.exit(2),
}
for name, act in cases.items():
    print(f"{name}: {fuzz.run_case(Case((name,), act), watch, frozenset({2, 4})).word}")


class Broken:
    name, refusals, ground = "broken", frozenset({2}), Ground(folder / "broken")

    def make(self, rng):
        self.ground.change("input.yaml", b"odd: %d" % rng.randint(0, 9))
        return Case(("plan", "input.yaml"), lambda: 1 / 0)


fuzz.build_kinds = lambda folder, names: [Broken()]
fuzz.MACHINES[:] = [None, None]
fuzz.prepare = lambda folder: watch
sys.argv = ["fuzz", "--count", "3", "--seed", "7", "--keep", str(Path(elsewhere).parent / "kept")]
sys.exit(fuzz.main())
"""


def test_what_no_case_may_do_is_noticed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    words = [sys.executable, "-c", CASES, FUZZ, tmp_path / "inputs", tmp_path / "outside"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=100)
    told = re.findall(r"^([a-z ]+): ([a-z ]+)$", done.stdout, re.MULTILINE)
    assert len(told) == 14, done.stdout + done.stderr
    assert [name for name, word in told if not name.startswith(word)] == []
    assert done.returncode == 1 and "3 cases with seed 7: 3 failures" in done.stdout
    kept = tmp_path / "kept" / "broken-7-0"
    assert (kept / "input" / "input.yaml").read_bytes().startswith(b"odd: ")
    said = (kept / "failure.txt").read_text()
    assert "scripts/fuzz --seed 7 --kind broken --only 0" in said and "ZeroDivisionError" in said


def run_fuzz(count: int, seed: int, timeout_s: float) -> str:
    words = [sys.executable, FUZZ, "--count", str(count), "--seed", str(seed), "--jobs", "2"]
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{KINDS * count} cases with seed {seed}: 0 failures" in done.stdout
    shares = [float(share) for share in re.findall(r" ([\d.]+)% ", done.stdout)]
    assert len(shares) == KINDS and min(shares) > 8, "they are shallow: too few are accepted"
    return done.stdout


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_500_of_each_kind_end_in_an_answer() -> None:
    started_at = time.monotonic()
    run_fuzz(500, seed=1, timeout_s=280)
    assert time.monotonic() - started_at < 90, "about 40 s on two cores of its own"


@pytest.mark.nightly
@pytest.mark.timeout(7300)
def test_10000_of_each_kind_end_in_an_answer() -> None:
    run_fuzz(10_000, seed=2, timeout_s=7200)
