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
from pathlib import Path

import pytest

pytest.importorskip("dash", reason="the page needs dash: gpipe-planner[dashboard]")

from playwright.sync_api import Page, expect
from werkzeug.serving import make_server

from dashboard.app import make_app
from gpipe_sim.compare import compare_run
from gpipe_sim.plan import make_plan
from gpipe_sim.planfile import load_plan, save_plan
from gpipe_sim.predict import predict
from gpipe_sim.runs import Measured, save_measured
from gpipe_sim.simulate import simulate
from gpipe_sim.sweep import load_scenario, shipped_scenarios
from gpipe_sim.units import format_seconds

SMALL = "?scenario=bubble&set=plan.microbatches=8"
expect.set_options(timeout=30_000)


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


@pytest.fixture(scope="module")
def browser_page(chromium) -> Iterator[Page]:
    """One page for all stories: what it has loaded once it need not load again."""
    context = chromium.new_context(viewport={"width": 1440, "height": 1000})
    yield context.new_page()
    context.close()


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
    browser_page.set_default_timeout(30_000)
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
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
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
    expect(page.locator("#problems")).to_contain_text("cluster.link.bandwidth")
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
    page.goto(server + SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.fill("#microbatches", "32")
    shows_step_time(page, step_time("bubble", "plan.microbatches=32"))
    address_has(page, "set=plan.microbatches%3D32")
    expect(page.locator("#number-bubble")).to_have_text("8.6%")
    expect(page.locator("#verdict")).not_to_be_empty()

    page.fill("#microbatches", "1000")
    wrong = page.locator(".mantine-NumberInput-root", has=page.locator("#microbatches"))
    expect(wrong).to_contain_text("expected at most")
    expect(page.locator("#problems")).to_contain_text("plan.microbatches")
    page.fill("#microbatches", "16")
    expect(wrong).not_to_contain_text("expected at most")


def test_two_knobs_turned_at_once_both_count(page, server):
    page.goto(server + SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.locator("#checkpoint").get_by_text("always").click()
    page.locator("#schedule").get_by_text("1f1b").click()
    address_has(page, "plan.checkpoint%3Dalways")
    address_has(page, "plan.schedule%3D1f1b")
    expect(page.locator("#checkpoint input[value=always]")).to_be_checked()
    expect(page.locator("#schedule input[value='1f1b']")).to_be_checked()


def test_the_critical_path_is_drawn_on_demand_and_stays_in_the_address(page, server):
    page.goto(server + SMALL)
    traces = "() => document.querySelector('#gantt .js-plotly-plot')?.data?.map(t => t.name) ?? []"
    page.wait_for_function(f"({traces})().includes('forward')")
    assert "critical path" not in page.evaluate(traces)
    page.get_by_role("switch", name="critical path").check(force=True)
    page.wait_for_function(f"({traces})().includes('critical path')")
    address_has(page, "critical=1")
    page.reload()
    page.wait_for_function(f"({traces})().includes('critical path')")
    expect(page.get_by_role("switch", name="critical path")).to_be_checked()


# --- the whole space -------------------------------------------------------------------------------------------------


def test_a_click_on_the_heat_map_or_a_row_of_the_table_makes_it_the_plan_on_screen(page, server):
    page.goto(server + SMALL + "#space")
    page.wait_for_selector("#heatmap .heatmaplayer image", state="attached")
    page.locator("#heatmap .nsewdrag").first.click(position={"x": 10, "y": 10})
    address_has(page, "plan.stages%3D4")  # the upper left corner: most stages, fewest micro-batches
    address_has(page, "plan.microbatches%3D1")
    shows_step_time(page, step_time("bubble", "plan.stages=4", "plan.microbatches=1"))

    page.locator("#table .ag-row[row-index='0'] .ag-cell[col-id=K]").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    address_has(page, "plan.stages%3D1&set=plan.microbatches%3D1&set=plan.checkpoint%3Dexcept_last")


def click_point(page: Page, chart: str, trace: int, point: int) -> dict:
    """With the mouse, in the middle of a marker; what the chart says of it."""
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
    page.goto(server + SMALL + "#space")
    K, M, mode = click_point(page, "front", 0, 0)["of"]
    address_has(page, f"plan.stages%3D{K}&set=plan.microbatches%3D{M}&set=plan.checkpoint%3D{mode}")
    shows_step_time(page, step_time("bubble", f"plan.stages={K}", f"plan.microbatches={M}", f"plan.checkpoint={mode}"))

    page.goto(server + "?scenario=bubble&set=plan.microbatches=2#space")
    M = round(click_point(page, "bubble-by-m", 0, 3)["x"])
    assert M == 8
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))

    page.goto(server + "?scenario=bubble&set=plan.microbatches=2#space")
    assert round(click_point(page, "memory-by-m", 2, 4)["x"]) == 16
    address_has(page, "plan.checkpoint%3Dalways")
    shows_step_time(page, step_time("bubble", "plan.microbatches=16", "plan.checkpoint=always"))

    page.goto(server + "?scenario=checkpoint&set=plan.microbatches=16#space")
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
    """A model of many layers on many devices: the search takes a few seconds, and its first state must be seen."""
    page.goto(server + "?scenario=demo&set=plan.stages=2&set=plan.microbatches=4#space")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#advice")).to_contain_text("Searching")
    page.locator("#overlap").uncheck(force=True)
    address_has(page, "cluster.overlap%3Dfalse")
    page.get_by_role("link", name="take this plan").click()
    address_has(page, "plan.balance")
    address_has(page, "cluster.overlap%3Dfalse")
    expect(page.locator("#advice")).not_to_contain_text("changed since")
    page.locator("#overlap").check(force=True)
    expect(page.locator("#advice")).to_contain_text("search again")


