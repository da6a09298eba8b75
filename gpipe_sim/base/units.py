"""Quantities with units: ``"25 GB/s"``, ``"80 GiB"``, ``"10 us"``, ``"312 TFLOP/s"`` to and from SI floats.

Every quantity in a file carries its unit, and every number inside the program is in seconds, bytes, bytes per second
or FLOP per second. The spelling is strict because the usual sloppiness costs factors: ``GB`` is 10^9 bytes, ``GiB``
is 2^30 bytes, ``Gb`` and ``Gbit`` are 10^9 *bits*, and ``KB``, which people use for both 1000 and 1024, is refused.
"""

import math
import re
from collections.abc import Mapping

from gpipe_sim.base.limits import AMOUNT, TEXT, shortened, shown

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

# A unit maps to (multiplier, divisor). Small units divide, because 10 * 1e-6 is 9.999999999999999e-06.
_Units = Mapping[str, tuple[int, int]]

_SIZE: _Units = {p + "B": (f, 1) for p, f in (_DECIMAL | _BINARY).items()}
_BITS: _Units = {p + b: (f, 8) for p, f in _DECIMAL.items() for b in ("b", "bit")}
_TIME: _Units = {
    "s": (1, 1),
    "ms": (1, 10**3),
    "us": (1, 10**6),
    "\u00b5s": (1, 10**6),
    "\u03bcs": (1, 10**6),
    "ns": (1, 10**9),
}
_DURATION: _Units = {**_TIME, "min": (60, 1), "h": (3600, 1), "d": (86400, 1), "y": (31557600, 1)}
_COUNT: _Units = {"": (1, 1), "k": (10**3, 1), "M": (10**6, 1), "B": (10**9, 1), "T": (10**12, 1)}
_BANDWIDTH: _Units = {unit + "/s": scale for unit, scale in [*_SIZE.items(), *_BITS.items()]}
_COMPUTE: _Units = {p + "FLOP/s": (f, 1) for p, f in _DECIMAL.items()}


