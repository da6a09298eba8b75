"""A training of weeks in the terminal: how long, what the time goes to, and what would help."""

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpipe_sim.base.units import format_duration
from gpipe_sim.campaign.campaign import DAY, Campaign, headline
from gpipe_sim.campaign.conditions import KINDS, LOSSES
from gpipe_sim.scenario.catalog import Price
from gpipe_sim.show.palette import LOSS_COLOURS

_LETTERS = dict(zip(LOSSES, "=cldrwf", strict=True))


def campaigns_table(name: str, campaigns: Sequence[Campaign]) -> Table:
    """A row for each plan."""
    swept = list(campaigns[0].plan.scenario.swept)
    table = Table(*[path.split(".", 1)[1] for path in swept], title=name, title_justify="left", header_style="bold")
    for column in ("devices", "step", "ideal days", "days (p5 to p95)", "goodput", "save every", "money"):
        table.add_column(column, justify="right")
    for campaign in campaigns:
        days, scenario = campaign.days, campaign.plan.scenario
        table.add_row(
            *(str(scenario.swept[path]) for path in swept),
            f"{campaign.num_devices:,}",
            format_duration(campaign.step_time_s),
            f"{campaign.conditions.work_s / DAY:.1f}",
            f"{days.mean():.1f} ({np.quantile(days, 0.05):.1f} to {np.quantile(days, 0.95):.1f})",
            f"{campaign.outcomes.goodput.mean():.1%}",
            format_duration(campaign.conditions.interval_s),
            "" if campaign.money is None else amount(float(campaign.money.mean()), campaign.price),
        )
    return table


def amount(money: float, price: Price | None) -> str:
    """Money with its currency: to the cent if it is little."""
    digits = 2 if abs(money) < 1000 else 0
    return f"{money:,.{digits}f} {price.currency if price else ''}"


def campaign_details(campaign: Campaign, width: int) -> RenderableType:
    """One plan's training: what its time goes to, how often to save, what would help, and when it happened."""
    return Group(
        headline(campaign), "", _parts(campaign, width), "", _failures(campaign), "", _saving(campaign), "",
        _worth(campaign), "", _timeline(campaign, width),
    )  # fmt: skip


def _parts(campaign: Campaign, width: int) -> Text:
    """What the time goes to: each bar begins where the one above it ended."""
    mean = campaign.outcomes.parts_s.mean(axis=0)
    total, cells = mean.sum(), max(20, min(60, width - 50))
    chart, before = Text(), 0.0
    for part, seconds in zip(LOSSES, mean.tolist(), strict=True):
        if seconds > 0:
            first, last = (round(value / total * cells) for value in (before, before + seconds))
            chart.append(f"{part:<16}" + " " * first)
            chart.append("=" * max(last - first, 1), Style(color="black", bgcolor=LOSS_COLOURS[part]))
            chart.append(
                " " * (cells - max(last, first + 1)) + f" {format_duration(seconds):>9} {seconds / total:6.1%}\n"
            )
            before += seconds
    chart.append(f"{'all of it':<16}" + " " * cells + f" {format_duration(total):>9}")
    return chart


def _failures(campaign: Campaign) -> str:
    """How many of each kind, and the work lost with them."""
    outcomes = campaign.outcomes
    counts, lost = outcomes.failures.mean(axis=0), outcomes.lost_by_kind_s.mean(axis=0)
    if not counts.any():
        return "Nothing fails."
    kinds = [
        f"{kind} {count:.1f} ({format_duration(seconds)})"
        for kind, count, seconds in zip(KINDS, counts, lost, strict=True)
        if count
    ]
    return f"Failures, and the work lost with them: {', '.join(kinds)}; {counts.sum():.1f} in all."


def _saving(campaign: Campaign) -> str:
    c, best = campaign.conditions, campaign.best_interval
    tried = ", ".join(f"{format_duration(one.interval_s)} {one.goodput:.1%}" for one in campaign.intervals)
    pause = f"a checkpoint every {format_duration(c.interval_s)} stops training for {format_duration(c.pause_s)}"
    counts = f" and counts {format_duration(c.write_s)} later" if c.write_s else ""
    return (
        f"Saving: {pause}{counts}. Best of those tried is every {format_duration(best.interval_s)}, "
        f"{best.goodput:.1%} ({tried})."
    )


def _worth(campaign: Campaign) -> str:
    lines = ["What would help, on average:"]
    for worth in campaign.worths:
        sign = "saves" if worth.days_saved >= 0 else "costs"
        line = f"  {worth.change:<32} {sign} {format_duration(abs(worth.days_saved) * DAY)}"
        if worth.money_saved is not None:
            line += f", {'saves' if worth.money_saved >= 0 else 'costs'} "
            line += amount(abs(worth.money_saved), campaign.price)
        lines.append(line)
    return "\n".join(lines)


def _timeline(campaign: Campaign, width: int) -> Text:
    """What one training's time went to, hour by hour, day by day or week by week."""
    buckets, cells = campaign.buckets, max(20, min(60, width - 30))
    chart = Text("One training, of median length, and what was lost when:\n")
    for bucket in buckets:
        chart.append(f"from day {bucket.start_s / DAY:6.1f} |")
        length, shown = sum(bucket.parts_s), 0
        for part, until in zip(LOSSES, np.cumsum(bucket.parts_s).tolist(), strict=True):
            upto = round(until / (buckets[0].end_s - buckets[0].start_s) * cells)
            chart.append(_LETTERS[part] * (upto - shown), Style(color="black", bgcolor=LOSS_COLOURS[part]))
            shown = max(shown, upto)
        chart.append(" " * (cells - shown) + f"| {bucket.parts_s[0] / length:6.1%}\n")
    named = [f"{_LETTERS[part]} {part}" for part in LOSSES if any(b.parts_s[LOSSES.index(part)] for b in buckets)]
    chart.append("  ".join(named))
    return chart