def test_two_plans_are_pinned_and_stand_on_one_axis(page, server):
    page.goto(server + SMALL)
    shows_step_time(page, step_time("bubble", "plan.microbatches=8"))
    page.click("#pin-a")
    address_has(page, "&a=")
    page.fill("#microbatches", "32")
    shows_step_time(page, step_time("bubble", "plan.microbatches=32"))
    page.click("#pin-b")
    address_has(page, "&b=")
    page.get_by_role("tab", name="Side by side").click()
    page.wait_for_selector("#gantt-b .js-plotly-plot")
    ranges = page.evaluate(
        "() => ['a','b'].map(n => document.querySelector(`#gantt-${n} .js-plotly-plot`).layout.xaxis.range[1])"
    )
    assert ranges[0] == ranges[1]
    expect(page.locator("#pinned-numbers")).to_contain_text(step_time("bubble", "plan.microbatches=8"))
    expect(page.locator("#pinned-numbers tr", has_text="B against A")).to_contain_text("-20.5%")  # 210 after 264 ms


# --- take it away ----------------------------------------------------------------------------------------------------


def test_what_is_downloaded_simulates_to_what_is_on_screen(page, server, tmp_path):
    def download(name: str, file: str) -> Path:
        with page.expect_download() as got:
            page.click(name)
        got.value.save_as(tmp_path / file)
        return tmp_path / file

    page.goto(server + SMALL)
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
    page.goto(server + "?scenario=bubble&set=plan.microbatches=4&set=plan.stages=2#runs")
    page.click("#run-start")
    expect(page.locator("#run-log")).to_contain_text(": finished", timeout=120_000)
    page.locator("#runs .ag-row").first.click()
    page.wait_for_selector("#compare-timelines .js-plotly-plot .barlayer .point")
    page.wait_for_selector("#accuracy-chart .scatterlayer .point")
    expect(page.locator("#accuracy")).to_contain_text("step time off by")
    (done,) = [path for path in runs.iterdir() if path.is_dir()]
    assert (done / "measured.json").is_file()


def test_a_run_is_stopped_by_its_button_with_all_its_processes(page, server, runs):
    def processes() -> list[str]:
        """Of runs in this test's folder: the launcher and its ranks."""
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        return [line.decode() for line in lines if str(runs).encode() in line]

    page.goto(server + "?scenario=checkpoint&set=plan.stages=2#runs")
    expect(page.locator("#run-stop")).to_be_disabled()
    page.click("#run-start")
    expect(page.locator("#run-log")).to_contain_text(": running")
    page.wait_for_timeout(2000)  # its ranks are starting or at work
    assert processes()
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
    page.goto(server + SMALL + "#runs")
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
    page.goto(server + "#tour")
    page.wait_for_selector("#tour-chart .js-plotly-plot")
    expect(page.locator("#tour-numbers")).to_contain_text("bubble 75.0%")
    page.get_by_role("slider", name="knob of this stop").press("ArrowLeft")
    expect(page.locator("#tour-numbers")).to_contain_text("bubble 66.7%")
    page.get_by_text("6. 1F1B").click()
    expect(page.locator("#tour-text")).to_contain_text("alternate")


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
    return {where: e.id || e.getAttribute('aria-label') || e.name || e.innerText?.slice(0, 30) || e.tagName, seen};
}"""
"""What has the focus, and whether it, or what is drawn in its place, looks different for that."""


@pytest.mark.parametrize("tab", ["plan", "space", "pinned", "runs", "tour", "scenario"])
def test_every_control_of_a_tab_has_a_name(page, server, tab):
    if tab == "plan":
        page.goto(server + "?scenario=demo&set=plan.stages=2&set=plan.microbatches=4")
    page.locator(f"[role=tab][id$='tab-{tab}']").click()
    expect(page.locator(f"[role=tabpanel][id$='panel-{tab}']")).to_be_visible()
    assert page.evaluate(NAMELESS) == []


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
    for wanted in ("scenario", "stages", "microbatches", "batch", "device", "overlap", "get-plan", "get-report"):
        assert wanted in names, names
    assert [one["where"] for one in visited if not one["seen"] and one["where"] != "BODY"] == []

    page.focus("#bandwidth [role=slider]")
    page.keyboard.press("ArrowLeft")
    address_has(page, "cluster.link%3D")
    page.get_by_role("button", name="Skip to the plan").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Space")).to_have_attribute("aria-selected", "true")
    address_has(page, "#space")


def test_the_page_is_readable_in_light_and_dark_and_at_both_widths(page, server):
    page.goto(server + SMALL)
    page.wait_for_selector("#gantt .js-plotly-plot .main-svg")
    try:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)"
            sign = ">" if scheme == "light" else "<"
            page.wait_for_function(f"() => {background}.map(Number).reduce((a, b) => a + b) {sign} 380")
            for width in (800, 1440):
                page.set_viewport_size({"width": width, "height": 1000})
                page.wait_for_function("() => document.documentElement.scrollWidth <= window.innerWidth + 1")
    finally:
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1440, "height": 1000})
