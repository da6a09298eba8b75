"""Imported profiles: times, and the bytes that cross every cut of a graph that is not a chain."""

import os
from pathlib import Path

import pytest

from gpipe_sim.base.files import InputError
from gpipe_sim.cost.pipedream import import_pipedream

GRAPHS = Path(__file__).parent / "data" / "graphs"
"""Made up for these tests, in PipeDream's format: times are those of a device that computes 2 TFLOP/s."""
PIPEDREAM = os.environ.get("GPIPE_PIPEDREAM_PROFILES")
"""A folder with the profiles that PipeDream's authors measured, for those who have them."""


def crossing(profile, name: str) -> float:
    return float(profile.table["output_bytes"][profile.names.index(name), 0])


@pytest.fixture
def convolutions():
    return import_pipedream(GRAPHS / "convolutions.graph.txt", 64)


@pytest.fixture
def recurrent():
    return import_pipedream(GRAPHS / "recurrent.graph.txt", 64)


def test_a_chain_is_cut_at_each_layers_output(convolutions):
    assert convolutions.num_layers == 17
    assert convolutions.sizes == (64,)
    assert crossing(convolutions, "node2:Conv2d") == 33554432
    assert crossing(convolutions, "node17:Linear") == 0, "nothing follows the last layer"


def test_a_branch_adds_what_passes_it(convolutions):
    passing = crossing(convolutions, "node13:Size")
    assert passing == 4194304 + 4, "the pooled activations pass the node that asks for their size"


def test_loading_the_data_is_not_counted_as_compute(convolutions):
    assert convolutions.table["forward_s"][convolutions.names.index("node1:Input"), 0] == 0
    assert convolutions.table["forward_s"].sum() == pytest.approx(0.026045 - 0.008, abs=1e-6)


def test_skip_connections_are_carried_along_and_each_output_counts_once(recurrent):
    # node5, output 0 of node4, goes to node7 and, past node8, to node11.
    assert crossing(recurrent, "node7:Dropout") == 2621440 + 2621440
    # After node11 its sum, which node12 and node16 both take, and output 1 of node8, which node18 takes.
    assert crossing(recurrent, "node11:Add") == 2621440 + 131072
    # Of the third LSTM only the dropped-out sum is left; output 1 of node8 passes all of it.
    assert crossing(recurrent, "node17:Dropout") == 2621440 + 131072


def test_only_the_outputs_that_are_used_cross(recurrent):
    assert crossing(recurrent, "node4:LSTM") == 2621440 + 131072, "two of the three outputs of node4 have a user"


def test_views_keep_nothing_of_their_own(convolutions):
    assert convolutions.table["saved_bytes"][convolutions.names.index("node3:ReLU"), 0] == 0
    assert convolutions.table["saved_bytes"][convolutions.names.index("node2:Conv2d"), 0] == 33554432


@pytest.mark.skipif(not PIPEDREAM, reason="GPIPE_PIPEDREAM_PROFILES names no folder with PipeDream's own profiles")
@pytest.mark.parametrize(
    ("name", "layers", "forward_s", "cut", "crossing_bytes"),
    [
        ("vgg16", 41, 0.251874 - 0.017972, "node33:Size", 12845056 + 4),
        ("gnmt", 48, 0.033533, "node34:Dropout", 6160384 + 131072 + 6160384),
    ],
)
def test_pipedreams_own_profiles_are_read(name, layers, forward_s, cut, crossing_bytes):
    profile = import_pipedream(Path(PIPEDREAM) / f"{name}.graph.txt", 64)
    assert profile.num_layers == layers
    assert profile.table["forward_s"].sum() == pytest.approx(forward_s, abs=1e-6)
    assert crossing(profile, cut) == crossing_bytes


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
