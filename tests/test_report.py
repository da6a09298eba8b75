"""The figures say what the step says, and a real browser opens the report without a network."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from plans import equal_stages
from playwright.sync_api import Browser, Page, expect

from dashboard.charts import comparisons
from dashboard.charts import many_plans as sweeps
from dashboard.charts import one_step as figures
from dashboard.report import comparison_page, report_page
from gpipe_sim.base.files import parse_yaml
from gpipe_sim.explain.predict import Prediction, fastest, pareto, predict
from gpipe_sim.explain.waterfall import critical_path
from gpipe_sim.make.making import make_plan
from gpipe_sim.runs.compare import Comparison, compare_run
from gpipe_sim.runs.directory import Measured, RunSummary
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.show.palette import KIND_NAMES, KINDS
from gpipe_sim.step.simulate import simulate


def predictions(
    *,
    name="small",
    batch=256,
    K="3",
    M="4",
    checkpoint="always",
    saved="4 MB",
    bandwidth="10 GB/s",
    memory="1 GB",
    more="",
) -> list[Prediction]:
    text = f"""
    name: {name}
    model: {{kind: layers, layers: [{{name: layer, repeat: 48, forward: 1 ms, output: 1 MB, saved: {saved}}}]}}
    batch: {batch}
    cluster: {{device: {{memory: {memory}}}, link: {{bandwidth: {bandwidth}, latency: 10 us}}{more}}}
    plan: {{stages: {K}, microbatches: {M}, checkpoint: {checkpoint}}}
    """
    return [predict(make_plan(scenario)) for scenario in parse_scenario(parse_yaml(text, "test.yaml"))]


@pytest.fixture(scope="module")
def one() -> Prediction:
    return predictions()[0]


@pytest.fixture(scope="module")
def grid() -> list[Prediction]:
    """K and M swept; the largest micro-batches do not fit."""
    found = predictions(K="[2, 4]", M="[1, 4, 32]", memory="12 GB")
    assert {prediction.fits for prediction in found} == {True, False}
    return found


# --- figures -------------------------------------------------------------------------------------------------------


PRESENT = "FRBU"
"""The kinds of actions of `one`."""


def bars_of(figure, kind):
    return next(trace for trace in figure.data if trace.name == KIND_NAMES[kind])


def test_gantt_has_one_trace_for_each_kind(one):
    names = [trace.name for trace in figures.gantt(one.step).data]
    assert len(names) == len(set(names))
    assert {KIND_NAMES[kind] for kind in PRESENT} <= set(names)


def test_gantt_draws_every_action_once(one):
    figure = figures.gantt(one.step)
    drawn = [name for kind in PRESENT for name in bars_of(figure, kind).hovertext]
    assert sorted(drawn) == sorted(str(action) for timeline in one.step.ranks for action in timeline.actions)


def test_gantt_bars_begin_and_last_as_their_actions(one):
    figure = figures.gantt(one.step)
    assert figure.layout.xaxis.title.text == "time, s"
    for kind in PRESENT:
        bars = bars_of(figure, kind)
        spans = [span for span in one.step.spans() if span.lane == "compute" and span.action.kind == kind]
        assert list(bars.base) == pytest.approx([span.start_s for span in spans])
        assert list(bars.x) == pytest.approx([span.end_s - span.start_s for span in spans])
        assert list(bars.y) == [span.rank for span in spans]


def test_gantt_names_the_stage_where_a_rank_has_several_and_draws_later_ones_lighter():
    step = simulate(equal_stages(4, 4, schedule="zb_v"))
    figure = figures.gantt(step)
    assert {trace.name for trace in figure.data} >= {"forward", "backward for the inputs", "backward for the weights"}
    forwards = bars_of(figure, "F")
    named = {text.replace("<br>", "") for text in forwards.text}
    assert named == {f"{stage}F{microbatch}" for stage in range(4) for microbatch in range(4)}
    colors = {text[0]: color for text, color in zip(forwards.text, forwards.marker.color, strict=True)}
    assert colors["0"] == colors["1"] == KINDS["F"] == forwards.marker.color[0]
    assert colors["2"] == colors["3"] != KINDS["F"]


def test_gantt_counts_short_steps_in_milliseconds():
    step = predictions(batch=1, M="1")[0].step
    figure = figures.gantt(step)
    assert figure.layout.xaxis.title.text == "time, ms"
    assert list(bars_of(figure, "F").x) == pytest.approx([16, 16, 16])


def test_gantt_outlines_the_critical_path_only_when_given(one):
    critical = critical_path(one.plan, one.step)
    assert "critical path" not in [trace.name for trace in figures.gantt(one.step).data]
    outline = figures.gantt(one.step, critical).data[-1]
    assert outline.name == "critical path"
    assert max(x for x in outline.x if x is not None) == pytest.approx(one.step_time_s)


def test_gantt_title_is_text_and_not_markup(one):
    assert figures.gantt(one.step, title="<b>bold</b>").layout.title.text == "&lt;b&gt;bold&lt;/b&gt;"


def test_gantt_puts_rank_0_on_top(one):
    bottom, top = figures.gantt(one.step).layout.yaxis.range
    assert top < 0 < bottom


def test_large_steps_are_drawn_as_lines_with_a_gap_after_each():
    step = predictions(K="16", M="128", checkpoint="never")[0].step
    figure = figures.gantt(step)
    assert {trace.type for trace in figure.data} == {"scattergl"}
    forwards = bars_of(figure, "F")
    assert np.isnan(forwards.x[2::3]).all()
    assert not np.isnan(forwards.x[0::3]).any()
    assert len(forwards.x) == 3 * 16 * 128


def test_the_largest_steps_are_one_outline_for_each_kind():
    """Every action is a rectangle of the path: from its start to its end."""
    step = predictions(K="32", M="128", checkpoint="never")[0].step
    shapes = {shape.name: shape for shape in figures.gantt(step).layout.shapes}
    forwards = [span for span in step.spans() if span.lane == "compute" and span.action.kind == "F"]
    drawn = shapes["forward"].path.removesuffix("Z").split("Z")
    assert len(drawn) == len(forwards) == 32 * 128
    ends = [float(rectangle.partition("H")[2].partition("V")[0]) for rectangle in drawn]
    assert ends == pytest.approx([span.end_s for span in forwards], rel=1e-5)
    assert shapes["forward"].fillcolor == KINDS["F"]
    assert all(shape.showlegend for shape in shapes.values())


def test_numbers_are_left_out_of_many_bars_that_are_too_narrow_for_them(one):
    many = predictions(K="8", M="64", checkpoint="never")[0].step
    assert bars_of(figures.gantt(many), "F").text is None
    assert bars_of(figures.gantt(one.step), "F").text is not None


def test_memory_parts_stack_up_to_the_peak(one):
    figure = figures.memory_parts(one.step, one.plan.memory_limit)
    stacks = np.sum([trace.y for trace in figure.data if trace.type == "bar"], axis=0)
    assert figure.layout.yaxis.title.text.endswith("GiB")
    assert list(stacks * 2**30) == pytest.approx(one.peak_memory_bytes)


def test_memory_over_time_reaches_the_peak_on_every_rank(one):
    *curves, limit = figures.memory_over_time(one.step, one.plan.memory_limit).data
    assert [max(curve.y) * 2**30 for curve in curves] == pytest.approx(one.peak_memory_bytes)
    assert {curve.line.shape for curve in curves} == {"hv"}
    assert limit.line.dash == "dash"


def test_a_limit_far_above_the_curves_does_not_flatten_them(one):
    assert figures.memory_over_time(one.step, 1e15).data[-1].visible == "legendonly"


def test_waterfall_bars_join_up_to_the_step_time(one):
    (bars,) = figures.waterfall(one.breakdown_s).data
    ends = [base + length for base, length in zip(bars.base, bars.x, strict=True)]
    assert list(bars.base[1:-1]) == pytest.approx(ends[:-2])
    assert bars.base[-1] == 0
    assert ends[-2:] == pytest.approx([one.step_time_s] * 2)


def test_heatmap_separates_what_fits_from_what_does_not(grid):
    fits, over = sweeps.heatmap(grid, "step_time_s").data
    count = [sum(z is not None for row in trace.z for z in row) for trace in (fits, over)]
    assert count == [sum(p.fits for p in grid), sum(not p.fits for p in grid)]
    assert all(text.startswith("× ") for row in over.text for text in row if text)
    assert all("does not fit" in text for row in over.hovertext for text in row if text)


@pytest.mark.parametrize("metric", sweeps.METRICS)
def test_heatmap_shows_the_fastest_plan_of_a_cell_and_says_so(metric):
    found = predictions(K="[2, 4]", M="8", checkpoint="[never, always]", memory="1 TB")
    fits, _ = sweeps.heatmap(found, metric).data
    best = fastest(found[:2])
    assert best.plan.checkpoint[0] == "never"
    assert sweeps._write(sweeps._value(best, metric), metric) == fits.text[0][0]
    assert "the fastest that fits of 2" in fits.hovertext[0][0]


def test_facets_have_one_scale_and_mark_the_plan_on_screen_and_the_best():
    found = predictions(K="[2, 4]", M="[1, 8]", checkpoint="[never, always]", memory="1 TB")
    here, best = found[1], fastest(found)
    chart = sweeps.facets(found, "step_time_s", here)
    maps = [trace for trace in chart.data if trace.type == "heatmap" and trace.name == "fits"]
    assert [trace.customdata[0][0] for trace in maps] == ["never", "always"]
    assert {trace.coloraxis for trace in maps} == {"coloraxis"}
    (frame,) = chart.layout.shapes
    columns, rows = ([1, 8], [2, 4])
    middle = (columns.index(here.plan.num_microbatches), rows.index(here.plan.num_ranks))
    assert ((frame.x0 + frame.x1) / 2, (frame.y0 + frame.y1) / 2) == middle
    assert {"y": "never", "y2": "always"}[frame.yref] == here.plan.checkpoint[0]
    (star,) = [
        (trace.customdata[0][0], K, M)
        for trace in maps
        for K, cells in zip(trace.y, trace.text, strict=True)
        for M, text in zip(trace.x, cells, strict=True)
        if "\u2605" in text
    ]
    assert star == (best.plan.checkpoint[0], str(best.plan.num_ranks), str(best.plan.num_microbatches))


def test_the_axes_of_time_against_memory_show_what_fits(grid):
    fitting = [prediction for prediction in grid if prediction.fits]
    assert 0 < len(fitting) < len(grid)
    chart = sweeps.time_memory(grid, grid[0].plan.memory_limit)
    points = next(trace for trace in chart.data if trace.name == "fits")
    assert chart.layout.xaxis.range[1] == pytest.approx(1.15 * max(points.x))
    assert chart.layout.yaxis.range[1] >= max(points.y)


def test_the_front_holds_what_no_other_plan_beats_in_both(grid):
    front = pareto(grid)
    for prediction in grid:
        beaten = any(
            other.step_time_s <= prediction.step_time_s
            and max(other.peak_memory_bytes) <= max(prediction.peak_memory_bytes)
            for other in grid
            if other is not prediction
        )
        assert (prediction in front) == (not beaten)


def test_time_memory_marks_what_does_not_fit(grid):
    traces = {trace.name: trace for trace in sweeps.time_memory(grid, grid[0].plan.memory_limit).data}
    assert len(traces["does not fit"].x) == sum(not prediction.fits for prediction in grid)
    assert len(traces["fits"].x) + len(traces["does not fit"].x) == len(grid)


def test_sweep_lines_keep_quantities_in_the_order_of_the_file():
    figure = sweeps.sweep_lines(predictions(bandwidth="[25 GB/s, 1 GB/s, 10 GB/s]"))
    assert list(figure.data[0].x) == ["25 GB/s", "1 GB/s", "10 GB/s"]
    assert figure.layout.xaxis.type == "category"


def test_sweep_lines_sort_numbers_and_show_the_closed_form():
    found = predictions(M="[64, 1, 8]")
    step_time, bubble, ideal = sweeps.sweep_lines(found).data
    assert list(step_time.x) == [1, 8, 64]
    assert list(ideal.y) == pytest.approx([2 / 3, 2 / 10, 2 / 66])
    assert bubble.y[0] == found[1].bubble_fraction


def test_sweep_lines_refuse_a_sweep_over_two_fields(grid):
    with pytest.raises(ValueError, match="found 2 swept fields"):
        sweeps.sweep_lines(grid)


# --- the page, in a browser ----------------------------------------------------------------------------------------


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Write a report and open it; at the end, nothing may have gone wrong or left for the network."""
    page = chromium.new_page()
    errors: list[str] = []
    schemes: set[str] = set()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: schemes.add(urlsplit(request.url).scheme))

    def open_report(found: list[Prediction] | Comparison, title: str = "a report") -> Page:
        text = comparison_page(found) if isinstance(found, Comparison) else report_page(found, title)
        (tmp_path / "report.html").write_text(text)
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_function("document.querySelectorAll('.plotly-graph-div:not(.js-plotly-plot)').length === 0")
        return page

    yield open_report
    page.close()
    assert errors == []
    assert schemes <= {"file", "data", "blob"}


