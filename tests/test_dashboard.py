"""What the dashboard computes and refuses, without a browser: state, controls, form, long work, runs, archives."""

import base64
import gc
import gzip
import io
import os
import re
import threading
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest

pytest.importorskip("dash", reason="the page needs dash: gpipe-planner[dashboard]")

from dashboard.charts.campaigns import goodput_by_interval
from dashboard.charts.many_plans import facets, knee, time_memory
from dashboard.jobs import archive as uploads
from dashboard.jobs.archive import MAX_RUNS, unpack_run
from dashboard.jobs.runs import Jobs, Progress, run_directory
from dashboard.jobs.tasks import SupersededError, Task, Tasks
from dashboard.page import controls, form, ids, neighbourhood, state
from dashboard.page.app import LOCAL_NAMES, make_app
from dashboard.page.first_screen import WORDS, about, tiles
from dashboard.page.knobs import turned
from dashboard.page.neighbourhood import around
from dashboard.page.pins import differences, pinned, without
from dashboard.page.ranges import drawing, ranges
from dashboard.page.space_callbacks import left_out
from dashboard.page.state import (
    MAX_CELLS,
    Library,
    State,
    current,
    explore,
    on_screen,
    open_space,
    settled,
    text_of,
    with_plan,
)
from dashboard.page.weeks_callbacks import train
from gpipe_sim.base.files import InputError, parse_yaml
from gpipe_sim.base.units import format_seconds
from gpipe_sim.explain.predict import predict
from gpipe_sim.explain.waterfall import PARTS
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.program import shape_of
from gpipe_sim.scenario.reading import load_scenario, parse_scenario, shipped_scenarios
from gpipe_sim.search.advise import advise
from gpipe_sim.search.setups import Setup
from gpipe_sim.show import palette

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
    found = current(state, LIBRARY)
    assert found.step_time_s > 0
    assert len(tiles(found, None)) == 4
    assert f"on {found.plan.world} " in about(found)


def test_the_first_sentence_names_the_link_as_the_scenario_does():
    demo = State(scenario="demo", settings={"plan.stages": "8", "plan.microbatches": "16"})
    assert "on 8 h100-80gb over nvlink4 (450 GB/s), 64 sequences a step" in about(current(demo, LIBRARY))
    slower = demo.with_settings(cluster__link="{bandwidth: 25 GB/s, latency: 5 us}")
    assert "on 8 h100-80gb with 25.0 GB/s links, 64 sequences" in about(current(slower, LIBRARY))


def test_what_a_step_takes_time_for_has_words_and_a_colour():
    assert set(PARTS) <= set(WORDS)
    assert set(PARTS) == set(palette.BREAKDOWN)


def test_a_state_is_predicted_as_the_simulator_predicts_it():
    state = State.from_query(SMALL, "demo")
    (scenario,) = load_scenario(shipped_scenarios() / "bubble.yaml", "plan.microbatches=8")
    assert current(state, LIBRARY).step_time_s == predict(make_plan(scenario)).step_time_s


def test_turning_every_knob_changes_what_it_says():
    state = settled(State.from_query(SMALL, "demo"), LIBRARY)
    plan = current(state, LIBRARY).plan
    for knob, value, check in (
        ("ranks", 2, lambda p: p.num_stages == 2),
        ("stages-per-rank", 1, lambda p: p.stages_per_rank == 1),
        ("microbatches", 4, lambda p: p.num_microbatches == 4),
        ("batch", 16, lambda p: p.scenario.batch == 16),
        ("checkpoint", "never", lambda p: set(p.checkpoint) == {"never"}),
        ("recompute", "on_demand", lambda p: p.recompute == "on_demand"),
        ("schedule", "1f1b", lambda p: p.schedule == "1f1b"),
        ("replicas", 2, lambda p: p.replicas == 2),
        ("shard", "optimizer", lambda p: p.shard == "optimizer"),
        ("bandwidth", 9.0, lambda p: p.link(0).bandwidth == pytest.approx(1e9)),
        ("latency", -3.0, lambda p: p.link(0).latency == pytest.approx(1e-3)),
        ("overlap", False, lambda p: not p.scenario.cluster.overlap),
        ("jitter", 5, lambda p: p.scenario.cluster.jitter.cv == 0.05),
        ("device", "h100-80gb", lambda p: p.scenario.cluster.device.name == "h100-80gb"),
    ):
        assert check(current(turned(state, plan, knob, value), LIBRARY).plan), knob
    transformer = settled(State(scenario="checkpoint"), LIBRARY).with_settings(cluster__devices_per_node="8")
    plan = current(transformer, LIBRARY).plan
    assert current(turned(transformer, plan, "tensor", 2), LIBRARY).plan.world == 2 * plan.world


