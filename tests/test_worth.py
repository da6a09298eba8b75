"""What people act on: tokens per second, MFU, days and money."""

import json
import re

import pytest
from commands import run
from plans import equal_stages, scenario

from gpipe_sim.base.units import format_count, format_money, parse_price, parse_tokens
from gpipe_sim.cost.transformer import num_parameters
from gpipe_sim.explain.predict import predict
from gpipe_sim.make.making import make_plan

SCENARIO = """
model: {kind: transformer, preset: gpt2, layers: 2}
batch: 8
cluster: {device: a100-80gb, link: nvlink3, price: 2 USD/h}
plan: {stages: 2, microbatches: 4, checkpoint: never}
"""


def small(**cluster):
    model = {"kind": "transformer", "preset": "gpt2", "layers": 2}
    cluster = {"device": "a100-80gb", "link": "nvlink3", "price": "2 USD/h"} | cluster
    plan = {"stages": 2, "microbatches": 4, "checkpoint": "never"}
    return make_plan(scenario({"name": "small", "model": model, "batch": 8, "cluster": cluster, "plan": plan}))


def test_tokens_and_model_flops_are_those_of_the_batch():
    plan = small()
    found = predict(plan).to_dict()
    assert found["parameters"] == num_parameters(plan.scenario.model)
    assert found["tokens_per_s"] == pytest.approx(8 * 1024 / found["step_time_s"])
    assert found["tokens_per_s_per_device"] == pytest.approx(found["tokens_per_s"] / 2)
    products = num_parameters(plan.scenario.model) - 1024 * 768 - (4 + 4 + 2) * 768 - 2 * (5 * 768 + 3072 + 768)
    assert found["model_flops"] == pytest.approx(6 * 8 * 1024 * products + 12 * 2 * 8 * 1024**2 * 768, rel=2e-3)
    assert found["mfu"] == pytest.approx(found["model_flops"] / (found["step_time_s"] * 2 * 312e12))


def test_recomputation_costs_utilisation_and_does_not_count_as_the_models():
    plain = predict(small())
    again = predict(make_plan(scenario(plain.plan.scenario.document.data | {"plan": {"stages": 2, "microbatches": 4}})))
    assert again.worth().flops_per_step == plain.worth().flops_per_step
    assert again.worth().mfu < plain.worth().mfu


def test_money_is_the_price_of_the_devices_in_use_for_the_time_they_are_used():
    prediction = predict(small())
    found = prediction.to_dict(tokens=1e12)
    assert found["money_per_step"] == pytest.approx(2 * 2 * found["step_time_s"] / 3600)
    assert found["money_per_token"] == pytest.approx(found["money_per_step"] / (8 * 1024))
    assert found["days"] == pytest.approx(1e12 / found["tokens_per_s"] / 86400)
    assert found["money"] == pytest.approx(found["days"] * 24 * 2 * 2)
    assert (found["currency"], found["price_source"]) == ("USD", "scenario")


def test_a_price_in_the_scenario_comes_before_the_catalogues():
    dear, listed = predict(small(price="7 EUR/h")).worth(), small()
    assert (dear.price.per_hour, dear.price.currency) == (7.0, "EUR")
    device = listed.scenario.cluster.device
    assert re.search(r"20\d\d$", device.price.source), "a price says when it was asked"


def test_of_a_model_that_says_no_tokens_only_its_parameters_are_known():
    found = predict(equal_stages(2, 4)).to_dict(tokens=1e9)
    unknown = ("tokens_per_s", "tokens_per_s_per_device", "model_flops", "mfu", "money_per_step", "days", "money")
    assert [found[key] for key in unknown] == [None] * len(unknown)
    assert found["parameters"] == 0
    assert predict(equal_stages(2, 4)).worth().sentence() is None


def test_simulate_and_plan_tell_days_and_money(capsys, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    for command in ("simulate", "plan"):
        status, out, _ = run(capsys, command, path, "--tokens", "1T", "--html", tmp_path / f"{command}.html")
        assert status == 0
        assert re.search(r"1e\+12 tokens take [\d.,]+ days, [\d,]+ USD", " ".join(out.split()))
        assert "1e+12 tokens take" in (tmp_path / f"{command}.html").read_text()
        _, out, _ = run(capsys, command, path, "--tokens", "1T", "--json")
        assert json.loads(out)["results"][0]["tokens"] == 1e12
    status, _, err = run(capsys, "simulate", path, "--tokens", "many")
    assert status == 2
    assert "--tokens: found 'many', expected a number of tokens such as 300B or 1T" in err


@pytest.mark.parametrize(
    ("text", "tokens"), [("1T", 1e12), ("300B", 300e9), ("1.5M", 1.5e6), ("2e9", 2e9), ("42", 42.0), ("7 k", 7e3)]
)
def test_tokens_are_written_as_people_say_them(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "T", "1.2.3", "1e400", "inf", "1 TB"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(ValueError, match="expected a number of tokens"):
        parse_tokens(text)


def test_prices_have_a_currency_and_are_by_the_hour():
    assert parse_price("2.50 USD/h") == (2.5, "USD")
    assert parse_price("3 EUR/h") == (3.0, "EUR")
    assert parse_price(1.25) == (1.25, "USD")
    for wrong in ("2.50", "2.50 USD", "-1 USD/h", "free", True, -1, None):
        with pytest.raises(ValueError, match="expected the price of a device hour"):
            parse_price(wrong)


def test_money_is_shown_in_cents_or_with_three_digits():
    assert [format_money(value) for value in (1234.5, 1.0, 0.0123456, 1.5e-7, 0)] == [
        "1,234.50",
        "1.00",
        "0.0123",
        "1.50e-07",
        "0.00",
    ]


def test_counts_are_shown_with_commas_or_three_digits():
    assert [format_count(value) for value in (235_612.4, 1000, 999.7, 99.96, 0.5)] == [
        "235,612",
        "1,000",
        "1,000",
        "100",
        "0.5",
    ]
