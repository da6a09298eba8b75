"""The page's server: who may ask it for what, and its parts put together."""

import atexit
from pathlib import Path
from urllib.parse import urlsplit

import dash
from flask import Response, abort, request

from dashboard import callbacks, downloads, pins, run_callbacks, space_callbacks, tour
from dashboard.archive import MAX_ARCHIVE
from dashboard.jobs import Jobs
from dashboard.layout import page
from dashboard.state import Library
from dashboard.tasks import Tasks
from gpipe_sim.sweep import shipped_scenarios

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")


def make_app(
    *, runs: Path, allow_run: bool = False, scenarios: Path | None = None, hosts: tuple[str, ...] = LOCAL_NAMES
) -> dash.Dash:
    """The application. Requests must be addressed to one of `hosts`, by name, and come from no other page."""
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
    app.server.config["MAX_CONTENT_LENGTH"] = 2 * MAX_ARCHIVE
    app.layout = lambda: page(library, allow_run=allow_run)
    _guard(app, hosts)
    for part in (callbacks, pins, downloads):
        part.register(app, library)
    space_callbacks.register(app, library, Tasks())
    tour.register(app)
    run_callbacks.register(app, library, jobs)
    atexit.register(jobs.stop_all)
    return app


def _guard(app: dash.Dash, hosts: tuple[str, ...]) -> None:
    """Refuse what another page in the same browser could send here.

    A page elsewhere can post to this address, but its browser says where it comes from (`Origin`); and a name that was
    made to point here (DNS rebinding) shows in `Host`.
    """

    def refuse_others() -> None:
        host = urlsplit(f"//{request.host}").hostname or ""
        if "*" not in hosts and host not in hosts:
            abort(403, f"this server does not answer for {host}")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            abort(403, "a request from another page is not answered")

    def keep_to_ourselves(response: Response) -> Response:
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    app.server.before_request(refuse_others)
    app.server.after_request(keep_to_ourselves)
