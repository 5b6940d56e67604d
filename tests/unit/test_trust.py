"""No file chooses code: what a run directory, a config or a sweep names runs only if it was typed.

The code of these tests leaves a file behind when it runs: none may.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from paceline import trust
from paceline.errors import ConfigError
from paceline.job import load_job, remember_asked
from paceline.launch import find_launcher
from paceline.launch.member import TRUSTED, take_part
from paceline.plan.planner import make_plan
from paceline.records.rundir import RunDir
from paceline.run.flow import order_for
from paceline.run.rank import TRAIN
from paceline.run.resume import load_resumption
from paceline.sweep.spec import read_spec
from tests.harness import prepare_run
from tests.machines import MACHINE

CODE = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
import torch
from paceline import Workload

class X(Workload):
    def build_model(self, config): return torch.nn.Linear(4, 1)
    def build_data(self, config, split): return [torch.zeros(4)] * 8
    def loss(self, model, batch): return model(batch).sum(), len(batch)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has typed nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(TRUSTED, raising=False)
    return tmp_path / "state" / "paceline"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A file that somebody sent."""
    file = tmp_path / "sent" / "p.py"
    file.parent.mkdir()
    file.write_text(CODE)
    return file


def has_run(file: Path) -> bool:
    return file.with_suffix(".ran").exists()


def make_run(folder: Path, source: str) -> RunDir:
    """A run directory as a run that has begun leaves it."""
    job, plan, run = prepare_run(folder, source, ["launch.device=cpu"])
    find_launcher("local").plan(order_for(job, MACHINE, plan, str(run.root))).save(run.launch)
    return run


@pytest.fixture
def sent(tmp_path: Path, code: Path, state: Path) -> RunDir:
    """A run directory from elsewhere: nothing of it was typed here."""
    run = make_run(tmp_path / "run", f"{code}:X")
    shutil.rmtree(state)
    code.with_suffix(".ran").unlink()
    return run


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_b1_run_yaml_does_not_choose_code(tmp_path: Path, code: Path) -> None:
    run = make_run(tmp_path / "run", "lm_tiny")
    edit(run.config, "workload: lm", f"workload: {code}:X")
    with pytest.raises(ConfigError, match="names the workload .*p.py:X, and launch.json lm"):
        load_resumption(run.root, [], allow_change=False)
    assert not has_run(code)


def test_b1_nor_does_it_from_inside_the_run_directory(tmp_path: Path, code: Path) -> None:
    run = make_run(tmp_path / "run", f"{code}:X")
    code.with_suffix(".ran").unlink()
    inside = Path(shutil.copy(code, run.root))
    trust.remember([inside])  # not even then
    for path in (run.config, run.launch):
        edit(path, str(code), str(inside))
    with pytest.raises(ConfigError, match="lies inside the run directory"):
        load_resumption(run.root, [], allow_change=False, approve=lambda files: True)
    assert not has_run(code) and not has_run(inside)


