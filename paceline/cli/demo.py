"""`paceline demo`: the loop on this machine in about two minutes, on real text."""

import typer

from paceline.cli.arguments import JsonFlag, OutOption, Overrides

RECIPE = "lm_tiny"
CPU_RANKS = 2


def demo(overrides: Overrides = None, out: OutOption = None, as_json: JsonFlag = False) -> None:
    """Train a small language model on Python's own sources and write a report of it.

    On every GPU where there are some, else on 2 CPU ranks.

    Example: paceline demo
    """
    from pathlib import Path

    from paceline.cli.talk import ConsoleTalk, print_json, say_result
    from paceline.cluster.gpus import Nvml
    from paceline.flow import run_job
    from paceline.job import load_job
    from paceline.rundir import RunDir

    talk = ConsoleTalk()
    nvml = Nvml.open()
    ranks = [] if nvml and nvml.handles else [f"launch.nproc={CPU_RANKS}"]
    talk.say("a small language model learns Python from Python's own sources")
    job = load_job(RECIPE, ["name=demo", *ranks, *(overrides or [])])
    result = run_job(job, out, talk)
    run = RunDir(Path(result.run_dir))
    say_result(talk, result, run)
    _say_learned(talk, result.val_loss, result.data_facts.get("unigram_entropy"))
    if as_json:
        print_json(result.to_json())
    raise typer.Exit(result.exit_code)


def _say_learned(talk: object, val_loss: float | None, entropy: float | None) -> None:
    """A model that knows only how often each byte occurs has the entropy as its loss."""
    from paceline.cli.talk import ConsoleTalk

    assert isinstance(talk, ConsoleTalk)
    if val_loss is None or entropy is None:
        return
    verdict = "it has learned structure" if val_loss < entropy else "it has not learned yet"
    talk.say(
        f"validation loss {val_loss:.3f} nats a byte; byte frequencies alone give"
        f" {entropy:.3f}: {verdict}"
    )
