"""What the dashboard computes and refuses, without a browser: state, controls, form, long work, runs, archives."""

import base64
import io
import zipfile
from dataclasses import replace
from threading import Event

import pytest

pytest.importorskip("dash", reason="the page needs dash: gpipe-planner[dashboard]")

from dashboard import controls, form, ids
from dashboard.archive import unpack_run
from dashboard.jobs import Jobs, run_directory
from dashboard.knobs import turned
from dashboard.space import around
from dashboard.state import Library, State, current, explore, on_screen, open_space, settled, text_of, with_plan
from dashboard.sweeps import knee, time_memory
from dashboard.tasks import SupersededError, Task, Tasks
from gpipe_sim.advise import advise
from gpipe_sim.cuts import Frame
from gpipe_sim.files import InputError, parse_yaml
from gpipe_sim.plan import make_plan
from gpipe_sim.predict import predict
from gpipe_sim.sweep import load_scenario, parse_scenario, shipped_scenarios

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
    outlined = State(scenario="bubble", critical=True)
    assert State.from_query(outlined.to_query(), "demo") == outlined


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
    shown = current(with_plan(state, best.plan, LIBRARY), LIBRARY)
    assert best.plan.num_stages > 2, "what the knobs had fixed is open to the search"
    assert shown.plan.balance == best.plan.balance
    assert shown.plan.checkpoint == best.plan.checkpoint
    assert shown.step_time_s == pytest.approx(best.step_time_s, rel=1e-9)


@pytest.mark.parametrize(("stages", "placement"), [("2", "auto"), ("4", "[0, 2, 1, 3]")])
def test_a_recommended_plan_replaces_what_the_file_has_instead(stages, placement):
    """Lists from which it was chosen, and a placement of another number of stages."""
    path = shipped_scenarios() / "shared_nic.yaml"
    choices = f"plan.stages={stages}", f"plan.placement={placement}", "plan.window=1", "plan.backward=fifo"
    (plan,) = map(make_plan, load_scenario(path, *choices))
    state = State(text=f"{path.read_text()}  window: [1, all]\n  backward: [fifo, reverse]\n")
    shown = current(with_plan(state, plan, LIBRARY), LIBRARY).plan
    assert shown.scenario.swept == {}
    assert Frame.of(shown) == Frame.of(plan)
    assert (shown.balance, shown.checkpoint) == (plan.balance, plan.checkpoint)


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
    for base_state in (State(text=base), State(scenario="bubble")):
        for path, value in (
            ("profile", str(secret)),
            (" profile", str(secret)),
            ("model", f"{{kind: profile, path: {secret}}}"),
            ("model.kind", "python"),
            ("model.path", str(secret)),
        ):
            with pytest.raises(InputError, match="set in its text only"):
                current(replace(base_state, settings={path: value}), LIBRARY)


def test_a_link_cannot_unpack_into_more_than_a_scenario_may_have():
    import zlib

    bomb = base64.urlsafe_b64encode(zlib.compress(b"a" * 10**8, 9)).decode()
    assert len(State.from_query(f"?text={bomb}", "demo").text) <= 200_000


# --- controls and the form -------------------------------------------------------------------------------------------


def test_a_turn_whose_response_was_dropped_is_not_lost():
    """Two knobs turned before the server answered: both differ from what it last showed, so both count."""
    state = State.from_query(SMALL, "demo")
    before = controls.shown(state, LIBRARY)
    values = before | {ids.STAGES: 2, ids.CHECKPOINT: "always"}
    turned = controls.turned_since(values, before)
    plan = current(controls.steered(state, LIBRARY, turned), LIBRARY).plan
    assert (plan.num_stages, set(plan.checkpoint)) == (2, {"always"})


def test_controls_that_stand_for_an_older_address_do_not_overwrite_a_newer_one():
    """A click on the heat map changed the address; the knobs do not show that yet when another one is turned."""
    before = controls.shown(State.from_query(SMALL, "demo"), LIBRARY)
    clicked = State(scenario="bubble", settings={"plan.stages": "2", "plan.microbatches": "16"})
    turned = controls.turned_since(before | {ids.CHECKPOINT: "always"}, before)
    plan = current(controls.steered(clicked, LIBRARY, turned), LIBRARY).plan
    assert (plan.num_stages, plan.num_microbatches, plan.checkpoint[0]) == (2, 16, "always")


@pytest.mark.parametrize("scenario", sorted(LIBRARY.files))
def test_what_the_controls_show_is_no_turn_of_them(scenario):
    state = State(scenario=scenario)
    shown = controls.shown(state, LIBRARY)
    assert set(shown) == set(controls.CONTROLS)
    assert controls.turned_since(shown, shown) == {}


def test_the_form_shows_what_stands_in_the_scenario():
    shown = form.shown(parse_yaml((shipped_scenarios() / "demo.yaml").read_text(), "demo.yaml").data)
    assert shown["form-model-layers"] == 32
    assert shown["form-cluster-memory-reserve"] == "2 GiB"
    assert shown["form-cluster-link-bandwidth"] == "450 GB/s", "of a link by name, the catalogue's"
    assert shown["form-cluster-network-bandwidth"] == ""
    assert shown["form-cluster-overlap"] is True
    assert form.shown({"cluster": {"device": {"memory": "16 GiB"}}})["form-cluster-device"] == "{memory: 16 GiB}"


