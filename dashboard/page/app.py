"""The page's server: who may ask it for what, and its parts put together."""

import atexit
import gzip
import hmac
import traceback
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import dash
from flask import abort, redirect, request
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from dashboard.jobs.archive import MAX_ARCHIVE
from dashboard.jobs.runs import Jobs
from dashboard.jobs.tasks import Tasks
from dashboard.page import (
    callbacks,
    downloads,
    gallery,
    pins,
    range_callbacks,
    run_callbacks,
    space_callbacks,
    tour,
    weeks_callbacks,
)
from dashboard.page.layout import page
from dashboard.page.state import Library
from gpipe_sim.base.limits import shortened
from gpipe_sim.commands.common import say
from gpipe_sim.scenario.reading import shipped_scenarios

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")


def make_app(
    *,
    runs: Path,
    allow_run: bool = False,
    scenarios: Path | None = None,
    hosts: tuple[str, ...] = LOCAL_NAMES,
    token: str | None = None,
) -> dash.Dash:
    """The application. Requests must be addressed to one of `hosts`, by name, come from no other page and, where there
    is a token, know it."""
    library = Library.of(shipped_scenarios(), *([scenarios] if scenarios else []))
    jobs = Jobs(runs, allowed=allow_run)
    app = dash.Dash(
        __name__,
        title="GPipe Planner",
        update_title="",
        serve_locally=True,
        compress=False,
        suppress_callback_exceptions=True,
    )
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')
    app.server.config["MAX_CONTENT_LENGTH"] = 2 * MAX_ARCHIVE
    app.layout = lambda: page(library, allow_run=allow_run, running=jobs.running())
    _guard(app, hosts, token)
    app.server.after_request(_compressed())
    tasks = Tasks()
    for part in (pins, downloads, gallery):
        part.register(app, library)
    for long in (callbacks, range_callbacks, space_callbacks, weeks_callbacks):
        long.register(app, library, tasks)
    tour.register(app)
    run_callbacks.register(app, library, jobs)
    atexit.register(jobs.stop_all)
    return app


def _compressed() -> Callable[[Response], Response]:
    """Scripts and styles, some megabytes, go out compressed; each is compressed once.

    Answers to callbacks do not: on one machine, where the page mostly runs, that would take longer than it saves.
    """
    known: dict[str, bytes] = {}

    def compress(response: Response) -> Response:
        asset = "/_dash-component-suites/" in request.path or "/assets/" in request.path
        plain = "Content-Encoding" not in response.headers and response.status_code == 200
        if not asset or not plain or "gzip" not in request.headers.get("Accept-Encoding", ""):
            return response
        response.direct_passthrough = False
        data = response.get_data()
        if request.full_path not in known and len(known) < _MOST_ASSETS:
            known[request.full_path] = gzip.compress(data, compresslevel=6, mtime=0)
        if request.full_path in known:
            response.set_data(known[request.full_path])
            response.headers["Content-Encoding"] = "gzip"
            response.headers.add("Vary", "Accept-Encoding")
        return response

    return compress


_MOST_ASSETS = 200
"""Addresses whose answers are kept compressed: more than the page has, and a bound for what others make up."""
_COOKIE = "gpipe-token"


def _guard(app: dash.Dash, hosts: tuple[str, ...], token: str | None) -> None:
    """Refuse what another page in the same browser could send here.

    A page elsewhere can post to this address, but its browser says where it comes from (`Origin`); and a name that was
    made to point here (DNS rebinding) shows in `Host`. Whoever opens the address with the token keeps it in a cookie,
    and goes on without it in the address.
    """

    def refuse_others() -> Response | None:
        try:
            host = urlsplit(f"//{request.host}").hostname or ""
            origin = request.headers.get("Origin")
            netloc = None if origin is None else urlsplit(origin).netloc
        except ValueError:  # half of a bracket, and the like
            abort(400, "the headers of this request cannot be read")
        if host not in hosts:
            abort(403, f"this server does not answer for {host}: gpipe dashboard --allow-host would let it")
        if netloc is not None and netloc != request.host:
            abort(403, "a request from another page is not answered")
        if token is None or _same(request.cookies.get(_COOKIE, ""), token):
            return None
        if not _same(request.args.get("token", ""), token):
            abort(403, "this page is only for those who know its token: open the address that gpipe dashboard printed")
        known = redirect(request.path)
        known.set_cookie(_COOKIE, token, httponly=True, samesite="Strict")
        return known

    def cannot_answer(error: Exception) -> Exception | tuple[str, int]:
        """Requests can be made up, by those who are let in too. What fails is told in a line, where it can be found."""
        if isinstance(error, HTTPException):
            return error
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
        say(f"{request.path} cannot be answered: {told}: {shortened(error)}")
        return f"no request that this page makes, or a mistake of ours: {told}", 400

    def keep_to_ourselves(response: Response) -> Response:
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    def _same(a: str, b: str) -> bool:
        return hmac.compare_digest(a.encode(), b.encode())

    app.server.before_request(refuse_others)
    app.server.register_error_handler(Exception, cannot_answer)
    app.server.after_request(keep_to_ourselves)