def charts(page: Page) -> list[str | None]:
    return [figure.get_attribute("data-figure") for figure in page.query_selector_all("figure")]


def test_report_of_one_plan_opens_offline_with_every_figure(opened, one):
    page = opened([one], "one plan")
    assert page.title() == "one plan"
    assert charts(page) == ["gantt", "waterfall", "utilization", "memory", "memory-parts"]
    assert page.locator(".verdict").inner_text() == one.verdict
    assert page.locator("figure .main-svg").count() > 0
    assert "predicted" in page.locator("ul").inner_text()


def test_report_draws_a_bar_for_each_action_wait_and_message(opened, one):
    page = opened([one])
    assert page.locator("[data-figure=gantt] .barlayer .point").count() == len(list(one.step.spans()))


def test_critical_path_is_switched_off_in_the_legend(opened, one):
    page = opened([one])
    line = page.locator("[data-figure=gantt] .scatterlayer .js-line")
    assert line.count() > 0
    page.locator("[data-figure=gantt] .legendtoggle").last.click()
    expect(line).to_have_count(0)


def test_report_of_a_sweep_has_table_heat_maps_and_the_fastest_plan_that_fits(opened, grid):
    page = opened(grid)
    assert charts(page)[:4] == ["time-memory", "heatmap", "heatmap", "heatmap"]
    assert "gantt" in charts(page)
    assert page.locator("tbody tr").count() == len(grid)
    assert page.locator("tr.over").count() == sum(not prediction.fits for prediction in grid)
    best = fastest(grid)
    assert page.locator("tr.best td").first.inner_text() == str(best.plan.num_ranks)
    assert page.locator("h2").first.inner_text() == f"The fastest plan that fits: {best.settings}"


