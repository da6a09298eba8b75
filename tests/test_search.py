"""The search: exact where everything can be tried, and close to it where not."""

import gc
import itertools
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import layers, random_plans, scenario

import gpipe_sim.cuts
import gpipe_sim.search
from gpipe_sim.advise import advise, certainty, describe, remedies, sensitivities
from gpipe_sim.cuts import Frame
from gpipe_sim.evaluate import evaluate
from gpipe_sim.files import Document, InputError
from gpipe_sim.intervals import Intervals
from gpipe_sim.metrics import step_metrics
from gpipe_sim.partition import partition
from gpipe_sim.plan import Plan, make_plan, stage_costs
from gpipe_sim.predict import predict
from gpipe_sim.scenario import Scenario
from gpipe_sim.schedule import SCHEDULES
from gpipe_sim.search import Candidate, front, search
from gpipe_sim.simulate import simulate
from gpipe_sim.space import Space, space_of
from gpipe_sim.sweep import load_scenario, parse_scenario, shipped_scenarios


def problem(rng: np.random.Generator, **cluster: Any) -> Space:
    """A few uneven layers on up to three devices, with memory that is short or not, and links that matter or not."""
    layer = {
        "forward": lambda: f"{rng.uniform(0.5, 3)!r} ms",
        "backward": lambda: f"{rng.uniform(0.5, 6)!r} ms",
        "overhead": lambda: f"{float(rng.choice([0, 0.3]))!r} ms",
        "output": lambda: f"{rng.uniform(0.1, 4)!r} MB",
        "saved": lambda: f"{rng.uniform(4, 12)!r} MB",
        "parameters": lambda: f"{rng.uniform(0, 10)!r} MB",
    }
    layers = [{"name": f"l{i}"} | {key: make() for key, make in layer.items()} for i in range(rng.integers(3, 7))]
    memory = rng.choice([60, 120, 250, 1000])
    data: dict[str, Any] = {
        "name": "problem",
        "model": {"kind": "layers", "layers": layers},
        "batch": int(rng.choice([4, 5, 8])),
        "dtype": "fp32",
        "cluster": {
            "device": {"memory": f"{memory} MB", "compute": "1 TFLOP/s", "bandwidth": "100 GB/s"},
            "devices_per_node": 3,
            "link": {"bandwidth": f"{float(rng.choice([0.3, 1, 100]))!r} GB/s", "latency": "10 us"},
            "overlap": bool(rng.random() < 0.8),
            "slowdown": {1: 1.5} if rng.random() < 0.3 else {},
        }
        | cluster,
    }
    return space_of([scenario(data)])


def every_plan(space: Space) -> list[Plan]:
    found = gpipe_sim.search._Search(space)
    return [plan for frame in found.frames() for plan in found.possibilities(frame)]


def best_of_all(space: Space) -> float | None:
    """By trying out every plan there is."""
    plans = every_plan(space)
    fits = [
        metrics.step_time_s
        for plan, metrics in zip(plans, evaluate(plans), strict=True)
        if metrics.peak_memory_bytes.max() <= plan.memory_limit
    ]
    return min(fits, default=None)


def best_found(space: Space) -> float | None:
    return min((candidate.step_time_s for candidate in search(space) if candidate.fits), default=None)


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_a_small_space_is_solved_exactly(seed):
    space = problem(np.random.default_rng(seed))
    assert best_found(space) == best_of_all(space)


def test_a_space_too_large_to_enumerate_is_solved_nearly_exactly(monkeypatch):
    """Forbidden to enumerate, the search must come close to what enumeration finds."""
    gaps, missed = [], 0
    for seed in range(25):
        space = problem(np.random.default_rng(seed))
        best = best_of_all(space)
        monkeypatch.setattr(gpipe_sim.search, "ENUMERATED", -1)
        found = best_found(space)
        monkeypatch.undo()
        missed += found is None and best is not None
        if best is not None and found is not None:
            gaps.append(found / best - 1)
            assert gaps[-1] >= -1e-12, "nothing is better than the best"
    assert missed <= 1, "of cases in which some plan fits, only just, and it did not find it"
    assert np.mean(gaps) < 0.005
    assert max(gaps) < 0.05


