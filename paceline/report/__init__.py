"""summary.md and report.html from the files of a run, and timeline.json if it has a pipeline. It
only reads: no torch, no other stage."""

from collections.abc import Sequence

from paceline.records.files import write_atomic
from paceline.records.rundir import RunDir
from paceline.records.tables import read_training
from paceline.report.html import render_html
from paceline.report.markdown import render_markdown
from paceline.report.story import read_story
from paceline.schedules.trace import render_trace
from paceline.traces.flow import write_profile_facts


def write_report(run: RunDir, beside: Sequence[RunDir] = ()) -> None:
    """Write summary.md and report.html of a run, whatever state it is in. The losses of the runs
    `beside` it are drawn into its own chart."""
    write_profile_facts(run)
    story = read_story(run)
    others = {other.root.name: read_training(other.training) for other in beside}
    write_atomic(run.summary, render_markdown(story))
    write_atomic(run.report, render_html(story, others))
    if story.measured is not None:
        write_atomic(run.timeline, render_trace(story.measured.median))
