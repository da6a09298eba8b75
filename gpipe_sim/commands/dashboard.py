"""`gpipe dashboard`: the page in which plans are explored, chosen, run and compared."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpipe_sim.commands.common import say
from gpipe_sim.files import InputError, Problem


def dashboard(
    host: Annotated[str, typer.Option(help="Where to listen; anything but this machine is open to its network.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8050,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where run directories are kept.")] = Path("runs"),
    scenarios: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of your own scenarios to offer beside ours.")
    ] = None,
    allow_run: Annotated[bool, typer.Option("--allow-run", help="Let the page execute plans on this machine.")] = False,
) -> None:
    """Open the dashboard: explore the tradeoffs, choose a plan, see predicted over measured."""
    import logging
    import socket

    try:
        from werkzeug.serving import make_server

        from dashboard.app import LOCAL_NAMES, make_app
    except ModuleNotFoundError as error:
        message = f"needs the package {error.name}, expected an installation with gpipe-planner[dashboard]"
        raise InputError([Problem("gpipe dashboard", "", message)]) from error
    if scenarios is not None and not scenarios.is_dir():
        raise InputError([Problem("--scenarios", "", f"there is no folder {scenarios}")])
    local = host in LOCAL_NAMES
    app = make_app(runs=runs, allow_run=allow_run, scenarios=scenarios, hosts=LOCAL_NAMES if local else ("*",))
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    try:
        server = make_server(host, port, app.server, threaded=True)
    except (OSError, SystemExit, socket.gaierror) as error:
        raise InputError([Problem("--port", "", f"cannot listen on {host}:{port}, expected a free port")]) from error
    if not local:
        can = "and can run plans here" if allow_run else "but cannot run anything"
        say(f"listening on {host}: everyone who reaches this machine sees these scenarios and runs, {can}")
    say(f"open http://{host}:{server.server_port}/ (Ctrl-C ends it)")
    sys.stderr.flush()
    try:
        server.serve_forever()
    finally:
        server.server_close()
