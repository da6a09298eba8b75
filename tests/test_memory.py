"""Memory over time: every byte has a beginning and an end, and the peaks grow as the papers say."""

from collections.abc import Container
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import ONE_STAGE, equal_stages, handing_on, layers, plan, random_plans, scenario

from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.step.memory import stage_bytes
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.step import MODEL_PARTS, RankTimeline

SAVED = 4.0
"""Bytes that a sample leaves on each of `equal_stages`."""


def largest(plan: Plan, stage: int, part: str) -> float:
    return float(simulate(plan).memory[stage].parts[part].max())


@given(random_plans(shared=True))
def test_memory_returns_to_its_start_after_a_step_and_is_never_negative(plan):
    for curve in simulate(plan).memory:
        for part, values in curve.parts.items():
            assert (values >= 0).all(), part
            if part not in ("parameters", "optimizer", "inputs"):
                assert values[-1] == 0, part
        assert curve.total[-1] == curve.parts["parameters"][0] + curve.parts["optimizer"][0] + curve.parts["inputs"][-1]
        assert (np.diff(curve.times) > 0).all()


@given(random_plans())
def test_peak_is_the_sum_of_its_parts_and_activations_are_what_is_not_the_model(plan):
    for curve in simulate(plan).memory:
        at_peak = curve.at_peak()
        assert curve.peak_bytes == pytest.approx(sum(at_peak.values()), abs=1)
        model = sum(at_peak[part] for part in MODEL_PARTS)
        assert curve.activation_bytes == pytest.approx(curve.peak_bytes - model, abs=1)


def replay(plan: Plan, stage: int, size: int) -> dict[str, float]:
    """The highest points of a stage's passes, by allocating and freeing tensor by tensor, layer by layer."""
    costs, weights = plan.profile.at(size), plan.profile.parameter_bytes
    freed = costs.freed_bytes if costs.freed_bytes is not None else np.zeros(len(weights))
    layers = list(range(len(weights)))[plan.stages[stage]]
    is_last = stage == plan.num_stages - 1
    saved = sum(costs.saved_bytes[layer] for layer in layers)

    def after(layer: int) -> dict[object, float]:
        """The tensors between a layer and the next."""
        skips = {skip: skip.bytes for skip in costs.skips if skip.made <= layer < skip.used}
        if layer < 0:
            return skips if stage > 0 else {}  # the model's own inputs are held for the whole step
        return skips | {layer: costs.output_bytes[layer] - sum(skips.values())}

    def sum_of(tensors: dict[object, float], but: Container[object]) -> float:
        return sum(amount for tensor, amount in tensors.items() if tensor not in but)

    came, goes = after(layers[0] - 1), after(layers[-1]) if not is_last else {}
    inputs = came | {skip: skip.bytes for skip in costs.skips if skip.made < layers[0] <= skip.used}
    held, forward, no_grad = 0.0, 0.0, 0.0
    for layer in layers:
        held += costs.saved_bytes[layer]
        forward = max(forward, held + costs.workspace_forward_bytes[layer])
        alive = sum_of((after(layer - 1) if layer > 0 else {}) | after(layer), but=inputs)
        no_grad = max(no_grad, alive + costs.workspace_no_grad_bytes[layer])
    peaks = {"first": 0.0, "later": 0.0}
    made = 0.0
    copied = sum(skip.bytes for skip in costs.skips if skip.made < layers[0] and skip.used > layers[-1])
    for layer in reversed(layers):
        # Gradients of what later stages use have been received.
        entering = sum_of(after(layer), but=goes) if layer < layers[-1] or is_last else 0.0
        there = after(layer - 1) if layer > 0 else {}
        handed_on = {skip for skip in costs.skips if skip.made < layer < skip.used}
        leaving = sum_of(there, but=handed_on)
        made += weights[layer]  # fp32: a gradient is as large as its weight
        less = freed[layer] if layer < layers[-1] else 0.0
        making = max(0.0, leaving + weights[layer] + costs.workspace_backward_bytes[layer] - less)
        adding = max(0.0, leaving + weights[layer] + costs.workspace_accumulate_bytes[layer] - less)
        peaks["first"] = max(peaks["first"], held + copied + entering + making + made - weights[layer])
        peaks["later"] = max(peaks["later"], held + copied + entering + adding)
        held -= costs.saved_bytes[layer]
    return {
        "forward_workspace": max(0.0, forward - saved),
        "no_grad_workspace": no_grad,
        "first_backward_workspace": max(0.0, peaks["first"] - saved),
        "backward_workspace": max(0.0, peaks["later"] - saved),
        "saved": saved,
        "input": sum(came.values()),
        "output": sum(goes.values()),
        "handed_on": sum(amount for tensor, amount in goes.items() if tensor in inputs),
    }