def test_table_sorts_by_the_column_that_is_clicked(opened, grid):
    page = opened(grid)
    column = page.locator("th").all_inner_texts().index("step time") + 1
    for expected in (sorted, lambda values: sorted(values, reverse=True)):
        page.locator(f"th:nth-child({column}) button").click()
        cells = page.locator(f"td:nth-child({column})")
        values = [float(value) for value in cells.evaluate_all("cells => cells.map(cell => cell.dataset.value)")]
        assert values == expected(values)


def test_report_of_one_swept_field_draws_its_lines(opened):
    page = opened(predictions(bandwidth="[25 GB/s, 1 GB/s]"))
    assert "sweep-lines" in charts(page)
    assert "heatmap" not in charts(page)


def test_report_of_several_scenarios_names_each(opened):
    page = opened([*predictions(name="first"), *predictions(name="second", M="[2, 8]")])
    assert page.locator("th").first.inner_text() == "scenario"
    assert charts(page).count("gantt") == 2
    assert {"first", "second"} <= set(page.locator("h2").all_inner_texts())


def test_markup_in_names_is_shown_and_not_run(opened):
    name = "<script>document.title = 'run'</script>"
    page = opened(predictions(name=f'"{name}"', M="[2, 8]"), name)
    assert page.title() == name
    assert page.locator("h1").inner_text() == name
    assert page.locator("h3", has_text=name).count() == 1


