"""Predictions to one HTML page that opens anywhere, offline: plotly.js inside, no fonts, nothing to load."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboard.charts import campaigns, comparisons
from dashboard.charts import many_plans as sweeps
from dashboard.charts import one_step as figures
from dashboard.charts.style import CONFIG
from gpipe_sim.base.units import format_bandwidth, format_bytes, format_duration, format_seconds
from gpipe_sim.campaign.campaign import DAY, Campaign, headline
from gpipe_sim.explain.predict import Prediction, fastest, varying
from gpipe_sim.explain.waterfall import critical_path
from gpipe_sim.runs.compare import Comparison
from gpipe_sim.scenario.schema import Transformer
from gpipe_sim.show.campaign import amount


def report_page(
    predictions: Sequence[Prediction],
    title: str,
    tokens: float | None = None,
    *,
    chosen: Prediction | None = None,
    reason: str = "",
    training: Campaign | None = None,
) -> str:
    """One plan in full or, of several, a comparison and then in full the fastest that fits of each scenario.

    With a number of `tokens`, also how many days they take, and how much money. Where one of the plans was `chosen`,
    that one is told in full, with the `reason`; and its `training`, where it was chosen by that.
    """
    body = _Page()
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in predictions:
        scenario = prediction.plan.scenario
        groups.setdefault((scenario.document.file, scenario.name), []).append(prediction)
    if reason:
        body.add(f'<p class="verdict">{escape(reason)}</p>')
    if len(predictions) > 1:
        fitting = sum(prediction.fits for prediction in predictions)
        body.add(f'<p class="verdict">{fitting} of {len(predictions)} plans fit in memory.</p>')
        body.add(_table(list(groups.values())))
    for (_, name), group in groups.items():
        if len(groups) > 1:
            body.add(f"<h2>{escape(name)}</h2>")
        if len(group) > 1:
            body.sweep(group)
        best = chosen if chosen is not None and any(one is chosen for one in group) else fastest(group)
        if len(group) > 1:
            which = "The fastest plan that fits" if best.fits else "No plan fits; the fastest of them"
            heading = "The recommended plan" if best is chosen else f"{which}: {escape(best.settings)}"
            body.add(f"<h2>{heading}</h2>")
        body.plan(best, tokens)
    if training is not None:
        body.add("<h2>The whole training</h2>")
        body.trainings([training])
    body.add("<h2>Assumptions</h2>")
    for (_, name), group in groups.items():
        items = "".join(f"<li>{escape(line)}</li>" for line in assumptions(group))
        body.add(f"<h3>{escape(name)}</h3><ul>{items}</ul>")
    return _PAGE.format(title=escape(title), style=_STYLE, plotly=get_plotlyjs(), body=body.html, sort=_SORT)


def comparison_page(comparison: Comparison) -> str:
    """One run: what was predicted and what was measured, on one axis, and where the error comes from."""
    body = _Page()
    plan, measured = comparison.prediction.plan, comparison.measured
    body.add(f'<p class="verdict">{escape(comparison.sentence)}</p>')
    data = comparison.to_dict()
    time, bubble, memory = data["step_time"], data["bubble_fraction"], data["peak_memory_bytes"]
    numbers = [
        ("step time", format_seconds(time["measured_s"]), f"predicted {format_seconds(time['predicted_s'])}"),
        ("error", f"{time['error']:+.1%}", f"steps vary by {comparison.measured_cv:.1%}"),
        ("bubble", f"{bubble['measured']:.1%}", f"predicted {bubble['predicted']:.1%}"),
    ]
    if memory["measured"]:
        highest, expected = max(memory["measured"]), max(memory["predicted"])
        numbers.append(("peak memory", format_bytes(highest), f"predicted {format_bytes(expected)}"))
    cards = "".join(
        f'<div class="number"><dt>{name}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
        for name, value, note in numbers
    )
    body.add(f'<dl class="numbers">{cards}</dl>')
    caption = f"Of each rank, above as predicted, below as measured: the step with the median time, of {data['steps']}."
    body.add(body.figure(comparisons.timelines(comparison), "timelines", "Predicted over measured", caption))
    shares = body.figure(
        comparisons.attribution(comparison),
        "attribution",
        "Where the error comes from",
        "The measured step simulated again with its own figures, one cause after the other; the bars sum to the error.",
    )
    rest = body.figure(
        comparisons.residuals(comparison.prediction.step, measured.steps),
        "residuals",
        "Residuals",
        "Of every action: its measured time, the median over steps, less the predicted one.",
    )
    body.add(f'<div class="pair">{shares}{rest}</div>')
    if measured.memory:
        caption = "Solid: the model. Dotted: the allocator, in a step of its own laid over the median step."
        body.add(body.figure(comparisons.memory(comparison), "memory", "Memory over time", caption))
    body.add(f"<p>{escape(measured.how)}</p>")
    title = f"{plan.scenario.name}: predicted and measured"
    return _PAGE.format(title=escape(title), style=_STYLE, plotly=get_plotlyjs(), body=body.html, sort=_SORT)


def campaign_page(found: Sequence[Campaign], title: str) -> str:
    """Trainings of weeks."""
    body = _Page()
    body.trainings(found)
    return _PAGE.format(title=escape(title), style=_STYLE, plotly=get_plotlyjs(), body=body.html, sort=_SORT)


class _Page:
    """The page's body as it grows; figures are numbered so that the same predictions give the same file."""

    def __init__(self) -> None:
        self.html = ""
        self._num_figures = 0

    def add(self, html: str) -> None:
        self.html += html + "\n"

    def figure(self, figure: go.Figure, name: str, heading: str, caption: str) -> str:
        self._num_figures += 1
        chart = figure.to_html(
            config=dict(CONFIG),
            include_plotlyjs=False,
            full_html=False,
            default_height=f"{figure.layout.height}px",
            div_id=f"{name}-{self._num_figures}",
        )
        return f'<figure data-figure="{name}"><h3>{heading}</h3><p class="caption">{caption}</p>{chart}</figure>'

    def sweep(self, group: Sequence[Prediction]) -> None:
        """What the swept fields do within one scenario."""
        plans = [prediction.plan for prediction in group]
        fields = varying(group)
        limits = {plan.memory_limit for plan in plans}
        chart = sweeps.time_memory(group, limits.pop() if len(limits) == 1 else None)
        caption = "A point per plan; down and to the left is better. Rings: no other plan that fits beats it in both."
        self.add(self.figure(chart, "time-memory", "Time against memory", caption))
        if len({(plan.num_ranks, plan.num_microbatches) for plan in plans}) > 1:
            caption = "× and grey: does not fit. A cell that several plans share shows the fastest that fits."
            maps = [
                self.figure(
                    sweeps.heatmap(group, metric),
                    "heatmap",
                    f"{name.capitalize()} by ranks and micro-batches",
                    caption,
                )
                for metric, name in sweeps.METRICS.items()
            ]
            self.add(f'{maps[0]}<div class="pair">{maps[1]}{maps[2]}</div>')
        if len(fields) == 1:
            caption = "The closed form is that of equal stages and free links: (K-1)/(M+K-1), or the schedule's own."
            heading = f"Along {escape(fields[0])}"
            self.add(self.figure(sweeps.sweep_lines(group), "sweep-lines", heading, caption))

    def plan(self, prediction: Prediction, tokens: float | None) -> None:
        """One plan: the verdict, its numbers, and why they are what they are."""
        plan, step, limit = prediction.plan, prediction.step, prediction.plan.memory_limit
        self.add(f'<p class="verdict">{escape(prediction.verdict)}</p>')
        numbers = "".join(
            f'<div class="number {kind}"><dt>{name}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
            for name, value, note, kind in key_numbers(prediction)
        )
        self.add(f'<dl class="numbers">{numbers}</dl>')
        if worth := prediction.worth(tokens).sentence():
            self.add(f'<p class="verdict">{escape(worth)}.</p>')
        jitter = plan.scenario.cluster.jitter
        sample = f" With jitter: the sample with the median step time, of {jitter.samples}." if jitter else ""
        chart = figures.gantt(step, critical_path(plan, step))
        caption = "A row for each rank. The outlined chain sets the step time; a click in the legend hides it." + sample
        self.add(self.figure(chart, "gantt", "Timeline", caption))
        caption = "Bytes in use on each rank. A limit far above them starts hidden; click it in the legend."
        over_time = self.figure(figures.memory_over_time(step, limit), "memory", "Memory over time", caption)
        caption = "What each rank holds at its own highest moment."
        parts = self.figure(figures.memory_parts(step, limit), "memory-parts", "Memory at the peak", caption)
        caption = "What each cause adds to the step; together they are the step time."
        waterfall = self.figure(figures.waterfall(prediction.breakdown_s), "waterfall", "Where the time goes", caption)
        caption = "Share of the pipeline's time in which a rank computes; the rest is its bubble."
        utilization = figures.utilization(step, prediction.utilization)
        busy = self.figure(utilization, "utilization", "Utilisation", caption)
        self.add(f'<div class="pair">{waterfall}{busy}</div><div class="pair">{over_time}{parts}</div>')

    def trainings(self, found: Sequence[Campaign]) -> None:
        """How long and how much, and in full the one that takes the fewest days."""
        best = min(found, key=lambda one: float(one.days.mean()))
        self.add(f'<p class="verdict">{escape(headline(best))}</p>')
        low, high = np.quantile(best.days, [0.05, 0.95])
        numbers = [
            ("days", f"{best.days.mean():,.4g}", f"{low:,.4g} to {high:,.4g}, p5 to p95 of {len(best.days)} seeds"),
            (
                "goodput",
                f"{best.outcomes.goodput.mean():.1%}",
                f"{best.conditions.work_s / DAY:,.4g} days if nothing failed",
            ),
            ("save every", format_duration(best.conditions.interval_s), f"{format_bytes(best.checkpoint_bytes)} each"),
        ]
        if best.money is not None:
            numbers.append(("money", amount(float(best.money.mean()), best.price), f"on {best.num_devices:,} devices"))
        cards = "".join(
            f'<div class="number"><dt>{name}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
            for name, value, note in numbers
        )
        self.add(f'<dl class="numbers">{cards}</dl>')
        caption = "The training of median length; useful is what it would take if nothing failed and nothing was saved."
        self.add(self.figure(campaigns.losses_over_time(best), "losses", "What the time goes to", caption))
        caption = "The mean of some seeds, all intervals with the same luck; marked is the one that is used."
        saving = self.figure(campaigns.goodput_by_interval(best), "intervals", "How often to save", caption)
        caption = "Boxes hold half of the seeds, whiskers the rest."
        self.add(
            f'<div class="pair">{saving}{self.figure(campaigns.days_by_seed(found), "days", "Days", caption)}</div>'
        )
        rows = "".join(
            f"<tr><td>{escape(worth.change)}</td><td>{worth.days_saved:+,.3g}</td>"
            f"<td>{'' if worth.money_saved is None else escape(amount(worth.money_saved, best.price))}</td></tr>"
            for worth in best.worths
        )
        self.add(
            "<h3>What would help</h3><table>"
            f"<tr><th>change</th><th>days saved</th><th>money saved</th></tr>{rows}</table>"
        )


