"""AmoebaNet-D: as its papers describe it, as layers that compute, and what these cost."""

import pytest

from gpipe_sim.cost.amoebanet import cells, shapes


@pytest.mark.parametrize(
    ("L", "D", "millions"),  # Huang et al., arXiv 1811.06965, Table 1; torchgpipe, docs/benchmarks.rst
    [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7), (36, 544, 1056), (72, 512, 1845)],
)
def test_parameters_are_those_that_were_published(L, D, millions):
    layers = shapes(L, D)
    assert len(layers) == L + 6
    assert sum(layer.parameters for layer in layers) / 1e6 == pytest.approx(millions, rel=5e-4)


def test_channels_double_where_sides_are_halved():
    assert [cell.channels for cell in cells(3, 64)] == [32, 64, 64, 128, 128, 256, 256]
    assert [cell.leaving // cell.channels for cell in cells(3, 64)] == [3, 3, 4, 3, 4, 3, 4]


@pytest.mark.parametrize(("L", "D"), [(4, 64), (0, 64), (3, 8), (3, 40)])
def test_what_is_no_amoebanet_is_refused(L, D):
    with pytest.raises(ValueError, match="expected a multiple of 3 and one of 16"):
        cells(L, D)
    with pytest.raises(ValueError, match="expected a multiple of 32"):
        shapes(3, 16, side=48)


def test_layers_hold_what_their_shapes_say():
    """Beside it a norm keeps a mean and a deviation of each channel."""
    torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")
    from gpipe_exec.amoebanet import amoebanet, small
    from gpipe_exec.measure.timing import skips_of
    from gpipe_exec.measure.worker import memory_of_layers

    workload, n, word = small(), 2, 4
    costs, found = shapes(3, 32, side=64, classes=10), memory_of_layers(workload, n, torch.device("cpu"))
    for layer, shape, saved, output in zip(
        workload.layers, costs, found["saved_bytes"], found["output_bytes"], strict=True
    ):
        assert sum(p.numel() for p in layer.parameters()) == shape.parameters
        assert output == n * word * shape.output
        channels = sum(norm.num_features for norm in layer.modules() if isinstance(norm, torch.nn.BatchNorm2d))
        if layer is not workload.layers[-1]:  # what a loss keeps depends on the loss
            assert saved == n * word * shape.saved + 2 * word * channels
    handed_on = [(i, i + 2, n * word * cell.handed_on) for i, cell in enumerate(costs[1:-1])]
    assert skips_of(workload.layers, workload.sample(n)[0]) == handed_on
    with torch.device("meta"):
        whole = amoebanet(18, 208)
    assert [sum(p.numel() for p in layer.parameters()) for layer in whole] == [s.parameters for s in shapes(18, 208)]