@pytest.mark.parametrize(
    ("field", "value", "check"),
    [
        ("form-model-layers", 40, lambda s: s.model.layers == 40),
        ("form-model-ffn", "", lambda s: s.model.ffn is None),
        ("form-model-attention", "classic", lambda s: s.model.attention == "classic"),
        ("form-cluster-device", "{memory: 16 GiB, compute: 1 TFLOP/s}", lambda s: s.cluster.device.memory == 2**34),
        (
            "form-cluster-link-bandwidth",
            "1 GB/s",
            lambda s: (s.cluster.link.bandwidth, s.cluster.link.latency) == (1e9, 5e-6),
        ),
        ("form-cluster-network-bandwidth", "2 GB/s", lambda s: s.cluster.network.bandwidth == 2e9),
        ("form-cluster-overlap", False, lambda s: not s.cluster.overlap),
        ("form-optimizer", "sgd", lambda s: s.optimizer == "sgd"),
    ],
)
def test_filling_in_a_field_sets_it_in_the_scenario_and_in_its_text(field, value, check):
    state = controls.steered(State(scenario="demo"), LIBRARY, {field: value})
    assert check(parse_scenario(on_screen(state, LIBRARY))[0])
    assert check(parse_scenario(parse_yaml(text_of(state, LIBRARY), "demo.yaml"))[0]), "the editor shows the same"
    shown = form.shown(on_screen(state, LIBRARY).data)
    assert shown[field] == value


@pytest.mark.parametrize(
    ("field", "path", "value"),
    [
        ("form-model-heads", "model.heads", 0),
        ("form-cluster-device", "cluster.device", "h10"),
        ("form-cluster-link-bandwidth", "cluster.link.bandwidth", "25"),
        ("form-cluster-memory-reserve", "cluster.memory_reserve", "2 G"),
        ("form-batch", "batch", 1.5),
        ("form-batch", "batch", ""),
    ],
)
def test_a_mistake_is_told_at_its_field_in_the_words_of_the_command_line(field, path, value):
    state = controls.steered(State(scenario="demo"), LIBRARY, {field: value})
    with pytest.raises(InputError) as page:
        current(state, LIBRARY)
    with pytest.raises(InputError) as command:
        load_scenario(shipped_scenarios() / "demo.yaml", f"{path}={value if value != '' else 'null'}")
    assert form.told(page.value.problems)[field] == command.value.problems[0].message
    assert controls.shown(state, LIBRARY)[field] == value, "what was typed stays"


# --- long work -------------------------------------------------------------------------------------------------------


def test_work_that_takes_longer_than_a_moment_tells_how_far_it_is_and_then_its_result():
    tasks, go_on = Tasks(), Event()

    def work(task: Task) -> str:
        task.total = 2
        task.advance()
        go_on.wait()
        return "done"

    task = tasks.ask("me", "space", 1, work)
    assert (task.ended.is_set(), task.done, task.total) == (False, 1, 2)
    go_on.set()
    assert tasks.ask("me", "space", 1, work, patience_s=30) is task
    assert task.value() == "done"


def test_newer_work_of_a_page_ends_the_older_and_leaves_other_pages_alone():
    tasks, go_on, other = Tasks(), Event(), Event()

    def work(task: Task, gate: Event) -> str:
        gate.wait()
        task.advance()
        return "done"

    old = tasks.ask("me", "space", "old", lambda task: work(task, go_on), patience_s=0)
    theirs = tasks.ask("you", "space", "old", lambda task: work(task, other), patience_s=0)
    new = tasks.ask("me", "space", "new", lambda task: "new", patience_s=30)
    go_on.set()
    other.set()
    assert old.ended.wait(30)
    with pytest.raises(SupersededError):
        old.value()
    assert new.value() == "new"
    assert tasks.ask("you", "space", "old", lambda task: "again", patience_s=30) is theirs
    assert theirs.value() == "done"


def test_a_search_and_the_space_around_a_plan_can_be_superseded():
    state = State(scenario="checkpoint", settings={"batch": "48"})
    for work in (
        lambda task: around(state, LIBRARY, task),
        lambda task: advise(open_space(state, LIBRARY), task.advance),
    ):
        task = Task("x")
        task.superseded.set()
        with pytest.raises(SupersededError):
            work(task)


def test_the_space_around_a_plan_advances_to_its_total():
    task = Task("x")
    found = around(State.from_query(SMALL, "demo"), LIBRARY, task)
    assert task.done == pytest.approx(task.total)
    assert {one.plan.num_stages for one in found.plans} == {1, 2, 4}
    assert len(found.links) == 21


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


def test_a_run_is_really_stopped(tmp_path):
    plan = current(State.from_query("?scenario=checkpoint", "demo"), LIBRARY).plan
    jobs = Jobs(tmp_path, allowed=True)
    name = jobs.start(plan, "rehearse")
    assert jobs.progress(name).state == "running"
    with pytest.raises(InputError, match="another run is under way"):
        jobs.start(plan, "rehearse")
    jobs.stop(name)
    assert jobs.progress(name).state == "stopped"
