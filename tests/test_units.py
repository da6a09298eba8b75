"""Quantities: exact where the file is exact, and strict where people are sloppy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_sim.base import units
from gpipe_sim.base.units import (
    format_bandwidth,
    format_bytes,
    format_compute,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_compute,
    parse_seconds,
)

PARSERS = [parse_bytes, parse_seconds, parse_bandwidth, parse_compute]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "80 GiB", 80 * 2**30),
        (parse_bytes, "80 GB", 80e9),
        (parse_bytes, "1 kB", 1000),
        (parse_bytes, "1 KiB", 1024),
        (parse_bytes, "2 TiB", 2**41),
        (parse_bytes, "0 B", 0),
        (parse_bytes, "1.5 MB", 1_500_000),
        (parse_bytes, ".5 GB", 5e8),
        (parse_bytes, "1e3 B", 1000),
        (parse_seconds, "10 us", 1e-05),
        (parse_seconds, "10 µs", 1e-05),
        (parse_seconds, "5 ms", 5e-3),
        (parse_seconds, "7 ns", 7e-9),
        (parse_seconds, "3 s", 3),
        (parse_bandwidth, "25 GB/s", 25e9),
        (parse_bandwidth, "25 GiB/s", 25 * 2**30),
        (parse_bandwidth, "10 Gb/s", 1.25e9),
        (parse_bandwidth, "10 Gbit/s", 1.25e9),
        (parse_bandwidth, "8 Mbit/s", 1e6),
        (parse_bandwidth, "inf GB/s", math.inf),
        (parse_compute, "312 TFLOP/s", 312e12),
        (parse_compute, "2.25 PFLOP/s", 2.25e15),
        (parse_compute, "67 GFLOP/s", 67e9),
    ],
)
def test_a_quantity_is_exactly_its_si_value(parse, text, value):
    assert parse(text) == value


@given(st.integers(0, 10**9), st.sampled_from([("s", 0), ("ms", 3), ("us", 6), ("ns", 9)]))
def test_whole_numbers_of_small_units_are_as_exact_as_a_float_can_be(number, unit):
    name, digits = unit
    assert parse_seconds(f"{number} {name}") == float(f"{number}e-{digits}")


@given(st.integers(1, 10**6), st.sampled_from(["", "k", "M", "G", "T", "P"]))
def test_a_byte_is_eight_bits(number, prefix):
    assert parse_bandwidth(f"{8 * number} {prefix}b/s") == parse_bandwidth(f"{number} {prefix}B/s")
    assert parse_bandwidth(f"{number} {prefix}b/s") == parse_bandwidth(f"{number} {prefix}bit/s")


@given(st.integers(0, 10**6), st.sampled_from(["B", "kB", "GB", "KiB", "GiB"]), st.sampled_from(["", " ", "  "]))
def test_spaces_around_a_quantity_do_not_matter(number, unit, space):
    assert parse_bytes(f"{space}{number}{space}{unit}{space}") == parse_bytes(f"{number} {unit}")


def test_gb_gib_and_gbit_are_three_different_sizes():
    assert parse_bandwidth("1 GiB/s") > parse_bandwidth("1 GB/s") > parse_bandwidth("1 Gb/s")


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("number", [0, 5, 2.5, "5", "2.5", "1e3"])
def test_a_number_without_a_unit_is_refused_and_an_example_given(parse, number):
    with pytest.raises(ValueError, match=r"has no unit, expected .* such as '\d+ \S+'"):
        parse(number)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("value", [None, True, False, [], ["5 GB"], {"a": 1}, "", " ", "GB", "fast", "nan GB/s"])
def test_what_is_no_quantity_is_refused_and_an_example_given(parse, value):
    with pytest.raises(ValueError, match=r"found .*, expected .* such as '\d+ \S+'"):
        parse(value)


@pytest.mark.parametrize(
    ("parse", "text", "suggestions"),
    [
        (parse_bytes, "25 KB", ["kB", "KiB"]),  # 1000 or 1024: people use it for both
        (parse_bandwidth, "25 KB/s", ["kB/s", "KiB/s"]),
        (parse_bytes, "25 Gb", ["GB"]),  # a size in bits
        (parse_bytes, "25 gib", ["GiB"]),
        (parse_bandwidth, "25 gb/s", ["GB/s", "Gb/s"]),
        (parse_seconds, "10 MS", ["ms"]),
        (parse_compute, "312 Tflop/s", ["TFLOP/s"]),
    ],
)
def test_an_ambiguous_spelling_is_refused_and_every_reading_of_it_offered(parse, text, suggestions):
    with pytest.raises(ValueError, match="unknown unit") as caught:
        parse(text)
    expected = str(caught.value).split("expected ")[1]
    assert set(suggestions) <= set(expected.split(" or "))


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, "10 GB/s"),
        (parse_bytes, "10 us"),
        (parse_seconds, "10 GB"),
        (parse_seconds, "10 min"),
        (parse_bandwidth, "10 GB"),
        (parse_bandwidth, "10 GB/ms"),
        (parse_compute, "312 TFLOP"),
        (parse_compute, "312 GB/s"),
        (parse_bytes, "1,000 MB"),
        (parse_bytes, "80 GB or so"),
    ],
)
def test_a_unit_of_another_dimension_or_none_is_refused(parse, text):
    with pytest.raises(ValueError, match=r"unknown unit .* expected"):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_bytes, "-1 B"), (parse_seconds, "-1 us"), (parse_bandwidth, "-1 GB/s"), (parse_compute, "-1 FLOP/s")],
)
def test_a_negative_quantity_is_refused(parse, text):
    with pytest.raises(ValueError, match="not negative"):
        parse(text)


@pytest.mark.parametrize(("parse", "text"), [(parse_bandwidth, "0 GB/s"), (parse_compute, "0 TFLOP/s")])
def test_a_rate_of_zero_is_refused(parse, text):
    with pytest.raises(ValueError, match="above zero"):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_bytes, "inf GB"), (parse_seconds, "inf s"), (parse_compute, "inf FLOP/s"), (parse_seconds, "1e400 s")],
)
def test_only_a_bandwidth_may_be_infinite(parse, text):
    with pytest.raises(ValueError, match="finite"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80.0 GiB", format_bytes(80 * 2**30)),
        ("1.00 KiB", format_bytes(1024)),
        ("0 B", format_bytes(0)),
        ("12.3 ms", format_seconds(0.0123)),
        ("10.0 us", format_seconds(1e-5)),
        ("123 s", format_seconds(123.4)),
        ("0 s", format_seconds(0)),
        ("25.0 GB/s", format_bandwidth(25e9)),
        ("free", format_bandwidth(math.inf)),
        ("312 TFLOP/s", format_compute(312e12)),
    ],
)
def test_values_are_shown_with_three_digits_in_a_unit_that_suits_them(text, value):
    assert text == value


@pytest.mark.parametrize(
    ("show", "parse", "smallest"),
    [
        (format_bytes, parse_bytes, 1.0),
        (format_seconds, parse_seconds, 1e-9),
        (format_bandwidth, parse_bandwidth, 1.0),
        (format_compute, parse_compute, 1.0),
    ],
)
@given(exponent=st.floats(0, 17))
def test_what_is_shown_reads_back_as_nearly_the_same_value(show, parse, smallest, exponent):
    value = smallest * 10**exponent
    assert parse(show(value)) == pytest.approx(value, rel=0.005)


def test_bits_per_second_written_as_bps_are_told_as_bits():
    with pytest.raises(ValueError, match=r"expected Gbit/s"):
        units.parse_bandwidth("25 Gbps")
    with pytest.raises(ValueError, match=r"expected GB/s"):
        units.parse_bandwidth("25 GBps")


def test_both_characters_that_look_like_mu_are_micro():
    assert units.parse_seconds("10 \u00b5s") == units.parse_seconds("10 \u03bcs") == 1e-05


def test_an_amount_too_large_for_a_float_is_refused():
    with pytest.raises(ValueError, match="finite"):
        units.parse_bytes("1e308 GB")
    with pytest.raises(ValueError, match="finite"):
        units.parse_bandwidth("1e400 B/s")
