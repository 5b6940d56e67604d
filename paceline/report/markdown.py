"""summary.md: what a person pastes into an issue."""

import json

from paceline.records import Env, Git
from paceline.records.words import duration, plain, shown, size, table, visible
from paceline.report.pipeline import describe_source, explain_idle, rank_table
from paceline.report.story import Story, basis, further, headline, last_samples


def render_markdown(story: Story) -> str:
    blocks = [
        f"# {plain(story.name)}",
        table(
            ("figure", "value", ""),
            [(each.label, each.text, each.beside) for each in [*headline(story), *further(story)]],
        ),
        basis(story),
        *_failure(story),
        *_unwritten(story),
        *_findings(story),
        "## Decided",
        table(
            ("choice", "requested", "effective", "because"),
            [
                (name, shown(choice.requested), shown(choice.value), choice.because)
                for name, choice in story.plan.choices().items()
            ],
        ),
        _batch(story),
        _engine_config(story),
        *(f"- {finding.severity}: {plain(str(finding))}" for finding in story.plan.findings),
        *_audit(story),
        "## Where a step's time goes (median; warm-up left out if there is more)",
        _phases(story),
        *_pipeline(story),
        *_sheets(story),
        *_samples(story),
        "## Machine",
        _machine(story),
    ]
    return visible("\n\n".join(block for block in blocks if block) + "\n")


def _audit(story: Story) -> list[str]:
    if story.audit is None:
        return []
    rows = [
        (p.what, p.requested, p.effective, p.proof, "yes" if p.ok else "NO")
        for p in story.audit.proofs
    ]
    columns = ("", "decided", "really ran", "seen in", "as decided")
    return [
        f"## What really ran (rank 0, step {story.audit.step})",
        *(f"- warning: {plain(str(proof))}" for proof in story.audit.mismatches),
        table(columns, rows),
    ]


def _failure(story: Story) -> list[str]:
    result = story.result
    if result is None or (result.failure is None and result.bad_step is None):
        return []
    lines = ["## What went wrong"]
    if result.bad_step is not None:
        ids = ", ".join(str(index) for index in result.bad_sample_ids[:32])
        lines.append(
            f"Loss or gradient of step {result.bad_step} was not finite; the update was not"
            f" applied. Samples: {ids}"
        )
    if result.failure is not None:
        failure = result.failure
        log = f" (log: {failure.log})" if failure.log else ""
        lines.append(
            f"Rank {failure.rank} on {plain(failure.host)}, step {failure.step}, in"
            f" {failure.phase}: {plain(failure.message)}{log}"
        )
        lines += [f"then {plain(other)}" for other in failure.others]
    return lines


def _unwritten(story: Story) -> list[str]:
    """Say what is missing from the files on which this report is based."""
    unwritten = story.result.unwritten if story.result else []
    if not unwritten:
        return []
    return [
        "## What could not be written",
        "\n".join(f"- {plain(str(each))}" for each in unwritten),
    ]


def _findings(story: Story) -> list[str]:
    """Report the judgement of the run: which rank is slow, why the run waits, if it is healthy."""
    if not story.findings:
        return []
    rows = [(f.severity, f.kind, f.words, f.to_try) for f in story.findings]
    return ["## What stands out", table(("", "kind", "what", "to try"), rows)]


def _batch(story: Story) -> str:
    batch, state = story.plan.batch, story.plan.state_bytes
    return (
        f"{batch}; {story.plan.model.num_trainable:,} parameters;"
        f" {size(state.total)} of state a rank, {size(state.peak)} while weights are gathered;"
        f" {size(story.plan.exchange.sent)} of gradients sent a step"
        f" ({story.plan.exchange.because})."
    )


def _engine_config(story: Story) -> str:
    """Return the engine's config as it ran, to be pasted into another run. Nothing inside a code
    block needs escaping but the fence, and JSON has no line of only that."""
    settings = story.plan.engine_config
    if not settings:
        return ""
    body = json.dumps(settings, indent=2)
    return f"Config of {story.plan.strategy.value}:\n\n```json\n{body}\n```"


def _phases(story: Story) -> str:
    by_rank = story.phases_s
    if not by_rank:
        return "No steps were recorded."
    names = list(next(iter(by_rank.values())))
    rows = [
        (f"rank {rank}", *(duration(phases[name]) for name in names))
        for rank, phases in by_rank.items()
    ]
    return table(("", *names), rows)


def _pipeline(story: Story) -> list[str]:
    facts = story.result.pipeline if story.result else None
    if facts is None:
        return []
    shown = rank_table(facts)
    return [
        "## Pipeline",
        plain(describe_source(facts, story.plan.crew.num_nodes)),
        " ".join(plain(sentence) for sentence in explain_idle(facts)),
        table(shown.columns, shown.rows),
    ]


def _sheets(story: Story) -> list[str]:
    """Return the profiles of steps, and what held memory."""
    return [
        block
        for sheet in story.sheets
        for block in (
            f"## {plain(sheet.title)}",
            " ".join(plain(sentence) for sentence in sheet.sentences),
            table(sheet.columns, sheet.rows),
        )
    ]


def _samples(story: Story) -> list[str]:
    found = last_samples(story)
    if not found:
        return []
    rows = [(sample.prompt, sample.text) for sample in found]
    heads = ("what was said", "the model's") if found[0].heard else ("prompt", "the model's")
    return [f"## Samples of step {found[0].step}", table(heads, rows)]


def _machine(story: Story) -> str:
    env = story.env
    gpus = ", ".join(f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in env.gpus) or "none"
    rows = [
        ("host", env.host),
        ("CPU", f"{env.cpu}, {env.cores} cores, {size(env.memory_bytes)}"),
        ("GPUs", gpus),
        ("software", _software(env)),
        ("git", _git(env.git)),
    ]
    if story.result is not None:
        marks = story.result.fingerprints
        rows.append(
            (
                "fingerprints",
                f"config {marks.config}, code {marks.code}, data {marks.data},"
                f" hardware {marks.hardware}",
            )
        )
    return table(("", ""), rows)


def _software(env: Env) -> str:
    parts = {"torch": env.torch, "CUDA": env.cuda, "NCCL": env.nccl, "Python": env.python}
    return ", ".join(f"{name} {version}" for name, version in parts.items() if version)


def _git(git: Git | None) -> str:
    if git is None:
        return "not a checkout"
    return f"{git.commit[:12]} ({git.branch}{', dirty' if git.dirty else ''})"