_LEAST_RATE = 1e-6
"""A rate is divided by: anything slower would make infinities of large sizes."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf)\s*(\S.*?)?\s*")


def _parse(value: object, units: _Units, what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) and len(value) <= TEXT else None
    if match is None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"{shortened(value)} has no unit, expected {what} such as {example!r}")
        raise ValueError(f"found {shown(value)}, expected {what} such as {example!r}")
    number, unit = float(match[1]), match[2]
    if unit is None:
        raise ValueError(f"{match[1]} has no unit, expected {what} such as {example!r}")
    if unit not in units:
        raise ValueError(f"unknown unit {unit!r} in {value!r}, expected {_suggest(unit, units, what, example)}")
    if number < 0:
        raise ValueError(f"found {value!r}, expected {what} that is not negative")
    multiplier, divisor = units[unit]
    amount = number * multiplier / divisor
    if math.isinf(amount) and not (units is _BANDWIDTH and match[1].endswith("inf")):
        raise ValueError(f"found {value!r}, expected {what} that is finite")
    if amount > (limit := AMOUNT if units in (_SIZE, _TIME) else AMOUNT**2) and not math.isinf(amount):
        raise ValueError(f"found {value!r}, expected {what} of at most {limit:.0e} {next(iter(units))}")
    return amount


def _suggest(unit: str, units: _Units, what: str, example: str) -> str:
    """Name the units that differ from this one only by case; the reader knows which was meant, we do not."""
    alike = [known for known in units if known.lower() == unit.lower()]
    if unit.upper() in ("KB", "KB/S"):
        alike += [known for known in units if known.startswith("KiB")]
    if unit.endswith("bps"):
        alike = [known for known in units if known == unit.removesuffix("bps") + "bit/s"]
    if unit.endswith("Bps"):
        alike = [known for known in units if known == unit.removesuffix("ps") + "/s"]
    return " or ".join(alike) if alike else f"{what} such as {example!r}"


def parse_bytes(value: object) -> float:
    """``"80 GiB"`` -> 85899345920.0"""
    return _parse(value, _SIZE, "a size", "80 GiB")


def parse_seconds(value: object) -> float:
    """``"10 us"`` -> 1e-05"""
    return _parse(value, _TIME, "a time", "10 us")


def parse_duration(value: object) -> float:
    """``"5 min"``, ``"2 h"``, ``"1.5 d"`` and ``"9 y"`` (of 365.25 days) beside the units of `parse_seconds`"""
    return _parse(value, _DURATION, "a time", "10 min")


def parse_tokens(value: object) -> float:
    """``"15.6T"``, ``"300B"`` or ``1e9`` -> tokens; here B is 10^9, as people who count tokens write it"""
    text = value if isinstance(value, str) else repr(value) if type(value) in (int, float) else None
    match = (
        re.fullmatch(r"\s*(\d+\.?\d*(?:[eE][+]?\d{1,3})?)\s*([kMBT]?)\s*", text) if text and len(text) < TEXT else None
    )
    tokens = float(match[1]) * _COUNT[match[2]][0] if match else 0.0
    if not 1 <= tokens <= AMOUNT:
        raise ValueError(f"found {shown(value)}, expected a number of tokens such as 300B or 1T")
    return tokens


def parse_bandwidth(value: object) -> float:
    """``"25 GB/s"`` -> 25e9, ``"10 Gbit/s"`` -> 1.25e9 and ``"inf GB/s"``, a free link, in bytes per second"""
    bandwidth = _parse(value, _BANDWIDTH, "a bandwidth", "25 GB/s")
    if bandwidth < _LEAST_RATE:
        raise ValueError(f"found {value!r}, expected a bandwidth above zero, of at least {_LEAST_RATE:.0e} B/s")
    return bandwidth


def parse_compute(value: object) -> float:
    """``"312 TFLOP/s"`` -> 312e12"""
    compute = _parse(value, _COMPUTE, "a compute rate", "312 TFLOP/s")
    if compute < 1:
        raise ValueError(f"found {value!r}, expected a compute rate above zero, of at least 1 FLOP/s")
    return compute


def parse_price(value: object) -> tuple[float, str]:
    """``"2.50 USD/h"``, of one device -> 2.5 and ``"USD"``; a number alone is in US dollars per hour"""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= AMOUNT:
        return float(value), "USD"
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) and len(value) <= TEXT else None
    unit = re.fullmatch(r"([A-Z]{3})/h", match[2] or "") if match else None
    if match is None or unit is None or not 0 <= float(match[1]) <= AMOUNT:
        raise ValueError(f"found {shown(value)}, expected the price of a device hour such as '2.50 USD/h'")
    return float(match[1]), unit[1]


def format_count(value: float) -> str:
    """A whole number of at least four digits with commas, of smaller ones three digits: 235,600 and 12.3"""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def format_money(value: float) -> str:
    """Three significant digits at least, and whole cents of what is larger than one."""
    if value >= 1 or value == 0:
        return f"{value:,.2f}"
    return f"{value:.3g}" if value >= 1e-4 else f"{value:.2e}"


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    """Three significant digits in the largest unit that leaves a number of at least one."""
    factor, unit = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    number = value / factor
    digits = 0 if abs(number) >= 100 or number == 0 else 1 if abs(number) >= 10 else 2
    return f"{number:.{digits}f} {unit}"


def format_bytes(value: float) -> str:
    """85899345920 -> ``"80.0 GiB"``"""
    return _scaled(value, [(2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")])


def format_seconds(value: float) -> str:
    """0.0123 -> ``"12.3 ms"``"""
    return _scaled(value, [(1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]) if value else "0 s"


def format_duration(value: float) -> str:
    """183600 -> ``"51.0 h"``; from two days on in days, from two years on in years"""
    steps = [(31557600.0, "y"), (86400.0, "d"), (3600.0, "h"), (60.0, "min")]
    fitting = [step for step in steps if value >= 2 * step[0]]
    return _scaled(value, fitting[:1]) if fitting else format_seconds(value)


def format_tokens(value: float) -> str:
    """15.6e12 -> ``"15.6 T"``"""
    return _scaled(value, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1, "")]).strip()


def format_bandwidth(value: float) -> str:
    """25e9 -> ``"25.0 GB/s"``"""
    if math.isinf(value):
        return "free"
    return _scaled(value, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")])


def format_compute(value: float) -> str:
    """312e12 -> ``"312 TFLOP/s"``"""
    return _scaled(value, [(1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s")])
