"""Layers from the meta device: only a rank's own have memory, and what is in it does not depend on the cut."""

import pytest
from plans import layers, plan, scenario

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from torch import nn  # noqa: E402

from gpipe_exec import Pipeline  # noqa: E402
from gpipe_exec.engine.materialize import dematerialize, materialize  # noqa: E402
from gpipe_exec.layers import build_workload, transformer  # noqa: E402
from gpipe_sim.scenario.schema import Transformer  # noqa: E402

SHAPE = {"kind": "transformer", "layers": 3, "hidden": 12, "heads": 3, "vocab": 31, "sequence": 7}
CPU = torch.device("cpu")
VARIANTS = [{}, {"tied": True}, {"positions": "rotary", "norm": "rms"}, {"positions": "learned", "tied": True}]


def on_meta(shape):
    with torch.device("meta"):
        return transformer(Transformer(**SHAPE | shape)).layers


def names(made):
    return [str(index) for index in range(len(made))]


def state_of(made, own):
    return {
        f"{index}.{name}": tensor
        for index in own
        for name, tensor in [*made[index].named_parameters(), *made[index].named_buffers()]
    }


@pytest.mark.parametrize("shape", VARIANTS)
def test_weights_do_not_depend_on_the_cut_also_where_they_are_shared(shape):
    whole = on_meta(shape)
    assert materialize(whole, names(whole), range(6), CPU)
    expected = state_of(whole, range(6))
    for own in ([0, 1], [2, 3], [4, 5], [5], [0, 5]):
        mine = on_meta(shape)
        materialize(mine, names(mine), own, CPU)
        for name, tensor in state_of(mine, own).items():
            assert torch.equal(tensor, expected[name]), (own, name)
        others = [index for index in range(6) if index not in own]
        shared = {id(tensor) for tensor in state_of(mine, own).values()}
        assert all(t.is_meta or id(t) in shared for t in state_of(mine, others).values())
        if shape.get("tied"):
            assert mine[0].tokens.weight is mine[5].weight


def test_the_same_seed_gives_the_same_weights_and_layers_that_are_alike_different_ones():
    one, two, other = (on_meta({}) for _ in range(3))
    for made, seed in ((one, 0), (two, 0), (other, 1)):
        materialize(made, names(made), range(6), CPU, seed)
    assert torch.equal(one[1].up.weight, two[1].up.weight)
    assert not torch.equal(one[1].up.weight, one[2].up.weight)
    assert not torch.equal(one[1].up.weight, other[1].up.weight)


@pytest.mark.parametrize("shape", VARIANTS)
def test_what_is_computed_from_a_tables_shape_is_there(shape):
    real, made = transformer(Transformer(**SHAPE | shape)).layers, on_meta(shape)
    materialize(made, names(made), range(6), CPU)
    for name, buffer in real.named_buffers():
        assert torch.equal(buffer, made.get_buffer(name)), name


def test_materializing_leaves_random_states_and_layers_with_values_alone():
    real = transformer(Transformer(**SHAPE)).layers
    before, state = state_of(real, range(6)), torch.random.get_rng_state()
    assert not materialize(real, names(real), range(6), CPU)
    made = on_meta({})
    materialize(made, names(made), range(6), CPU)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(tensor is state_of(real, range(6))[name] for name, tensor in before.items())


def test_a_module_that_cannot_initialise_itself_is_named():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(3, 3), Own())
    materialize(made, ["0", "1"], [0], CPU)
    with pytest.raises(ValueError, match=r"1 \(Own\) was built on the meta device and has no reset_parameters"):
        materialize(made, ["0", "1"], [1], CPU)


def test_a_layer_can_let_go_of_its_memory_again():
    made = on_meta({"tied": True})
    materialize(made, names(made), [1, 5], CPU)
    dematerialize(made, [1, 5])
    assert made[0].tokens.weight is made[5].weight
    assert all(tensor.is_meta for tensor in state_of(made, range(6)).values())


def test_a_pipeline_trains_what_it_materialises_and_a_scenarios_model_is_the_same_for_every_plan():
    given = {"name": "test", "model": SHAPE, "batch": 4, "dtype": "fp32"}
    given["cluster"] = {"device": "a100-80gb", "link": "nvlink3"}
    workload = build_workload(scenario(given), on_meta=True)
    assert all(parameter.is_meta for parameter in workload.layers.parameters())
    planned = plan(layers([1.0] * 6, [2.0] * 6), 2, batch=4, stages=1)
    pipe = Pipeline(workload.layers, planned, workload.loss)
    loss = pipe.step(*workload.sample(4))
    assert 2.0 < float(loss) < 5.0
    expected = on_meta({})
    materialize(expected, names(expected), range(6), CPU)
    for ours, theirs in zip(pipe.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
