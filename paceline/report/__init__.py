"""summary.md and report.html from the files of a run. A pure reader: no torch, no other stage."""

from paceline.files import write_atomic
from paceline.report.html import render_html
from paceline.report.markdown import render_markdown
from paceline.report.story import read_story
from paceline.rundir import RunDir


def write_report(run: RunDir) -> None:
    """Write summary.md and report.html of a run, whatever state it is in."""
    story = read_story(run)
    write_atomic(run.summary, render_markdown(story))
    write_atomic(run.report, render_html(story))