def key_numbers(prediction: Prediction) -> Iterator[tuple[str, str, str, str]]:
    """Name, value, note and CSS class of each."""
    plan, peak = prediction.plan, max(prediction.peak_memory_bytes)
    several = f", v = {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
    note = f"K = {plan.num_ranks}{several}, M = {plan.num_microbatches}, {plan.schedule}"
    if plan.scenario.cluster.jitter:
        p50, p95 = map(format_seconds, (prediction.step_time_p50_s, prediction.step_time_p95_s))
        note = f"mean; p50 {p50}, p95 {p95}"
    yield "step time", format_seconds(prediction.step_time_s), note, ""
    yield "throughput", f"{prediction.throughput_samples_s:.4g} /s", f"samples, batch {plan.scenario.batch}", ""
    yield "bubble", f"{prediction.bubble_fraction:.1%}", f"closed form {prediction.bubble_ideal:.1%}", ""
    share = f"{peak / plan.memory_limit:.0%} of {format_bytes(plan.memory_limit)}"
    note, kind = (f"fits, {share}", "good") if prediction.fits else (f"does not fit, {share}", "bad")
    yield "peak memory", format_bytes(peak), note, kind


def _table(groups: Sequence[Sequence[Prediction]]) -> str:
    """All plans, one row each; a click on a column's head sorts by it."""
    predictions = [prediction for group in groups for prediction in group]
    best = [fastest(group) for group in groups]
    swept = [prediction.plan.scenario.swept for prediction in predictions]
    told = ("plan.stages", "plan.stages_per_rank", "plan.microbatches")
    fields = {f: None for values in swept for f in values if f not in told}
    several = any(prediction.plan.stages_per_rank > 1 for prediction in predictions)
    place = {f: {text: i for i, text in enumerate(dict.fromkeys(str(v.get(f, "")) for v in swept))} for f in fields}

    def cells(prediction: Prediction) -> Iterator[tuple[str, Any, str]]:
        """Heading, value to sort by, text. Swept values sort in the order of the file."""
        plan, peak = prediction.plan, max(prediction.peak_memory_bytes)
        if len(groups) > 1:
            yield "scenario", plan.scenario.name, plan.scenario.name
        yield "K", plan.num_ranks, str(plan.num_ranks)
        if several:
            yield "v", plan.stages_per_rank, str(plan.stages_per_rank)
        yield "M", plan.num_microbatches, str(plan.num_microbatches)
        for field in fields:
            text = str(plan.scenario.swept.get(field, ""))
            yield field.split(".", 1)[1], place[field][text], text
        yield "step time", prediction.step_time_s, format_seconds(prediction.step_time_s)
        yield "samples/s", prediction.throughput_samples_s, f"{prediction.throughput_samples_s:.4g}"
        yield "bubble", prediction.bubble_fraction, f"{prediction.bubble_fraction:.1%}"
        yield "closed form", prediction.bubble_ideal, f"{prediction.bubble_ideal:.1%}"
        yield "peak memory", peak, format_bytes(peak)
        yield "fits", int(prediction.fits), "yes" if prediction.fits else "× no"

    head = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name, _, _ in cells(predictions[0])
    )
    rows = ""
    for prediction in predictions:
        kind = "over" if not prediction.fits else "best" if prediction in best else ""
        texts = (f'<td data-value="{escape(str(value))}">{escape(text)}</td>' for _, value, text in cells(prediction))
        rows += f'<tr class="{kind}">{"".join(texts)}</tr>\n'
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        '<p class="caption">A click on a heading sorts. Bold: the fastest plan that fits. ×: does not fit.</p>'
    )


