"""The dashboard in a real browser: each story that a person goes through, and what must not be possible."""

import io
import json
import logging
import re
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import axe_playwright_python
import pytest

pytest.importorskip("dash", reason="the page needs dash: gpipe-planner[dashboard]")

from playwright.sync_api import Page, Request, expect
from werkzeug.serving import make_server

from dashboard.page.app import make_app
from dashboard.page.ids import TICKS
from gpipe_sim.base.units import format_seconds
from gpipe_sim.explain.predict import predict
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import load_plan, save_plan
from gpipe_sim.runs.compare import compare_run
from gpipe_sim.runs.directory import Measured, save_measured
from gpipe_sim.scenario.reading import load_scenario, shipped_scenarios
from gpipe_sim.step.simulate import simulate

SMALL = "?scenario=bubble&set=plan.microbatches=8"
PATIENCE_MS = 180_000
"""For a machine that is busy: what is waited for comes in a moment elsewhere."""
expect.set_options(timeout=PATIENCE_MS)


def scenario(name: str, *overrides: str):
    (point,) = load_scenario(shipped_scenarios() / f"{name}.yaml", *overrides)
    return point


def step_time(name: str, *overrides: str) -> str:
    return format_seconds(predict(make_plan(scenario(name, *overrides))).step_time_s)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(runs) -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    app = make_app(runs=runs, allow_run=True)
    one = make_server("127.0.0.1", 0, app.server, threaded=True)
    thread = threading.Thread(target=one.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{one.server_port}/"
    one.shutdown()


AWAITED: set[Request] = set()
"""What the page has asked the server and not been answered."""


@pytest.fixture(scope="module")
def browser_page(chromium) -> Iterator[Page]:
    """One page for all stories: what it has loaded once it need not load again."""
    context = chromium.new_context(viewport={"width": 1440, "height": 1000})
    found = context.new_page()
    found.on("request", lambda request: AWAITED.add(request))
    for answered in ("requestfinished", "requestfailed"):
        found.on(answered, lambda request: AWAITED.discard(request))
    yield found
    context.close()


AT_WORK = """ticks => {
    const {stored, completed, ...waiting} = window.store.getState().callbacks;
    const asks = tick => {
        const props = dash_component_api.getLayout(tick)?.props;
        return props && props.max_intervals > (props.n_intervals ?? 0);
    };
    return Object.values(waiting).some(some => some.length > 0) || ticks.some(asks);
}"""
"""Whether the page has callbacks that wait, are asked or are drawn, or will ask again in a moment."""


def quiet(page: Page) -> None:
    """Until the server has answered whatever the page asks, and that is drawn, however long the two take."""
    moments = 0
    while moments < 3:
        page.wait_for_timeout(40)
        moments = 0 if AWAITED or page.evaluate(AT_WORK, TICKS) else moments + 1


def visit(page: Page, server: str, address: str) -> None:
    """As `goto`, but a page that is loaded already goes there by itself, as a link or a control would lead it."""
    if not page.url.startswith(server):
        page.goto(server + address)
        return
    query, _, tab = address.partition("#")
    go = "([search, hash]) => dash_clientside.set_props('url', {search, hash})"
    page.evaluate(go, [query, f"#{tab or 'plan'}"])
    expect(page.locator(f"[role=tab][id$='tab-{tab or 'plan'}']")).to_have_attribute("aria-selected", "true")
    quiet(page)


@pytest.fixture
def page(browser_page, server) -> Iterator[Page]:
    """Its errors and requests are noted; none may go elsewhere."""
    errors: list[str] = []

    def said(message):
        if message.type == "error":
            errors.append(message.text)

    def failed(error):
        errors.append(str(error))

    def asked(request):
        if not request.url.startswith((server, "data:", "blob:")):
            errors.append(request.url)

    listeners = {"console": said, "pageerror": failed, "request": asked}
    for event, listener in listeners.items():
        browser_page.on(event, listener)
    browser_page.set_default_timeout(PATIENCE_MS)
    yield browser_page
    for event, listener in listeners.items():
        browser_page.remove_listener(event, listener)
    assert errors == []


def shows_step_time(page: Page, text: str) -> None:
    expect(page.locator("#number-step-time")).to_have_text(text)


def address_has(page: Page, part: str) -> None:
    expect(page).to_have_url(re.compile(re.escape(part)))


# --- who is answered -------------------------------------------------------------------------------------------------


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=300) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_request_from_another_page_or_for_another_name_is_refused(server):
    assert status(server) == 200
    assert status(server, Origin="http://evil.example") == 403
    assert status(server, Host="evil.example") == 403
    assert status(server, Origin=server.rstrip("/")) == 200


def test_two_browsers_do_not_see_each_other(chromium, server):
    first, second = (chromium.new_context().new_page() for _ in range(2))
    first.goto(server + SMALL)
    shows_step_time(first, step_time("bubble", "plan.microbatches=8"))
    first.fill("#microbatches", "32")
    address_has(first, "microbatches%3D32")
    second.goto(server + SMALL)
    shows_step_time(second, step_time("bubble", "plan.microbatches=8"))
    expect(second.locator("#microbatches")).to_have_value("8")
    tokens = [one.evaluate("() => dash_component_api.getLayout('token').props.data") for one in (first, second)]
    assert tokens[0] != tokens[1]
    for one in (first, second):
        one.context.close()


# --- start: choose, upload, fill in ----------------------------------------------------------------------------------


