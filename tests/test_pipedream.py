"""Imported profiles: times, and the bytes that cross every cut of a graph that is not a chain."""

from pathlib import Path

import pytest

from gpipe_sim.files import InputError
from gpipe_sim.pipedream import import_pipedream

DATA = Path(__file__).parent / "data" / "pipedream"


def crossing(profile, name: str) -> float:
    return float(profile.table["output_bytes"][profile.names.index(name), 0])


def test_a_chain_is_cut_at_each_layers_output():
    vgg = import_pipedream(DATA / "vgg16.graph.txt", 128)
    assert vgg.num_layers == 41
    assert vgg.sizes == (128,)
    assert crossing(vgg, "node2:Conv2d") == 1644167168
    assert crossing(vgg, "node41:Linear") == 0, "nothing follows the last layer"


def test_a_branch_adds_what_passes_it():
    vgg = import_pipedream(DATA / "vgg16.graph.txt", 128)
    assert crossing(vgg, "node33:Size") == 12845056 + 4, "the pooled activations pass the node that asks for their size"


def test_loading_the_data_is_not_counted_as_compute():
    vgg = import_pipedream(DATA / "vgg16.graph.txt", 128)
    assert vgg.table["forward_s"][vgg.names.index("node1:Input"), 0] == 0
    assert vgg.table["forward_s"].sum() == pytest.approx(0.251874 - 0.017972, abs=1e-6)


def test_skip_connections_are_carried_along_and_each_output_counts_once():
    gnmt = import_pipedream(DATA / "gnmt.graph.txt", 64)
    # node8, output 0 of node7, goes to node10 and, past node11, to node14.
    assert crossing(gnmt, "node10:Dropout") == 6291456 + 6291456
    # After node14 only its sum remains, although node15 and node19 both take it.
    assert crossing(gnmt, "node14:Add") == 6291456
    # The context, output 2 of node23, passes node31 on its way to node35 and node42.
    assert crossing(gnmt, "node34:Dropout") == 6160384 + 131072 + 6160384


def test_only_the_outputs_that_are_used_cross():
    gnmt = import_pipedream(DATA / "gnmt.graph.txt", 64)
    assert crossing(gnmt, "node7:LSTM") == 6291456 + 131072, "two of the three outputs of node7 have a user"


def test_views_keep_nothing_of_their_own():
    vgg = import_pipedream(DATA / "vgg16.graph.txt", 128)
    assert vgg.table["saved_bytes"][vgg.names.index("node3:ReLU"), 0] == 0
    assert vgg.table["saved_bytes"][vgg.names.index("node2:Conv2d"), 0] == 1644167168


NODE = (
    "{} -- Linear(1) -- forward_compute_time={}, backward_compute_time=1.0, activation_size=8.0, parameter_size=4.0\n"
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1: has no nodes"),
        ("what is this\n", "1: found 'what is this', expected a node or an edge"),
        (NODE.format("node1", "fast"), "1: node1: found 'fast', expected a number from 0 to 1e+18"),
        (NODE.format("node1", 1.0) + "\tnode1 -- node2\n", "2: node2: found in an edge, expected a node"),
        (
            NODE.format("a", 1) + NODE.format("b", 1) + "\ta -- b\n\tb -- a\n",
            "a, b: wait for each other, expected a graph without cycles",
        ),
    ],
)
def test_a_wrong_file_is_reported_with_its_line(tmp_path, text, problem):
    path = tmp_path / "graph.txt"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        import_pipedream(path, 1)
    assert f"{path}:" in str(error.value)
    assert problem in str(error.value)