def test_report_states_jitter_and_stragglers(opened):
    more = ", jitter: {cv: 0.05, samples: 5}, slowdown: {1: 1.5}"
    page = opened(predictions(more=more))
    assumptions = page.locator("ul").inner_text()
    assert "5 samples" in assumptions
    assert "Rank 1 computes 1.5 times as long" in assumptions


def test_plans_of_thousands_of_actions_are_drawn_on_the_graphics_card(opened):
    found = predictions(K="16", M="128", checkpoint="never", memory="1 TB")
    assert sum(len(timeline.actions) for timeline in found[0].step.ranks) > figures.MAX_BARS
    page = opened(found)
    page.wait_for_selector("[data-figure=gantt] canvas", state="attached")
    assert page.locator("[data-figure=gantt] .barlayer .point").count() == 0
    kinds = page.evaluate("document.querySelector('[data-figure=gantt] .js-plotly-plot').data.map(t => t.type)")
    assert set(kinds) == {"scattergl"}


def test_comparison_lays_predicted_and_measured_on_one_axis(opened, one):
    slower = replace(one.plan.profile, action_overhead_s=1e-4)
    steps = tuple(simulate(replace(one.plan, profile=slower), memory=False) for _ in range(3))
    comparison = compare_run(one.plan, Measured(device="cpu", engine="gpipe", steps=steps))
    page = opened(comparison)
    assert charts(page) == ["timelines", "attribution", "residuals"]
    assert page.locator(".verdict").inner_text() == comparison.sentence