def test_a_scenario_is_chosen_filled_in_edited_and_uploaded(page, server, tmp_path):
    page.goto(server + SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.get_by_role("tab", name="Scenario").click()
    expect(page.locator("#form-other-model")).to_contain_text("edited in the text")
    expect(page.locator("#form-model-layers")).to_be_hidden()

    page.get_by_label("scenario", exact=True).first.click()
    page.get_by_role("option", name="checkpoint", exact=True).click()
    expect(page.locator("#device")).to_have_value("a100-80gb")
    expect(page.locator("#editor")).to_have_value(re.compile("name: checkpoint"))
    expect(page.locator("#editor")).to_have_value(re.compile("^# "))
    layers = page.locator("#form-model-layers")
    expect(layers).to_have_value("64")
    expect(page.locator("#form-cluster-link-bandwidth")).to_have_value("300 GB/s")

    page.fill("#form-model-layers", "12")
    address_has(page, "model.layers%3D12")
    expect(page.locator("#editor")).to_have_value(re.compile("layers: 12"))
    expect(page.locator("#commands")).to_contain_text("--set model.layers=12")

    page.fill("#form-cluster-link-bandwidth", "25 Gigs")
    page.press("#form-cluster-link-bandwidth", "Enter")
    with pytest.raises(Exception) as wrong:
        scenario("checkpoint", "cluster.link.bandwidth=25 Gigs")
    message = wrong.value.problems[0].message
    field = page.locator(".mantine-TextInput-root", has=page.locator("#form-cluster-link-bandwidth"))
    expect(field).to_contain_text(message)
    expect(page.locator("#problems")).to_contain_text("link bandwidth: ")
    expect(page.locator("#problems")).not_to_contain_text("--set")
    page.fill("#form-cluster-link-bandwidth", "25 GB/s")
    page.press("#form-cluster-link-bandwidth", "Enter")
    expect(field).not_to_contain_text(message)
    expect(page.locator("#problems")).to_be_empty()

    text = (shipped_scenarios() / "bubble.yaml").read_text()
    page.fill("#editor", text.replace("name: bubble", "name: mine"))
    page.click("#edit-apply")
    address_has(page, "?text=")
    page.fill("#editor", text.replace("batch:", "bach:"))
    page.click("#edit-apply")
    expect(page.locator("#editor-problems")).to_contain_text("did you mean")
    expect(page.locator("#editor")).to_have_value(re.compile("bach:"))

    (tmp_path / "own.yaml").write_text(text.replace("name: bubble", "name: uploaded").replace("1 ms", "4 ms"))
    page.set_input_files("#upload input", tmp_path / "own.yaml")
    expect(page.locator("#editor")).to_have_value(re.compile("name: uploaded"))


def test_a_link_that_cannot_be_read_is_told_so(page, server):
    page.goto(server + "?text=nonsense")
    expect(page.locator("#problems")).to_contain_text("expected a link made by this page")


# --- verdict and knobs -----------------------------------------------------------------------------------------------


def test_the_verdict_follows_the_knobs_as_the_simulator_says(page, server):
    visit(page, server, SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.fill("#microbatches", "32")
    shows_step_time(page, step_time("bubble", "plan.microbatches=32"))
    address_has(page, "set=plan.microbatches%3D32")
    expect(page.locator("#number-bubble")).to_have_text("8.6%")
    expect(page.locator("#verdict")).not_to_be_empty()

    page.fill("#microbatches", "1000")
    wrong = page.locator(".mantine-NumberInput-root", has=page.locator("#microbatches"))
    expect(wrong).to_contain_text("expected at most")
    expect(page.locator("#problems")).to_contain_text("micro-batches M: ")
    expect(page.locator("#number-step-time")).to_have_count(0)  # nor any other figure of the plan before
    page.fill("#microbatches", "16")
    expect(wrong).not_to_contain_text("expected at most")


def test_two_knobs_turned_at_once_both_count(page, server):
    visit(page, server, SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.locator("#checkpoint").get_by_text("always").click()
    page.locator("#schedule").click()
    page.get_by_role("option", name="1f1b", exact=True).click()
    address_has(page, "plan.checkpoint%3Dalways")
    address_has(page, "plan.schedule%3D1f1b")
    expect(page.locator("#checkpoint input[value=always]")).to_be_checked()
    expect(page.locator("#schedule")).to_have_value("1f1b")


def test_a_knob_acts_while_it_is_dragged_and_is_turned_when_it_is_let_go(page, server):
    visit(page, server, SMALL)
    shown = step_time("bubble", "plan.microbatches=8")
    shows_step_time(page, shown)
    drawn(page)
    thumb = page.locator("#latency [role=slider]")
    thumb.scroll_into_view_if_needed()
    box = thumb.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 190, y, steps=4)
    expect(page.locator("#number-step-time")).not_to_have_text(shown)
    page.wait_for_function(f"() => {TIMELINE}.data.stepTime > 0.2641")
    assert "latency" not in page.url
    page.mouse.move(x, y, steps=4)  # and back to where it was
    shows_step_time(page, shown)
    page.mouse.up()
    quiet(page)
    assert "latency" not in page.url
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 170, y, steps=4)
    page.mouse.up()
    address_has(page, "latency")
    quiet(page)
    latency = page.evaluate("new URLSearchParams(location.search).getAll('set').find(s => s.includes('latency'))")
    shows_step_time(page, step_time("bubble", "plan.microbatches=8", latency))


def test_beneath_each_knob_is_the_step_time_over_its_range_from_which_a_value_is_chosen(page, server):
    visit(page, server, SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    curve = page.get_by_role("img", name=re.compile("step time over micro-batches M"))
    expect(curve).to_have_attribute(
        "aria-label", re.compile("M: 1: 768 ms, 2: 480 ms, 4: 336 ms, 8: 264 ms, 16: 228 ms")
    )
    curve.scroll_into_view_if_needed()
    box = curve.bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 12)
    page.mouse.down()
    shows_step_time(page, "768 ms")
    expect(page.locator("#microbatches")).to_have_value("8")
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 12)
    shows_step_time(page, "201 ms")
    page.mouse.up()
    expect(page.locator("#microbatches")).to_have_value("64")
    address_has(page, "plan.microbatches%3D64")
    shows_step_time(page, step_time("bubble", "plan.microbatches=64"))
    schedules = page.locator("#spark-schedule")
    expect(schedules).to_have_attribute("aria-label", re.compile("1f1b: 201 ms"))