@pytest.mark.parametrize("enumerated", [gpipe_sim.search.ENUMERATED, -1])
def test_layers_that_take_no_memory_are_searched_and_the_search_ends(monkeypatch, enumerated):
    """There is no plan with less memory than none, so the front is a single point."""
    monkeypatch.setattr(gpipe_sim.search, "ENUMERATED", enumerated)
    weightless = TRANSFORMER | {"model": layers([0.001] * 4, [0.002] * 4), "plan": {"schedule": "gpipe"}}
    (only,) = front(search(space_of([scenario(weightless)])))
    assert only.peak_bytes == 0
    assert only.plan.num_stages == 4


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_the_front_holds_no_plan_that_another_beats_in_both(seed):
    points = front(search(problem(np.random.default_rng(seed))))
    for earlier, later in itertools.pairwise(points):
        assert earlier.step_time_s <= later.step_time_s
        assert earlier.peak_bytes > later.peak_bytes


@settings(max_examples=5)
@given(st.integers(0, 10**6))
def test_the_fastest_cut_is_never_slower_than_the_most_even_one(seed):
    """The partition minimises the largest stage; the search minimises the step."""
    space = replace(problem(np.random.default_rng(seed)), microbatches=(4,), stages=(2, 3), checkpoints=("never",))
    best = min(candidate.step_time_s for candidate in search(space))
    for plan in {plan.num_stages: plan for plan in every_plan(space)}.values():
        slowdowns = [plan.slowdown(stage) for stage in range(plan.num_stages)]
        even = partition(stage_costs(plan.profile, plan.sizes, plan.checkpoint, slowdowns))
        assert best <= evaluate([replace(plan, balance=even)])[0].step_time_s * (1 + 1e-9)


TRANSFORMER = {
    "name": "small",
    "model": {"kind": "transformer", "layers": 12, "hidden": 1024, "heads": 16, "vocab": 32000, "sequence": 1024},
    "batch": 32,
    "cluster": {"device": "a100-80gb", "devices_per_node": 4, "link": {"bandwidth": "300 GB/s", "latency": "5 us"}},
}


def with_plan(**plan: Any) -> Space:
    return space_of([scenario(TRANSFORMER | {"plan": plan})])


def space_from(data: dict[str, Any]) -> Space:
    """Of a scenario with lists."""
    return space_of(list(parse_scenario(Document("s.yaml", data))))


def test_what_is_fixed_stays_and_what_is_left_out_is_searched():
    space = with_plan(stages=4, schedule="1f1b", checkpoint="always")
    assert (space.stages, space.schedules, space.checkpoints) == ((4,), ("1f1b",), ("always",))
    assert space.microbatches == tuple(range(1, 33))
    for candidate in search(space):
        assert candidate.plan.num_stages == 4
        assert candidate.plan.schedule == "1f1b"
        assert set(candidate.plan.checkpoint) == {"always"}
    free = with_plan()
    assert free.stages == (1, 2, 3, 4)
    assert free.checkpoints is None
    assert free.schedules == tuple(SCHEDULES)
    balanced = with_plan(balance=[4, 4, 4, 3], microbatches=8)
    assert {candidate.plan.balance for candidate in search(balanced)} == {(4, 4, 4, 3)}


def test_a_schedule_that_someone_adds_is_searched_too(monkeypatch):
    """With links that take long, 1f1b with twice the warm-up waits less than 1f1b, and `gpipe plan` finds out."""

    def eager(stage, num_stages, num_microbatches, backward):
        ahead = min(2 * (num_stages - 1 - stage), num_microbatches)
        order = [("F", m) for m in range(ahead)]
        for m in range(num_microbatches):
            order += [("F", m + ahead)] if m + ahead < num_microbatches else []
            order.append(("B", m))
        return iter(order)

    monkeypatch.setitem(SCHEDULES, "eager", eager)
    cluster = TRANSFORMER["cluster"] | {"link": {"bandwidth": "10 GB/s", "latency": "2 ms"}}
    found = search(space_of([scenario(TRANSFORMER | {"cluster": cluster, "plan": {"stages": 4, "microbatches": 16}})]))
    best = {
        name: min(candidate.step_time_s for candidate in found if candidate.plan.schedule == name)
        for name in ("1f1b", "eager")
    }
    assert best["eager"] < best["1f1b"]
    assert {candidate.plan.backward for candidate in found if candidate.plan.schedule == "eager"} == {"fifo"}


def test_stages_without_a_number_of_devices_are_a_mistake_at_its_line():
    cluster = {key: value for key, value in TRANSFORMER["cluster"].items() if key != "devices_per_node"}
    with pytest.raises(InputError, match=r"cluster.devices_per_node: is missing"):
        space_of([scenario(TRANSFORMER | {"cluster": cluster})])


