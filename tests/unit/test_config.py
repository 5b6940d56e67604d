"""Config: strict, all problems at once, and nothing in a file runs code (F46b)."""

import re
from pathlib import Path

import pytest

from paceline.config.describe import iter_keys
from paceline.config.load import (
    dump_config,
    load_config,
    read_draft,
    recipe_names,
    validate,
)
from paceline.config.schema import RunConfig, run_schema
from paceline.data.base import TextData
from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.strategies import strategy_section
from paceline.workloads.lm.workload import LMModel

SCHEMA = run_schema(LMModel, TextData, strategy_section())


def load(*overrides: str, source: str = "lm_tiny") -> RunConfig:
    return validate(read_draft(source, overrides), SCHEMA)


def problems(*overrides: str, source: str = "lm_tiny") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, source=source)
    assert caught.value.exit_code == 2
    return caught.value.problems


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name: str) -> None:
    assert load_job(name, []).config.name == name


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("++train.steps=7", "train.steps", 7),
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("name='two words'", "name", "two words"),
        ('name="off"', "name", "off"),
        ("train.compile=off", "train.compile", "off"),
        ("optim.fused=on", "optim.fused", "on"),
        ("model.tied=false", "model.tied", False),
        ("~train.eval_every", "train.eval_every", "off"),
        ("data.source=/some/where", "data.source", "/some/where"),
    ],
)
def test_overrides_as_hydra_users_write_them(override: str, path: str, value: object) -> None:
    found: object = load(override)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_experiment_stands_in_for_the_recipe() -> None:
    assert load_job("+experiment=lm_tiny", ["train.steps=3"]).config.train.steps == 3


def test_the_last_override_wins() -> None:
    assert load("train.steps=3", "train.steps=4").train.steps == 4


def test_every_problem_is_reported_at_once() -> None:
    found = problems("train.stps=5", "launch.nproc=two", "=", "+foo.bar=1", "model.num_kv_heads=3")
    text = "\n".join(found)
    assert len(found) == 5
    assert (
        "unknown key train.stps in override 'train.stps=5'\nhint: did you mean train.steps?" in text
    )
    assert "launch.nproc=two in override 'launch.nproc=two'; it wants auto, or whole number" in text
    assert "'=' is not an override" in text
    assert "unknown key foo.bar" in text
    assert "num_heads 4 must be a multiple of num_kv_heads 3" in text


def test_plus_is_for_open_maps_only() -> None:
    assert "already has" in problems("+train.steps=5")[0]


def test_dropping_what_the_recipe_does_not_set_is_said() -> None:
    assert "drops a key that the recipe does not set" in problems("~optim.clip")[0]


def test_an_unknown_key_in_a_file_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("workload: lm\ntrain:\n  stepz: 3\n")
    assert problems(source=str(file)) == [
        f"unknown key train.stepz in {file}\nhint: did you mean train.steps?"
    ]


def test_a_number_in_quotes_is_not_a_number() -> None:
    assert "it wants auto, or whole number >= 1" in problems("train.steps='7'")[0]


def test_bare_off_in_yaml_is_the_word(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("workload: lm\ntrain:\n  compile: off\noptim:\n  fused: on\n")
    config = load(source=str(file))
    assert (config.train.compile, config.optim.fused) == ("off", "on")


def test_environment_variables_with_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_NAME", "from-env")
    assert load("name=${oc.env:MY_NAME}").name == "from-env"
    assert load("name=${oc.env:NOT_THERE,fallback}").name == "fallback"
    assert "NOT_THERE" in problems("name=${oc.env:NOT_THERE}")[0]


def test_a_secret_is_never_read_into_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = problems("name=${oc.env:HF_TOKEN}")
    assert "reads the secret HF_TOKEN" in found[0]
    assert "hf_secret" not in "\n".join(found)


def test_the_name_of_a_variable_may_not_be_computed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "workload: lm\nname: ${oc.env:${data.text_field}}\ndata:\n  text_field: HF_TOKEN\n"
    )
    assert "computes the name of a variable" in "\n".join(problems(source=str(file)))