SPLITS = """
name: halves
model:
  kind: layers
  layers: [{name: layer, repeat: 16, forward: 1 ms, backward: 2 ms, backward_weights: 1 ms, output: 1 MB}]
batch: 16
cluster: {device: {memory: 16 GiB}, link: {bandwidth: 10 GB/s}}
plan: {stages: 4, microbatches: 8, checkpoint: never}
"""


@pytest.mark.parametrize("scenario", ["bubble", "interleaved", "replicas"])
def test_the_curve_of_a_knob_is_what_turning_it_comes_to(scenario):
    here = settled(State(scenario=scenario), LIBRARY)
    plan = current(here, LIBRARY).plan
    curves = dict(ranges(here, LIBRARY, Task("curves")))
    assert set(curves) >= set(ids.KNOBS) - {ids.STAGES_PER_RANK}
    assert (ids.STAGES_PER_RANK in curves) == (scenario == "interleaved")
    for knob, curve in curves.items():
        values = [point.value for point in curve]
        assert len(set(values)) == len(values)
        told = drawing(knob, curve, None)["label"]
        now = controls.shown(here, LIBRARY)[knob]  # of a link that is faster than its slider: the slider's end
        assert now is None or now in values
        for point in (curve[0], curve[-1]):
            there = here if point.value == now else turned(here, plan, knob, point.value)
            found = current(there, LIBRARY)
            assert (point.step_time_s, point.fits) == (pytest.approx(found.step_time_s), found.fits), (knob, point)
            assert format_seconds(point.step_time_s) in told


def test_knobs_keep_ranks_stages_and_schedule_consistent():
    """K stays when stages per rank or the schedule are chosen anew: the stages follow."""
    state = State(text=SPLITS)
    for knob, value, K, v, schedule in (
        ("schedule", "zb_v", 4, 2, "zb_v"),
        ("ranks", 2, 2, 2, "zb_v"),
        ("schedule", "1f1b", 2, 1, "1f1b"),
        ("ranks", 4, 4, 1, "1f1b"),
        ("schedule", "interleaved_1f1b", 4, 2, "interleaved_1f1b"),
        ("stages-per-rank", 4, 4, 4, "interleaved_1f1b"),
        ("schedule", "dualpipe_v", 4, 2, "dualpipe_v"),
        ("schedule", "auto", 4, 2, "auto"),
        ("schedule", "zb_h2", 4, 1, "zb_h2"),
    ):
        state = controls.steered(state, LIBRARY, {knob: value})
        plan = current(state, LIBRARY).plan
        assert (plan.num_ranks, plan.stages_per_rank, plan.schedule) == (K, v, schedule), (knob, value)
        shown = controls.shown(state, LIBRARY)
        assert (shown[ids.RANKS], shown[ids.STAGES_PER_RANK], shown[ids.SCHEDULE]) == (K, v, schedule)


