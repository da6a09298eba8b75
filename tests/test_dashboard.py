"""The dashboard in a real browser: each story that a person goes through, and what must not be possible."""

import base64
import io
import json
import re
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("dash", reason="the page needs dash: gpipe-planner[dashboard]")

from werkzeug.serving import make_server

from dashboard.app import make_app
from dashboard.archive import unpack_run
from dashboard.jobs import Jobs, run_directory
from dashboard.knobs import turned
from dashboard.state import Library, State, current, explore, open_space, settled, with_plan
from dashboard.sweeps import knee, time_memory
from gpipe_sim.advise import advise
from gpipe_sim.files import InputError
from gpipe_sim.plan import make_plan
from gpipe_sim.planfile import load_plan
from gpipe_sim.predict import predict
from gpipe_sim.sweep import load_scenario, shipped_scenarios
from gpipe_sim.units import format_seconds

LIBRARY = Library.of(shipped_scenarios())
SMALL = "?scenario=bubble&set=plan.microbatches=8"


# --- the state, without a browser ------------------------------------------------------------------------------------


def test_an_address_reproduces_its_state():
    state = State(
        scenario="bubble", settings={"plan.stages": "2", "cluster.link": "{bandwidth: 1 GB/s, latency: 5 us}"}
    )
    assert State.from_query(state.to_query(), "demo") == state
    own = State(text=(shipped_scenarios() / "bubble.yaml").read_text(), settings={"plan.microbatches": "4"})
    again = State.from_query(own.to_query(), "demo")
    assert (again.text, dict(again.settings)) == (own.text, dict(own.settings))
    assert State.from_query("", "demo").scenario == "demo"


@pytest.mark.parametrize("scenario", sorted(LIBRARY.files))
def test_every_scenario_that_is_offered_can_be_shown(scenario):
    state = settled(State(scenario=scenario), LIBRARY)
    assert current(state, LIBRARY).step_time_s > 0


def test_a_state_is_predicted_as_the_simulator_predicts_it():
    state = State.from_query(SMALL, "demo")
    (scenario,) = load_scenario(shipped_scenarios() / "bubble.yaml", "plan.microbatches=8")
    assert current(state, LIBRARY).step_time_s == predict(make_plan(scenario)).step_time_s


def test_turning_every_knob_changes_what_it_says():
    state = settled(State.from_query(SMALL, "demo"), LIBRARY)
    plan = current(state, LIBRARY).plan
    for knob, value, check in (
        ("stages", 2, lambda p: p.num_stages == 2),
        ("microbatches", 4, lambda p: p.num_microbatches == 4),
        ("batch", 16, lambda p: p.scenario.batch == 16),
        ("checkpoint", "never", lambda p: set(p.checkpoint) == {"never"}),
        ("recompute", "on_demand", lambda p: p.recompute == "on_demand"),
        ("schedule", "1f1b", lambda p: p.schedule == "1f1b"),
        ("bandwidth", 9.0, lambda p: p.link(0).bandwidth == pytest.approx(1e9)),
        ("latency", -3.0, lambda p: p.link(0).latency == pytest.approx(1e-3)),
        ("overlap", False, lambda p: not p.scenario.cluster.overlap),
        ("jitter", 5, lambda p: p.scenario.cluster.jitter.cv == 0.05),
        ("device", "h100-80gb", lambda p: p.scenario.cluster.device.name == "h100-80gb"),
    ):
        assert check(current(turned(state, plan, knob, value), LIBRARY).plan), knob


def test_a_recommended_plan_becomes_the_plan_on_screen():
    """Also one whose stages differ in what they recompute."""
    state = State(scenario="checkpoint", settings={"cluster.memory_reserve": "40 GiB", "plan.stages": "2"})
    best = advise(open_space(state, LIBRARY)).recommended
    shown = current(with_plan(state, best.plan), LIBRARY)
    assert best.plan.num_stages > 2, "what the knobs had fixed is open to the search"
    assert shown.plan.balance == best.plan.balance
    assert shown.plan.checkpoint == best.plan.checkpoint
    assert shown.step_time_s == pytest.approx(best.step_time_s, rel=1e-9)


def test_a_point_of_the_front_names_the_plan_that_a_click_chooses():
    found = explore(State.from_query(SMALL, "demo"), LIBRARY, {"plan.stages": [2, 4], "plan.microbatches": [4, 16]})
    for trace in time_memory(found).data:
        for seconds, (K, M, mode) in zip(trace.x, trace.customdata, strict=True):
            (same,) = [p for p in found if (p.plan.num_stages, p.plan.num_microbatches) == (K, M)]
            assert (same.plan.checkpoint[0], same.step_time_s) == (mode, pytest.approx(seconds / 1e3))


def test_exploring_leaves_out_what_makes_no_plan():
    state = State.from_query(SMALL, "demo")
    found = explore(state, LIBRARY, {"plan.microbatches": [1, 2, 10**6]})
    assert [prediction.plan.num_microbatches for prediction in found] == [1, 2]


