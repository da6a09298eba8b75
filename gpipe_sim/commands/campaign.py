"""`gpipe campaign`: a training of weeks, with what fails on the way."""

import json
from pathlib import Path
from typing import Annotated

import typer

from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.base.units import parse_tokens
from gpipe_sim.commands.common import AsJson, Html, Overrides, importing, progress, say, scenario_argument, write


def campaign(
    scenario_file: Annotated[Path, scenario_argument("A scenario, by file or name, or a plan file.")],
    overrides: Overrides = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens to train on, such as 300B or 1T; else campaign.tokens.")
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Predict a whole training: days, goodput and money with failures, restarts and checkpoints, for many seeds.

    What fails and what is done about it stands under campaign: in the scenario.
    """
    from gpipe_sim.campaign.campaign import run_campaign
    from gpipe_sim.commands.simulate import load_questions
    from gpipe_sim.explain.predict import predict_all

    try:
        wanted = None if tokens is None else parse_tokens(tokens)
    except ValueError as error:
        raise InputError([Problem("--tokens", "", str(error))]) from error
    ((name, plans),) = load_questions([scenario_file], overrides or [])
    predictions = list(predict_all(plans))
    if full := [prediction.settings for prediction in predictions if not prediction.fits]:
        more = f" and {len(full) - 1} more" if len(full) > 1 else ""
        say(f"{full[0]}{more}: not enough memory, so nobody can train it as it is")
    with progress("training", 3 * len(plans), long=True) as advance:
        found = [run_campaign(one.plan, one.step_time_s, wanted, advance) for one in predictions]
    if html is not None:
        with importing("--html", "report"):
            from dashboard.report import campaign_page
        write(html, campaign_page(found, f"{name}: a training of weeks"), "report, to open in a browser")
    if as_json:
        print(json.dumps({"scenario": name, "results": [one.to_dict() for one in found]}, indent=2))
        return
    from gpipe_sim.show.campaign import campaign_details, campaigns_table
    from gpipe_sim.show.terminal import make_console

    console = make_console()
    console.print(campaigns_table(name, found))
    if len(found) == 1:
        console.print(campaign_details(found[0], console.width))
