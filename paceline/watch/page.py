"""The live page: `paceline watch runs/ --serve`. It is read-only: every route is a GET.

    /                 the list of runs; the run itself where one was named
    /run/NAME         one run, by a name that the list has
    /events[/NAME]    server-sent events: the pieces of the page that have changed, and new lines

On localhost anybody on this machine may look, but no page of another site (the Host header must be
ours). On any other address a token is required, which is part of the printed link.
"""

import asyncio
import ipaddress
import json
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from paceline.data.extras import require_extra
from paceline.errors import ConfigError
from paceline.records.words import visible
from paceline.report.html import environment
from paceline.watch.fleet import Fleet
from paceline.watch.fragments import Pieces, draw_list, draw_run
from paceline.watch.view import RunView

TICK_S = 1.0
PING_TICKS = 15  # a comment now and then, to notice that a client has gone
COOKIE = "paceline_token"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


PORT = "8765"
WRITTEN = re.compile(r"(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^:\[\]]*))(?::(?P<port>[^:]*))?")
DIGITS = re.compile("[0-9]{1,5}")
ADDRESS_HINT = f"hint: write it as HOST:PORT, or leave it out for localhost:{PORT}"


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `HOST:PORT`, `:PORT` or `HOST`; an IPv6 address must be in brackets, since its own
        colons cannot be told from that of a port."""
        found = WRITTEN.fullmatch(text)
        if found is None or (found["six"] is not None and not _is_ipv6(found["six"])):
            said = "is not an address"
            if _is_ipv6(text):
                said = f"an IPv6 address stands in brackets, as [{text}] or [::1]:{PORT}"
            raise ConfigError(f"--serve {text}: {said}\n{ADDRESS_HINT}")
        port = PORT if found["port"] is None else found["port"]
        if not DIGITS.fullmatch(port) or not 0 < int(port) < 65536:
            raise ConfigError(f"--serve {text}: {port!r} is not a port\n{ADDRESS_HINT}")
        return cls(found["six"] or found["host"] or "localhost", int(port))

    @property
    def is_local(self) -> bool:
        return self.host in ("localhost", "127.0.0.1", "::1")

    def link(self, token: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (f"?token={token}" if token else "")


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


class Drawn(NamedTuple):
    """The pieces of a page; for one run, the run too, because its log is sent by lines."""

    pieces: Pieces
    view: RunView | None


class Channel:
    """What all viewers of one page share: its pieces are drawn once a second, however many there
    are. `draw` reads files, so it runs in a thread."""

    def __init__(self, draw: "Callable[[], Drawn]") -> None:
        self._draw, self._lock = draw, asyncio.Lock()
        self._drawn_at, self._found = 0.0, Drawn(Pieces(), None)

    async def look(self) -> "Drawn":
        async with self._lock:
            if time.monotonic() - self._drawn_at > 0.9 * TICK_S:
                self._found = await asyncio.to_thread(self._draw)
                self._drawn_at = time.monotonic()
            return self._found


async def stream(channel: Channel, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
    """Yield an event for each tick that changed something: all pieces first, then those that differ
    from what was sent before, and the lines that the log has gained."""
    sent, num_lines, quiet = Pieces(), 0, 0
    while not await is_gone():
        pieces, view = await channel.look()
        changed = {name: piece for name, piece in pieces.items() if sent.get(name) != piece}
        lines: list[str] = []
        if view is not None and view.num_lines > num_lines:
            lines = list(view.lines)[-(view.num_lines - num_lines) :]
            num_lines = view.num_lines
        if changed or lines:
            body = {"html": changed, "lines": [visible(line) for line in lines]}
            yield f"data: {json.dumps(body)}\n\n"
            quiet = 0
        quiet += 1
        if quiet % PING_TICKS == 0:
            yield ": still here\n\n"
        sent = dict(pieces)
        await asyncio.sleep(TICK_S)


def build_app(fleet: Fleet, token: str) -> Any:
    """Return the application; with an empty token it needs none, and accepts only local Hosts."""
    require_extra("starlette", "watch")
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response, StreamingResponse
    from starlette.routing import Route

    channels: dict[str, Channel] = {}
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store",
               "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}  # fmt: skip

    def draw(name: str) -> Drawn:
        if name:
            view = fleet.follow(name)
            return Drawn(draw_run(view) if view is not None else Pieces(), view)
        return Drawn(draw_list(fleet.read(), fleet.names(), fleet.sweeps()), None)

    async def name_of(request: Request, prefix: str) -> str | None:
        """Return the run of this page; empty for the list, None if there is no such run."""
        await asyncio.to_thread(fleet.scan)
        name = name_in(request.scope, prefix) if request.path_params else ""
        if not name and fleet.is_single:
            name = next(iter(fleet.readers), "")
        return name if not name or name in fleet.readers else None

    async def page(request: Request) -> Response:
        name = await name_of(request, "/run/")
        if name is None:
            return HTMLResponse("<p>There is no such run.</p>", 404, headers)
        root = request.url_for("page").path
        return HTMLResponse(render_page(name, root, fleet.is_single), headers=headers)

    async def events(request: Request) -> Response:
        name = await name_of(request, "/events/")
        if name is None:
            return Response("there is no such run", 404, headers)
        if name not in channels:
            channels[name] = Channel(lambda: draw(name))
        told = stream(channels[name], request.is_disconnected)
        return StreamingResponse(told, media_type="text/event-stream", headers=headers)

    async def script(request: Request) -> Response:
        return Response(_file("live.js"), media_type="text/javascript", headers=headers)

    allowed = ["*"] if token else list(LOCAL_HOSTS)
    return Starlette(
        routes=[
            Route("/", page, name="page"),
            Route("/run/{name:path}", page),
            Route("/events", events),
            Route("/events/{name:path}", events),
            Route("/live.js", script),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=allowed, www_redirect=False),
            Middleware(TokenGate, token=token),
            Middleware(GZipMiddleware, minimum_size=2000),
        ],
    )


class TokenGate:
    """Admits requests with the token: once in the link, then in a cookie hidden from scripts."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, RedirectResponse

        if scope["type"] != "http" or not self._token:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.query_params.get("token", "")
        if self._is_right(given):
            # One slash: a path that begins with two would be the address of another host.
            answer: Any = RedirectResponse("/" + request.url.path.lstrip("/"))
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            await answer(scope, receive, send)
        elif self._is_right(request.cookies.get(COOKIE, "")) or self._is_right(bearer):
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse("this page needs its token", 401)(scope, receive, send)

    def _is_right(self, given: str) -> bool:
        return bool(given) and secrets.compare_digest(given.encode(), self._token.encode())