def assumptions(group: Sequence[Prediction]) -> Iterator[str]:
    """What the numbers rest on, one sentence each."""
    plans = [prediction.plan for prediction in group]
    scenario, profile = plans[0].scenario, plans[0].profile
    cluster, device = scenario.cluster, scenario.cluster.device
    yield "All times and sizes are predicted by simulating the schedule; nothing was run."
    if profile.source != "analytic":
        yield f"Layer costs were {profile.source}, on {profile.device}, {profile.dtype}."
    elif isinstance(scenario.model, Transformer):
        yield (
            f"Layer costs are analytic: a roofline of {device.name} in {scenario.dtype} (figures: {device.source}), "
            f"with {device.efficiency:.0%} of peak compute attained."
        )
    else:
        yield "Layer costs are those written in the scenario."
    links = {
        f"{format_bandwidth(link.bandwidth)} and {format_seconds(link.latency)} latency"
        for plan in plans
        for stage, (here, there) in enumerate(pairwise(plan.placement))
        if here != there and (link := plan.link(stage))
    }
    how = "beside compute" if cluster.overlap else "while the sender waits"
    yield f"Links, each direction: {'; '.join(sorted(links)) or 'none'}. Messages travel {how}."
    if any(plan.shared_nics for plan in plans):
        yield "Several stages send through one network card, and share it fairly."
    if any(plan.crowded_nodes for plan in plans):
        yield f"Ranks share {cluster.cores} cores per node fairly."
    reserve = f", {format_bytes(cluster.reserve)} of it kept by the runtime" if cluster.reserve else ""
    yield f"Memory: {format_bytes(device.memory)} per device{reserve}; optimizer {scenario.optimizer}."
    if price := cluster.device_price:
        yield f"A device costs {price.per_hour:g} {price.currency} an hour ({price.source})."
    for rank, factor in cluster.slowdown.items():
        yield f"Rank {rank} computes {factor:g} times as long as the others."
    if cluster.jitter:
        noise = f"lognormal, {cluster.jitter.cv:.1%} of the mean"
        yield f"Compute times vary ({noise}); figures are means over {cluster.jitter.samples} samples."