def test_the_knee_is_where_more_bandwidth_no_longer_helps():
    assert knee([1, 2, 4, 8], [10.0, 5.0, 2.04, 2.0]) == 4
    assert knee([1, 2], [1.0, 1.0]) is None


def test_a_scenario_from_a_browser_reads_no_file_of_the_server(tmp_path):
    secret = tmp_path / "profile.json"
    secret.write_text("{}")
    base = (shipped_scenarios() / "bubble.yaml").read_text()
    for text in (
        f"{base}\nprofile: {secret}\n",
        f"name: x\nmodel: {{kind: profile, path: {secret}}}\nbatch: 1\n",
        "name: x\nmodel: {kind: python, function: os:getcwd}\nbatch: 1\n",
    ):
        with pytest.raises(InputError, match="files of the server"):
            current(State(text=text), LIBRARY)
    with pytest.raises(InputError, match="set in its text only"):
        current(State(text=base, settings={"profile": str(secret)}), LIBRARY)


def test_a_link_cannot_unpack_into_more_than_a_scenario_may_have():
    import zlib

    bomb = base64.urlsafe_b64encode(zlib.compress(b"a" * 10**8, 9)).decode()
    assert len(State.from_query(f"?text={bomb}", "demo").text) <= 200_000


# --- runs and archives -----------------------------------------------------------------------------------------------


def test_names_of_runs_cannot_leave_their_folder(tmp_path):
    for name in ("../etc", "a/b", ".hidden", "", "..", "/etc/passwd"):
        with pytest.raises(InputError):
            run_directory(tmp_path, name)