def test_predicted_and_measured_lie_over_each_other_in_one_chart(one):
    """The measured strip of a rank lies below its predicted one, each action as long as it took."""
    slower = simulate(replace(one.plan, profile=replace(one.plan.profile, action_overhead_s=1e-4)), memory=False)
    chart = comparisons.timelines(compare_run(one.plan, Measured(device="cpu", engine="gpipe", steps=(slower,))))
    for kind, name in ((kind, KIND_NAMES[kind]) for kind in PRESENT):
        above, below = (trace for trace in chart.data if trace.name == name)
        for bars, step in ((above, one.step), (below, slower)):
            spans = [span for span in step.spans() if span.lane == "compute" and span.action.kind == kind]
            assert list(bars.base) == pytest.approx([span.start_s for span in spans])
        assert all(upper < lower for upper, lower in zip(above.y, below.y, strict=True))
        assert above.marker.color == below.marker.color
        assert (above.showlegend, below.showlegend) == (True, False)


def test_large_comparisons_are_drawn_as_lines():
    (large,) = predictions(K="16", M="128", checkpoint="never")
    comparison = compare_run(large.plan, Measured(device="cpu", engine="gpipe", steps=(large.step,)))
    assert {trace.type for trace in comparisons.timelines(comparison).data} == {"scattergl"}


def test_accuracy_puts_every_run_beside_the_diagonal():
    runs = [
        RunSummary(
            name=f"run-{device}-{seconds}",
            utc=None,
            device=device,
            schedule="gpipe",
            checkpoint="always",
            num_stages=4,
            num_microbatches=8,
            predicted_s=seconds,
            measured_s=2 * seconds,
            error=-0.5,
            bubble_error=0.0,
            memory_errors=None,
        )
        for device in ("cpu", "rehearse")
        for seconds in (0.01, 1.0)
    ]
    diagonal, *devices = comparisons.accuracy(runs).data
    assert list(diagonal.x) == list(diagonal.y)
    assert [trace.name for trace in devices] == ["cpu", "rehearse"]
    assert len({trace.marker.color for trace in devices}) == 2
    for trace in devices:
        assert list(trace.x) == [2 * y for y in trace.y]
        assert all("run-" + trace.name in text and "-50.0%" in text for text in trace.hovertext)
