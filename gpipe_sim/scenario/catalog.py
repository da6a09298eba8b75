"""Devices and links by name, with their published peak figures and where those were published.

Peaks are what the vendor prints for *dense* arithmetic, one direction of a link, one device. What a layer attains is
less: ``efficiency`` is the fraction of peak compute that the analytic model assumes, 0.5 unless a scenario says
otherwise (Narayanan et al. 2021, Table 1: end-to-end training at 135 to 163 of 312 TFLOP/s per A100, 0.43 to 0.52).
Memory printed as a power of two is binary, other sizes are decimal. A driver keeps some of it back, cards with GDDR
and ECC 6 %: that is what ``memory_reserve`` is for, which is ``runtime`` if a scenario says nothing. A measured profile
replaces all of this.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

DType = Literal["fp64", "fp32", "bf16", "fp16"]

GB, GiB, TFLOP = 1e9, 2.0**30, 1e12
_GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Price:
    """Of one device for an hour. Prices change: each says where and when it was asked, and a scenario may have its own
    (``cluster.price``)."""

    per_hour: float
    currency: str = "USD"
    source: str = field(default="scenario", compare=False)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one CPU core, as the roofline sees it."""

    name: str
    memory: float
    """Bytes on the device."""
    compute: Mapping[str, float]
    """Peak dense FLOP/s by dtype."""
    bandwidth: float
    """Bytes/s between the device and its own memory."""
    efficiency: float = 0.5
    """Fraction of peak compute that large layers attain."""
    memory_efficiency: float | None = None
    """Fraction of `bandwidth` that what is not a product attains, in time of its own; None where a layer takes as long
    as the longer of its arithmetic and its traffic."""
    launch: float = 5e-6
    """Seconds to launch one kernel: what makes small micro-batches cost more per sample."""
    runtime: float = 0.0
    """Bytes that its runtime takes of the memory before a model does."""
    price: Price | None = field(default=None, compare=False)
    source: str = field(default="scenario", compare=False)


GPU_RUNTIME = 1.5 * GiB
"""Of a GPU, assumed: about 0.5 GiB for the process's context with its kernels, as much for the buffers of NCCL's
communicators (up to six of them, some tens of MiB for each peer), and the rest for the libraries' workspaces and blocks
that the allocator has and cannot use."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection, each direction on its own."""

    name: str
    bandwidth: float
    """Bytes/s in each direction."""
    latency: float
    """Seconds from the end of sending to arrival; it delays, it does not occupy. Typical, not published."""
    source: str = field(default="scenario", compare=False)


def _device(name: str, memory: float, bandwidth: float, source: str, **compute: float) -> Device:
    peaks = MappingProxyType({dtype: peak * TFLOP for dtype, peak in compute.items()})
    price = _PRICES.get(name)
    runtime = 0.0 if name.startswith("tpu") else GPU_RUNTIME
    figures = {"memory": memory, "bandwidth": bandwidth, "runtime": runtime}
    return Device(name=name, compute=peaks, price=price, source=source, **figures)


def _price(per_hour: float, source: str) -> Price:
    return Price(per_hour=per_hour, source=source)


_AWS = "Amazon EC2 Capacity Blocks, US East, December 2024"
_SPECIALTY = "middle of on-demand prices of GPU clouds, mercatus-ai.com/blog/cloud-gpu-pricing, May 2026"
_RUNPOD = "RunPod, usagepricing.com/blueprint/billing-units/gpu-hour-pricing, 2026"
_PRICES = {
    "a100-40gb": _price(1.844, _AWS),
    "a100-80gb": _price(1.30, _SPECIALTY),
    "h100-80gb": _price(3.00, _SPECIALTY),
    "h200": _price(4.00, _SPECIALTY),
    "b200": _price(5.89, _RUNPOD),
    "rtx-4090": _price(0.69, _RUNPOD),
}
"""Devices that are not here have no price of which place and date are known."""

_V100 = {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}
_A100 = {"fp64": 19.5, "fp32": 19.5, "bf16": 312.0, "fp16": 312.0}
_H100 = {"fp64": 67.0, "fp32": 67.0, "bf16": 989.0, "fp16": 989.0}

_DEVICES = [
    _device("p40", 24 * GiB, 346 * GB, "NVIDIA Tesla P40 datasheet", fp32=12.0),
    _device("p100", 16 * GiB, 732 * GB, "NVIDIA Tesla P100 datasheet (SXM2)", fp64=5.3, fp32=10.6, fp16=21.2),
    _device("v100-16gb", 16 * GiB, 900 * GB, "NVIDIA V100 datasheet (SXM2)", **_V100),
    _device("v100-32gb", 32 * GiB, 900 * GB, "NVIDIA V100 datasheet (SXM2)", **_V100),
    _device("t4", 16 * GiB, 300 * GB, "NVIDIA T4 datasheet", fp32=8.1, fp16=65.0),
    _device("a100-40gb", 40 * GiB, 1555 * GB, "NVIDIA A100 datasheet (SXM4)", **_A100),
    _device("a100-80gb", 80 * GiB, 2039 * GB, "NVIDIA A100 datasheet (SXM4)", **_A100),
    _device("h100-80gb", 80 * GiB, 3350 * GB, "NVIDIA H100 datasheet (SXM5)", **_H100),
    _device("h200", 141 * GB, 4800 * GB, "NVIDIA H200 datasheet (SXM)", **_H100),
    _device("b200", 180 * GB, 7700 * GB, "NVIDIA HGX B200 datasheet", fp64=37.0, fp32=75.0, bf16=2250.0, fp16=2250.0),
    _device("rtx-4090", 24 * GiB, 1008 * GB, "NVIDIA Ada architecture whitepaper", fp32=82.6, bf16=165.2, fp16=165.2),
    _device("tpu-v2-core", 8 * GiB, 350 * GB, "Jouppi et al., CACM 63(7), 2020; half a chip", fp32=1.5, bf16=23.0),
    _device("tpu-v3-core", 16 * GiB, 450 * GB, "Jouppi et al., CACM 63(7), 2020; half a chip", fp32=2.0, bf16=61.5),
]