def archive(members: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, text in members.items():
            file.writestr(name, text)
    return stream.getvalue()


def test_members_of_an_archive_cannot_leave_the_runs_folder_and_nothing_is_left_of_a_bad_one(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    evil = archive({"../../evil.txt": "x", "../plan.yaml": "format: gpipe-plan-1", "measured.json": "{}"})
    with pytest.raises(InputError):
        unpack_run(evil, runs, "../../evil.zip")
    assert list(tmp_path.rglob("*")) == [runs]
    with pytest.raises(InputError, match="no zip file"):
        unpack_run(b"not a zip", runs, "x")


def test_nothing_runs_without_permission(tmp_path):
    plan = current(State.from_query(SMALL, "demo"), LIBRARY).plan
    with pytest.raises(InputError, match="--allow-run"):
        Jobs(tmp_path, allowed=False).start(plan, "rehearse")


# --- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(runs) -> Iterator[str]:
    app = make_app(runs=runs, allow_run=True)
    one = make_server("127.0.0.1", 0, app.server, threaded=True)
    thread = threading.Thread(target=one.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{one.server_port}/"
    one.shutdown()


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_request_from_another_page_or_for_another_name_is_refused(server):
    assert status(server) == 200
    assert status(server, Origin="http://evil.example") == 403
    assert status(server, Host="evil.example") == 403
    assert status(server, Origin=server.rstrip("/")) == 200


@pytest.fixture
def watched(chromium, server):
    """A page whose errors and requests are noted; none may go elsewhere."""
    page = chromium.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if not _local(request.url, server) else None)
    page.set_viewport_size({"width": 1440, "height": 1000})
    page.set_default_timeout(30_000)
    yield page
    page.close()
    assert errors == []


def _local(url: str, server: str) -> bool:
    return url.startswith((server, "data:", "blob:"))


def verdict_step(page) -> str:
    return page.locator("#number-step-time").inner_text()


def test_the_verdict_follows_the_knobs_as_the_simulator_says(watched, server):
    watched.goto(server + SMALL)
    watched.wait_for_selector("#gantt .js-plotly-plot")
    expected = {M: load_scenario(shipped_scenarios() / "bubble.yaml", f"plan.microbatches={M}")[0] for M in (8, 32)}
    texts = {M: format_seconds(predict(make_plan(one)).step_time_s) for M, one in expected.items()}
    watched.wait_for_function("text => document.querySelector('#number-step-time')?.innerText === text", arg=texts[8])
    watched.fill("#microbatches", "32")
    watched.wait_for_function("text => document.querySelector('#number-step-time')?.innerText === text", arg=texts[32])
    assert "set=plan.microbatches%3D32" in watched.url
    assert "8.6%" in watched.locator("#number-bubble").inner_text()


def test_a_mistake_is_told_beside_its_field(watched, server):
    watched.goto(server + SMALL)
    watched.wait_for_selector("#number-step-time")
    watched.fill("#microbatches", "1000")
    watched.wait_for_selector("text=/expected at most/")
    assert "plan.microbatches" in watched.locator("#problems").inner_text()


def test_a_click_on_the_heat_map_makes_it_the_plan_on_screen(watched, server):
    watched.goto(server + SMALL)
    watched.get_by_role("tab", name="Space").click()
    watched.wait_for_selector("#heatmap .heatmaplayer image", state="attached")
    watched.locator("#heatmap .nsewdrag").first.click(position={"x": 10, "y": 10})
    watched.wait_for_function("() => document.location.search.includes('plan.stages')")
    assert re.search(r"plan\.stages%3D\d+", watched.url)


def test_what_is_downloaded_simulates_to_what_is_on_screen(watched, server, tmp_path):
    watched.goto(server + SMALL)
    watched.wait_for_selector("#number-step-time")
    shown = verdict_step(watched)
    with watched.expect_download() as plan:
        watched.click("#get-plan")
    plan.value.save_as(tmp_path / "plan.yaml")
    assert format_seconds(predict(load_plan(tmp_path / "plan.yaml")).step_time_s) == shown
    with watched.expect_download() as scenario:
        watched.click("#get-scenario")
    scenario.value.save_as(tmp_path / "scenario.yaml")
    (point,) = load_scenario(tmp_path / "scenario.yaml")
    assert format_seconds(predict(make_plan(point)).step_time_s) == shown
    with watched.expect_download() as trace:
        watched.click("#get-trace")
    trace.value.save_as(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "gpipe simulate" in watched.locator("#commands").inner_text()


def test_two_plans_are_pinned_and_stand_on_one_axis(watched, server):
    watched.goto(server + SMALL)
    watched.wait_for_selector("#number-step-time")
    watched.click("#pin-a")
    watched.wait_for_function("() => document.location.search.includes('&a=')")
    watched.fill("#microbatches", "32")
    watched.wait_for_function("() => document.location.search.includes('microbatches%3D32')")
    watched.click("#pin-b")
    watched.wait_for_function("() => document.location.search.includes('&b=')")
    watched.get_by_role("tab", name="Side by side").click()
    watched.wait_for_selector("#gantt-b .js-plotly-plot")
    ranges = watched.evaluate(
        "() => ['a','b'].map(n => document.querySelector(`#gantt-${n} .js-plotly-plot`).layout.xaxis.range[1])"
    )
    assert ranges[0] == ranges[1]


def test_the_tour_shows_each_idea_with_a_knob(watched, server):
    watched.goto(server)
    watched.get_by_role("tab", name="Tour").click()
    watched.wait_for_selector("#tour-chart .js-plotly-plot")
    watched.wait_for_selector("text=/bubble 75.0%/")
    watched.get_by_text("6. 1F1B").click()
    watched.wait_for_selector("text=/alternate/")


def test_an_edited_scenario_is_applied_and_a_wrong_one_is_told(watched, server):
    watched.goto(server + SMALL)
    watched.get_by_role("tab", name="Scenario").click()
    watched.wait_for_function("() => document.querySelector('#editor').value.includes('name: bubble')")
    text = (shipped_scenarios() / "bubble.yaml").read_text()
    watched.fill("#editor", text.replace("name: bubble", "name: mine"))
    watched.click("#edit-apply")
    watched.wait_for_function("() => document.location.search.startsWith('?text=')")
    watched.fill("#editor", text.replace("batch:", "bach:"))
    watched.click("#edit-apply")
    watched.wait_for_selector("text=/did you mean/")


def test_a_run_is_started_followed_compared_and_listed(watched, server, runs):
    watched.goto(server + "?scenario=bubble&set=plan.microbatches=4&set=plan.stages=2")
    watched.get_by_role("tab", name="Runs").click()
    watched.click("#run-start")
    watched.wait_for_selector("text=/: finished/", timeout=120_000)
    watched.wait_for_selector("#runs .ag-row")
    watched.click("#runs .ag-row")
    watched.wait_for_selector("#compare-measured .js-plotly-plot")
    (done,) = [path for path in runs.iterdir() if path.is_dir()]
    assert (done / "measured.json").is_file()


def test_a_run_is_really_stopped(tmp_path):
    plan = current(State.from_query("?scenario=checkpoint", "demo"), LIBRARY).plan
    jobs = Jobs(tmp_path, allowed=True)
    name = jobs.start(plan, "rehearse")
    assert jobs.progress(name).state == "running"
    with pytest.raises(InputError, match="another run is under way"):
        jobs.start(plan, "rehearse")
    jobs.stop(name)
    assert jobs.progress(name).state == "failed"


def test_two_browsers_do_not_see_each_other(chromium, server):
    first, second = (chromium.new_context().new_page() for _ in range(2))
    first.goto(server + SMALL)
    first.wait_for_selector("#number-step-time")
    first.fill("#microbatches", "32")
    first.wait_for_function("() => document.location.search.includes('microbatches%3D32')")
    second.goto(server + SMALL)
    second.wait_for_selector("#number-step-time")
    assert second.input_value("#microbatches") == "8"


@pytest.mark.parametrize("width", [800, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_in_light_and_dark_and_at_both_widths(watched, server, width, scheme, tmp_path):
    watched.emulate_media(color_scheme=scheme)
    watched.set_viewport_size({"width": width, "height": 1000})
    watched.goto(server + SMALL)
    watched.wait_for_selector("#gantt .js-plotly-plot .main-svg")
    assert watched.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth + 1")
    background = watched.evaluate("() => getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background)[:3])) > 380
    assert light == (scheme == "light")
    watched.screenshot(path=str(tmp_path / f"{scheme}-{width}.png"))
