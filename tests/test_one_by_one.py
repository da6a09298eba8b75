"""Layers measured one by one: the same figures, one layer at a time in memory, equal layers once."""

from functools import partial
from itertools import pairwise

import pytest
from plans import scenario

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

import torch.distributed as dist  # noqa: E402
from test_devices import MadeUp  # noqa: E402
from torch import nn  # noqa: E402

from gpipe_exec.engine.precision import lower  # noqa: E402
from gpipe_exec.layers import Workload, build_workload, convnet  # noqa: E402
from gpipe_exec.measure import worker  # noqa: E402
from gpipe_exec.measure.timing import LayerClock, filled, forms_before  # noqa: E402

SHAPE = {"kind": "transformer", "layers": 2, "hidden": 32, "heads": 2, "vocab": 60, "sequence": 8}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A process group of this process, and measurements that take no longer than they must."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(worker, "WARMUP_S", 0.0)
    monkeypatch.setattr(worker, "MEASURED_S", 0.0)
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


def scenario_of(dtype):
    cluster = {"device": "a100-80gb", "link": "nvlink3"}
    return scenario({"name": "test", "model": SHAPE, "batch": 4, "dtype": dtype, "cluster": cluster})


def columns(how, workload, lowered=None):
    return how(workload, 2, 2, CPU, LayerClock(CPU), lowered, lambda: None)


@pytest.mark.parametrize(("dtype", "in_fp32"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_bytes_are_those_of_all_layers_at_once_and_every_layer_has_its_times(dtype, in_fp32):
    lowered = torch.bfloat16 if dtype == "bf16" else None
    together, alone = (build_workload(scenario_of(dtype), on_meta=on_meta) for on_meta in (False, True))
    if lowered:
        lower(together.layers, lowered, in_fp32=in_fp32)
    expected, found = (
        columns(partial(worker._measure_size, whole=together.layers, num_members=1, parts=1), together, lowered),
        columns(partial(worker._measure_one_by_one, in_fp32=in_fp32), alone, lowered),
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name.endswith("bytes"):
            assert found[name] == values, name
        else:
            assert len(found[name]) == len(values) == 5
            takes = [[second > 0 for second in column] for column in (found[name], values)]
            assert name in ("spread", "backward_inputs_s") or takes[0] == takes[1], name
    assert all(tensor.is_meta for tensor in [*alone.layers.parameters(), *alone.layers.buffers()])
    assert {parameter.dtype for parameter in alone.layers.parameters()} == {torch.float32}


def test_one_layer_at_a_time_is_in_memory_and_equal_ones_are_measured_once():
    workload = build_workload(scenario_of("fp32"), on_meta=True)
    seen = []

    def note(layer, _):
        there = [index for index, one in enumerate(workload.layers) if not next(one.parameters()).is_meta]
        seen.append((list(workload.layers).index(layer), tuple(there)))

    for layer in workload.layers:
        layer.register_forward_pre_hook(note)
    columns(worker._measure_one_by_one, workload)
    real = [(index, there) for index, there in seen if there]
    assert dict.fromkeys(index for index, _ in real).keys() == {0, 1, 3, 4}  # a block stands for both
    assert all(there == (index,) for index, there in real)


def test_layers_with_values_are_back_where_they_were_and_unchanged():
    layers, sample, loss = convnet()
    workload = Workload(layers, lambda n: (sample(n)[0].bfloat16(), sample(n)[1]), loss)
    before = {name: tensor.clone() for name, tensor in workload.layers.named_parameters()}
    found = columns(worker._measure_one_by_one, workload, torch.bfloat16)
    assert len(found["forward_s"]) == 7
    for name, tensor in workload.layers.named_parameters():
        assert torch.equal(tensor, before[name]), name


def test_a_layer_that_needs_values_to_tell_its_shape_is_given_them():
    class Picks(nn.Module):
        def forward(self, x):
            return x[x[:, 0] > -100.0]

    layers = nn.Sequential(nn.Linear(3, 3), Picks(), nn.Linear(3, 2))
    forms = forms_before(layers, torch.ones(4, 3))
    assert [tuple(form.shape) for form in forms] == [(4, 3), (4, 3), (4, 3)]
    workload = Workload(layers, lambda n: (torch.ones(n, 3), torch.ones(n, 2)), nn.functional.mse_loss)
    assert len(columns(worker._measure_one_by_one, workload)["forward_s"]) == 3


def test_made_up_values_have_the_form_and_whole_numbers_are_zeros():
    with torch.device("meta"):
        value = (torch.empty(2, 3, dtype=torch.bfloat16), {"mask": torch.empty(2, dtype=torch.int64)})
    made, rest = filled(value)
    assert (made.dtype, made.shape) == (torch.bfloat16, (2, 3))
    assert rest["mask"].tolist() == [0, 0]


def test_layers_of_a_device_beside_the_host_are_timed_by_its_events_and_waited_for_once():
    device = MadeUp()
    clock = LayerClock(device)
    marks = []
    for seconds in (1.0, 2.0, 4.0):
        marks.append(clock.now())
        device.work(seconds)
    marks.append(clock.now())
    assert not device.is_done
    assert clock.seconds(list(pairwise(marks))) == [1.0, 2.0, 4.0]
    assert device.is_done
