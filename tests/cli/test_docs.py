"""The pages of docs/ do what they say: each command of a bash block runs as it stands, in a folder
of the block's own; keys, defaults and links exist.

    paceline train lm_tiny launch.nprocs=2   # exit 2      the code that is expected, 0 unless told

A text block right after a bash block is what its last command prints; `...` stands for anything.
In CI every command is parsed and, where its verb can, planned, and one block of each page is run;
all blocks are run at night.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.config.aliases import IMPLIED, RENAMED
from paceline.config.describe import iter_keys
from paceline.config.schema import CheckpointConfig
from paceline.job import load_job
from paceline.machine.launchers import launch_section
from tests import warm
from tests.cli.program import Ran, environment, free_port
from tests.docs import (
    EXIT,
    FENCED,
    PATH,
    ROOT,
    check_command,
    fenced,
    our_words,
    parse,
    settings,
    text_of,
    write_files,
)
from tests.schedulers.slurm import SlurmCluster, why_not

PAGES = (
    "launching", "checking", "troubleshooting", "strategies", "mae", "checkpoints", "sweeping",
    "statistics", "bench", "pipelines", "optimizers", "your-job", "speech", "text", "images",
    "generate", "export", "python", "trackers", "health", "watch", "diagnose", "ddp", "asr", "gpu",
    "nsa",
)  # fmt: skip
COMMAND_S = 240
SCHEDULED = ("srun", "salloc", "sbatch")
NEEDS = {  # a word of a command, and the program that it needs
    "torchrun": "torchrun", "mpirun": "mpirun", "deepspeed": "deepspeed",
    "launch.launcher=mpi": "mpirun", "launch.launcher=deepspeed": "deepspeed",
    "strategy.name=deepspeed": "deepspeed",
}  # fmt: skip
FIRST_OF_TWO = {"train", "launch.launcher=torchrun", "launch.nnodes=2"}
# Files and methods that are called like keys, a key misspelt on purpose, keys of a page's own job.
NO_KEYS = {
    "audit.json", "launch.json", "train.log", "data.json", "launch.nprocs", "model.safetensors",
    "model.onnx", "model.parameters", "model.named_parameters", "loss.backward", "observe.rules",
    "train.out", "model.width", "data.size", "dist.all_reduce", "dist.init_process_group",
    "dist.destroy_process_group",
}  # fmt: skip
OPEN_MAPS = ("launch.env", "strategy.deepspeed_config", "model.hf_config", "model.speech_config")


@dataclass(frozen=True)
class Block:
    name: str
    commands: tuple[str, ...]
    shown: tuple[str, ...]  # what the last command prints

    @property
    def words(self) -> list[str]:
        return [word for command in self.commands for word in command.split()]


def blocks_of(page: str) -> Iterator[Block]:
    text = text_of(page)
    found = list(FENCED.finditer(text))
    for number, block in enumerate(found):
        if block[1] != "bash":
            continue
        after = found[number + 1] if number + 1 < len(found) else None
        follows = after is not None and not text[block.end() : after.start()].strip()
        shown = after[2].splitlines() if after is not None and follows else []
        lines = tuple(line for line in block[2].splitlines() if line.strip())
        yield Block(f"{page}:{text.count(chr(10), 0, block.start()) + 1}", lines, tuple(shown))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
CODE = fenced("launching", "python")


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """Warm where it is nothing but our program, or a Python file of the page; all else is for a
    shell."""
    own = {"XDG_CACHE_HOME": str(folder / "cache")}  # rates that a check kept are not another's
    ours = our_words(command)
    if file := re.fullmatch(r"python (\w+)\.py", command):
        env, argv, starter = {}, [sys.executable, "-m", file[1]], warm.start
    elif ours is None or "launch.launcher=deepspeed" in command:
        env, argv, starter = {}, ["bash", "-c", command], subprocess.Popen
    else:
        env, argv, starter = ours[0], [sys.executable, "-m", "paceline", *ours[1]], warm.start
    return starter(
        argv, cwd=folder, env=environment(**settings(), **own, **env), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> Ran:
    with process:
        try:
            out, _ = process.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # Paceline and launchers end their ranks then
            raise
    return Ran(process.returncode, out, "")


def run_twice(command: str, folder: Path) -> Ran:
    """Two agents on loopback stand for two machines in one shared folder."""
    both = [start(command, folder), start(command, folder)]
    ends = [finish(process) for process in both]
    return Ran(max(end.code for end in ends), "".join(end.out for end in ends), "")


def run_with_other(command: str, folder: Path) -> Ran:
    """Paceline starts this machine's agent and says what to run on the other one."""
    log = folder / "first.log"
    first = start(f"{command} > {log.name} 2>&1", folder)
    deadline = time.monotonic() + COMMAND_S
    told = None
    while told is None and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        told = re.search(r"run this on the other .*? in this folder: (.*)\n", _read(log))
    second = finish(start(told[1], folder)) if told else Ran(1, "", "")
    code = finish(first).code
    return Ran(max(code, second.code), _read(log) + second.out, "")


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def run_one(command: str, folder: Path, cluster: SlurmCluster | None) -> Ran:
    command = command.replace("HOST", "localhost").replace("PORT ", f"{free_port()} ")
    command = re.sub(r"(?<=[:=])PORT\b", free_port(), command)
    command = re.sub(r"^sbatch ", "sbatch --wait ", command)  # to see the job to its end
    words = shlex.split(command, comments=True)
    if cluster is not None:
        argv = ["bash", "-c", command]
        done = cluster.run(argv, cwd=folder, env=settings(), timeout=COMMAND_S)
        jobs = "".join(_read(path) for path in folder.glob("*.out"))
        return Ran(done.returncode, done.stdout + done.stderr + jobs, "")
    if words[0] == "torchrun" and "--nnodes" in words:
        return run_twice(command, folder)
    if set(words) >= FIRST_OF_TWO:
        return run_with_other(command, folder)
    return finish(start(command, folder))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if why_not() is not None:
        pytest.skip(f"SLURM: {why_not()}")
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