def test_a_balance_of_the_file_gives_way_to_another_number_of_stages():
    state = State(text=SPLITS.replace("stages: 4", "balance: [3, 5, 4, 4]"))
    plan = current(controls.steered(state, LIBRARY, {ids.SCHEDULE: "zb_v"}), LIBRARY).plan
    assert (plan.num_ranks, plan.num_stages) == (4, 8)


def test_a_plan_with_several_stages_on_a_rank_becomes_the_plan_on_screen():
    state = State(text=SPLITS)
    there = current(controls.steered(state, LIBRARY, {ids.SCHEDULE: "zb_v"}), LIBRARY).plan
    assert current(with_plan(state, there, LIBRARY), LIBRARY).plan.placement == there.placement


def test_the_space_around_several_stages_on_a_rank_is_over_ranks():
    state = controls.steered(State(text=SPLITS), LIBRARY, {ids.SCHEDULE: "zb_v"})
    found = around(state, LIBRARY)
    assert {one.plan.num_ranks for one in found.plans} == {1, 2, 4, 8}
    assert {one.plan.stages_per_rank for one in found.plans} == {2}


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
    assert Setup.of(shown) == Setup.of(plan)
    assert (shown.balance, shown.checkpoint) == (plan.balance, plan.checkpoint)


def test_a_recommended_plan_replaces_replicas_shards_and_the_unit_of_recomputation():
    path = shipped_scenarios() / "bubble.yaml"
    (plan,) = map(make_plan, load_scenario(path, "plan={stages: 2, microbatches: 4, checkpoint: always}"))
    text = path.read_text().replace("[1, 2, 4, 8, 16, 32, 64]", "2")
    state = State(text=f"{text}  replicas: 2\n  shard: optimizer\n  recompute_unit: layer\n")
    assert current(state, LIBRARY).plan.replicas == 2
    shown = current(with_plan(state, plan, LIBRARY), LIBRARY)
    assert (shown.plan.replicas, shown.plan.shard, shown.plan.recompute_unit) == (1, "none", "stage")
    assert shown.step_time_s == predict(plan).step_time_s


def test_a_point_of_the_front_names_the_plan_that_a_click_chooses():
    found = explore(State.from_query(SMALL, "demo"), LIBRARY, {"plan.stages": [2, 4], "plan.microbatches": [4, 16]})
    for trace in time_memory(found).data:
        for seconds, (K, M, mode) in zip(trace.x, trace.customdata, strict=True):
            (same,) = [p for p in found if (p.plan.num_stages, p.plan.num_microbatches) == (K, M)]
            assert (same.plan.checkpoint[0], same.step_time_s) == (mode, pytest.approx(seconds / 1e3))


def test_up_to_four_plans_are_pinned_and_the_same_one_only_once():
    state = State(scenario="bubble")
    for M in (4, 8, 8, 16, 32, 64):
        state = pinned(state.with_settings(plan__microbatches=str(M)), LIBRARY)
    assert list(state.pins) == ["a", "b", "c", "d"]
    turned_back = state.with_settings(plan__stages="2").with_settings(plan__microbatches="32", plan__stages="4")
    assert pinned(replace(turned_back, pins=without(state.pins, "a")), LIBRARY).pins == without(state.pins, "a")
    assert State.from_query(state.to_query(), "demo").pins == state.pins
    assert [current(State.from_query(pin, "demo"), LIBRARY).plan.num_microbatches for pin in state.pins.values()] == [
        4,
        8,
        16,
        32,
    ]
    freed = pinned(replace(state, pins=without(state.pins, "b")).with_settings(plan__microbatches="64"), LIBRARY)
    assert list(freed.pins) == ["a", "b", "c", "d"]
    plans = {name: current(State.from_query(pin, "demo"), LIBRARY) for name, pin in freed.pins.items()}
    rows = {row[0]: row[1:] for row in differences(plans)}
    assert rows["micro-batches M"] == ["4", "64", "16", "32"]
    assert "schedule" not in rows
    assert rows["step time against A"][0] == ""