def test_devices_and_links_of_different_speed_are_honoured():
    """A slow device gets fewer layers, and a slow edge is cut where little crosses."""
    slow = TRANSFORMER | {"cluster": TRANSFORMER["cluster"] | {"slowdown": {2: 2.0}}, "plan": {"stages": 4}}
    best = next(c for c in search(space_of([scenario(slow)])) if c.fits)
    assert best.plan.balance[2] < min(best.plan.balance[1], best.plan.balance[3])


def test_shared_nics_are_searched_with_the_simulator():
    cluster = {
        "device": "a100-80gb",
        "nodes": 2,
        "devices_per_node": 2,
        "link": {"bandwidth": "300 GB/s", "latency": "5 us"},
        "network": {"bandwidth": "5 GB/s", "latency": "15 us"},
    }
    data = TRANSFORMER | {"cluster": cluster, "plan": {"stages": 4, "microbatches": [4, 8], "placement": [0, 2, 1, 3]}}
    del data["plan"]["microbatches"]
    space = space_of([scenario(data | {"plan": data["plan"] | {"microbatches": 4, "checkpoint": "always"}})])
    candidates = search(space)
    assert candidates
    assert all(candidate.plan.shared_nics for candidate in candidates)


# --- advice --------------------------------------------------------------------------------------------------------


def test_the_reason_names_what_a_faster_plan_would_need():
    tight = TRANSFORMER | {"cluster": TRANSFORMER["cluster"] | {"memory_reserve": "78.5 GiB"}}
    advice = advise(space_of([scenario(tight)]))
    assert advice.fits
    assert "slower than the fastest, which fits only above" in advice.reason
    plenty = advise(with_plan())
    assert "the fastest of all, and it fits" in plenty.reason
    assert plenty.recommended.step_time_s <= advice.recommended.step_time_s
    assert "times as long" in plenty.naive_sentence


def test_a_recommendation_is_on_the_front_and_its_figures_are_the_simulators():
    advice = advise(with_plan(stages=[2, 4][1], microbatches=8))
    assert advice.recommended in advice.front
    assert predict(advice.recommended.plan).step_time_s == pytest.approx(advice.recommended.step_time_s, rel=1e-9)


def test_nothing_fits_is_told_with_changes_that_do_fit():
    cluster = TRANSFORMER["cluster"] | {"memory_reserve": "78.5 GiB", "devices_per_node": 2}
    space = space_of([scenario(TRANSFORMER | {"cluster": cluster})])
    advice = advise(space)
    assert not advice.fits
    assert "nothing fits in 1.50 GiB" in advice.reason
    told = list(remedies(space, advice.recommended))
    more = next(text for text in told if "stages instead of 2 would fit" in text)
    stages = int(more.split()[0])
    enough = TRANSFORMER | {"cluster": cluster | {"devices_per_node": stages}, "plan": {"stages": stages}}
    assert advise(space_of([scenario(enough)])).fits
    assert any(text.startswith("devices of") for text in told)


def test_with_jitter_the_odds_against_each_rival_are_told():
    jittery = TRANSFORMER | {
        "cluster": TRANSFORMER["cluster"] | {"jitter": {"cv": 0.1, "samples": 40}},
        "plan": {"stages": 4},
    }
    advice = advise(space_of([scenario(jittery)]))
    assert all(rival.beaten is not None and 0 <= rival.beaten <= 1 for rival in advice.rivals)
    assert "with the same luck" in certainty(advice, [])
    assert advice.rivals[0].margin >= 0


def test_without_jitter_the_margin_is_weighed_against_past_errors():
    advice = advise(with_plan())
    margin = advice.rivals[0].margin
    assert "not known" in certainty(advice, [])
    assert "less than the" in certainty(advice, [2 * margin + 0.01])
    assert "more than the" in certainty(advice, [margin / 2])


def test_sensitivities_name_the_bottleneck_and_where_the_best_plan_changes():
    slow_links = TRANSFORMER["cluster"] | {"link": {"bandwidth": "2 GB/s", "latency": "5 us"}, "slowdown": {1: 1.5}}
    one = scenario(TRANSFORMER | {"cluster": slow_links, "plan": {"stages": 4, "balance": [4, 4, 4, 3]}})
    sentences = list(sensitivities(advise(space_of([one]))))
    assert "stage 1" in sentences[0]
    assert any(text.startswith("With links") for text in sentences)


