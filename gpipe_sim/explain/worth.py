"""What people act on: tokens per second, the share of the devices' arithmetic that is the model's, days and money.

    tokens/s   = batch x sequence / step time
    MFU        = model FLOPs of a step / (step time x peak FLOP/s of all devices in the model's dtype)
    days       = tokens / (tokens/s) / 86400
    money      = price of a device hour x devices in use x hours

Model FLOPs are those of a forward and a backward of the whole batch, three times the forward's: about 6 for each weight
and token, and attention's. What is computed again is not counted, nor padding, nor the optimizer (Chowdhery et al.,
PaLM, arXiv 2204.02311, appendix B). Whether attention counts every pair of tokens or only those that a causal mask
leaves is ``model.causal``; PaLM, as most papers, counts every pair. The peak is the catalogue's for dense arithmetic.

Only a transformer says how many tokens and FLOPs a sample has: of other models these figures are not known.
"""

from dataclasses import dataclass
from typing import Any

from gpipe_sim.base.units import format_count, format_money
from gpipe_sim.cost.transformer import DTYPE_BYTES, flops_per_sample, num_parameters
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.catalog import Price
from gpipe_sim.scenario.schema import Transformer

_DAY_S = 86_400.0
_HOUR_S = 3_600.0


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What a plan yields and costs; None where that is not known."""

    parameters: int
    """Of the whole model, each counted once."""
    devices: int
    """That the plan uses."""
    step_time_s: float
    tokens_per_step: int | None
    flops_per_step: float | None
    peak_flops: float | None
    """Of one device, in the model's dtype."""
    price: Price | None
    """Of one device for an hour."""
    tokens: float | None = None
    """That are to be trained on."""

    @property
    def tokens_per_s(self) -> float | None:
        """Of all devices together."""
        return None if self.tokens_per_step is None else self.tokens_per_step / self.step_time_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the devices could have computed in that time."""
        if self.flops_per_step is None or self.peak_flops is None:
            return None
        return self.flops_per_step / (self.step_time_s * self.peak_flops * self.devices)

    @property
    def days(self) -> float | None:
        """For all `tokens`."""
        if self.tokens is None or self.tokens_per_s is None:
            return None
        return self.tokens / self.tokens_per_s / _DAY_S

    @property
    def money_per_step(self) -> float | None:
        """In the price's currency, as the next two."""
        return None if self.price is None else self.price.per_hour * self.devices * self.step_time_s / _HOUR_S

    @property
    def money_per_token(self) -> float | None:
        """Of one token."""
        if self.money_per_step is None or self.tokens_per_step is None:
            return None
        return self.money_per_step / self.tokens_per_step

    @property
    def money(self) -> float | None:
        """For all `tokens`."""
        return None if self.tokens is None or self.money_per_token is None else self.tokens * self.money_per_token

    def to_dict(self) -> dict[str, Any]:
        """The keys that ``--json`` has of it; those of a number of tokens only where one is asked for."""
        per_device = None if self.tokens_per_s is None else self.tokens_per_s / self.devices
        result = {
            "parameters": self.parameters,
            "devices": self.devices,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": per_device,
            "model_flops": self.flops_per_step,
            "mfu": self.mfu,
            "price_per_hour": None if self.price is None else self.price.per_hour,
            "price_source": None if self.price is None else self.price.source,
            "currency": None if self.price is None else self.price.currency,
            "money_per_step": self.money_per_step,
            "money_per_token": self.money_per_token,
        }
        if self.tokens is not None:
            result |= {"tokens": self.tokens, "days": self.days, "money": self.money}
        return result

    def sentence(self) -> str | None:
        """All of it in words, for those who read; None where nothing is known."""
        told = []
        if self.tokens_per_s is not None:
            each = format_count(self.tokens_per_s / self.devices)
            told.append(f"{format_count(self.tokens_per_s)} tokens/s, {each} per device")
        if self.mfu is not None:
            told.append(f"MFU {self.mfu:.1%}")
        if self.price is not None and self.money_per_step is not None:
            cost = f"{format_money(self.money_per_step)} {self.price.currency} a step"
            if self.money_per_token is not None:
                cost += f", {format_money(1e6 * self.money_per_token)} for a million tokens"
            told.append(f"{cost}, at {format_money(self.price.per_hour)} for a device hour")
        if self.tokens is not None and self.days is not None:
            all_money = "" if self.money is None or self.price is None else f", {self.money:,.0f} {self.price.currency}"
            told.append(f"{self.tokens:.4g} tokens take {format_count(self.days)} days{all_money}")
        return "; ".join(told) if told else None


def _peak_flops(plan: Plan) -> float | None:
    """Of one device, or the mean of those in use where there are several kinds."""
    cluster = plan.scenario.cluster
    if not cluster.groups:
        return cluster.device.compute.get(plan.dtype)
    firsts = [plan.global_rank(rank, replica) for rank in plan.ranks for replica in range(plan.replicas)]
    peaks = [cluster.device_at(first + number).compute[plan.dtype] for first in firsts for number in range(plan.tensor)]
    return sum(peaks) / len(peaks)


def worth_of(plan: Plan, step_time_s: float, tokens: float | None = None) -> Worth:
    """What a plan with that step time yields and costs."""
    scenario, model = plan.scenario, plan.scenario.model
    parameters = round(float(plan.profile.parameter_bytes.sum()) / DTYPE_BYTES[plan.dtype])
    tokens_per_step, flops_per_step = None, None
    if isinstance(model, Transformer):
        parameters, tokens_per_step = num_parameters(model), scenario.batch * model.sequence
        flops_per_step = scenario.batch * flops_per_sample(model)
    return Worth(
        parameters=parameters,
        devices=plan.world,
        step_time_s=step_time_s,
        tokens_per_step=tokens_per_step,
        flops_per_step=flops_per_step,
        peak_flops=_peak_flops(plan),
        price=scenario.cluster.device_price,
        tokens=tokens,
    )
