"""The catalogue: the names that scenarios rely on, and figures that cannot be a slip of the pen."""

import re

import pytest

from gpipe_sim.scenario.catalog import LINKS, device_names, find_device, this_cpu

PUBLISHED = [name for name in device_names() if name != "cpu"]


def test_every_promised_device_is_there():
    promised = (
        "p40 p100 v100-16gb v100-32gb t4 a100-40gb a100-80gb h100-80gb h200 b200 rtx-4090 tpu-v2-core tpu-v3-core cpu"
    )
    assert set(promised.split()) <= set(device_names())


def test_every_promised_link_is_there():
    promised = "pcie3 pcie4 pcie5 nvlink2 nvlink3 nvlink4 nvlink5 10gbit 25gbit 100gbit 200gbit 400gbit"
    assert set(promised.split()) <= set(LINKS)


@pytest.mark.parametrize("name", device_names())
def test_a_device_answers_to_its_name_and_says_where_its_figures_are_from(name):
    device = find_device(name)
    assert device.name == name
    assert device.source not in ("", "scenario")
    assert 0 < device.efficiency <= 1
    assert 0 < device.launch < 1e-4


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_device_has_figures_of_the_right_magnitude(name):
    device = find_device(name)
    assert 8 * 2**30 <= device.memory <= 300e9
    assert 2e11 <= device.bandwidth <= 1e13
    assert device.compute
    assert all(1e12 <= peak <= 3e15 for peak in device.compute.values())


@pytest.mark.parametrize("name", device_names())
def test_narrower_numbers_are_never_slower(name):
    compute = find_device(name).compute
    peaks = [compute[dtype] for dtype in ("fp64", "fp32", "fp16") if dtype in compute]
    assert peaks == sorted(peaks)
    assert compute.get("bf16", 0) in (0, compute.get("fp16", compute.get("bf16")))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if re.search(r"-\d+gb$", name)])
def test_a_size_in_a_name_is_the_size_in_binary(name):
    assert find_device(name).memory == int(name.removesuffix("gb").rpartition("-")[2]) * 2**30


@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "gigabytes_per_second"),
    [
        ("p40", "fp32", 12.0, 346),
        ("v100-16gb", "fp16", 125, 900),
        ("a100-40gb", "bf16", 312, 1555),
        ("a100-80gb", "bf16", 312, 2039),
        ("h100-80gb", "bf16", 989, 3350),
    ],
)
def test_datasheet_figures(name, dtype, tflops, gigabytes_per_second):
    device = find_device(name)
    assert device.compute[dtype] == pytest.approx(tflops * 1e12)
    assert device.bandwidth == pytest.approx(gigabytes_per_second * 1e9)


def test_a_tpu_core_is_half_a_chip():
    assert find_device("tpu-v2-core").compute["bf16"] * 2 == pytest.approx(46e12)
    assert find_device("tpu-v3-core").compute["bf16"] * 2 == pytest.approx(123e12)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_answers_to_its_name_and_says_where_its_figures_are_from(name):
    link = LINKS[name]
    assert link.name == name
    assert link.source not in ("", "scenario")
    assert 1e9 <= link.bandwidth <= 1e12
    assert 1e-6 <= link.latency <= 1e-4


@pytest.mark.parametrize("name", [name for name in LINKS if name.endswith("gbit")])
def test_a_networks_name_is_its_rate_in_bits(name):
    assert LINKS[name].bandwidth == int(name.removesuffix("gbit")) * 1e9 / 8


@pytest.mark.parametrize("family", [["pcie3", "pcie4", "pcie5"], ["nvlink2", "nvlink3", "nvlink4", "nvlink5"]])
def test_each_generation_of_a_link_is_faster(family):
    bandwidths = [LINKS[name].bandwidth for name in family]
    assert bandwidths == sorted(set(bandwidths))


def test_nvlink_counts_one_direction_only():
    assert LINKS["nvlink3"].bandwidth == 600e9 / 2


def test_an_unknown_device_is_a_key_error():
    with pytest.raises(KeyError):
        find_device("a100-81gb")


def test_links_cannot_be_changed():
    with pytest.raises(TypeError):
        LINKS["pcie3"] = LINKS["pcie4"]


def test_the_cpu_is_one_core_of_this_machine():
    cpu = find_device("cpu")
    assert cpu == this_cpu()
    assert cpu.memory > 0
    assert cpu.bandwidth > 0
    assert 1e9 < cpu.compute["fp32"] < 1e12
