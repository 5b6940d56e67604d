"""Launch plans without any scheduler: argv, environment with reasons, who runs where."""

import base64
import json
import os
import re
from pathlib import Path

import pytest

from paceline.errors import ConfigError, Outcome
from paceline.job import load_job
from paceline.launch.base import Task
from paceline.launch.deadlines import Deadlines, explain_missed
from paceline.launch.ending import LaunchEnd, judge_end
from paceline.launch.local import build_spec
from paceline.launch.member import take_part
from paceline.launch.signals import SignalLog
from paceline.launch.slurm import batch_script
from paceline.launch.supervisor import Supervisor
from paceline.machine.fabric import NODE_CACHE, choose_fabric, make_node_caches
from paceline.machine.facts import allowed_variables
from paceline.machine.gpus import rocm_gpus
from paceline.machine.group import StoreAddress
from paceline.machine.hosts import read_hostfile
from paceline.machine.launchers import LAUNCHERS
from paceline.machine.topology import RankId, Topology
from paceline.plan.crew import check_crew, choose_crew
from paceline.plan.planner import make_plan
from paceline.records import Env, Gpu, Limits, Link, RankEnd
from paceline.records.rundir import RunDir
from paceline.schedules.actions import Action, Kind
from paceline.train.heartbeat import ActionMark
from tests.machines import box, draw, machine, order_of


@pytest.mark.parametrize("by", sorted(LAUNCHERS))
def test_every_launcher_draws_words_and_a_map(by: str) -> None:
    plan = draw("launch.nproc=2", "launch.device=cpu", "launch.env.NAME=a b; c", by=by)
    assert all(isinstance(word, str) for word in plan.argv)
    assert [place.rank for place in plan.ranks] == [0, 1]
    assert plan.env["NAME"] == "a b; c" and plan.reasons["NAME"] == "launch.env"
    assert "a b; c" not in " ".join(plan.argv), "values travel in the environment"
    assert json.loads(plan.to_json())["launcher"] == by
    if by != "local":
        assert plan.argv[-1] == "RUN_DIR"


def test_torchrun_words() -> None:
    more = ["launch.nproc=8", "launch.nnodes=4", "launch.rdzv_endpoint=head:4444"]
    plan = draw(*more, "launch.torchrun_args=[--tee,'3']", "launch.device=cpu", by="torchrun")
    text = " ".join(plan.argv)
    assert "-m torch.distributed.run --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d" in text
    assert "--rdzv-endpoint head:4444" in text and "--tee 3 -m paceline.run RUN_DIR" in text
    assert len(plan.ranks) == 32 and plan.crew.num_nodes == 4


def test_torchrun_on_one_node_takes_any_free_port() -> None:
    argv = draw("launch.nproc=2", "launch.device=cpu", by="torchrun").argv
    assert argv[argv.index("--rdzv-endpoint") + 1] == "localhost:0"


def test_srun_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")
    plan = draw("launch.nproc=4", "launch.nnodes=2", "launch.device=cpu", by="slurm")
    text = " ".join(plan.argv)
    assert text.startswith("srun --nodes 2 --ntasks 8 --ntasks-per-node 4 --kill-on-bad-exit=1")
    assert [place.host for place in plan.ranks] == ["gpu07"] * 4 + ["gpu08"] * 4


def hostfile(folder: Path, text: str = "a slots=4\nb slots=4  # the second\n\n") -> str:
    (folder / "hosts").write_text(text)
    return f"launch.hostfile={folder / 'hosts'}"


def test_mpirun_words(tmp_path: Path) -> None:
    plan = draw(hostfile(tmp_path), "launch.device=cpu", by="mpi")
    text = " ".join(plan.argv)
    assert text.startswith(
        "mpirun -n 8 --map-by ppr:4:node --oversubscribe --bind-to none --hostfile "
    )
    assert "-x MASTER_ADDR=a -x MASTER_PORT=" in text
    assert [place.host for place in plan.ranks] == ["a"] * 4 + ["b"] * 4


def test_deepspeed_words(tmp_path: Path) -> None:
    gpus = ["launch.devices=[0,4]", "launch.device=cuda"]
    alone = draw(*gpus, env=box(8), by="deepspeed")
    assert alone.argv[:3] == ["deepspeed", "--include", "localhost:0,4"]
    assert "CUDA_VISIBLE_DEVICES" not in alone.env, "--include sets it"
    many = draw(*gpus, hostfile(tmp_path), env=box(8), by="deepspeed")
    text = " ".join(many.argv)
    assert "-m paceline.launch.each_host RUN_DIR -- " in text and "--master_addr a" in text
    assert "-m deepspeed.launcher.launch --world_info=" in text and "--node_rank={node}" in text
    (world,) = re.findall(r"--world_info=(\S+)", text)
    assert json.loads(base64.urlsafe_b64decode(world)) == {"a": [0, 4], "b": [0, 4]}