@given(random_plans(max_stages=6), st.data())
def test_highest_points_of_a_stage_equal_a_replay_layer_by_layer(plan, data):
    num_layers = plan.profile.num_layers
    K = data.draw(st.integers(1, num_layers))
    cuts = sorted(data.draw(st.permutations(range(1, num_layers)))[: K - 1])
    balance = tuple(b - a for a, b in pairwise([0, *cuts, num_layers]))
    merged = replace(plan, balance=balance, placement=tuple(range(K)), checkpoint=plan.checkpoint[:K])
    if data.draw(st.booleans()):
        merged = data.draw(handing_on(merged))
    for size in set(merged.sizes):
        found = stage_bytes(merged, size)
        for stage in range(K):
            for name, expected in replay(merged, stage, size).items():
                assert getattr(found, name)[stage] == pytest.approx(expected, abs=1e-6), name


def holdings(plan: Plan, timeline: RankTimeline) -> list[tuple[float, float, float]]:
    """(from, to, bytes) of everything a rank holds beside its model, one by one, straight from the definition."""
    (stage,), held = timeline.stages, []
    row = {(action.kind, action.microbatch): i for i, action in enumerate(timeline.actions)}
    again = [plan.recompute == "on_demand" and recomputed for recomputed in plan.recomputed(stage)]
    takers = ["R" if by_recompute else "B" for by_recompute in again]

    def posted(order: list[float], time: float) -> float:
        place = sorted(order).index(time)
        return 0.0 if plan.window is None or place < plan.window else sorted(order)[place - plan.window]

    taken = timeline.taken_s
    forwards = [float(taken[row["F", m]]) for m in range(plan.num_microbatches)]
    takes = [float(taken[row[takers[m], m]]) for m in range(plan.num_microbatches)]
    first_backward = min(float(timeline.start_s[row["B", m]]) for m in range(plan.num_microbatches))
    for m, size in enumerate(plan.sizes):
        costs = stage_bytes(plan, size)
        f, b = row["F", m], row["B", m]
        start, end, sent = timeline.start_s, timeline.end_s, timeline.send_end_s
        again = ("R", m) in row
        begin = start[row["R", m]] if again else start[f]
        held.append((begin, end[b], costs.saved[stage]))
        held.append((start[f], end[f], (costs.no_grad_workspace if again else costs.forward_workspace)[stage]))
        if again:
            held.append((begin, end[row["R", m]], costs.forward_workspace[stage]))
        is_first = start[b] == first_backward
        held.append(
            (start[b], end[b], (costs.first_backward_workspace if is_first else costs.backward_workspace)[stage])
        )
        if stage > 0:
            held.append((posted(forwards, forwards[m]), end[b], costs.input[stage]))
            held.append((end[b], sent[b], costs.input[stage]))
        if stage < plan.num_stages - 1:
            held.append((max(posted(takes, takes[m]), end[f]), end[b], costs.output[stage]))
            if again:
                held.append((end[f], sent[f], costs.output[stage]))
    return [(begin, end, round(amount)) for begin, end, amount in held]


@given(random_plans(schedules=ONE_STAGE))
def test_curve_equals_adding_up_everything_held_one_by_one(plan):
    step = simulate(plan)
    for timeline, curve in zip(step.ranks, step.memory, strict=True):
        held = holdings(plan, timeline)
        data = sum(values for part, values in curve.parts.items() if part not in MODEL_PARTS)
        for time, found in zip(curve.times, data, strict=True):
            expected = sum(amount for begin, end, amount in held if begin <= time < end)
            assert found == expected


@given(st.integers(1, 5), st.integers(1, 12))
def test_gpipe_without_checkpointing_holds_every_micro_batch(K, M):
    for stage in range(K):
        assert largest(equal_stages(K, M), stage, "activations") == M * SAVED


@given(st.integers(1, 5), st.integers(1, 12))
def test_peak_activations_of_gpipe_grow_with_m_at_fixed_micro_batch_size(K, M):
    fewer, more = (simulate(equal_stages(K, count)).memory for count in (M, M + 1))
    assert all(a.activation_bytes < b.activation_bytes for a, b in zip(fewer, more, strict=True))


