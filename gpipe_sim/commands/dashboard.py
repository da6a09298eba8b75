"""`gpipe dashboard`: the page in which plans are explored, chosen, run and compared."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.commands.common import importing, say


def dashboard(
    host: Annotated[
        str,
        typer.Option(
            help="Where to listen; anything but this machine is open to its network, to all who know a token."
        ),
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name under which browsers reach this machine; repeatable."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8050,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where run directories are kept.")] = Path("runs"),
    scenarios: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of your own scenarios to offer beside ours.")
    ] = None,
    allow_run: Annotated[bool, typer.Option("--allow-run", help="Let the page execute plans on this machine.")] = False,
) -> None:
    """Open the dashboard: explore the tradeoffs, choose a plan, see predicted over measured."""
    import logging
    import secrets
    import socket

    with importing("gpipe dashboard", "dashboard"):
        from werkzeug.serving import make_server

        from dashboard.page.app import LOCAL_NAMES, make_app
    if scenarios is not None and not scenarios.is_dir():
        raise InputError([Problem("--scenarios", "", f"there is no folder {scenarios}")])
    local = host in LOCAL_NAMES
    names = (*LOCAL_NAMES, host.strip("[]").lower(), *(name.lower() for name in allow_host or ()))
    token = None if local and not allow_host else secrets.token_urlsafe(24)
    app = make_app(runs=runs, allow_run=allow_run, scenarios=scenarios, hosts=names, token=token)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    try:
        server = make_server(host, port, app.server, threaded=True)
    except (OSError, SystemExit, socket.gaierror) as error:
        raise InputError([Problem("--port", "", f"cannot listen on {host}:{port}, expected a free port")]) from error
    if not local:
        can = "and can run plans here" if allow_run else "but cannot run anything"
        say(f"listening on {host}: everyone who has the token in this address sees these scenarios and runs, {can}")
        if host in ("0.0.0.0", "::") and not allow_host:
            say("browsers must use a name that is told with --allow-host, such as this machine's")
    name = allow_host[0] if allow_host else "127.0.0.1" if host == "0.0.0.0" else host
    say(f"open http://{name}:{server.server_port}/{f'?token={token}' if token else ''} (Ctrl-C ends it)")
    sys.stderr.flush()
    try:
        server.serve_forever()
    finally:
        server.server_close()