TIMELINE = "document.getElementById('gantt').timeline"


def drawn(page: Page) -> None:
    page.wait_for_function("() => document.getElementById('gantt')?.timeline?.drawnIn")


def test_the_timeline_is_zoomed_moved_pointed_at_and_played_and_its_view_survives_a_knob(page, server):
    page.goto(server + SMALL)
    drawn(page)
    expect(page.locator("#moves")).to_contain_text("What to change next")  # to which the timeline gives way
    timeline = page.locator("#gantt canvas")
    timeline.scroll_into_view_if_needed()

    def view() -> tuple[float, float]:
        found = page.evaluate(f"{TIMELINE}.view")
        return found["from"], found["to"]

    box = timeline.bounding_box()
    page.mouse.move(box["x"] + 64 + 1, box["y"] + 40)  # the beginning of rank 0
    panel = page.locator("#gantt .timeline-panel")
    expect(panel).to_contain_text("Rank 0: forward of micro-batch 0 in stage 0, 0.00 us to 8.00 ms")
    last_row = box["y"] + 24 + 3.3 * page.evaluate(f"{TIMELINE}.rowHeight")
    page.mouse.move(box["x"] + 64 + 2, last_row)
    expect(panel).to_contain_text(
        "Rank 3 nothing has reached the rank yet (forward of micro-batch 0 in stage 2 on rank 2)"
    )
    page.mouse.move(box["x"] + box["width"] - 20, last_row)  # up to the step's end
    expect(panel).to_contain_text("Rank 3 is done, and waits for the end of the step")
    page.mouse.wheel(0, -500)
    page.wait_for_function(f"() => {TIMELINE}.view.to - {TIMELINE}.view.from < 0.6")
    zoomed = view()
    page.get_by_role("switch", name="critical path").check(force=True)
    page.wait_for_function(f"() => {TIMELINE}.data.critical")
    address_has(page, "critical=1")
    page.fill("#microbatches", "32")
    shows_step_time(page, step_time("bubble", "plan.microbatches=32"))
    page.wait_for_function(f"() => {TIMELINE}.data.microbatch.reduce((a, b) => Math.max(a, b)) === 31")
    assert view() == zoomed
    timeline.focus()
    page.keyboard.press("a")
    assert view()[0] < zoomed[0]
    page.keyboard.press("w")
    assert view()[1] - view()[0] < zoomed[1] - zoomed[0]
    page.keyboard.press("0")
    assert view() == (0, 1)
    page.keyboard.press("ArrowRight")
    expect(panel).to_contain_text("Rank 0: forward of micro-batch 1")
    page.mouse.move(0, 0)
    page.get_by_role("slider", name="moment of the step").fill("500")
    expect(panel).to_contain_text("At 105 ms. Rank 0: ")
    moving = page.evaluate(f"() => {{ {TIMELINE}.seek(6.9 / 210); return {TIMELINE}.onTheirWay(); }}")
    assert [(one["microbatch"], one["from"], one["to"]) for one in moving] == [(2, 0, 1), (1, 1, 2), (0, 2, 3)]
    page.reload()
    drawn(page)
    page.wait_for_function(f"() => {TIMELINE}.data.critical")
    expect(page.get_by_role("switch", name="critical path")).to_be_checked()


def test_what_is_dense_is_drawn_as_busy_shares_that_resolve_on_zoom(page, server):
    visit(page, server, "?scenario=bubble&set=batch=1024&set=plan.microbatches=1024")
    drawn(page)
    page.wait_for_function(f"() => {TIMELINE}.data.kind.length > 8000 && {TIMELINE}.isDense")
    middle = page.evaluate(
        f"""() => {{
            const t = {TIMELINE}, c = t.canvas.getContext('2d'), scale = devicePixelRatio;
            return [...c.getImageData((64 + t.width / 4) * scale, (24 + 8) * scale, 1, 1).data];
        }}"""
    )
    forward = (0x00, 0x72, 0xB2, 255)
    assert all(abs(a - b) < 12 for a, b in zip(middle, forward, strict=True)), middle  # nothing but forwards there
    page.evaluate(f"{TIMELINE}.look(0.5, 0.51)")
    page.wait_for_function(f"() => !{TIMELINE}.isDense")


# --- the whole space -------------------------------------------------------------------------------------------------


def test_a_click_on_the_heat_map_or_a_row_of_the_table_makes_it_the_plan_on_screen(page, server):
    visit(page, server, SMALL + "#space")
    page.wait_for_selector("#heatmap .heatmaplayer image", state="attached")
    page.locator("#heatmap .nsewdrag").first.click(position={"x": 10, "y": 10})
    address_has(page, "plan.stages%3D4")  # the upper left corner: most stages, fewest micro-batches
    address_has(page, "plan.microbatches%3D1")
    shows_step_time(page, step_time("bubble", "plan.stages=4", "plan.microbatches=1"))

    page.locator("#table .ag-row[row-index='0'] .ag-cell[col-id=K]").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    address_has(page, "plan.stages%3D1&set=plan.microbatches%3D1&set=plan.checkpoint%3Dexcept_last")


