"""Split backwards: two halves that are together what the whole is, to the last bit where the arithmetic is the same."""

import copy
import gc
import random
import weakref
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gpipe_exec.devices.allocator import bytes_of_parts, storage_bytes, trace_bytes  # noqa: E402
from gpipe_exec.engine.messages import flatten, wants_gradient  # noqa: E402
from gpipe_exec.engine.split import Halves  # noqa: E402
from gpipe_exec.engine.stage import Stage  # noqa: E402
from gpipe_exec.layers import mlp, transformer  # noqa: E402
from gpipe_exec.measure.worker import memory_of_layers  # noqa: E402
from gpipe_sim.scenario.schema import Transformer  # noqa: E402

WIDTH = 6
CPU = torch.device("cpu")


class Doubled(torch.autograd.Function):
    """2 x w, as people write their own operations: it computes every gradient and may run once."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.runs = 0
        return 2 * x @ w

    @staticmethod
    def backward(ctx, gradient):
        ctx.runs += 1
        assert ctx.runs == 1
        x, w = ctx.saved_tensors
        assert ctx.saved_tensors[0] is not None
        return 2 * gradient @ w.T, 2 * x.T @ gradient


class Of(nn.Module):
    """A module from a function of its input and of what is given by name: parameters and modules."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def square():
    return nn.Parameter(torch.randn(WIDTH, WIDTH))


def linear():
    return nn.Linear(WIDTH, WIDTH)


def frozen(module):
    return module.requires_grad_(False)


def shared_sequence():
    one = nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.GELU())
    return nn.Sequential(one, linear(), one, nn.Tanh(), one)


def tied_lookup(m, x):
    return functional.linear(torch.tanh(m.table(x)), m.table.weight)


MODULES = {
    "linear": linear,
    "deep": lambda: nn.Sequential(linear(), nn.GELU(), linear(), nn.LayerNorm(WIDTH), nn.ReLU(), linear()),
    "no parameters": lambda: nn.Sequential(nn.GELU(), nn.Softmax(-1)),
    "identity": nn.Identity,
    "norms only": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH)),
    "shared": shared_sequence,
    "used twice in a chain": lambda: Of(lambda m, x: torch.tanh(x @ m.w) @ m.w, w=square()),
    "used twice, once transposed": lambda: Of(lambda m, x: torch.tanh(x @ m.w) @ m.w.T, w=square()),
    "used in two branches": lambda: Of(lambda m, x: m.w(x).tanh() * m.w(2 * x), w=linear()),
    "made of another that is used too": lambda: Of(lambda m, x: (x @ (m.a * m.b)).tanh() @ m.a, a=square(), b=square()),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.Tanh(), linear()),
    "frozen first": lambda: nn.Sequential(frozen(linear()), nn.Tanh(), linear()),
    "frozen bias": lambda: Of(lambda m, x: functional.linear(x, m.w, m.b), w=square(), b=frozen(linear()).bias),
    "all frozen": lambda: frozen(nn.Sequential(linear(), nn.Tanh(), linear())),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.4), linear(), nn.Dropout(0.2)),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True)),
    "added in place": lambda: Of(lambda m, x: m.a(x).add_(m.b(x)).mul_(3), a=linear(), b=linear()),
    "own function": lambda: Of(lambda m, x: Doubled.apply(m.a(x).tanh(), m.w) + m.a(x), a=linear(), w=square()),
    "views": lambda: Of(lambda m, x: m.a(x).view(-1, 2, WIDTH // 2).transpose(0, 1).reshape(-1, WIDTH), a=linear()),
    "residual": lambda: Of(
        lambda m, x: x + m.b(functional.gelu(m.a(m.n(x)))), a=linear(), b=linear(), n=nn.LayerNorm(6)
    ),
    "several outputs": lambda: Of(
        lambda m, x: {"a": [m.a(x), x.detach()], "n": torch.arange(3), "b": (m.b(m.a(x)), m.a(x).detach() * 2)},
        a=linear(),
        b=linear(),
    ),
    "parameter as output": lambda: Of(lambda m, x: (m.a(x), m.w, (m.w * 2).tanh()), a=linear(), w=square()),
    "parameter as output and used": lambda: Of(lambda m, x: (x @ m.w, m.w), w=square()),
    "output used inside, too": lambda: Of(lambda m, x: (lambda y: (y, m.b(y)))(m.a(x)), a=linear(), b=linear()),
    "does not use its input": lambda: Of(lambda m, x: m.a(torch.ones_like(x)), a=linear()),
    "nothing wants a gradient": lambda: Of(lambda m, x: x.detach() * 2),
    "recurrent": lambda: Of(lambda m, x: m.r(x[None])[0][0], r=nn.LSTM(WIDTH, WIDTH, 2)),
    "one dimension": lambda: Of(lambda m, x: torch.tanh(x * m.g) + m.g, g=nn.Parameter(torch.randn(WIDTH))),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, norm_first=True),
}
FIRST = {
    "lookup": lambda: nn.Sequential(nn.Embedding(9, WIDTH), linear(), nn.GELU(), linear()),
    "tied lookup": lambda: Of(tied_lookup, table=nn.Embedding(9, WIDTH)),
}


