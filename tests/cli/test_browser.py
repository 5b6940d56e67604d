"""The report in a real browser: it renders, without an error and without asking the network."""

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.records.rundir import RunDir
from paceline.sweep.outputs import write_outputs
from tests.reported import finish, write_run
from tests.sweeps import draw_sweep

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
]  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "run")


def browse(tmp_path: Path, page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *arguments, page.as_uri()],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip


@pytest.mark.parametrize("width", [1100, 390])
def test_the_report_renders_and_fits(run: RunDir, tmp_path: Path, width: int) -> None:
    finish(run)
    # The page itself measures whether anything is wider than the window.
    probe = run.report.with_name("probe.html")
    script = (
        "<script>document.title = [document.querySelectorAll('svg').length,"
        " document.documentElement.scrollWidth <= window.innerWidth,"
        " getComputedStyle(document.querySelector('.card')).borderRadius].join('|')</script>"
    )
    probe.write_text(run.report.read_text().replace("</body>", f"{script}</body>"))
    done = browse(tmp_path, probe, f"--window-size={width},1200", "--dump-dom")
    # The loss on two axes and its tooltips, a chart and its tooltips, a bar a rank, two small ones.
    assert f"<title>{3 + 2 + 2 + 2 * 2}|true|8px</title>" in done.stdout, done.stdout[:300]


@pytest.mark.parametrize(("clicked", "seen"), [("", "linear|raw,smooth"), ("log", "log|raw,smooth"),
                                               ("smooth", "linear|raw")])  # fmt: skip
def test_the_switches_of_the_loss_work_by_style_alone(
    run: RunDir, tmp_path: Path, clicked: str, seen: str
) -> None:
    finish(run)
    probe = run.report.with_name("probe.html")
    script = (
        f"<script>if ('{clicked}') document.getElementById('{clicked}').click();"
        " const shown = e => e.getClientRects().length > 0;"
        " const hero = [...document.querySelectorAll('.hero svg:not(.seen)')].filter(shown);"
        " document.title = [hero.map(e => e.classList[0]).join(), [...hero[0]"
        ".querySelectorAll('g')].filter(e => e.classList[0] && getComputedStyle(e).display"
        " != 'none').map(e => e.classList[0]).join()].join('|')</script>"
    )
    probe.write_text(run.report.read_text().replace("</body>", f"{script}</body>"))
    done = browse(tmp_path, probe, "--window-size=1100,1200", "--dump-dom")
    assert f"<title>{seen}</title>" in done.stdout, done.stdout[:300]


def test_a_picture_of_it_is_not_blank(run: RunDir, tmp_path: Path) -> None:
    finish(run)
    picture = tmp_path / "page.png"
    browse(tmp_path, run.report, "--window-size=1100,1400", f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000, "an empty page compresses to much less"


@pytest.mark.parametrize("width", [1100, 390])
def test_the_page_of_a_sweep_renders_and_fits(tmp_path: Path, width: int) -> None:
    """An iframe has the width that is asked for; a window has at least 500."""
    made = draw_sweep(tmp_path / "sweep")
    write_outputs(*made)
    folder = made[0]
    script = (
        "<script>document.title = [document.querySelectorAll('table.matrix').length,"
        " document.documentElement.scrollWidth <= window.innerWidth,"
        " document.querySelectorAll('svg.strip').length].join('|');"
        " parent.postMessage(document.title, '*')</script>"
    )
    probe = folder.root / "probe.html"
    probe.write_text(folder.report.read_text().replace("</body>", f"{script}</body>"))
    frame = folder.root / "frame.html"
    frame.write_text(
        "<title>waits</title><script>onmessage = e => document.title = e.data</script>"
        f"<iframe src='probe.html' style='width: {width}px; height: 900px'></iframe>"
    )
    done = browse(tmp_path, frame, "--virtual-time-budget=5000", "--dump-dom")
    assert "<title>2|true|9</title>" in done.stdout, done.stdout[:300]


def test_a_picture_of_a_sweep_is_not_blank(tmp_path: Path) -> None:
    made = draw_sweep(tmp_path / "sweep")
    write_outputs(*made)
    picture = tmp_path / "page.png"
    browse(tmp_path, made[0].report, "--window-size=1100,1400", f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000, "an empty page compresses to much less"
