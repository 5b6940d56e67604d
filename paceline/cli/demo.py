"""`paceline demo`: the loop on this machine in about two minutes, on real text."""

from paceline.cli.arguments import JsonFlag, OutOption, Overrides

RECIPE = "lm_tiny"
CPU_RANKS = 2


def demo(overrides: Overrides = None, out: OutOption = None, as_json: JsonFlag = False) -> None:
    """Train a small language model on Python's own sources and write a report of it.

    On every GPU where there are some, else on 2 CPU ranks.

    Example: paceline demo
    """
    from paceline.cli.train import finish
    from paceline.machine.gpus import Nvml

    nvml = Nvml.open()
    ranks = [] if nvml and nvml.handles else [f"launch.nproc={CPU_RANKS}"]
    finish(RECIPE, ["name=demo", *ranks, *(overrides or [])], out, as_json)