_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --card: #fff; --ink: #1c1e21; --soft: #5d636b; --rule: #e2e4e7;
  --good: #00694d; --bad: #b04a00; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --card: #1b1e23; --ink: #e8eaed; --soft: #a2a9b3;
  --rule: #30353d; --good: #3ecf9f; --bad: #ff9a52; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; overflow-wrap: anywhere; }
h3 { font-size: 15px; margin: 0; }
.verdict { font-size: 17px; max-width: 75ch; margin: 0 0 20px; }
.caption { color: var(--soft); font-size: 13px; margin: 2px 0 8px; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 0 0 16px; }
.number, figure, .scroll { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.number { padding: 12px 16px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-size: 23px; font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--soft); font-size: 13px; }
.good small { color: var(--good); } .bad dd, .bad small { color: var(--bad); }
figure { margin: 0 0 16px; padding: 14px 16px 8px; min-width: 0; overflow: hidden; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 16px; }
.scroll { overflow: auto; max-height: 460px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 14px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
@media (max-width: 1000px) { .pair { grid-template-columns: minmax(0, 1fr); }
  th, td { padding: 6px 8px; } th { white-space: normal; vertical-align: bottom; } }
th { position: sticky; top: 0; background: var(--card); }
th button { all: unset; cursor: pointer; color: var(--soft); font-weight: 600; }
th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
tr.over td { color: var(--bad); } tr.best td { font-weight: 650; color: var(--good); }
ul { margin: 4px 0 16px; padding-left: 20px; max-width: 90ch; }
.xtick text, .ytick text, .x2tick text, .y2tick text, .bartext-outside, .infolayer text {
  fill: var(--soft) !important; }
"""

_SORT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, column = head.cellIndex, body = head.closest("table").tBodies[0];
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  const key = row => row.cells[column].dataset.value;
  const compare = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b);
  body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
};
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
<script>{plotly}</script>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<script>{sort}</script>
</body>
</html>
"""