def test_a_plan_is_described_in_a_few_words():
    one = make_plan(
        scenario(
            TRANSFORMER
            | {
                "plan": {
                    "stages": 4,
                    "microbatches": 8,
                    "checkpoint": {"per_stage": ["always", "always", "never", "always"]},
                }
            }
        )
    )
    assert describe(one) == "K=4, M=8, gpipe, recompute stages 0-1, 3"


# --- never worse than what anybody would find by hand -----------------------------------------------------------------


def choices(path: Path) -> list[list[Scenario]]:
    """The scenario's points, those together between which the planner may choose."""
    found: dict[str, list[Scenario]] = {}
    for point in load_scenario(path):
        given = {field: value for field, value in point.swept.items() if not field.startswith("plan.")}
        found.setdefault(repr(given), []).append(point)
    return list(found.values())


@pytest.mark.parametrize("path", sorted(shipped_scenarios().glob("*.yaml")), ids=lambda path: path.stem)
def test_the_planner_is_never_worse_than_a_sweep_of_the_same_scenario(path):
    for points in choices(path):
        swept = [Candidate(plan, step_metrics(simulate(plan))) for plan in map(make_plan, points)]
        best = min((c.step_time_s for c in swept if c.fits), default=np.inf)
        found = min((c.step_time_s for c in search(space_of(points)) if c.fits), default=np.inf)
        assert found <= best * (1 + 1e-9)


def test_more_stages_than_groups_of_layers_are_searched_too():
    """A very long model is cut between groups of layers at first, but never between fewer than there are stages."""
    (point,) = load_scenario(
        shipped_scenarios() / "gpipe_83b9.yaml",
        "cluster.devices_per_node=400",
        "plan.stages=400",
        "plan.microbatches=4",
        "plan.schedule=gpipe",
    )
    found = search(space_of([point]))
    assert {candidate.plan.num_stages for candidate in found} == {400}
    assert found[0].step_time_s <= predict(make_plan(point)).step_time_s * (1 + 1e-9)


def test_a_given_cut_is_searched_for_every_number_of_micro_batches(monkeypatch):
    monkeypatch.setattr(gpipe_sim.search, "ENUMERATED", -1)
    space = with_plan(balance=[4, 4, 4, 3])
    best = min((c for c in search(space) if c.fits), key=lambda c: c.step_time_s)
    assert best.plan.balance == (4, 4, 4, 3)
    plans = [replace(best.plan, num_microbatches=M) for M in range(2, 33)]
    assert best.step_time_s <= min(metrics.step_time_s for metrics in evaluate(plans)) * (1 + 1e-9)


def test_an_automatic_cut_in_a_list_of_cuts_is_any_cut():
    given = space_from(TRANSFORMER | {"plan": {"stages": 4, "balance": [[9, 2, 2, 2], "auto"]}})
    assert best_found(given) == best_found(with_plan(stages=4))


@pytest.mark.parametrize(
    ("field", "values"),
    [("window", [1, "all"]), ("backward", ["fifo", "reverse"]), ("placement", [[0, 1, 2, 3], [3, 1, 2, 0]])],
)
@pytest.mark.parametrize("enumerated", [gpipe_sim.search.ENUMERATED, -1])
def test_the_best_of_a_list_is_chosen(monkeypatch, enumerated, field, values):
    monkeypatch.setattr(gpipe_sim.search, "ENUMERATED", enumerated)
    cluster = TRANSFORMER["cluster"] | {"link": {"bandwidth": "2 GB/s", "latency": "5 us"}, "slowdown": {3: 1.3}}
    plan = {"stages": 4, "microbatches": 8, "schedule": "gpipe", "checkpoint": "always"}
    data = TRANSFORMER | {"cluster": cluster, "batch": 30}
    best = [best_found(space_of([scenario(data | {"plan": plan | {field: value}})])) for value in values]
    assert min(best) < max(best)
    for order in (values, values[::-1]):
        space = space_from(data | {"plan": plan | {field: order}})
        assert best_found(space) == min(best)
    assert space.scenario.swept == {}