def test_a_plan_is_ringed_wherever_it_is_and_those_in_a_rectangle_are_kept(page, server):
    visit(page, server, SMALL + "#space")
    page.wait_for_selector("#heatmap .heatmaplayer image", state="attached")
    page.wait_for_selector("#table .ag-row")
    address = page.url
    expect(page.locator("#space-progress")).to_be_empty()
    quiet(page)
    cells = page.locator("#heatmap .nsewdrag").first
    cells.scroll_into_view_if_needed()
    width = cells.bounding_box()["width"]
    cells.hover(position={"x": width - 10, "y": 10})  # the upper right corner: most stages, most micro-batches
    box = cells.bounding_box()
    right, bottom = box["x"] + width, box["y"] + box["height"]
    expect(page.locator("#heatmap .ring")).to_have_count(1)
    expect(page.locator("#front .ring")).to_have_count(1)
    page.mouse.down()
    page.mouse.move(right - box["width"] * 2 / 7 + 3, bottom - 3, steps=4)  # two columns, with K = 1, 2 and 4
    page.mouse.up()
    expect(page.locator("#brushed")).to_contain_text("6 plans in the rectangle")
    expect(page.locator("#table .ag-row")).to_have_count(6)
    expect(page.locator("#heatmap .veil")).to_have_count(3 * 7 * 3 - 6)
    page.locator("#table .ag-row", has_text="201").hover()
    expect(page.locator("#heatmap .ring")).to_have_count(1)
    quiet(page)
    assert page.url == address  # the end of a drag is no click
    page.keyboard.press("Escape")
    expect(page.locator("#brushed")).to_be_empty()
    expect(page.locator("#heatmap .veil")).to_have_count(0)
    page.wait_for_function("() => document.querySelectorAll('#table .ag-row').length > 6")


def click_point(page: Page, chart: str, trace: int, point: int) -> dict:
    """With the mouse, in the middle of a marker; what the chart says of it."""
    expect(page.locator("#space-progress")).to_be_empty()
    quiet(page)
    mark = page.locator(f"#{chart} .scatterlayer .trace").nth(trace).locator(".point").nth(point)
    mark.wait_for(state="attached")
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    box = mark.bounding_box()
    said = page.evaluate(
        """([chart, trace, point]) => {
            const data = document.querySelector(`#${chart} .js-plotly-plot`).calcdata[trace];
            return {x: data[point].x, y: data[point].y, of: data[point].data ?? data[0].trace.customdata?.[point]};
        }""",
        [chart, trace, point],
    )
    page.mouse.move(box["x"] + box["width"] / 2 - 1, box["y"] + box["height"] / 2)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return said


def test_a_click_on_a_point_of_any_other_chart_makes_it_the_plan_on_screen(page, server):
    visit(page, server, SMALL + "#space")
    K, M, mode = click_point(page, "front", 0, 0)["of"]
    address_has(page, f"plan.stages%3D{K}&set=plan.microbatches%3D{M}&set=plan.checkpoint%3D{mode}")
    shows_step_time(page, step_time("bubble", f"plan.stages={K}", f"plan.microbatches={M}", f"plan.checkpoint={mode}"))

    visit(page, server, "?scenario=bubble&set=plan.microbatches=2#space")
    M = round(click_point(page, "bubble-by-m", 0, 3)["x"])
    assert M == 8
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))

    visit(page, server, "?scenario=bubble&set=plan.microbatches=2#space")
    assert round(click_point(page, "memory-by-m", 2, 4)["x"]) == 16
    address_has(page, "plan.checkpoint%3Dalways")
    shows_step_time(page, step_time("bubble", "plan.microbatches=16", "plan.checkpoint=always"))

    visit(page, server, "?scenario=checkpoint&set=plan.microbatches=16#space")
    bandwidth = click_point(page, "by-bandwidth", 0, 5)["x"]
    assert 0.99 < bandwidth < 1.01  # GB/s
    expect(page.locator("#bandwidth-shown")).to_have_text("1.00 GB/s")


def test_the_space_around_a_plan_shows_how_far_it_is_and_follows_the_knobs(page, server):
    """A thousand samples of each plan: long enough to be seen, and turned away from before it ends."""
    jitter = "set=cluster.jitter={cv:+0.1,+samples:+1000}"
    page.goto(f"{server}?scenario=demo&set=plan.stages=8&set=plan.microbatches=64&{jitter}#space")
    expect(page.locator("#space-progress")).to_contain_text(re.compile("Predicting the plans around this one: [0-9]"))
    page.focus("#jitter [role=slider]")
    page.keyboard.press("Home")
    address_has(page, "cluster.jitter%3Dnull")
    page.wait_for_selector("#heatmap .heatmaplayer image", state="attached")
    expect(page.locator("#space-progress")).to_be_empty()


def test_a_search_shows_how_far_it_is_follows_the_knobs_and_its_plan_can_be_taken(page, server):
    """One that takes minutes is seen, and turned away from before its end; a small one takes its place."""
    large = "&set=batch=4096&set=plan.stages=2&set=plan.microbatches=4"
    visit(page, server, f"?scenario=demo{large}")
    page.get_by_role("button", name="Find the best plan").click()
    expect(page.locator("#advice")).to_contain_text("Searching")
    page.locator("#overlap").uncheck(force=True)
    address_has(page, "cluster.overlap%3Dfalse")
    expect(page.locator("#advice")).to_contain_text("Searching")
    small = "&set=batch=16&set=cluster.devices_per_node=4&set=plan.stages=2&set=plan.microbatches=4"
    visit(page, server, f"?scenario=demo{small}&set=cluster.overlap=false")
    page.get_by_role("link", name="take this plan").click()
    address_has(page, "plan.balance")
    address_has(page, "cluster.overlap%3Dfalse")
    expect(page.locator("#advice")).to_contain_text("This is the best plan")
    # What the search found is not contradicted: whatever is advised beyond it was tried, and is faster.
    expect(page.locator("#moves")).to_contain_text(re.compile("No single change of this plan|What to change next"))
    expect(page.locator("#moves")).not_to_contain_text("+")
    page.locator("#overlap").check(force=True)
    expect(page.locator("#advice")).to_contain_text("search again")