# The block of each page that CI runs, by words that stand in it.
IN_CI = {
    "launching": "paceline train mine.yaml launch.nproc=2",
    "checking": "NCCL_TIMEOUT=1800",
    "troubleshooting": "optim.lr=1e30",
    "strategies": "strategy.comm_hook=bf16",
    "mae": "qkv_bias=false",
    "checkpoints": "paceline checkpoints convert",
    "sweeping": "tokens_per_s>=39",
    "bench": "paceline compare before after",
    "pipelines": "--times measured",
    "optimizers": "paceline checkpoints convert averaged --ema",
    "your-job": "train.stop_after=3",
    "speech": "--max-rejects 1",
    "text": "--train-bpe 280",
    "images": "shapes.py:Shapes",
    "generate": "train.sample_tokens=32",
    "export": 'run/exported/safetensors "def main("',
    "python": "python script.py",
    "trackers": "paceline plan lm_tiny",
    "health": "observe.rules.zero_grad=halt",
    "watch": "observe.memory=dumps",
    "diagnose": "paceline import train.out",
    "ddp": "observe.profile=steps:5-7",
    "asr": "data.root_dir=speech_16k train.steps=4",
    "gpu": "loss.chunk=64",
    "nsa": "NSA_SDPA_AUDIT=1",
}


def is_in_ci(block: Block) -> bool:
    return any(IN_CI[block.name.partition(":")[0]] in command for command in block.commands)