def test_torchrun_by_hostfile_has_rank_0_on_the_first_machine(tmp_path: Path) -> None:
    plan = draw(hostfile(tmp_path), "launch.device=cpu", by="torchrun")
    text = " ".join(plan.argv)
    assert "-m paceline.launch.each_host RUN_DIR -- " in text
    assert "--rdzv-backend static --node-rank {node} --rdzv-endpoint a:" in text
    assert [place.host for place in plan.ranks] == ["a"] * 4 + ["b"] * 4
    assert plan.findings == [], "nobody has to start it elsewhere"


def test_localhost_is_another_machine_on_each(tmp_path: Path) -> None:
    hosts = hostfile(tmp_path, "localhost slots=2\nb slots=2\n")
    with pytest.raises(ConfigError, match="names localhost beside other machines"):
        draw(hosts, "launch.device=cpu", by="torchrun")
    alone = draw(hosts, "launch.nnodes=1", "launch.device=cpu", by="torchrun")
    assert [place.host for place in alone.ranks] == ["localhost"] * 2


@pytest.mark.parametrize("by", ["deepspeed", "mpi", "torchrun"])
def test_more_nodes_than_the_hostfile_names_are_refused(by: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="launch.nnodes=3, and .*hosts names 2"):
        draw(hostfile(tmp_path), "launch.nnodes=3", "launch.device=cpu", by=by)