def gradients_of(stage, microbatches, values, splits):
    """Every gradient of the inputs and of the parameters, after all micro-batches."""
    torch.manual_seed(1)
    forms = [stage.forward(m, values[m], None, 1.0) for m in microbatches]
    given = [[torch.sin(3 + t.detach()) for t in flatten(form)[0] if wants_gradient(t)] for form in forms]
    found = []
    for m in reversed(microbatches):
        if stage.recomputed[m]:
            stage.recompute(m)
        found += stage.backward_inputs(m, given[m]) if splits else stage.backward(m, given[m])
    if splits:
        for m in microbatches:
            stage.backward_weights(m)
    found += [parameter.grad for parameter in stage.module.parameters()]
    assert not (stage._graphs or stage._kept or stage._pieces)
    return found


def both(module, values, *, is_first=False, recomputed=(False, False), there=False):
    """What the whole backward gives, and what its halves give."""
    results = []
    for splits in (False, True):
        own = copy.deepcopy(module)
        if there:
            for parameter in own.parameters():
                parameter.grad = torch.ones_like(parameter)
        stage = Stage(own, CPU, is_first, None, recomputed, split=(splits,) * 2)
        results.append(gradients_of(stage, [0, 1], values, splits))
    return results


def assert_same(whole, halves):
    assert len(whole) == len(halves)
    for a, b in zip(whole, halves, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def in_double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("there", [False, True], ids=["made", "added"])
@pytest.mark.parametrize("is_first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("name", MODULES)
def test_two_halves_give_the_gradients_of_the_whole(name, is_first, there, recomputed):
    values = [torch.randn(4, WIDTH) for _ in range(2)]
    made = MODULES[name]()
    whole, halves = both(made, values, is_first=is_first, recomputed=(recomputed, False), there=there)
    assert_same(whole, halves)


@pytest.mark.parametrize("name", FIRST)
def test_a_lookup_at_the_first_stage_gets_its_gradients_in_the_second_half(name):
    assert_same(*both(FIRST[name](), [torch.randint(9, (4, 3)) for _ in range(2)], is_first=True))


def test_a_convolution_with_batchnorm_is_split_exactly():
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    assert_same(*both(made, [torch.randn(2, 3, 8, 8) for _ in range(2)]))


def test_nested_inputs_get_a_gradient_each_and_integers_none():
    made = Of(lambda m, x: m.a(x["u"][0]) * x["v"][:, x["where"]], a=linear())
    values = [
        {"u": [torch.randn(4, WIDTH), torch.randn(2)], "v": torch.randn(4, 9), "where": torch.arange(WIDTH)}
        for _ in range(2)
    ]
    whole, halves = both(made, values)
    assert len(halves) == 2 * 3 + 2, "an input that is not used has a gradient of zeros"
    assert_same(whole, halves)


def test_the_last_stage_starts_from_its_weighted_loss():
    made = nn.Sequential(linear(), nn.GELU(), linear())
    found = []
    for splits in (False, True):
        own = copy.deepcopy(made)
        stage = Stage(own, CPU, False, functional.mse_loss, [False], split=[splits])
        stage.forward(0, torch.ones(3, WIDTH), torch.zeros(3, WIDTH), 0.25)
        gradients = stage.backward_inputs(0, []) if splits else stage.backward(0, [])
        if splits:
            stage.backward_weights(0)
        found.append(gradients + [parameter.grad for parameter in own.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@st.composite
def programs(draw):
    """A random module: each line makes a value of earlier ones and of parameters, which are used again and again."""
    lines = []
    for count in range(2, draw(st.integers(3, 14))):
        what = draw(st.sampled_from(sorted(LINES)))
        lines.append((what, draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1)), draw(st.integers(0, 3))))
    outputs = draw(st.lists(st.integers(0, len(lines) + 1), min_size=1, max_size=3))
    return lines, outputs


LINES = {
    "linear": lambda m, a, b, i: m.linears[i](a),
    "matrix": lambda m, a, b, i: a @ m.matrices[i],
    "turned": lambda m, a, b, i: a @ m.matrices[i].T,
    "product": lambda m, a, b, i: a @ (m.matrices[i] * m.matrices[i - 1]),
    "own": lambda m, a, b, i: Doubled.apply(a, m.matrices[i]),
    "norm": lambda m, a, b, i: m.norms[i](a),
    "gain": lambda m, a, b, i: a * m.norms[i].weight,
    "add": lambda m, a, b, i: a + b,
    "multiply": lambda m, a, b, i: torch.tanh(a) * b,
    "gelu": lambda m, a, b, i: functional.gelu(a),
    "in place": lambda m, a, b, i: (a * 2).add_(b).relu_(),
    "split": lambda m, a, b, i: torch.cat(torch.split(a, WIDTH // 2, 1)[::-1], 1),
    "detach": lambda m, a, b, i: a.detach() + i,
    "weights alone": lambda m, a, b, i: torch.tanh(m.matrices[i][: len(a)]),
}


def running(program):
    lines, outputs = program

    def run(m, x):
        values = list(x)
        for what, a, b, i in lines:
            values.append(LINES[what](m, values[a], values[b], i))
        return [values[i] for i in outputs]

    return Of(
        run,
        linears=nn.ModuleList(linear() for _ in range(4)),
        matrices=nn.ParameterList(square() for _ in range(4)),
        norms=nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4)),
    )


@given(programs(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_program_is_split_exactly(program, is_first):
    torch.manual_seed(0)
    values = [[torch.randn(4, WIDTH), torch.randn(4, WIDTH)] for _ in range(2)]
    assert_same(*both(running(program), values, is_first=is_first))


def test_weights_have_no_gradient_before_the_second_half_and_norms_have():
    made = nn.Sequential(linear(), nn.LayerNorm(WIDTH), linear())
    stage = Stage(made, CPU, False, None, [False], split=[True])
    output = stage.forward(0, torch.randn(4, WIDTH), None, 1.0)
    stage.backward_inputs(0, [torch.ones_like(output)])
    assert [parameter.grad is None for parameter in made.parameters()] == [True, True, False, False, True, True]
    stage.backward_weights(0)
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_at_the_first_stage_all_but_the_first_layer_is_split():
    made = nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.LayerNorm(WIDTH))
    stage = Stage(made, CPU, True, None, [False], split=[True])
    output = stage.forward(0, torch.randn(4, WIDTH), None, 1.0)
    assert stage.backward_inputs(0, [torch.ones_like(output)]) == []
    assert [parameter.grad is None for parameter in made.parameters()] == [True, True, True, True, False, False]
    stage.backward_weights(0)
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_the_second_half_runs_no_chain_again():
    """The operations on the way to the input run once: what they saved is gone when the second half begins."""
    ran = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            ran.append(gradient)
            return gradient

    made = Of(lambda m, x: m.b(Counted.apply(m.a(Counted.apply(x)))), a=linear(), b=linear())
    stage = Stage(made, CPU, False, None, [False], split=[True])
    output = stage.forward(0, torch.randn(4, WIDTH), None, 1.0)
    stage.backward_inputs(0, [torch.ones_like(output)])
    assert len(ran) == 2
    stage.backward_weights(0)
    assert len(ran) == 2


def test_layers_that_are_connected_otherwise_than_by_outputs_are_refused():
    passed = []

    def keep(m, x):
        passed.append(m.a(x))
        return passed[0]

    made = nn.Sequential(Of(keep, a=linear()), linear(), Of(lambda m, x: x + passed.pop()))
    stage = Stage(made, CPU, False, None, [False], split=[True])
    output = stage.forward(0, torch.randn(4, WIDTH), None, 1.0)
    with pytest.raises(RuntimeError, match="a value of an earlier one that is not among its inputs"):
        stage.backward_inputs(0, [torch.ones_like(output)])


def test_hooks_of_tensors_and_parameters_change_a_gradient_once():
    def run(m, x):
        y = m.a(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 3 * gradient)
        return m.b(y)

    made = Of(run, a=linear(), b=linear())

    def hooked():
        own = copy.deepcopy(made)
        own.a.weight.register_hook(lambda gradient: 5 * gradient)
        own.b.bias.register_hook(lambda gradient: 7 * gradient)
        return own

    values, results = [torch.randn(4, WIDTH)], []
    for splits in (False, True):
        stage = Stage(hooked(), CPU, False, None, [False], split=[splits])
        results.append(gradients_of(stage, [0], values, splits))
    assert_same(*results)


def test_a_saved_tensor_that_is_changed_in_place_is_told_as_without_a_split():
    made = Of(lambda m, x: (lambda y, z: (z, y.add_(1)))(*(lambda y: (y, y.exp() * y))(m.a(x))), a=linear())
    for splits in (False, True):
        stage = Stage(made, CPU, False, None, [False], split=[splits])
        outputs = stage.forward(0, torch.randn(4, WIDTH), None, 1.0)
        given = [torch.ones_like(output) for output in outputs]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stage.backward_inputs(0, given) if splits else stage.backward(0, given)


# --- what is held ---------------------------------------------------------------------------------------------------


def test_between_the_halves_only_what_products_need_is_held_and_nothing_after():
    """Linear inputs and gradients of their outputs: of x -> linear -> gelu -> linear -> gelu, two of each."""
    n = 256
    made = nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU())
    stage = Stage(made, CPU, False, None, [False], split=[True])
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held, each = [], n * WIDTH * 8

    def step():
        output = stage.forward(0, torch.randn(n, WIDTH), None, 1.0)
        given = [torch.ones_like(output)]
        del output
        stage.backward_inputs(0, given)
        del given
        mark()
        stage.backward_weights(0)
        mark()

    def mark():
        held.append(torch.empty(1))

    gc.disable()
    try:
        trace, _ = trace_bytes(CPU, step)
    finally:
        gc.enable()
    marks = [i for i, (a, b) in enumerate(zip(trace.held_bytes, trace.held_bytes[1:], strict=False)) if b - a == 8]
    assert trace.held_bytes[marks[-2]] == 4 * each
    assert trace.held_bytes[marks[-1]] == 8, "the first mark itself"


@pytest.mark.parametrize("name", ["deep", "shared", "own function", "several outputs", "parameter as output"])
def test_nothing_of_a_microbatch_outlives_it_and_no_cycle_holds_it(name):
    made = MODULES[name]()
    alive = []
    for module in made.modules():
        module.register_forward_hook(
            lambda module, given, output: alive.extend(weakref.ref(t) for t in flatten([given, output])[0] if t.grad_fn)
        )
    stage = Stage(made, CPU, False, None, [False], split=[True])
    gc.disable()
    try:
        outputs = flatten(stage.forward(0, torch.randn(4, WIDTH), None, 1.0))[0]
        given = [torch.ones_like(output) for output in outputs if wants_gradient(output)]
        del outputs
        stage.backward_inputs(0, given)
        assert alive
        stage.backward_weights(0)
        assert [reference for reference in alive if reference() is not None] == []
    finally:
        gc.enable()


def test_a_forward_that_is_given_up_leaves_nothing():
    made = nn.Sequential(linear(), nn.GELU(), linear())
    gc.disable()
    try:
        for half in (False, True):
            halves = Halves([torch.randn(4, WIDTH)], first=False)
            with halves.recording():
                output = made(*halves.inputs)
            halves.end([output])
            if half:
                halves.backward_inputs([torch.ones_like(output)])
            nodes = weakref.ref(output), weakref.ref(halves)
            del output, halves
            assert [node() for node in nodes] == [None, None]
    finally:
        gc.enable()


def test_random_orders_of_second_halves_are_all_exact():
    made = nn.Sequential(linear(), nn.GELU(), linear())
    values = [torch.randn(3, WIDTH) for _ in range(5)]
    whole = copy.deepcopy(made)
    stages = [Stage(whole, CPU, False, None, [False] * 5), Stage(made, CPU, False, None, [False] * 5, split=[True] * 5)]
    for stage in stages:
        outputs = [stage.forward(m, value, None, 1.0).detach() for m, value in enumerate(values)]
        for m, output in enumerate(outputs):
            (stage.backward if stage is stages[0] else stage.backward_inputs)(m, [output])
    for m in random.Random(0).sample(range(5), 5):
        stages[1].backward_weights(m)
    assert_same([p.grad for p in whole.parameters()], [p.grad for p in made.parameters()])
    assert storage_bytes([p.grad for p in made.parameters()]) > 0


def small_transformer():
    shape = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 96, "sequence": 32}
    return transformer(Transformer(kind="transformer", **shape))


@cache
def measured(made):
    """A workload, and what each of its layers holds with a micro-batch of eight."""
    workload = made()
    return workload, {name: np.array(values) for name, values in memory_of_layers(workload, 8, CPU).items()}, 8


@pytest.mark.parametrize("there", [False, True], ids=["made", "added"])
@pytest.mark.parametrize("span", [(0, 3), (1, 3), (2, 5), (1, None), (0, None)])
@pytest.mark.parametrize("made", [small_transformer, mlp], ids=["transformer", "mlp"])
def test_a_stage_holds_what_its_layers_were_measured_to_hold(made, span, there):
    """Between I and W the sum of what its layers keep; within them, layer after layer, no more than each was found to
    need on top of what the others hold."""
    workload, found, n = measured(made)
    first, last = span[0], span[1] or len(workload.layers)
    is_last = last == len(workload.layers)
    module = workload.layers[first:last]
    inputs, targets = workload.sample(n)
    with torch.no_grad():
        value = workload.layers[:first](inputs)
    module.zero_grad(set_to_none=not there)
    stage = Stage(module, CPU, first == 0, workload.loss if is_last else None, [False], split=[True])
    received = []

    def forward():
        output = stage.forward(0, value if first == 0 else value.clone(), targets, 1.0)
        received.extend([] if is_last else [torch.ones_like(output)])

    _, in_inputs, in_weights = bytes_of_parts(
        CPU,
        [
            forward,
            lambda: stage.backward_inputs(0, [received.pop()] if received else []),
            lambda: stage.backward_weights(0),
        ],
    )
    saved, kept, output = found["saved_bytes"], found["kept_bytes"], found["output_bytes"]
    weights = np.array([storage_bytes(list(layer.parameters())) for layer in workload.layers])
    assert in_inputs.after == pytest.approx(kept[first:last].sum(), rel=0.01)
    transient = found["workspace_weights_accumulate_bytes" if there else "workspace_weights_bytes"]
    boundary = (output[first - 1] if first else 0) + (0 if is_last else output[last - 1])
    inputs_levels, weights_levels = [], []
    for i in range(first, last):
        gradient_in, gradient_out = output[i] if i < last - 1 else 0, output[i - 1] if i else 0
        need = max(0, gradient_out + found["workspace_inputs_bytes"][i])
        inputs_levels.append(boundary + saved[first : i + 1].sum() + kept[i + 1 : last].sum() + gradient_in + need)
        gradients = 0 if there else weights[i + 1 : last].sum()
        weights_levels.append(kept[first : i + 1].sum() + gradients + max(0, weights[i] + transient[i]))
    assert in_inputs.highest == pytest.approx(max(inputs_levels), rel=0.03)
    assert in_weights.highest == pytest.approx(max(weights_levels), rel=0.01)
    assert in_weights.after == (0 if there else weights[first:last].sum())