OTHER = {
    "batch": "256",
    "dtype": "fp32",
    "precision": "pure",
    "optimizer": "sgd",
    "plan.balance": "[17, 18]",
    "plan.placement": "[1, 0]",
    "plan.window": "all",
    "plan.recompute_unit": "layer",
    "plan.sequence_split": "false",
    "plan.order": "[tensor, pipeline, data]",
    "plan.backward": "fifo",
}


@pytest.mark.parametrize("field", [*form.PLAN, *form.TRAINING], ids=lambda field: field.id)
def test_whatever_two_pinned_plans_differ_in_is_in_their_table(field):
    one = State(scenario="replicas", settings={"plan.schedule": "gpipe", "plan.balance": "[16, 19]"})
    other = one.with_settings(**{field.path.replace(".", "__"): OTHER[field.path]})
    rows = {row[0] for row in differences({"a": current(one, LIBRARY), "b": current(other, LIBRARY)})}
    assert {"batch": "batch N"}.get(field.label, field.label) in rows


def test_exploring_leaves_out_what_makes_no_plan():
    state = State.from_query(SMALL, "demo")
    found = explore(state, LIBRARY, {"plan.microbatches": [1, 2, 10**6]})
    assert [prediction.plan.num_microbatches for prediction in found] == [1, 2]


def test_the_letters_in_a_heat_map_can_be_read_on_every_colour():
    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    here = settled(State.from_query(SMALL, "demo"), LIBRARY)
    found = around(here, LIBRARY)
    chart = facets(found.plans, "step_time_s", found.here)
    fits = next(trace for trace in chart.data if trace.name == "fits")
    assert fits.textfont.color == "black"
    colours = [colour for _, colour in chart.layout.coloraxis.colorscale]
    assert min((luminance(colour) + 0.05) / 0.05 for colour in colours) >= 4.5


def test_no_two_ticks_of_goodput_read_the_same():
    state = State(scenario="demo", settings={"plan.stages": "8", "plan.microbatches": "16"})
    campaign = train(state, LIBRARY, "1T")
    shares = [tried.goodput for tried in campaign.intervals]
    digits = re.fullmatch(r"\.(\d)%", goodput_by_interval(campaign).layout.yaxis.tickformat)[1]
    assert 10 ** -(2 + int(digits)) <= (max(shares) - min(shares)) / 2


def test_the_knee_is_where_more_bandwidth_no_longer_helps():
    assert knee([1, 2, 4, 8], [10.0, 5.0, 2.04, 2.0]) == 4
    assert knee([1, 2], [1.0, 1.0]) is None