@given(st.integers(1, 5), st.integers(1, 12), st.sampled_from([1, 2, 3]))
def test_1f1b_is_bounded_by_k_micro_batches_plus_the_window(K, M, window):
    made = equal_stages(K, M, schedule="1f1b", window=window)
    for stage, curve in enumerate(simulate(made).memory):
        assert curve.parts["activations"].max() <= min(M, K - stage) * SAVED
        assert curve.parts["inputs"].max() <= min(M, K - stage + window)


def test_checkpointing_holds_one_rematerialised_micro_batch_and_all_boundary_inputs():
    for mode in ("always", "except_last"):
        made = equal_stages(3, 8, checkpoint=mode)
        assert largest(made, 1, "activations") == SAVED
        assert largest(made, 1, "inputs") == 8.0


def test_checkpointed_memory_is_n_plus_l_over_k_times_n_over_m():
    """GPipe section 2.3: at a fixed batch N, more micro-batches shrink the second term only."""
    model = layers([1.0] * 8, [2.0] * 8, [1.0] * 8, [10.0] * 8)
    for M in (1, 2, 4, 8):
        made = plan(model, M, batch=8, stages=2, checkpoint="always", balance=[4, 4])
        assert largest(made, 1, "inputs") == 8
        assert largest(made, 1, "activations") == 4 * 10 * 8 / M


def test_gradients_appear_with_the_first_backward_and_go_with_the_update():
    made = plan(layers([1.0, 1.0], parameters=100), 2)
    step = simulate(made)
    curve, timeline = step.memory[0], step.ranks[0]
    held = curve.times[curve.parts["gradients"] > 0]
    first_backward = min(s for s, a in zip(timeline.end_s, timeline.actions, strict=True) if a.kind == "B")
    assert held[0] == first_backward
    assert curve.parts["gradients"].max() == 100
    assert curve.parts["optimizer"][0] == 200  # adam in fp32: two states of four bytes per parameter


def test_the_first_stage_holds_the_whole_mini_batch():
    data = {
        "model": {"kind": "transformer", "layers": 2, "hidden": 8, "heads": 2, "vocab": 100, "sequence": 16},
        "batch": 12,
        "cluster": {"device": "a100-80gb", "link": "nvlink3"},
        "plan": {"stages": 2, "microbatches": 3},
    }
    first, second = simulate(make_plan(scenario(data))).memory
    assert (first.parts["inputs"] == 12 * 16 * 8).all(), "token numbers of eight bytes"
    assert second.parts["inputs"][0] == 0


def test_posted_receives_are_memory_from_the_moment_they_are_posted():
    made = equal_stages(2, 8, window=3)
    stage1 = simulate(made).memory[1]
    assert stage1.times[0] == 0
    assert stage1.parts["buffers"][0] == 3.0


def test_a_transformer_stage_holds_what_korthikanti_counts():
    """One block per stage, classic attention: s b h (34 + 5 a s / h) bytes per micro-batch in flight."""
    s, h, a, n, M = 64, 128, 4, 2, 4
    data = {
        "model": {"kind": "transformer", "layers": 4, "hidden": h, "heads": a, "vocab": 100, "sequence": s},
        "batch": n * M,
        "cluster": {"device": "a100-80gb", "link": "nvlink3"},
        "plan": {"stages": 3, "microbatches": M, "checkpoint": "never", "balance": [2, 2, 3]},
    }
    data["model"]["attention"] = "classic"
    made = make_plan(scenario(data))
    assert largest(made, 1, "activations") == M * 2 * s * n * h * (34 + 5 * a * s / h)


def test_workspace_of_a_stage_is_the_highest_point_of_walking_through_its_layers():
    data = {
        "model": {"kind": "transformer", "layers": 2, "hidden": 8, "heads": 2, "vocab": 1000, "sequence": 4},
        "batch": 1,
        "dtype": "fp32",
        "cluster": {"device": "a100-80gb", "link": "nvlink3"},
        "plan": {"stages": 1, "microbatches": 1},
    }
    made = make_plan(scenario(data))
    costs, profile = stage_bytes(made, 1), made.profile.at(1)
    logits = 4 * 1000 * 4
    assert profile.output_bytes[-1] == logits
    # The head's forward without gradients: its input, its logits and as much again for the loss.
    assert costs.no_grad_workspace[0] == profile.output_bytes[-2] + logits + profile.workspace_no_grad_bytes[-1]
    # Its backward begins with everything saved: gradients of logits, input and 8000 weights, and the workspace.
    head = logits + profile.output_bytes[-2] + profile.workspace_backward_bytes[-1] + 8000 * 4
    assert costs.backward_workspace[0] == head