_ATTAINED = "fitted to runs of Megatron-LM that others published: docs/evidence.md"
_DEVICES += [
    replace(
        device,
        name=f"{device.name}-attained",
        efficiency=efficiency,
        memory_efficiency=0.69,
        launch=28.5e-6,
        source=_ATTAINED,
    )
    for device in _DEVICES
    for name, efficiency in (("a100-80gb", 0.77), ("b200", 0.49))
    if device.name == name
]
"""What whole layers attain of the same peaks, in more detail than one efficiency; a launch includes the host's part.
The share of the memory's bandwidth and the launch were fitted on the A100 alone."""

_LINKS = [
    Link(name="pcie3", bandwidth=15.75 * GB, latency=5e-6, source="PCI-SIG, x16"),
    Link(name="pcie4", bandwidth=31.5 * GB, latency=5e-6, source="PCI-SIG, x16"),
    Link(name="pcie5", bandwidth=63.0 * GB, latency=5e-6, source="PCI-SIG, x16"),
    Link(name="nvlink2", bandwidth=150 * GB, latency=5e-6, source="NVIDIA V100 datasheet, half of 300 GB/s"),
    Link(name="nvlink3", bandwidth=300 * GB, latency=5e-6, source="NVIDIA A100 datasheet, half of 600 GB/s"),
    Link(name="nvlink4", bandwidth=450 * GB, latency=5e-6, source="NVIDIA H100 datasheet, half of 900 GB/s"),
    Link(name="nvlink5", bandwidth=900 * GB, latency=5e-6, source="NVIDIA HGX B200 datasheet, half of 1.8 TB/s"),
    Link(name="tpu-v2-ici", bandwidth=496 * _GBIT, latency=5e-6, source="Jouppi et al., CACM 63(7), 2020"),
    Link(name="tpu-v3-ici", bandwidth=656 * _GBIT, latency=5e-6, source="Jouppi et al., CACM 63(7), 2020"),
    Link(name="10gbit", bandwidth=10 * _GBIT, latency=30e-6, source="IEEE 802.3ae"),
    Link(name="25gbit", bandwidth=25 * _GBIT, latency=20e-6, source="IEEE 802.3by"),
    Link(name="100gbit", bandwidth=100 * _GBIT, latency=15e-6, source="IEEE 802.3ba; InfiniBand EDR"),
    Link(name="200gbit", bandwidth=200 * _GBIT, latency=10e-6, source="IEEE 802.3bs; InfiniBand HDR"),
    Link(name="400gbit", bandwidth=400 * _GBIT, latency=10e-6, source="IEEE 802.3bs; InfiniBand NDR"),
]

_LINKS += [
    Link(name="nvlink3-attained", bandwidth=238 * GB, latency=5e-6, source=_ATTAINED),
    Link(name="nvlink5-attained", bandwidth=425 * GB, latency=5e-6, source=_ATTAINED),
    Link(name="200gbit-attained", bandwidth=22.5 * GB, latency=10e-6, source=_ATTAINED),
]

LINKS: Mapping[str, Link] = MappingProxyType({link.name: link for link in _LINKS})
_PUBLISHED = {device.name: device for device in _DEVICES}


def device_names() -> list[str]:
    """The names a scenario may use under ``cluster.device``."""
    return [*_PUBLISHED, "cpu"]


def find_device(name: str) -> Device:
    """The device of that name; KeyError if the catalogue has none."""
    return this_cpu() if name == "cpu" else _PUBLISHED[name]


@cache
def this_cpu() -> Device:
    """One core of this machine: an estimate to start from; a profile measures what it really does.

    Peak is the clock times the FLOP per cycle of two fused multiply-add units of the widest vectors that
    ``/proc/cpuinfo`` names. Memory and memory bandwidth (20 GB/s per socket channel pair assumed) are this machine's
    divided by its cores, because a rank has one core.
    """
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    facts = dict(line.split(":", 1) for line in reversed(cpuinfo.splitlines()) if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    clock_hz = float(facts.get("cpu MHz", 2500)) * 1e6
    flags = facts.get("flags", facts.get("Features", ""))
    fp32_lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    peak = clock_hz * fp32_lanes * 2 * 2
    cores = os.cpu_count() or 1
    try:
        memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        memory = 8 * GiB * cores
    return Device(
        name="cpu",
        memory=memory / cores,
        compute={"fp64": peak / 2, "fp32": peak, "bf16": peak, "fp16": peak},
        bandwidth=20 * GB / cores,
        launch=2e-6,
        source=f"estimated from /proc/cpuinfo: {facts.get('model name', 'unknown processor')}",
    )
