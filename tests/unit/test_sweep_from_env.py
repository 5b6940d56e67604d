"""A sweep that is asked by variables of the environment."""

import re
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.sweep.from_env import VARIABLES, read_env
from paceline.sweep.spec import draw_cells, read_spec

PAGE = Path(__file__).parents[2] / "docs/sweeping.md"
# As the runbook has it.
RUNBOOK = {
    "MODE": "sweep", "INCLUDE": "localhost:0,1,2,3", "REPEATS": "2", "STOP_ON_ERROR": "0",
    "MAX_STEPS": "1000", "SWEEP_ZERO_STAGES": "0,1", "SWEEP_MICRO_BATCHES": "128,160,192",
    "SWEEP_NUM_WORKERS_LIST": "4,6,8", "SWEEP_PREFETCH_LIST": "2,4", "SWEEP_LOG_EVERY": "50",
    "TAIL_TIMING_POINTS": "10", "HEARTBEAT_EVERY_SEC": "30", "RUN_TIMEOUT_SEC": "2400",
    "FAILURE_DUMP_TAIL": "true", "FAIL_TAIL_LINES": "80", "RESUME_RUNS": "true",
    "SWEEP_VALIDATION_EVERY": "1000000", "SWEEP_CHECKPOINT_EVERY": "1000000",
    "DATASET_ROOT": "data/16k", "DATASET_MANIFEST_PATH": "data/16k/m.tsv",
    "DATASET_USE_TRIM": "false", "DATASET_OFFLINE_TRIMMED": "true",
    "ENABLE_CUDA_SYNC_TIMING": "false", "TIMING_RANK_SCOPE": "rank0", "PRECISION_MODE": "auto",
    "ATTN_IMPL": "auto", "ENABLE_TORCH_COMPILE": "false", "TORCH_COMPILE_MODE": "max-autotune",
    "TORCH_COMPILE_DYNAMIC": "true", "ENABLE_LENGTH_FIXED_SLICE": "false",
    "OUTPUT_ROOT": "outputs/bench", "PATH": "/bin",
}  # fmt: skip


def test_the_runbook_asks_for_its_matrix() -> None:
    asked = read_env(RUNBOOK)
    spec = read_spec(asked.recipe, asked.words, asked.axes, asked.given)
    cells = draw_cells(spec)
    assert len(cells) == 2 * 3 * 3 * 2 and asked.out == Path("outputs/bench")
    assert cells[0].settings == {
        "strategy.name": "ddp", "train.micro_batch_size": "128", "data.num_workers": "4",
        "data.prefetch": "2",
    }  # fmt: skip
    assert (spec.repeats, spec.steps, spec.tail_lines, spec.stop_on_error) == (2, 1000, 80, False)
    assert {"launch.nproc=4", "launch.devices=[0, 1, 2, 3]", "launch.total_s=2400",
            "data.root_dir=data/16k", "train.log_every=50"} <= set(spec.overrides)  # fmt: skip
    assert {"train.eval_every=off", "checkpoint.every=off"} <= set(spec.overrides)
    assert (spec.tail_points, spec.heartbeat_s, spec.cells) == (10, 30.0, {})
    assert spec.extras == {
        "compile": ["train.compile=max-autotune", "train.compile_dynamic=on"],
        "fixed_slice": ["data.fixed_slice_s=2"],
    }
    assert len(asked.notes) == 1 and "ENABLE_CUDA_SYNC_TIMING changes nothing" in asked.notes[0]


def test_switches_set_every_cell_and_leave_phase_c() -> None:
    asked = read_env(
        {"ENABLE_TORCH_COMPILE": "1", "ENABLE_LENGTH_FIXED_SLICE": "true",
         "FIXED_SLICE_SECONDS": "1.5", "MAX_STEPS": "100", "SWEEP_VALIDATION_EVERY": "50",
         "SWEEP_NUM_WORKERS": "2", "RUN_TIMEOUT_SEC": "0", "WORLD_SIZE": "0",
         "FAILURE_DUMP_TAIL": "false", "ATTN_IMPL": "flash_attention_2"}
    )  # fmt: skip
    assert asked.given["extras"] == {} and asked.given["tail_lines"] == 0
    assert set(asked.words) == {
        "train.compile=default", "train.compile_dynamic=on", "data.fixed_slice_s=1.5",
        "train.eval_every=50", "data.num_workers=2", "attention.impl=flash",
    }  # fmt: skip


def test_ab_is_a_run_as_it_was_against_a_tuned_one() -> None:
    asked = read_env(
        {"MODE": "ab", "MAX_STEPS": "1000", "AB_TUNED_NUM_WORKERS": "6", "AB_OLD_ZERO_STAGE": "0",
         "SWEEP_ZERO_STAGES": "0,1"}
    )  # fmt: skip
    spec = read_spec(asked.recipe, asked.words, asked.axes, asked.given)
    old, tuned = draw_cells(spec)
    assert (old.name, tuned.name, spec.baseline) == ("old_like", "tuned", "old_like")
    assert old.overrides == [
        "train.micro_batch_size=128", "strategy.name=ddp", "data.num_workers=2", "data.prefetch=2",
        "train.log_every=1", "train.eval_every=500", "checkpoint.every=500",
        "train.deterministic=true",
    ]  # fmt: skip
    assert {"data.num_workers=6", "train.eval_every=off", "train.deterministic=false",
            "checkpoint.every=off"} <= set(tuned.overrides)  # fmt: skip
    assert asked.notes == ["SWEEP_ZERO_STAGES changes nothing: MODE is ab"]
    both = read_env({"MODE": "both", "SWEEP_ZERO_STAGES": "0,1", "BASELINE_GROUP": "tuned"})
    spec = read_spec(both.recipe, both.words, both.axes, both.given)
    assert [cell.name for cell in draw_cells(spec)] == [
        "old_like", "tuned", "name=ddp", "name=zero1"
    ]  # fmt: skip
    assert spec.baseline == "tuned"


def test_every_bad_value_is_named_at_once() -> None:
    bad = {
        "MODE": "abc", "REPEATS": "none", "SWEEP_ZERO_STAGES": "0,7", "INCLUDE": "node1:0",
        "FIXED_SLICE_SECONDS": "-1", "DATASET_USE_TRIM": "true", "SWEEP_MICRO_BATCH": "4",
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        read_env({**bad, "ENABLE_LENGTH_FIXED_SLICE": "true"})
    told = caught.value.problems
    assert len(told) == len(bad) + 1
    for name in bad:
        assert any(name in problem for problem in told), name
    assert any("SWEEP_MICRO_BATCHES" in problem for problem in told), "the nearest one is named"


def test_the_page_has_every_variable() -> None:
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| ", PAGE.read_text(), re.MULTILINE)
    assert rows == list(VARIABLES)