def test_a_move_is_applied_and_taken_back(page, server):
    page.goto(server + SMALL)
    expect(page.locator("#device")).to_have_value("")  # which is the scenario's own
    before, after = (step_time("bubble", f"plan.microbatches={M}") for M in (8, 32))
    expect(page.locator("#moves")).to_contain_text(f"32 micro-batches instead of 8: step {before} → {after}")
    expect(page.locator("#about")).to_contain_text("bubble: a model of 4 layers on 4 devices with free links")
    page.locator("#move-0").click()
    shows_step_time(page, after)
    expect(page.locator("#change")).to_have_text("20.5% shorter than the plan before")
    page.get_by_role("button", name="Undo").click()
    shows_step_time(page, before)
    expect(page.locator("#microbatches")).to_have_value("8")
    expect(page.get_by_role("button", name="Undo")).to_be_disabled()

    page.locator("#schedule").click()
    page.get_by_role("option", name="naive", exact=True).click()
    expect(page.locator("#microbatches")).to_have_value("1")
    page.locator("#schedule").click()
    page.get_by_role("option", name="gpipe", exact=True).click()
    expect(page.locator("#microbatches")).to_have_value("8")
    shows_step_time(page, before)


def test_a_plan_that_takes_long_holds_nobody_up_and_is_left_for_the_next(chromium, page, server):
    page.goto(server + SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    large = "set=batch=16384&set=plan.microbatches=16384&set=cluster.jitter={cv:+0.1,+samples:+2000}"
    page.goto(f"{server}?scenario=bubble&{large}")
    page.wait_for_timeout(1000)  # it is being predicted
    other = chromium.new_context().new_page()
    other.goto(server + "?scenario=bubble&set=plan.microbatches=16")
    shows_step_time(other, step_time("bubble", "plan.microbatches=16"))
    other.context.close()
    page.goto(server + SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.fill("#batch", "100000000")
    page.fill("#microbatches", "100000000")
    expect(page.locator("#problems")).to_contain_text("expected")


def test_two_plans_are_pinned_and_stand_on_one_axis(page, server):
    visit(page, server, SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.click("#pin")
    address_has(page, "&a=")
    page.fill("#microbatches", "32")
    shows_step_time(page, step_time("bubble", "plan.microbatches=32"))
    page.click("#pin")
    address_has(page, "&b=")
    expect(page.locator("#tray")).to_contain_text("A: K = 4, M = 8, gpipe, 264 ms")
    expect(page.locator("#gantt .timeline-legend")).to_contain_text("behind it: A, 264 ms")
    assert page.evaluate(f"{TIMELINE}.data.axis") == pytest.approx(0.264)  # so that both are seen to their ends
    page.get_by_role("tab", name="Side by side").click()
    page.wait_for_function("() => document.getElementById('gantt-b')?.timeline?.drawnIn")
    axes = page.evaluate("() => ['a', 'b'].map(name => document.getElementById(`gantt-${name}`).timeline.data.axis)")
    assert axes[0] == axes[1] == pytest.approx(0.264)
    expect(page.locator("#pinned-numbers")).to_contain_text(step_time("bubble", "plan.microbatches=8"))
    expect(page.locator("#pinned-numbers tr", has_text="against A")).to_contain_text("-20.5%")  # 210 after 264 ms
    expect(page.locator("#pinned-numbers")).not_to_contain_text("schedule")  # which is the same
    page.wait_for_selector("#pinned-waterfalls .bars .point")
    page.locator("#gantt-a canvas").hover(position={"x": 400, "y": 60})
    page.wait_for_function("() => document.getElementById('gantt-b').timeline.pointed > 0")
    page.get_by_role("button", name="unpin A").click()
    expect(page.locator("#tray")).to_have_text("B: K = 4, M = 32, gpipe, 210 ms×")
    page.fill("#microbatches", "4")
    shows_step_time(page, step_time("bubble", "plan.microbatches=4"))
    page.click("#pin-b")  # back to it
    shows_step_time(page, step_time("bubble", "plan.microbatches=32"))


# --- take it away ----------------------------------------------------------------------------------------------------


def test_what_is_downloaded_simulates_to_what_is_on_screen(page, server, tmp_path):
    def download(name: str, file: str) -> Path:
        with page.expect_download() as got:
            page.click(name)
        got.value.save_as(tmp_path / file)
        return tmp_path / file

    visit(page, server, SMALL)
    shown = step_time("bubble", "plan.microbatches=8")
    shows_step_time(page, shown)
    assert format_seconds(predict(load_plan(download("#get-plan", "plan.yaml"))).step_time_s) == shown
    (point,) = load_scenario(download("#get-scenario", "scenario.yaml"))
    assert format_seconds(predict(make_plan(point)).step_time_s) == shown
    assert json.loads(download("#get-trace", "trace.json").read_text())["traceEvents"]
    assert download("#get-csv", "table.csv").read_text().startswith("K,M,checkpoint")
    assert "plotly" in download("#get-report", "report.html").read_text()
    expect(page.locator("#commands")).to_contain_text("gpipe simulate")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="copy the commands").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.locator("#commands").inner_text()


# --- run and compare -------------------------------------------------------------------------------------------------


def test_a_run_is_started_followed_compared_and_listed(page, server, runs):
    # With steps of some seconds, so that the page sees them, however seldom a busy machine lets it look.
    visit(page, server, "?scenario=bubble&set=batch=256&set=plan.microbatches=4&set=plan.stages=2#runs")
    page.click("#run-start")
    expect(page.locator("#run-phase")).to_contain_text(re.compile("measuring step [1-5] of 5"))
    expect(page.locator("#run-log")).to_contain_text(": finished")
    page.wait_for_selector("#compare-timelines .js-plotly-plot .barlayer .point")
    page.wait_for_selector("#accuracy-chart .scatterlayer .point")
    expect(page.locator("#accuracy")).to_contain_text("step time off by")
    (done,) = [path for path in runs.iterdir() if path.is_dir()]
    assert (done / "measured.json").is_file()
    address_has(page, f"#runs/{done.name}")
    page.reload()  # or from another tab, or by a link
    expect(page.locator("#run-log")).to_contain_text(f"{done.name}: finished")
    page.wait_for_selector("#compare-timelines .js-plotly-plot .barlayer .point")


def test_a_run_is_stopped_by_its_button_with_all_its_processes(page, server, runs):
    def processes() -> list[str]:
        """Of runs in this test's folder: the launcher and its ranks."""
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has just ended
                lines.append(path.read_bytes())
        return [line.decode() for line in lines if str(runs).encode() in line]

    visit(page, server, "?scenario=checkpoint&set=plan.stages=2#runs")
    expect(page.locator("#run-stop")).to_be_disabled()
    page.click("#run-start")
    expect(page.locator("#run-log")).to_contain_text(": running")
    page.wait_for_timeout(2000)  # its ranks are starting or at work
    assert processes()
    page.reload()
    expect(page.locator("#run-log")).to_contain_text(": running")
    expect(page.locator("#run-start")).to_be_disabled()
    second = page.context.new_page()
    second.goto(server + SMALL + "#runs")
    expect(second.locator("#run-log")).to_contain_text(": running")
    expect(second.locator("#run-start")).to_be_disabled()
    second.close()
    page.click("#run-stop")
    expect(page.locator("#run-log")).to_contain_text(": stopped")
    expect(page.locator("#run-stop")).to_be_disabled()
    assert processes() == []


def test_a_run_directory_from_another_machine_is_uploaded_and_listed(page, server, runs, tmp_path):
    plan = make_plan(scenario("bubble", "plan.microbatches=2"))
    step = simulate(plan, memory=False)
    save_plan(plan, tmp_path / "plan.yaml")
    save_measured(Measured(device="elsewhere", engine="gpipe", steps=(step,)), tmp_path / "measured.json")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("plan.yaml", "measured.json"):
            archive.write(tmp_path / name, f"some/where/{name}")
    visit(page, server, SMALL + "#runs")
    file = {"name": "theirs.zip", "mimeType": "application/zip", "buffer": stream.getvalue()}
    page.set_input_files("#runs-upload input", file)
    expect(page.locator("#runs-message")).to_contain_text("added")
    expect(page.locator("#runs .ag-row", has_text="elsewhere")).to_be_visible()
    (added,) = runs.glob("*-theirs")
    written = json.loads((added / "compare.json").read_text())["step_time"]["error"]
    assert (
        written
        == compare_run(plan, Measured(device="x", engine="gpipe", steps=(step,))).to_dict()["step_time"]["error"]
    )


# --- the tour, keyboard and looks ------------------------------------------------------------------------------------


def test_the_tour_shows_each_idea_with_a_knob(page, server):
    visit(page, server, SMALL + "#tour")
    page.wait_for_function("() => document.getElementById('tour-chart')?.timeline?.drawnIn")
    expect(page.locator("#tour-numbers")).to_contain_text("bubble 75.0%")
    expect(page.locator("#tour-back")).to_be_disabled()
    page.get_by_role("slider", name="knob of this stop").press("ArrowLeft")
    expect(page.locator("#tour-numbers")).to_contain_text("bubble 66.7%")
    page.click("#tour-next")
    expect(page.locator("#tour-before")).to_contain_text("Before: naive model parallelism, step 768 ms")
    axis = "() => ['', '-before'].map(which => document.getElementById(`tour-chart${which}`)?.timeline?.data?.axis)"
    page.wait_for_function(f"() => ({axis})().every(seconds => Math.abs(seconds - 0.768) < 1e-6)")
    page.get_by_role("slider", name="knob of this stop").press("End")
    expect(page.locator("#tour-knob-label")).to_have_text("micro-batches M: 16")
    assert page.evaluate(axis) == pytest.approx([0.768, 0.768])  # it stays where it is while the knob is turned
    page.get_by_label("stops of the tour").first.click()
    page.get_by_role("option", name="6. 1F1B").click()
    expect(page.locator("#tour-text")).to_contain_text("alternate")


def test_a_scenario_of_the_gallery_is_opened_and_its_collectives_are_seen(page, server):
    visit(page, server, SMALL)
    page.click("#pin")
    address_has(page, "&a=")
    page.get_by_role("tab", name="Gallery").click()
    expect(page.get_by_role("tabpanel", name="Gallery")).to_contain_text("Why is a pipeline with the same number")
    page.get_by_role("button", name="open replicas").click()
    address_has(page, "?scenario=replicas&a=")
    expect(page.locator("#about")).to_contain_text("16 a100-80gb, 8 copies of a pipeline of 2")
    expect(page.locator("#replicas")).to_have_value("8")
    page.locator("#shard").get_by_text("parameters").click()
    address_has(page, "plan.shard%3Dparameters")
    page.wait_for_function(f"() => {TIMELINE}?.data?.lane?.length === 5 * 4")  # a sum and a gather for each of two
    where = f"""() => {{
        const t = {TIMELINE}, [row, kind, stage, start, end] = t.data.lane.slice(-5);
        t.canvas.scrollIntoView({{block: 'center'}});
        t.look((start - t.data.begin) / t.data.axis, (end - t.data.begin) / t.data.axis);
        return [t.x((start + end) / 2), 24 + row * t.rowHeight + t.laneTop + 2];
    }}"""
    found = "Rank 1, with the ranks of all 8 replicas that hold stage 1: sum of the gradients"
    for _ in range(30):  # what is drawn beside the timeline later may move or narrow it once more
        x, y = page.evaluate(where)
        page.locator("#gantt canvas").hover(position={"x": x, "y": y})
        if found in page.locator("#gantt .timeline-panel").inner_text():
            break
        page.wait_for_timeout(500)
    expect(page.locator("#gantt .timeline-panel")).to_contain_text(found)


def test_the_colour_scheme_that_was_chosen_is_remembered(page, server):
    page.goto(server + SMALL)
    page.locator("#theme").get_by_text("Dark").click()
    dark = "document.documentElement.dataset.mantineColorScheme === 'dark'"
    page.wait_for_function(dark)
    page.reload()
    page.wait_for_function(dark)
    page.locator("#theme").get_by_text("Auto").click()
    page.wait_for_function(f"!({dark})")


NAMELESS = """() => [...document.querySelectorAll('input, button, textarea, select, a, [role=slider], [role=tab]')]
    .filter(e => e.type !== 'hidden' && e.type !== 'file' && e.tabIndex >= 0 && e.checkVisibility())
    .filter(e => !(e.ariaLabel || e.labels?.length || e.innerText?.trim()))
    .filter(e => !(e.getAttribute('aria-labelledby') || e.title))
    .map(e => e.outerHTML.slice(0, 200))"""

FOCUSED = """() => {
    const e = document.activeElement, near = [e, e.nextElementSibling, e.parentElement].filter(Boolean);
    const looks = ['outline', 'boxShadow', 'border', 'backgroundColor'];
    const look = () => JSON.stringify(near.map(x => looks.map(name => getComputedStyle(x)[name])));
    const focused = look();
    e.blur();
    const seen = look() !== focused;
    e.focus({focusVisible: true});
    const name = e === document.body ? 'BODY' : e.id || e.getAttribute('aria-label') || e.name;
    return {where: name || e.innerText?.slice(0, 30) || e.tagName, seen};
}"""
"""What has the focus, and whether it, or what is drawn in its place, looks different for that."""


TABS = ("plan", "space", "pinned", "weeks", "runs", "tour", "gallery", "scenario")


@pytest.mark.parametrize("tab", TABS)
def test_every_control_of_a_tab_has_a_name(page, server, tab):
    if tab == "plan":
        visit(page, server, "?scenario=demo&set=plan.stages=2&set=plan.microbatches=4")
    page.locator(f"[role=tab][id$='tab-{tab}']").click()
    expect(page.locator(f"[role=tabpanel][id$='panel-{tab}']")).to_be_visible()
    assert page.evaluate(NAMELESS) == []


def test_the_training_of_the_plan_on_screen_is_told_in_days_and_money(page, server):
    page.goto(server + "?scenario=checkpoint&set=plan.checkpoint=always")
    page.locator("[role=tab][id$='tab-weeks']").click()
    told = page.locator("#weeks-told")
    expect(told).to_contain_text("days, ")
    expect(told).to_contain_text("USD, goodput")
    helps = page.locator("#weeks-worths tbody tr")
    expect(helps).to_have_count(4)
    expect(helps.first).to_contain_text("one spare node more")
    page.locator("#weeks-tokens").fill("lots")
    expect(told).to_contain_text("expected a number of tokens")


def test_the_page_is_operated_by_the_keyboard_alone(page, server):
    page.goto(server + SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.add_style_tag(content="* { transition: none !important; }")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Skip to the plan")).to_be_focused()
    visited = []
    for _ in range(40):
        page.keyboard.press("Tab")
        visited.append(page.evaluate(FOCUSED))
    names = [one["where"] for one in visited]
    for wanted in (
        "scenario",
        "ranks",
        "stages-per-rank",
        "microbatches",
        "schedule",
        "batch",
        "device",
        "overlap",
        "get-plan",
        "get-report",
    ):
        assert wanted in names, names
    assert [one["where"] for one in visited if not one["seen"] and one["where"] != "BODY"] == []

    page.focus("#microbatches")
    expect(page.get_by_role("tooltip")).to_contain_text("Pieces that the batch is cut into")
    expect(page.locator("#microbatches")).to_have_attribute("aria-describedby", "tip")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_have_count(0)
    page.focus("#bandwidth [role=slider]")
    page.keyboard.press("ArrowLeft")
    address_has(page, "cluster.link%3D")
    page.get_by_role("button", name="Skip to the plan").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Find the best plan")).to_be_focused()
    page.get_by_role("tab", name="Plan").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Space")).to_have_attribute("aria-selected", "true")
    address_has(page, "#space")


MISPLACED = """() => {
    const papers = document.querySelectorAll('[role=tabpanel] .mantine-Paper-root');
    const cards = [...papers].filter(e => e.checkVisibility());
    const box = e => e.getBoundingClientRect(), found = [];
    for (const card of cards)
        for (const drawing of card.querySelectorAll('.main-svg, canvas, .ag-root'))
            if (box(drawing).bottom > box(card).bottom + 1 || box(drawing).right > box(card).right + 1)
                found.push([card.innerText.slice(0, 20), box(drawing).height, box(card).height]);
    cards.forEach((one, i) => cards.slice(i + 1).forEach(other => {
        const [a, b] = [box(one), box(other)], apart = 1;
        if (Math.min(a.right, b.right) > Math.max(a.left, b.left) + apart
                && Math.min(a.bottom, b.bottom) > Math.max(a.top, b.top) + apart)
            found.push([one.innerText.slice(0, 20), other.innerText.slice(0, 20)]);
    }));
    return found;
}"""
"""Drawings that reach beyond their card, and cards that overlap."""


def test_axe_finds_nothing_wrong_on_any_tab_in_light_and_dark(page, server):
    axe = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
    try:
        visit(page, server, SMALL)
        shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
        page.wait_for_selector("#utilization .js-plotly-plot .bars .point")
        stops = "() => [...document.querySelectorAll('#utilization *')].filter(e => e.tabIndex >= 0).length"
        assert page.evaluate(stops) <= 1
        page.click("#pin")
        address_has(page, "&a=")
        page.evaluate(axe)
        for scheme, what in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            page.emulate_media(color_scheme=scheme)
            for tab in TABS:
                page.locator(f"[role=tab][id$='tab-{tab}']").click()
                if tab in ("pinned", "gallery"):
                    page.wait_for_selector({"pinned": "#pinned-numbers th", "gallery": "#gallery-cards h2"}[tab])
                quiet(page)
                where = "document" if tab == "plan" else "{include: [['[role=tabpanel]']]}"  # the rest is the same
                found = page.evaluate(f"what => axe.run({where}, what)", what)["violations"]
                assert [(one["id"], one["nodes"][0]["html"]) for one in found] == [], (scheme, tab)
    finally:
        page.emulate_media(color_scheme="light")


def test_a_tab_to_which_one_comes_back_shows_what_it_showed(page, server):
    """Also what callbacks filled in: figures, tables and sentences."""
    visit(page, server, SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.click("#pin")
    address_has(page, "&a=")
    first: dict[str, str] = {}
    filled = {
        "plan": "#waterfall .bars .point",
        "space": "#table .ag-row",
        "pinned": "#pinned-numbers th",
        "weeks": "#weeks-losses .main-svg .point, #weeks-told *",
        "runs": "#accuracy *",
        "gallery": "#gallery-cards h2",
    }
    for _ in range(2):
        for tab in TABS:
            page.locator(f"[role=tab][id$='tab-{tab}']").click()
            if tab in filled:
                page.wait_for_selector(filled[tab])
            quiet(page)
            shown = page.locator("[role=tabpanel]:visible").inner_text()
            assert shown == first.setdefault(tab, shown), tab


def test_no_chart_reaches_beyond_its_card_however_often_something_changes(page, server):
    visit(page, server, SMALL)
    page.wait_for_selector("#utilization .js-plotly-plot .bars .point")
    for M in (7, 6, 5, 4):
        page.fill("#microbatches", str(M))
        shows_step_time(page, step_time("bubble", f"plan.microbatches={M}"))
        page.wait_for_function(f"({MISPLACED})().length === 0")
        quiet(page)
        assert page.evaluate(MISPLACED) == []
    page.click("#pin")
    page.get_by_role("tab", name="Space").click()
    page.wait_for_selector("#heatmap .heatmaplayer image", state="attached")
    for metric in ("bubble", "peak memory", "step time"):
        page.locator("#metric").get_by_text(metric, exact=True).click()
        quiet(page)
        assert page.evaluate(MISPLACED) == []
    page.locator("#heatmap .nsewdrag").first.click(position={"x": 10, "y": 10})
    address_has(page, "plan.microbatches%3D1")
    quiet(page)
    assert page.evaluate(MISPLACED) == []
    for tab in ("Side by side", "Runs", "Tour"):
        page.get_by_role("tab", name=tab).click()
        quiet(page)
        assert page.evaluate(MISPLACED) == []
    page.get_by_role("slider", name="knob of this stop").press("ArrowRight")
    quiet(page)
    assert page.evaluate(MISPLACED) == []
    page.get_by_role("tab", name="Plan").click()
    page.wait_for_selector("#utilization .js-plotly-plot .bars .point")  # drawn again
    drawn(page)


def test_on_a_narrow_page_the_knobs_come_when_asked_and_go_again(page, server):
    page.set_viewport_size({"width": 700, "height": 900})
    try:
        visit(page, server, SMALL)
        knobs = page.locator(".mantine-AppShell-navbar")  # however far it has been scrolled
        shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
        expect(knobs).not_to_be_in_viewport()
        page.get_by_role("tab", name="Space").click()  # nothing lies over it
        page.get_by_role("button", name="show or hide the knobs").click()
        expect(knobs).to_be_in_viewport()
        page.fill("#microbatches", "4")
        page.get_by_role("button", name="show or hide the knobs").click()
        expect(knobs).not_to_be_in_viewport()
        shows_step_time(page, step_time("bubble", "plan.microbatches=4"))
    finally:
        page.set_viewport_size({"width": 1440, "height": 1000})


def test_a_plan_that_was_left_on_another_tab_and_is_asked_for_again_is_drawn_again(page, server):
    visit(page, server, SMALL)
    drawn(page)
    page.get_by_role("tab", name="Space").click()
    page.fill("#microbatches", "4")
    shows_step_time(page, step_time("bubble", "plan.microbatches=4"))
    visit(page, server, SMALL)
    drawn(page)


def test_the_page_is_readable_in_light_and_dark_and_at_both_widths(page, server):
    visit(page, server, SMALL)
    drawn(page)
    try:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)"
            sign = ">" if scheme == "light" else "<"
            page.wait_for_function(f"() => {background}.map(Number).reduce((a, b) => a + b) {sign} 380")
            for width in (800, 1440):
                page.set_viewport_size({"width": width, "height": 1000})
                page.wait_for_function("() => document.documentElement.scrollWidth <= window.innerWidth + 1")
        page.set_viewport_size({"width": 800, "height": 1000})
        for tab in TABS:
            page.locator(f"[role=tab][id$='tab-{tab}']").click()
            expect(page.locator(f"[role=tabpanel][id$='panel-{tab}']")).to_be_visible()
            page.wait_for_function("() => document.documentElement.scrollWidth <= window.innerWidth + 1")
    finally:
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1440, "height": 1000})
