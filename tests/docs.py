"""Commands as pages show them: what is known of them without running them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from typer.main import get_command

from paceline.cli import app
from tests.cli.program import paceline

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXIT = re.compile(r"\s+# exit (\d+)$")
BIN = str(Path(sys.executable).parent)
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


def fenced(page: str, language: str) -> list[str]:
    return [block[2] for block in FENCED.finditer(text_of(page)) if block[1] == language]


def write_files(page: str, folder: Path) -> None:
    """What the commands of a page find in their folder: the small job of launching.md, the page's
    own Python files, whose first line is their name, and where it is named a corpus of speech."""
    (folder / "mine.yaml").write_text(*fenced("launching", "yaml"))
    for code in fenced(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", code):
            (folder / named[1]).write_text(code)
    if "LibriSpeech" in text_of(page):
        shutil.copytree(ROOT / "tests/data/speech", folder / "LibriSpeech")


def settings() -> dict[str, str]:
    """Ranks on CPU on any machine; Open MPI asks this of root; caches of the tests' own."""
    here = {"PATH": PATH, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""} if Path("/dev/nvidia0").exists() else {}
    return here | no_gpu | {"DS_ACCELERATOR": "cpu"}


def our_words(command: str) -> tuple[dict[str, str], list[str]] | None:
    """The variables and words of `NAME=value paceline VERB ...`; None if it is more than that."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    env = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
    rest = words[len(env) :]
    is_ours = rest[0] == "paceline" and not any(set(word) <= set("();<>|&") for word in rest)
    return (env, rest[1:]) if is_ours else None


PLANS = {"train": ["--dry-run"], "plan": [], "sweep": ["--dry-run"]}


def check_command(command: str, folder: Path) -> bool:
    """True for a command of ours, under whatever launcher: its words are known to the command line,
    its keys to the config, and what can be planned comes to the exit code that is promised."""
    marked = EXIT.search(command)
    text = EXIT.sub("", command).replace("HOST:PORT", "localhost:1")
    if "paceline " not in text:
        if text.startswith(("printf", "echo")):  # files that the next command reads
            subprocess.run(["bash", "-c", text], cwd=folder, check=True)
        return False
    ours = our_words(text)
    words = ours[1] if ours else shlex.split(text.partition("paceline ")[2].partition(" > ")[0])
    parse(words)
    expected = int(marked[1]) if marked else 0
    needs_a_run = bool({"--resume", "measured", "<"} & set(words))
    asks = ("strategy.name=deepspeed", "deepspeed_config_yaml.zero_optimization")
    is_elsewhere = any(w.startswith(asks) for w in words) and find_spec("deepspeed") is None
    if words[0] not in PLANS or needs_a_run or is_elsewhere or (ours and ours[0]):
        return True
    more = PLANS[words[0]] if "--dry-run" not in words else []
    ran = paceline(*words, *more, cwd=folder, **settings())
    # What only a run can end with is not in a plan.
    assert ran.code == (expected if expected in (2, 3) else 0), f"{command}\n{ran.err}"
    return True


def parse(words: list[str]) -> None:
    """As the program does before any verb begins; a word it does not know raises."""
    command: Any = get_command(app)
    context = command.make_context("paceline", list(words))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(
            context, context._protected_args + context.args
        )
        context = command.make_context(name, rest, parent=context)