@pytest.mark.parametrize("by", sorted(set(LAUNCHERS) - {"deepspeed"}))
def test_devices_work_for_every_launcher(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = draw("launch.devices=[0,4]", env=box(8), by=by)
    assert plan.crew.world_size == 2 and plan.env["CUDA_VISIBLE_DEVICES"] == "0,4"
    assert [(place.device, place.gpu) for place in plan.ranks] == [("cuda:0", 0), ("cuda:1", 4)]


def test_devices_count_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert draw("launch.devices=[0,2]", env=box(3)).env["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_one_gpu_named_twice_is_shared_over_gloo() -> None:
    plan = draw("launch.devices=[1,1,0]", env=box(2))
    assert plan.crew.backend.value == "gloo" and "two ranks on one GPU" in plan.crew.backend.because
    assert plan.crew.device_indices == [0, 0, 1] and plan.env["CUDA_VISIBLE_DEVICES"] == "1,0"


def crew_problems(env: Env, topology: Topology, *overrides: str) -> str:
    launch = load_job("lm_tiny", list(overrides)).config.launch
    found = check_crew(launch, env, choose_crew(launch, env, topology), topology)
    return "\n".join(f"{finding.severity}: {finding}" for finding in found)


def test_more_devices_than_exist_says_how_many_there_are() -> None:
    told = crew_problems(box(2), Topology(), "launch.nproc=4")
    assert "error: launch.nproc: each rank wants a GPU: 4 asked for, 2 usable here" in told
    told = crew_problems(box(2), Topology(), "launch.devices=[0,7]")
    assert "error: launch.devices: names GPU 7, and 2 are usable here" in told


def test_a_login_node_need_not_have_gpus() -> None:
    asked = ["launch.launcher=slurm", "launch.device=cuda", "launch.nproc=8", "launch.nnodes=2"]
    assert "error" not in crew_problems(machine(), Topology(), *asked)


def test_what_a_launcher_has_decided_is_not_asked_again() -> None:
    among = Topology(launcher="torchrun", rank=0, world_size=4, local_world_size=2, num_nodes=2)
    assert crew_problems(machine(), among, "launch.device=cpu", "launch.nproc=2") == ""
    assert "warning: launch.nproc: has no effect: torchrun has started 2 ranks here" in (
        crew_problems(machine(), among, "launch.device=cpu", "launch.nproc=8")
    )
    assert "ranks do not start ranks" in crew_problems(
        machine(), among, "launch.device=cpu", "launch.launcher=mpi"
    )


def test_a_rank_that_sees_one_gpu_under_a_launcher_is_right() -> None:
    among = Topology(launcher="slurm", rank=0, world_size=4, local_world_size=4)
    assert crew_problems(box(1), among) == ""


def test_local_ranks_stay_on_this_machine() -> None:
    assert "starts ranks on this machine only" in crew_problems(
        machine(), Topology(), "launch.nnodes=2", "launch.device=cpu"
    )


@pytest.mark.parametrize(
    "line", ["host; rm -rf x slots=2", "-oProxyCommand=x", "a b c", "$(id)", "a slots=many", "a/b"]
)
def test_f46f_a_hostfile_holds_names_and_nothing_else(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"good slots=1\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{file}:2")):
        read_hostfile(str(file))


def fabric(env: Env, asked: str = "auto", *overrides: str) -> dict[str, str]:
    launch = load_job("lm_tiny", list(overrides)).config.launch
    crew = choose_crew(launch, env, Topology())
    found = choose_fabric(asked, env, crew, "my run")
    assert all(why for _, why in found.variables.values()) and found.choice.because
    return {name: value for name, (value, _) in found.variables.items()}


def test_an_nvswitch_box_gets_what_has_a_meaning_there() -> None:
    assert fabric(box(8)) == {"NCCL_P2P_LEVEL": "NVL", "NCCL_NVLS_ENABLE": "1"}
    assert fabric(box(8), "nvlink")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_bridged_pairs_keep_their_pcie_path() -> None:
    links = [Link(a=0, b=1, kind="nvlink", nvlinks=12), Link(a=0, b=2, kind="system", nvlinks=0)]
    assert fabric(box(3, links=links)) == {}, "P2P_LEVEL=NVL would cut the pairs apart"


def test_several_nodes_bring_the_network_in() -> None:
    env = box(8, interfaces=["docker0", "eth0", "lo"], infiniband=["mlx5_0"])
    wide = fabric(env, "auto", "launch.launcher=torchrun", "launch.nnodes=2")
    assert wide["NCCL_SOCKET_IFNAME"] == "^lo,docker" and wide["NCCL_IB_DISABLE"] == "0"
    assert wide["NCCL_NET_GDR_LEVEL"] == "5"
    assert "NCCL_SOCKET_IFNAME" not in fabric(env)


def test_two_gpus_over_pcie() -> None:
    assert fabric(box(2, "host_bridge")) == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    assert fabric(box(4, "host_bridge")) == {}


def test_frontier() -> None:
    gpus = [
        Gpu(index=n, name="AMD Instinct MI250X", uuid=f"GPU-{n}", compute_capability="9.0",
            memory_bytes=64 << 30)
        for n in range(8)
    ]  # fmt: skip
    env = box(0, hip="6.2", cuda=None, gpus=gpus, interfaces=["hsn0", "lo"])
    found = fabric(env)
    assert found["NCCL_SOCKET_IFNAME"] == "hsn0" and found["NCCL_CROSS_NIC"] == "1"
    assert found["NCCL_NET_GDR_LEVEL"] == "3"
    cache = "{tmp}/paceline-miopen-{user}-my-run-{local_rank}"
    assert found["MIOPEN_USER_DB_PATH"] == found["MIOPEN_CUSTOM_CACHE_DIR"] == cache
    plan = draw(env=env)
    assert any("AWS-OFI-RCCL plugin cannot be loaded" in f.what for f in plan.findings)


def test_miopen_has_a_cache_of_each_rank_on_its_node(tmp_path: Path) -> None:
    asked = {"TMPDIR": str(tmp_path), "MIOPEN_USER_DB_PATH": f"{NODE_CACHE}-run-{{local_rank}}"}
    folders = {make_node_caches(asked, rank)["MIOPEN_USER_DB_PATH"] for rank in (0, 1)}
    assert len(folders) == 2
    assert all(
        Path(f).parent == tmp_path and Path(f).stat().st_mode & 0o777 == 0o700 for f in folders
    )
    own = {"MIOPEN_USER_DB_PATH": "/mine"}
    assert make_node_caches(own, 0) == own, "what the user has set stays"


def test_a_cache_that_another_made_is_not_used(tmp_path: Path) -> None:
    uid = os.getuid()
    (tmp_path / f"paceline-miopen-{uid}-run-0").symlink_to("/etc")
    asked = {"TMPDIR": str(tmp_path), "MIOPEN_USER_DB_PATH": f"{NODE_CACHE}-run-{{local_rank}}"}
    made = Path(make_node_caches(asked, 0)["MIOPEN_USER_DB_PATH"])
    assert made.is_dir() and not made.is_symlink() and made.resolve() != Path("/etc")
    made.rmdir()


def test_a_preset_never_replaces_what_the_user_set() -> None:
    env = box(8, variables={"NCCL_P2P_LEVEL": "SYS"})
    plan = draw(env=env)
    assert "NCCL_P2P_LEVEL" not in plan.env and plan.env["NCCL_NVLS_ENABLE"] == "1"
    assert any("stays SYS, as you set it" in finding.what for finding in plan.findings)
    assert draw("launch.fabric=off", env=box(8)).fabric.value == "off"
    assert draw("launch.env.NCCL_P2P_LEVEL=PHB", env=box(8)).env["NCCL_P2P_LEVEL"] == "PHB"


def test_the_batch_script_quotes_every_word() -> None:
    asked = ["lm_tiny", "name=$(touch x)", "launch.launcher=slurm"]
    order = order_of("launch.nproc=2", "launch.nnodes=2", "launch.device=cpu")
    text = batch_script("lm_tiny", "job.sh", order, asked)
    assert "train lm_tiny 'name=$(touch x)' launch.launcher=slurm --out" in text
    assert "#SBATCH --signal=B:USR2@120" in text and "-eq 75" in text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(run: RunDir, rank: int, time: float, step: int, phase: str = "forward") -> None:
    line = {"time": time, "rank": rank, "step": step, "phase": phase, "marks": step * 5}
    with run.heartbeat(rank).open("a") as file:
        file.write(json.dumps(line) + "\n")


LIMITS = Limits(start_s=300, progress_s=60, total_s=1000, grace_s=1, collective_s=1)


def test_deadlines_are_read_from_heartbeats(tmp_path: Path) -> None:
    run, clock = RunDir(tmp_path), Clock()
    deadlines = Deadlines(run, [0, 1], LIMITS, clock)
    clock.now = 200
    assert deadlines.missed() is None, "still starting"
    for second in range(200, 320, 10):  # rank 1 loads for long, and says so
        beat(run, 0, second, 0, "start")
        beat(run, 1, second, 0, "start")
        clock.now = second
        missed = deadlines.missed()
    assert missed == "start"


def test_a_rank_that_stands_still_is_overdue_though_its_thread_beats(tmp_path: Path) -> None:
    run, clock = RunDir(tmp_path), Clock()
    deadlines = Deadlines(run, [0, 1], LIMITS, clock)
    found = []
    for second in range(1, 100):
        beat(run, 0, second, step=second)
        beat(run, 1, second, step=7)
        clock.now = second
        found.append(deadlines.missed())
    assert found.index("progress") in range(60, 64)


def test_a_frozen_rank_is_overdue_before_its_first_step_too(tmp_path: Path) -> None:
    run, clock = RunDir(tmp_path), Clock()
    deadlines = Deadlines(run, [0], LIMITS, clock)
    beat(run, 0, 1, step=0, phase="start")
    clock.now = 2
    assert deadlines.missed() is None
    clock.now = 70
    assert deadlines.missed() == "progress"


def test_the_total_deadline_and_ranks_that_have_finished(tmp_path: Path) -> None:
    run, clock = RunDir(tmp_path), Clock()
    deadlines = Deadlines(run, [0], LIMITS, clock)
    beat(run, 0, 1, step=3)
    clock.now = 2
    deadlines.missed()
    run.rank(0).mkdir(parents=True)
    run.verdict(0).write_text("{}")
    clock.now = 500
    assert deadlines.missed() is None, "it has said its last word"
    clock.now = 1001
    assert deadlines.missed() == "total"


@pytest.mark.parametrize(
    ("world_size", "polls", "waits"), [(2, True, False), (2, False, True), (3, True, True)]
)
def test_a_failure_waits_for_a_signal_where_one_may_be_its_cause(
    world_size: int, polls: bool, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where all ranks are ours and only note signals: each restart would take 0.2 s more."""
    launch, run = draw("launch.nproc=2", "launch.device=cpu", by="local"), RunDir(tmp_path)
    task, store = Task("train", print, "paceline.run", polls), StoreAddress("localhost", 1, "")
    specs = [build_spec(launch, run, RankId(r, r, world_size), store, task) for r in range(2)]
    here, slept = Supervisor(run, specs, launch.limits), list[float]()
    monkeypatch.setattr("paceline.launch.supervisor.time.sleep", slept.append)
    monkeypatch.setattr(here, "_has_failed", lambda rank: True)
    monkeypatch.setattr(here, "ranks", [None])
    here._settle(SignalLog())
    assert bool(slept) == waits


def test_the_rank_that_is_behind_is_blamed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    draw("launch.nproc=3", "launch.device=cpu").save(run.launch)
    for rank, phase in ((0, "backward"), (1, "data"), (2, "backward")):
        beat(run, rank, 100, 9, phase)
    ends = {r: RankEnd(rank=r, host="h", exit_code=-15, stall="progress") for r in range(3)}
    rank, why = explain_missed(run, ends, "progress")
    assert rank == 1 and "at step 9 in data it is behind rank 0, which waits in backward" in why
    ends[2] = ends[2].model_copy(update={"was_stopped": True})
    assert explain_missed(run, ends, "progress")[0] == 2


def test_a_stalled_pipeline_blames_the_rank_at_work(tmp_path: Path) -> None:
    run = RunDir.create("r", tmp_path / "run")
    draw("launch.nproc=2", "launch.device=cpu").save(run.launch)
    for rank, phase in ((0, "forward"), (1, "backward")):
        run.rank(rank).mkdir(parents=True)
        beat = {"time": 100.0, "rank": rank, "step": 9, "phase": phase}
        run.heartbeat(rank).write_text(json.dumps(beat) + "\n")
    marks = [ActionMark(run.action_mark(rank)) for rank in (0, 1)]
    marks[1].set(Action(Kind.WEIGHT, 1, 12))
    ends = {r: RankEnd(rank=r, host="h", exit_code=-9, stall="progress") for r in (0, 1)}
    rank, why = explain_missed(run, ends, "progress")
    assert rank == 1 and "it alone is at work on a microbatch" in why
    failure = judge_end(run, 2, LaunchEnd(ends)).failure
    assert failure is not None and failure.message.startswith(
        "rank 1 stalled in stage 1, backward of the weights of microbatch 12: no progress for"
    )
    marks[1].set(None)
    assert explain_missed(run, ends, "progress")[0] == 0, "by phases, as without a pipeline"


def test_amd_gpus_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, simds in enumerate((0, 440, 440)):  # a CPU and two halves of an MI250X
        node = tmp_path / str(number)
        (node / "mem_banks/0").mkdir(parents=True)
        (node / "mem_banks/0/properties").write_text("heap_type 1\nsize_in_bytes 68702699520\n")
        (node / "name").write_text("aldebaran\n")
        (node / "properties").write_text(
            f"simd_count {simds}\ngfx_target_version 90010\ndevice_id 29704\nunique_id {number}\n"
        )
    gpus = rocm_gpus(tmp_path)
    assert [(gpu.index, gpu.uuid) for gpu in gpus] == [(0, "GPU-1"), (1, "GPU-2")]
    assert gpus[0].compute_capability == "9.0" and gpus[0].memory_bytes == 68702699520
    assert gpus[0].name == "AMD Instinct MI250X"  # not "aldebaran", which no data sheet has
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert [gpu.uuid for gpu in rocm_gpus(tmp_path)] == ["GPU-2"]


def test_deepspeed_names_the_machines_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runner drops CUDA_VISIBLE_DEVICES beside --include."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert "localhost:4,6" in draw("launch.devices=[0,2]", env=box(4), by="deepspeed").argv
    assert "localhost:4,5,6,7" in draw("launch.device=cuda", env=box(4), by="deepspeed").argv
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa")
    with pytest.raises(ConfigError, match="takes numbers"):
        draw("launch.device=cuda", env=box(1), by="deepspeed")


@pytest.mark.parametrize("by", sorted(set(LAUNCHERS) - {"slurm"}))
def test_too_many_devices_is_an_error_for_every_launcher(by: str) -> None:
    told = crew_problems(box(1), Topology(), f"launch.launcher={by}", "launch.nproc=4")
    assert "error: launch.nproc: each rank wants a GPU: 4 asked for, 1 usable here" in told


def test_threads_and_late_variables_of_launch_env() -> None:
    job = load_job("lm_tiny", ["launch.env.OMP_NUM_THREADS=3", "launch.device=cpu"])
    assert make_plan(job, machine()).threads.value == 3
    told = crew_problems(machine(), Topology(), "launch.env.TORCH_LOGS=+dynamo")
    assert "launch.env.TORCH_LOGS: has no effect" in told


@pytest.mark.parametrize("name", ["WANDB_KEY", "NCCL_PSK", "MY_AUTH", "HF_TOKEN", "DB_PASSWORD"])
def test_a_secret_is_no_setting_and_no_record(name: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret"):
        load_job("lm_tiny", [f"launch.env.{name}=x"])
    assert allowed_variables({name: "x", "NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}


def test_a_process_takes_part_only_in_what_its_own_verb_has_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """launch.json says what ranks were planned for; it never chooses what is run."""
    run = RunDir.create("r", tmp_path / "run")
    run.config.write_text("name: r\n")
    draw("launch.nproc=1", "launch.device=cpu").save(run.launch)
    work: list[str] = []
    other = Task("other", lambda context: work.append("ran"), "none")
    assert take_part(other, [str(run.root)]) == Outcome.CRASHED.exit_code
    assert "planned for `train`, and this process runs `other`" in capsys.readouterr().err
    assert work == [] and run.verdict(0).is_file()