def render_page(name: str, root: str, is_single: bool) -> str:
    """Return the empty page of a run, or of the list; events fill it."""
    style = "".join(
        (resources.files(package) / file).read_text(encoding="utf-8")
        for package, file in (("paceline.report", "report.css"), ("paceline.watch", "watch.css"))
    )
    template = environment().from_string(_file("page.html.jinja"))
    link = quote(os.fsencode(name))
    shown = visible(name)
    return template.render(name=shown, link=link, root=root, is_single=is_single, style=style)


def name_in(scope: Mapping[str, Any], prefix: str) -> str:
    """Return the run that a path names after its prefix. It is read from the bytes that were sent:
    names of folders need not be UTF-8, which the decoded path assumes."""
    sent = bytes(scope.get("raw_path") or quote(scope["path"]).encode())
    _, _, name = sent.partition(b"?")[0].partition(prefix.encode())
    return os.fsdecode(unquote_to_bytes(name))


def _file(name: str) -> str:
    return (resources.files("paceline.watch") / name).read_text(encoding="utf-8")


def serve(fleet: Fleet, address: Address, say: Callable[[str], None]) -> None:
    """Serve the page until somebody presses Ctrl-C."""
    uvicorn = require_extra("uvicorn", "watch")
    token = "" if address.is_local else secrets.token_urlsafe(24)
    app = build_app(fleet, token)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1
    )
    opened = _open(address)
    say(f"watching {fleet.root}: {address.link(token)} (Ctrl-C ends it)")
    uvicorn.Server(config).run(sockets=[opened])


def _open(address: Address) -> socket.socket:
    """Bind the address before it is announced."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        address.host.encode("idna")  # as `bind` does, which calls a bad name a TypeError
        return socket.create_server((address.host, address.port), family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot serve on {address.host}:{address.port}: {reason}\n"
            "hint: give --serve another HOST:PORT"
        ) from error