def test_b4_a_file_that_was_never_typed_here_is_refused(sent: RunDir, code: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_resumption(sent.root, [], allow_change=False)
    digest = trust._code_of(code).sha256
    assert f"{code} (SHA-256 {digest})" in str(refused.value) and "--trust-code" in str(
        refused.value
    )
    assert refused.value.exit_code == 2 and not has_run(code)


def test_who_says_yes_once_is_not_asked_again(sent: RunDir, code: Path) -> None:
    asked: list[trust.Code] = []
    resumed = load_resumption(
        sent.root, [], allow_change=False, approve=lambda files: not asked.extend(files)
    )
    assert [item.path for item in asked] == [str(code)] and has_run(code)
    assert resumed.job.config.workload == f"{code}:X"
    load_resumption(sent.root, [], allow_change=False)
    with pytest.raises(ConfigError, match="trust-code"):
        code.write_text(CODE + "\n# changed since\n")
        load_resumption(sent.root, [], allow_change=False, approve=lambda files: False)


def test_a_typed_file_goes_on_without_a_question(
    tmp_path: Path, code: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(code.parent)
    run = make_run(tmp_path / "run", "p.py:X")
    monkeypatch.chdir(tmp_path)
    resumed = load_resumption(run.root, [], allow_change=False)
    assert resumed.job.config.workload == f"{code}:X", "found from another folder too"
    ledger = state / trust.LEDGER
    assert ledger.stat().st_mode & 0o777 == 0o600 and state.stat().st_mode & 0o777 == 0o700


def test_what_the_file_imports_from_its_folder_counts_too(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = code.with_name("beside.py")
    neighbour.write_text("VALUE = 1\n")
    code.write_text("import beside\n" + CODE)
    monkeypatch.syspath_prepend(str(code.parent))
    run = make_run(tmp_path / "run", f"{code}:X")
    load_resumption(run.root, [], allow_change=False)
    neighbour.write_text("VALUE = 2\n")
    with pytest.raises(ConfigError, match="beside.py"):
        load_resumption(run.root, [], allow_change=False)


@pytest.mark.parametrize("name", ["beside/__init__.py", "beside/ext.so", "beside.abi3.so"])
def test_what_python_would_import_before_a_file_counts_too(
    name: str, tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code.with_name("beside.py").write_text("VALUE = 1\n")
    code.write_text("import beside\n" + CODE)
    monkeypatch.syspath_prepend(str(code.parent))
    run = make_run(tmp_path / "run", f"{code}:X")
    added = code.parent / name
    added.parent.mkdir(exist_ok=True)
    added.write_text("VALUE = 2\n")
    with pytest.raises(ConfigError, match=name):
        load_resumption(run.root, [], allow_change=False)


def test_a_member_of_a_launcher_imports_nothing_untrusted(
    sent: RunDir, code: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(sent.launch, '"world_size": 1', '"world_size": 2')
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert take_part(TRAIN, [str(sent.root)]) == 2
    assert "nobody has typed that file" in capsys.readouterr().err and not has_run(code)


def test_a_rank_above_0_remembers_what_its_user_typed(code: Path) -> None:
    assert trust.strangers([code])
    remember_asked("lm_tiny", ["train.steps=2", f"++workload={code}:X"])
    assert not trust.strangers([code]) and not has_run(code)


def test_a_ledger_that_others_can_write_says_nothing(code: Path, state: Path) -> None:
    trust.remember([code])
    (state / trust.LEDGER).chmod(0o666)
    assert trust.strangers([code])


@pytest.mark.parametrize("content", ["", "[" * 50_000, '{"files": [1]}', '{"files": {"a": 1}}'])
def test_a_damaged_ledger_says_nothing_and_is_written_anew(
    content: str, code: Path, state: Path
) -> None:
    trust.remember([code])
    (state / trust.LEDGER).write_text(content)
    assert trust.strangers([code])
    trust.remember([code])
    assert not trust.strangers([code])


def test_the_ledger_is_bounded(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "MAX_ENTRIES", 3)
    files = [tmp_path / f"{number}.py" for number in range(5)]
    for file in files:
        file.touch()
        trust.remember([file])
    assert [Path(code.path) for code in trust.strangers(files)] == files[:2]
    assert len(json.loads((state / trust.LEDGER).read_text())["files"]) == 3


def test_a_typed_job_starts_where_nothing_can_be_kept(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    make_plan(load_job(f"{code}:X", ["launch.device=cpu"]), MACHINE)
    assert has_run(code)


# Configs, recipes and sweeps: no file chooses a program

VARIABLES = [
    "PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "PATH",
    "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_CONF_FILE", "BASH_ENV", "ENV", "IFS", "PERL5LIB",
    "TORCH_EXTENSIONS_DIR", "CUDA_INJECTION64_PATH", "GCONV_PATH", "MY_PRELOAD", "PET_NO_PYTHON",
    "OMPI_MCA_plm_rsh_agent", "PACELINE_TRUSTED", "XDG_STATE_HOME", "OMP_TOOL_LIBRARIES",
    "INTEL_LIBITTNOTIFY64", "NCCL_CUDA_PATH", "ANY_LIBRARY", "KINETO_CONFIG",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
]  # fmt: skip
ORDINARY = ["OMP_NUM_THREADS", "NCCL_DEBUG", "NCCL_P2P_LEVEL", "NCCL_NET", "CUDA_VISIBLE_DEVICES",
            "MY_FLAGS", "HF_HOME", "TORCH_LOGS", "PATHS", "ENVIRONMENT"]  # fmt: skip
REFUSED_ARGS = [
    ["--no-python", "/x/evil.sh"], ["--no_python"], ["--no-py", "x"], ["-m", "evil"], ["--module"],
    ["--run-path", "x"], ["--run_p", "x"], ["evil.py"], ["--tee", "3", "evil.py"], ["--tee=3", "x"],
    ["--log-dir", "/etc"], ["--log-dir=../up"], ["--log-d", "logs"], ["--logs-specs", "evil"],
    ["--tee", "-m"], ["--rdzv-endpoint", "evil:1"], ["--role", "a b"], ["-t3"], ["--tee"],
]  # fmt: skip
ALLOWED_ARGS = [["--tee", "3"], ["--log-dir=logs"], ["--log_dir", "a/b"], ["--monitor-interval=2"]]


def config_file(folder: Path, launch: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(json.dumps({"workload": "lm", "launch": {"device": "cpu", **dict(launch)}}))  # type: ignore[call-overload]
    return str(path)


@pytest.mark.parametrize("name", VARIABLES)
def test_b3_a_file_sets_no_variable_that_chooses_code(name: str, tmp_path: Path) -> None:
    source = config_file(tmp_path, {"env": {name: "/x"}})
    with pytest.raises(ConfigError, match=f"launch.env.{name} in .*mine.yaml: it chooses"):
        load_job(source, [])
    job = load_job(source, [f"launch.env.{name}=/mine"])
    assert job.config.launch.env == {name: "/mine"}, "typed is trusted"
    notes = [str(finding) for finding in make_plan(job, MACHINE).findings]
    assert any(f"launch.env.{name}" in note and "was typed" in note for note in notes)


def test_a_file_sets_all_other_variables(tmp_path: Path) -> None:
    env = dict.fromkeys(ORDINARY, "1")
    assert load_job(config_file(tmp_path, {"env": env}), []).config.launch.env == env


@pytest.mark.parametrize(
    "value", ["/x/evil.so", "./evil.so", "evil/lib", "~/evil", "http://evil/x"]
)
def test_a_file_gives_no_variable_a_path(value: str, tmp_path: Path) -> None:
    """Libraries load code by variables that no list knows; what they load is a path."""
    source = config_file(tmp_path, {"env": {"NOBODY_KNOWS_ME": value}})
    with pytest.raises(ConfigError, match="launch.env.NOBODY_KNOWS_ME in .*: its value is a path"):
        load_job(source, [])
    typed = load_job("lm_tiny", [f"launch.env.NOBODY_KNOWS_ME={value}"])
    assert typed.config.launch.env == {"NOBODY_KNOWS_ME": value}


@pytest.mark.parametrize("arguments", REFUSED_ARGS, ids=" ".join)
def test_b3_a_file_gives_torchrun_no_program(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="launch.torchrun_args in .*mine.yaml"):
        load_job(config_file(tmp_path, {"torchrun_args": arguments}), [])
    typed = load_job("lm_tiny", [f"launch.torchrun_args={json.dumps(arguments)}"])
    assert typed.config.launch.torchrun_args == arguments  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", ALLOWED_ARGS, ids=" ".join)
def test_a_file_gives_torchrun_what_runs_nothing(arguments: list[str], tmp_path: Path) -> None:
    load_job(config_file(tmp_path, {"torchrun_args": arguments}), [])


def test_a_reference_in_a_file_is_read_before_it_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("workload: lm\nname: --no-python\nlaunch: {torchrun_args: ['${name}', x]}\n")
    with pytest.raises(ConfigError, match="--no-python is not one of"):
        load_job(str(path), [])


def test_a_file_names_no_peer_that_torchrun_obeys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="launch.rdzv_endpoint in .*mine.yaml"):
        load_job(config_file(tmp_path, {"rdzv_endpoint": "evil:4444"}), [])


def test_what_was_typed_is_not_refused_when_the_run_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "lm_tiny")
    edit(run.config, "  env: {}", "  env: {PYTHONPATH: /x}")
    with pytest.raises(ConfigError, match="launch.env.PYTHONPATH in .*run.yaml"):
        load_resumption(run.root, [], allow_change=False)
    trust.remember([run.config])  # as the flow does that has written it
    assert load_resumption(run.root, [], allow_change=False).job.config.launch.env


@pytest.mark.parametrize(
    "words",
    [
        {"overrides": ["workload=CODE:X"]},
        {"axes": {"workload": ["CODE:X"]}},
        {"overrides": ["++launch.env.PYTHONPATH=/x"]},
        {"axes": {"launch.env.LD_PRELOAD": ["a", "b"]}},
        {"extras": {"more": ["launch.torchrun_args=[--no-python,x]"]}},
        {"overrides": ["launch={env: {PATH: /x}}"]},
        {"overrides": ["launch=${model}"]},
    ],
    ids=str,
)
def test_a_sweeps_file_chooses_nothing_either(
    words: dict[str, object], code: Path, tmp_path: Path
) -> None:
    path = tmp_path / "sweep.yaml"
    body = {"recipe": "lm_tiny", "axes": {"train.grad_accum": [1, 2]}, **words}
    path.write_text(json.dumps(body).replace("CODE", str(code)))
    with pytest.raises(ConfigError, match="file may not choose"):
        read_spec(str(path), [], [], {})
    assert not has_run(code)
