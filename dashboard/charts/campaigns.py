"""Figures of a training of weeks: what its time goes to, how often to save, and how it spreads over seeds."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from dashboard.charts.style import INK, figure
from gpipe_sim.campaign.campaign import DAY, Campaign
from gpipe_sim.campaign.conditions import LOSSES
from gpipe_sim.show.palette import CRITICAL, LOSS_COLOURS


def losses_over_time(campaign: Campaign) -> go.Figure:
    """What each part of the training of median length went to, stacked to all of its time."""
    starts = [bucket.start_s / DAY for bucket in campaign.buckets]
    widths = [(bucket.end_s - bucket.start_s) / DAY for bucket in campaign.buckets]
    bars = [
        go.Bar(
            x=starts,
            y=[bucket.parts_s[index] / (bucket.end_s - bucket.start_s) for bucket in campaign.buckets],
            width=widths,
            offset=0,
            name=part,
            marker={"color": LOSS_COLOURS[part], "line": {"width": 0}},
            hovertemplate=f"{part}: %{{y:.1%}} from day %{{x:.4~g}}<extra></extra>",
        )
        for index, part in enumerate(LOSSES)
    ]
    y = {"title": {"text": "share of the time"}, "tickformat": ".0%", "range": [0, 1]}
    return figure(*bars, height=360, x={"title": {"text": "day"}}, y=y, barmode="stack")


def goodput_by_interval(campaign: Campaign) -> go.Figure:
    """How much of the time is useful with each of the intervals that were tried; the one that is used is marked."""
    used = campaign.conditions.interval_s
    line = go.Scatter(
        x=[tried.interval_s / 60 for tried in campaign.intervals],
        y=[tried.goodput for tried in campaign.intervals],
        mode="lines+markers",
        line={"color": INK},
        marker={"color": [CRITICAL if tried.interval_s == used else INK for tried in campaign.intervals], "size": 9},
        showlegend=False,
        hovertemplate="saving every %{x:.3~g} min: %{y:.2%}<extra></extra>",
    )
    x = {"title": {"text": "minutes between two checkpoints"}, "type": "log"}
    shares = [tried.goodput for tried in campaign.intervals]
    spread = max(shares) - min(shares)
    digits = max(0, math.ceil(-math.log10(spread)) - 1) if spread > 0 else 1  # so that no two ticks read the same
    return figure(line, height=340, x=x, y={"title": {"text": "goodput"}, "tickformat": f".{digits}%"})


def days_by_seed(campaigns: Sequence[Campaign]) -> go.Figure:
    """How many days the trainings of all seeds take, a box for each plan."""
    boxes = [
        go.Box(x=found.days.tolist(), name=name, boxpoints=False, marker={"color": INK}, showlegend=False)
        for name, found in zip(names_of(campaigns), campaigns, strict=True)
    ]
    y = {"autorange": "reversed", "showgrid": False}
    return figure(*boxes, height=120 + 60 * len(boxes), x={"title": {"text": "days"}}, y=y)


def names_of(campaigns: Sequence[Campaign]) -> list[str]:
    """What tells the plans apart: the fields that are swept."""
    return [
        ", ".join(f"{path.split('.', 1)[1]} {value}" for path, value in found.plan.scenario.swept.items())
        or "all seeds"
        for found in campaigns
    ]