def test_a_users_section_may_hold_tuples_and_paths(tmp_path: Path) -> None:
    from pydantic import Field

    from paceline.config.schema import DataConfig
    from paceline.config.section import Section

    class Mine(Section):
        sizes: tuple[int, ...] = Field((1, 2), description="sizes")
        root: Path = Field(Path("/x"), description="a place")

    schema = run_schema(Mine, DataConfig)
    draft = read_draft(None, ["workload=x", "model.sizes=[3,4]", "model.root=/y"])
    config = validate(draft, schema)
    assert (config.model.sizes, config.model.root) == ((3, 4), Path("/y"))  # type: ignore[attr-defined]
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.yaml", schema) == config


def test_plus_adds_to_an_open_map() -> None:
    from pydantic import Field

    from paceline.config.schema import DataConfig
    from paceline.config.section import Section

    class Mine(Section):
        extra: dict[str, int] = Field({}, description="anything")

    draft = read_draft(None, ["workload=x", "+model.extra.a=1", "model.extra.b=2"])
    config = validate(draft, run_schema(Mine, DataConfig))
    assert config.model.extra == {"a": 1, "b": 2}  # type: ignore[attr-defined]
    evil = read_draft(None, ["workload=x", "+model.extra._target_=os.system"])
    with pytest.raises(ConfigError, match="would import code"):
        validate(evil, run_schema(Mine, DataConfig))


@pytest.mark.parametrize(
    "override", ["optim.lr=.inf", "data.timeout_s=.inf", "train.seed=99999999999999999999"]
)
def test_numbers_that_no_rank_can_use_are_refused(override: str) -> None:
    assert "it wants" in problems(override)[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("5\n", "must be a map"),
        ("name: !!python/object/apply:os.system ['touch hacked']\n", "YAML tag"),
        ("name: !!python/name:os.system\n", "YAML tag"),
        ("a: &x [1]\nb: *x\n", "alias"),
        ("[" * 30 + "]" * 30, "levels deep"),
        ("- 1\n- 2\n", "must be a map"),
        ("name: [\n", "not valid YAML"),
        ("workload: lm\nmodel:\n  _target_: torch.hub.load\n", "would import code"),
    ],
)
def test_yaml_that_would_run_code_is_refused(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "evil.yaml"
    file.write_text(text)
    assert says in "\n".join(problems(source=str(file)))
    assert not (tmp_path / "hacked").exists()


def test_a_key_that_stands_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("workload: lm\ntrain:\n  steps: 3\n  seed: 1\n  steps: 4\nworkload: mae\n")
    with pytest.raises(ConfigError) as refused:
        load_job(str(path), [])
    said = "\n".join(refused.value.problems)
    assert f"{path}:5: steps is a key for the second time, after line 3" in said
    assert f"{path}:6: workload is a key for the second time, after line 1" in said


def test_two_keys_that_contradict_are_named_where_they_were_typed() -> None:
    words = ["train.epochs=1", "train.seed=2", "train.steps=5"]
    with pytest.raises(ConfigError) as refused:
        load_job("mae_tiny", words)
    assert "train in overrides 'train.epochs=1' and 'train.steps=5': steps 5" in str(refused.value)


def test_one_run_trains_one_workload() -> None:
    with pytest.raises(ConfigError) as refused:
        load_job("digits.py:Digits", ["workload=lm"])
    assert "digits.py:Digits is what shall be trained, and so is workload=lm" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("digits:Digits", "digits.py:Digits"),
        ("digits.Digits", "digits.py:Digits"),
        ("jobs.words.Words", "jobs/words.py:Words"),
    ],
)
def test_a_class_named_as_python_does_is_understood(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    for file in ("digits.py", "jobs/words.py"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"hint: did you mean {re.escape(meant)}\?"):
        load_job(name, [])


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "huge.yaml"
    file.write_text("a: {b: " * 2_000_000)
    assert "has more than 1048576" in problems(source=str(file))[0]


def test_a_tag_in_an_override_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problems("name=!!python/object/apply:os.system ['touch hacked']")
    assert not (tmp_path / "hacked").exists()


def test_a_file_may_not_choose_code_to_run(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("raise SystemExit('it ran')")
    file = tmp_path / "mine.yaml"
    file.write_text(f"workload: {job}:Mine\n")
    with pytest.raises(ConfigError, match="a file may not choose code"):
        load_job(str(file), [])


def test_configs_are_frozen_and_survive_the_disk(tmp_path: Path) -> None:
    config = load("train.steps=9")
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 10  # type: ignore[misc]
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.yaml", SCHEMA) == config


def test_every_key_has_a_type_and_a_meaning() -> None:
    for key in iter_keys(SCHEMA):
        assert key.meaning and key.type, key.path