def test_one_block_of_each_page_is_run() -> None:
    chosen = [block.name.partition(":")[0] for block in BLOCKS if is_in_ci(block)]
    assert chosen == list(dict.fromkeys(block.name.partition(":")[0] for block in BLOCKS))


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(IN_CI))
def test_every_command_is_parsed_and_planned(page: str, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    commands = [command for block in blocks_of(page) for command in block.commands]
    assert sum(check_command(command, tmp_path) for command in commands) > 0


def test_a_flag_that_is_not_there_does_not_parse() -> None:
    parse(["bench", "run", "ddp", "--repeats", "2"])
    with pytest.raises(Exception, match="No such option: --repeat"):
        parse(["bench", "run", "ddp", "--repeat", "2"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block, id=block.name, marks=pytest.mark.slow if is_in_ci(block) else pytest.mark.nightly
        )
        for block in BLOCKS
    ],
)
def test_the_commands_of_a_block(
    block: Block, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for program in {NEEDS[word] for word in block.words if word in NEEDS}:
        if shutil.which(program, path=PATH) is None:
            pytest.skip(f"{program} is not installed")
    scheduled = any(command.split()[0] in SCHEDULED for command in block.commands)
    where = request.getfixturevalue("cluster") if scheduled else None
    write_files(block.name.partition(":")[0], tmp_path)
    ran = Ran(0, "", "")
    for command in block.commands:
        marked = EXIT.search(command)
        ran = run_one(EXIT.sub("", command), tmp_path, where)
        assert ran.code == (int(marked[1]) if marked else 0), f"{command}\n{ran.out[-3000:]}"
    for line in block.shown:
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        assert re.search(pattern, ran.out), f"not shown: {line}\n{ran.out[-3000:]}"


def test_the_python_of_launching_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", *CODE], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "alone 0 1 0\n", done.stderr


def test_every_key_in_the_pages_exists() -> None:
    names = ("lm_tiny", "mae_tiny", "causal_lm", "speech_tiny", "whisper_tiny_made")
    jobs = [load_job(name, []).config for name in names]
    known = {key.path for config in jobs for key in iter_keys(type(config))}
    known |= RENAMED.keys() | IMPLIED.keys()
    sections = "|".join(sorted({path.split(".")[0] for path in known if "." in path}))
    for page in PAGES:
        for found in re.finditer(rf"(?<![\w/.])(?:{sections})(?:\.[a-z_0-9]+)+", text_of(page)):
            key = found[0]
            assert key in known | NO_KEYS or key.startswith(OPEN_MAPS), f"{page}: {key}"


def test_launching_has_every_launch_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `launch\.(\w+)` \| (\w+) \|", text_of("launching"), re.MULTILINE))
    known = launch_section().model_fields
    assert list(rows) == list(known)
    for name, shown in rows.items():
        default = known[name].default
        expected = (
            f"{default:g}"
            if isinstance(default, float)
            else str("none" if default in ({}, []) else default)
        )
        assert shown == expected, name


def test_checkpoints_has_every_checkpoint_key_with_its_default() -> None:
    text = text_of("checkpoints")
    rows = dict(re.findall(r"^\| `checkpoint\.(\w+)` \| (\w+) \|", text, re.MULTILINE))
    known = CheckpointConfig.model_fields.items()
    assert rows == {name: str(field.default).replace("True", "true") for name, field in known}


def test_checkpoints_names_a_test_for_every_promise() -> None:
    rows = re.findall(
        r"^\| F(\w+): .*`(\w+\.py) -k f(\w+)` \|$", text_of("checkpoints"), re.MULTILINE
    )
    assert len(rows) == 23
    for fault, file, chosen in rows:
        assert fault == chosen
        tests = (ROOT / "tests" / "cli" / file).read_text()
        assert re.search(rf"(?:_|\")f{fault}_", tests), f"F{fault} is not in {file}"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}.md" for page in PAGES)])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    assert page == "docs/launching.md" or targets
    for target in targets:
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {target}"
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not anchor or anchor in slugs, f"{page}: {target}"


def test_no_page_names_this_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(?:work|tmp|root|home)/", text_of(page)), page
