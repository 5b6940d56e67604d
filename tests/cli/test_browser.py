"""The report in a real browser: it renders, without an error and without asking the network."""

import asyncio
import importlib.util
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from paceline.records.rundir import RunDir
from paceline.sweep.outputs import write_outputs
from paceline.watch.fleet import Fleet
from paceline.watch.page import build_app, render_page
from tests.cli.program import free_port
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


def browse(tmp_path: Path, page: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    address = page if isinstance(page, str) else page.as_uri()
    return subprocess.run(
        [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *arguments, address],
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


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 390])
def test_the_live_page_fills_itself_and_follows(run: RunDir, tmp_path: Path, width: int) -> None:
    run.train_log.write_text("[rank 0] step 20 loss 0.25\n")
    seen = look(run, tmp_path, f"{FITS}, document.querySelectorAll('#log span').length", width)
    assert seen == "true,true,live,1"


@pytest.mark.slow
def test_the_live_page_of_a_large_run_fills_itself(tmp_path: Path) -> None:
    """64 ranks and 100,000 steps, as benchmarks/watch_view.py makes them (3 s)."""
    run = load_benchmark("watch_view").write_run(tmp_path / "large", 64, 100_000)
    rows = "document.querySelectorAll('#all tr').length"
    step = "/^step100,0[0-9]{2}of/.test(document.getElementById('tiles').textContent)"
    gpus = "document.querySelectorAll('#gpus .heat').length"
    assert look(run, tmp_path, f"{FITS}, {rows}, {step}, {gpus}") == "true,true,live,65,true,64"


@pytest.mark.slow
def test_the_live_page_is_dark_where_that_is_asked_for(run: RunDir, tmp_path: Path) -> None:
    style = "getComputedStyle(document.body)"
    colours = f"[{style}.backgroundColor, {style}.color].map(c => c.match(/[0-9]+/g).join('.'))"
    seen = look(run, tmp_path, colours, 1100, "--blink-settings=preferredColorScheme=0")
    page, ink = ([int(part) for part in colour.split(".")] for colour in seen.split(","))
    assert max(page) < 64 and min(ink) > 128, seen


# Nothing is wider than the window, charts are drawn, and the server is heard.
FITS = (
    "document.documentElement.scrollWidth <= innerWidth,"
    " document.querySelectorAll('svg').length > 3, document.getElementById('link').textContent"
)


def look(run: RunDir, tmp_path: Path, asked: str, width: int = 1100, *arguments: str) -> str:
    """Open the live page of a run that grows; return what the page finds for some expressions, once
    it was filled twice. A page around it has the width that is asked for; a window has 500."""
    port = int(free_port())
    app = build_app(Fleet(run.root), "")
    watching = (
        "<script>const waits = setInterval(() => { if (!(document.body.dataset.ticks > 1)) return;"
        f" clearInterval(waits); fetch('/seen?' + [{asked}].join()) }}, 50)</script>"
    )
    # Only once the page has said what it sees is the page around it loaded.
    frame = f"<iframe src='/' style='width: {width}px; height: 900px'></iframe><img src='/hold'>"
    seen: list[str] = []

    async def framed(scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == "/seen":
            seen.append(scope["query_string"].decode())
        for _ in range(300 if path == "/hold" else 0):
            await asyncio.sleep(0.1 if not seen else 0)
        pages = {"/frame": frame, "/hold": "", "/seen": ""}
        pages["/"] = render_page(run.root.name, "/", True)
        if path not in pages:
            await app(scope, receive, send)
            return
        body = pages[path].replace("</body>", f"{watching}</body>").encode()
        head = [(b"content-type", b"text/html; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(framed, port=port, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    threads = [threading.Thread(target=server.run, daemon=True)]
    threads.append(threading.Thread(target=grow, args=(run, server), daemon=True))
    for thread in threads:
        thread.start()
    browse(tmp_path, f"http://localhost:{port}/frame", *arguments, "--dump-dom")
    server.should_exit = True
    for thread in threads:
        thread.join(10)
    return seen[0] if seen else "nothing"


def grow(run: RunDir, server: uvicorn.Server) -> None:
    """Append rows as a run does."""
    first = int(run.training.read_text().splitlines()[-1].partition(",")[0]) + 1
    for step in range(first, first + 180):
        if server.should_exit:
            return
        with run.training.open("a") as file:
            file.write(f"{step},{5 / step},0.1,1.5,0.5,32,4096,0,0,\n")
        time.sleep(0.3)


def load_benchmark(name: str) -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