# --- cuts -------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_that_stages_are_tried_only_up_to_a_longest_changes_no_promise(seed):
    """Layers of very different costs make long stages of cheap ones; what a stage beyond the longest could do better
    must be noticed."""
    rng = np.random.default_rng(seed)
    seconds = rng.lognormal(0, 2, rng.integers(8, 40)).round(3)
    saved = rng.lognormal(0, 2, len(seconds)).round(3) * 1e6
    cluster = TRANSFORMER["cluster"] | {"devices_per_node": 8, "slowdown": {1: 1.5} if rng.random() < 0.3 else {}}
    model = layers(seconds.tolist(), (2 * seconds).tolist(), saved=saved.tolist(), parameters=1e6)
    data = TRANSFORMER | {"model": model, "cluster": cluster, "batch": 8}
    searcher = gpipe_sim.search._Search(space_of([scenario(data)]))
    limit = float(rng.choice([saved.max() * 3, saved.sum() * 8, np.inf]))

    def promised() -> dict[Frame, tuple[float, tuple[int, ...], tuple[str, ...]]]:
        plans = [(promise.step_time_s, promise.plan()) for promise in searcher.cutter.promises(limit)]
        assert all(before[0] <= after[0] * (1 + 1e-12) for before, after in itertools.pairwise(plans))
        return {Frame.of(plan): (seconds, plan.balance, plan.checkpoint) for seconds, plan in plans}

    found = promised()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpipe_sim.cuts, "_LONGER", 10**6)
        assert found == promised()


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_a_promised_cut_has_the_smallest_bottleneck(seed):
    """Where nothing is sent and memory is plenty, by trying out every cut."""
    rng = np.random.default_rng(seed)
    seconds = rng.lognormal(0, 1, 9).round(3)
    cluster = TRANSFORMER["cluster"] | {
        "slowdown": {2: 1.5} if rng.random() < 0.5 else {},
    }
    plan = {"stages": 4, "microbatches": 4}
    data = TRANSFORMER | {"model": layers(seconds.tolist()), "cluster": cluster, "plan": plan}
    searcher = gpipe_sim.search._Search(space_of([scenario(data)]))
    for promise in searcher.cutter.promises(np.inf):
        cut = promise.plan()
        cuts = [tuple(np.diff([0, *inner, 9]).tolist()) for inner in itertools.combinations(range(1, 9), 3)]
        bottlenecks = [replace(cut, balance=balance).busy_s.max() for balance in cuts]
        assert cut.busy_s.max() == pytest.approx(min(bottlenecks), rel=1e-9)


@given(random_plans())
def test_no_stage_is_ruled_out_that_the_evaluator_finds_to_fit(plan):
    """What the tables count is a lower bound of the peak; where the largest micro-batches come last, about that."""
    assume(plan.backward == "fifo" or len(set(plan.sizes)) == 1)
    searcher = gpipe_sim.search._Search(replace(space_of([plan.scenario]), stages=(plan.num_stages,)))
    places = searcher.cutter._places(Frame.of(plan), None)
    cuts = tuple(range(plan.profile.num_layers + 1))
    intervals = Intervals(plan.profile, plan.scenario.optimizer, cuts, [plan.sizes], plan.profile.num_layers)
    metrics = step_metrics(simulate(plan))
    for stage, (place, mine) in enumerate(zip(places, plan.stages, strict=True)):
        peak = metrics.peak_memory_bytes[plan.ranks.index(plan.placement[stage])] + 9  # of rounding to whole bytes
        table = intervals.stage(place._replace(mode=plan.checkpoint[stage]), peak)
        assert table.seconds[0, mine.stop - mine.start - 1, mine.start] < np.inf


def test_a_search_leaves_no_tables_behind():
    """They may be large, and a dashboard searches all day."""
    searcher = gpipe_sim.search._Search(with_plan())
    searcher.ask(np.inf)
    made = next(searcher.cutter.promises(np.inf)).plan.args[1]  # type: ignore[attr-defined]
    assert isinstance(made, Intervals)
    tables = weakref.ref(made)
    del searcher, made
    gc.collect()
    assert tables() is None


def test_sentences_about_very_many_stages_are_short():
    model = layers(np.linspace(0.010, 0.012, 60).tolist(), np.linspace(0.02, 0.03, 60).tolist(), parameters=1e6)
    plan = {"stages": 40, "microbatches": 8, "schedule": "gpipe", "checkpoint": "never"}
    cluster = TRANSFORMER["cluster"] | {"devices_per_node": 40}
    sentences = list(
        sensitivities(advise(space_from(TRANSFORMER | {"model": model, "cluster": cluster, "plan": plan})))
    )
    assert "24 others" in sentences[0]
    assert max(map(len, sentences)) < 600