def test_a_scenario_from_a_browser_reads_no_file_of_the_server(tmp_path):
    secret = tmp_path / "profile.json"
    secret.write_text("{}")
    order = tmp_path / "order.csv"
    order.write_text("0F0,0B0\n")
    base = (shipped_scenarios() / "bubble.yaml").read_text()
    for text in (
        f"{base}\nprofile: {secret}\n",
        f"name: x\nmodel: {{kind: profile, path: {secret}}}\nbatch: 1\n",
        "name: x\nmodel: {kind: python, function: os:getcwd}\nbatch: 1\n",
        base.replace("plan:\n", f"plan:\n  schedule: {order}\n"),
        base.replace("plan:\n", f"plan:\n  schedule: [gpipe, {order}]\n"),
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
            ("plan.schedule", str(order)),
            ("plan.schedule", f"[1f1b, {order}]"),
            ("plan", f"{{stages: 1, schedule: {order}}}"),
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
    values = before | {ids.RANKS: 2, ids.CHECKPOINT: "always"}
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
        ("form-plan-window", "all", lambda s: s.plan.window is None),
        ("form-plan-recompute-unit", "layer", lambda s: s.plan.recompute_unit == "layer"),
        ("form-plan-order", "[tensor, pipeline, data]", lambda s: s.plan.order == ("tensor", "pipeline", "data")),
        ("form-precision", "pure", lambda s: s.precision == "pure"),
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


def test_work_that_is_left_for_something_else_begins_anew_and_what_has_ended_is_kept():
    tasks, go_on = Tasks(), Event()

    def work(task: Task) -> str:
        go_on.wait()
        task.advance()
        return "done"

    left = tasks.ask("me", "moves", "here", work, patience_s=0)
    ended = tasks.ask("me", "space", "here", lambda task: "done", patience_s=30)
    tasks.leave("me", "moves", "space")
    go_on.set()
    assert left.ended.wait(30)
    assert not left.has_result
    again = tasks.ask("me", "moves", "here", work, patience_s=30)
    assert again is not left
    assert again.value() == "done"
    assert tasks.ask("me", "space", "here", work) is ended


def test_the_text_of_a_scenario_is_read_once_and_its_settings_go_into_copies():
    state = State(scenario="bubble", settings={"plan.microbatches": "8"})
    first = on_screen(state, LIBRARY)
    first.data["plan"]["microbatches"] = 99
    first.data["batch"] = 99
    assert on_screen(state, LIBRARY).data["plan"]["microbatches"] == 8
    assert on_screen(replace(state, settings={}), LIBRARY).data["batch"] == 64


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
    neighbourhood._known.clear()  # what another test has asked for is recalled at once
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
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
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


@pytest.mark.parametrize("at", range(0, 240, 12))
def test_a_damaged_archive_is_a_message(at, tmp_path):
    whole = archive({"plan.yaml": "format: gpipe-plan-1" * 9, "measured.json": "{}", "environment.json": "{}"})
    for damaged in (whole[:at], whole[:at] + b"\xff\xfe" + whole[at + 2 :], whole[:at] + whole[at + 7 :]):
        with pytest.raises(InputError):
            unpack_run(damaged, tmp_path, "x.zip")
    assert list(tmp_path.iterdir()) == []


def test_no_more_is_uploaded_than_there_is_room_for(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(MAX_RUNS - 2**20)  # without a byte on the disk
    with pytest.raises(InputError, match="no room for it: the runs here have 1023 MiB"):
        unpack_run(archive({"plan.yaml": " " * 2**21}), tmp_path, "x.zip")  # what it is unpacked, not compressed


def test_uploads_are_checked_one_after_the_other(tmp_path):
    """Each may take half a gigabyte for a moment."""
    with ThreadPoolExecutor(1) as pool:
        with uploads._one_at_a_time:
            asked = pool.submit(unpack_run, archive({"plan.yaml": ""}), tmp_path, "x.zip")
            with pytest.raises(TimeoutError):
                asked.result(timeout=0.2)
        with pytest.raises(InputError, match=r"measured.json: is missing"):
            asked.result(timeout=600)


def test_scripts_are_compressed_and_kept_by_the_browser(tmp_path):
    client = make_app(runs=tmp_path).server.test_client()
    page = client.get("/", headers={"Host": "localhost"}).text
    scripts = re.findall(r'src="(/[^"]+\.js[^"]*)"', page)
    largest = [path for path in scripts if "plotly" in path or "mantine" in path]
    assert largest
    for path in largest:
        plain = client.get(path, headers={"Host": "localhost"})
        small = client.get(path, headers={"Host": "localhost", "Accept-Encoding": "gzip"})
        assert gzip.decompress(small.data) == plain.data
        assert len(small.data) < 0.5 * len(plain.data)
        assert "max-age=31536000" in small.headers["Cache-Control"]


def test_a_page_for_others_answers_under_its_names_and_to_those_who_know_its_token(tmp_path):
    app = make_app(runs=tmp_path, hosts=(*LOCAL_NAMES, "lab.example"), token="a-token")
    client = app.server.test_client()
    here = {"base_url": "http://lab.example:8050"}
    assert client.get("/", **here).status_code == 403
    assert client.get("/?token=another", **here).status_code == 403
    assert client.post("/_dash-update-component", json={}, **here).status_code == 403
    assert client.get("/", base_url="http://evil.example").status_code == 403
    known = client.get("/?token=a-token", **here)
    assert (known.status_code, known.location) == (302, "/")
    assert "HttpOnly" in known.headers["Set-Cookie"]
    assert client.get("/", **here).status_code == 200
    assert client.get("/", headers={"Origin": "http://evil.example"}, **here).status_code == 403


@pytest.mark.parametrize("headers", [{"Host": "["}, {"Host": "[::1"}, {"Origin": "http://["}])
def test_headers_that_cannot_be_read_are_refused_politely(headers, tmp_path):
    answer = make_app(runs=tmp_path).server.test_client().get("/", headers=headers)
    assert answer.status_code in (400, 403)


def outputs_of(text: str) -> list[dict[str, str]] | dict[str, str]:
    """As the page names them in a request: one, or several of ``..a.value...b.value..``"""
    several = [dict(zip(("id", "property"), one.rsplit(".", 1), strict=True)) for one in text.strip(".").split("...")]
    return several if text.startswith("..") else several[0]


def test_a_request_that_was_made_up_is_answered_politely_and_without_a_traceback(tmp_path, capsys, monkeypatch):
    """Every callback of the page, with the same nonsense for everything that it takes."""
    tasks = Tasks()
    monkeypatch.setattr("dashboard.page.app.Tasks", lambda: tasks)
    client = make_app(runs=tmp_path).server.test_client()
    callbacks = [one for one in client.get("/_dash-dependencies").get_json() if not one["clientside_function"]]
    assert len(callbacks) > 10
    bodies: list[object] = [[], {}, {"output": 5}, {"output": "nothing.here"}]
    for value in (-1, [5], {"points": [{}]}, [{"run": 5}], "\ud800"):
        bodies += [
            {
                "output": one["output"],
                "outputs": outputs_of(one["output"]),
                "changedPropIds": ["{id}.{property}".format(**one["inputs"][0])],
                **{part: [{**given, "value": value} for given in one[part]] for part in ("inputs", "state")},
            }
            for one in callbacks
        ]
    for body in bodies:
        answer = client.post("/_dash-update-component", json=body)
        assert answer.status_code in (200, 204, 400), body
    assert client.get("/_dash-component-suites/a/b.js").status_code == 400
    assert "Traceback" not in capsys.readouterr().err
    for task in tasks._tasks.values():  # some of the nonsense is a question that takes a while
        task.superseded.set()
    for thread in threading.enumerate():
        if thread.name.endswith("(_run)"):
            thread.join()


def test_a_plan_too_large_for_the_page_is_refused_and_what_is_kept_is_bounded(monkeypatch):
    huge = State.from_query("?scenario=bubble&set=batch=1048576&set=plan.microbatches=1048576", "demo")
    with pytest.raises(InputError, match=f"expected at most {MAX_CELLS} here: use gpipe simulate"):
        current(huge, LIBRARY)
    monkeypatch.setattr(state, "KEPT_CELLS", 200)  # of plans that are as much smaller
    for microbatches in range(10, 20):
        current(State.from_query(f"?scenario=bubble&set=plan.microbatches={microbatches}", "demo"), LIBRARY)
    assert [kept.cells for kept in state._kept.values()] == [4 * 17, 4 * 18, 4 * 19]


def test_what_a_page_asked_for_last_is_not_kept_for_that(monkeypatch):
    """Fifty pages would keep fifty plans with their timelines, however little room there is for them."""
    monkeypatch.setattr(state, "KEPT_CELLS", 1)
    found = []
    for page in range(5):
        asked = State.from_query(f"?scenario=bubble&set=plan.microbatches={page + 20}", "demo")
        found.append(weakref.ref(current(asked, LIBRARY, f"page {page}")))
    gc.collect()
    assert [one() is not None for one in found] == [False] * 4 + [True]


def test_around_a_large_plan_others_as_large_are_left_out_with_a_word(monkeypatch):
    monkeypatch.setattr(state, "LARGE_CELLS", 50)
    monkeypatch.setattr(neighbourhood, "LARGE_CELLS", 50)
    monkeypatch.setattr(neighbourhood, "_known", type(neighbourhood._known)())
    monkeypatch.setattr(state, "_kept", type(state._kept)())  # what other tests have asked for before
    small, large = (State.from_query(f"?scenario=bubble&set=plan.microbatches={M}", "demo") for M in (8, 16))
    before = neighbourhood.around(small, LIBRARY)
    shape = shape_of(before.here.plan)
    assert not before.here_is_large
    assert shape in state.graph_of
    found = neighbourhood.around(large, LIBRARY)
    sizes = [one.plan.num_stages * one.plan.num_microbatches for one in found.plans]
    assert sorted(size for size in sizes if size > 50) == [64]
    assert max(size for size in sizes if size <= 50) == 32
    assert (found.links, found.here_is_large) == ([], True)
    assert found.here.kept_step is None
    assert shape not in state.graph_of, "what was kept before large work is forgotten"
    assert "only the one on screen" in str(left_out(found))


def test_large_plans_are_predicted_one_after_the_other_and_small_ones_meanwhile(monkeypatch):
    monkeypatch.setattr(state, "LARGE_CELLS", 30)
    small, large = (
        State.from_query(f"?scenario=bubble&set=plan.microbatches={n}&set=batch=63", "demo") for n in (7, 9)
    )
    with state._one_large, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(current, large, LIBRARY)
        assert current(small, LIBRARY).step_time_s > 0
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.2)
        state._one_large.release()
        assert asked.result(timeout=600).step_time_s > 0
        state._one_large.acquire()


def test_a_run_tells_its_phase_and_how_long_it_will_take(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dashboard.jobs.runs.time.monotonic", lambda: now[0])
    jobs = Jobs(tmp_path, allowed=True)

    def seen(done: int, at_s: float) -> str:
        now[0] = at_s
        return Progress(done, 7, "", "running", jobs._seconds_left("run", done, 7)).phase

    assert seen(0, 100) == "starting its processes"
    assert seen(1, 130) == "warming up, step 2 of 2"  # what the start took says nothing of a step
    assert seen(3, 134) == "measuring step 2 of 5, about 8.00 s left"
    assert seen(3, 135) == "measuring step 2 of 5, about 7.00 s left"
    assert seen(7, 142) == "comparing with the prediction"
    assert Progress(7, 7, "", "finished").phase == "finished"


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


def test_a_page_finds_the_run_that_one_before_it_has_left_and_stops_it(tmp_path):
    """Without waiting for the run to begin: it is one from the moment it is started."""
    plan = current(State.from_query("?scenario=checkpoint", "demo"), LIBRARY).plan
    killed = Jobs(tmp_path, allowed=True)
    name = killed.start(plan, "rehearse")
    jobs = Jobs(tmp_path, allowed=True)
    assert jobs.running() == name
    assert jobs.progress(name).state == "running"
    with pytest.raises(InputError, match="another run is under way"):
        jobs.start(plan, "rehearse")
    Jobs(tmp_path, allowed=False).stop(name)  # a page that may not run anything
    jobs.stop_all()  # one that ends, and has not started it
    assert jobs.running() == name
    jobs.stop(name)
    assert jobs.progress(name).state == "stopped"
    assert jobs.running() is None
    assert Jobs(tmp_path, allowed=True).progress(name).state == "failed", "nobody knows any more why it ended"
    killed.stop(name)  # which waits for it, as init would
    (tmp_path / f".{name}.pid").write_text(str(os.getpid()))
    assert Jobs(tmp_path, allowed=True).running() is None, "another process has its number now"
