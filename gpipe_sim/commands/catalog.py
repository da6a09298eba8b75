"""`gpipe catalog`: the scenarios that come with the tool, and what scenarios can name."""


def catalog() -> None:
    """List the scenarios that come with the tool, and devices, links, models and failure rates with their sources."""
    from rich.table import Table

    from gpipe_sim.base.units import format_bandwidth, format_bytes, format_compute, format_duration, format_seconds
    from gpipe_sim.cost.transformer import num_parameters
    from gpipe_sim.scenario.catalog import LINKS, device_names, find_device
    from gpipe_sim.scenario.failures import FAILURES
    from gpipe_sim.scenario.presets import PRESETS
    from gpipe_sim.scenario.reading import question_of, shipped_scenarios
    from gpipe_sim.scenario.schema import preset_model
    from gpipe_sim.show.terminal import make_console

    scenarios = Table("scenario", "what it asks", title="Scenarios (gpipe simulate NAME)", title_justify="left")
    for file in sorted(shipped_scenarios().glob("*.yaml")):
        scenarios.add_row(file.stem, question_of(file))
    heads = ("device", "memory", "bandwidth", "peak compute", "per hour", "source")
    devices = Table(*heads, title="Devices", title_justify="left")
    for device in map(find_device, device_names()):
        peaks = ", ".join(f"{dtype} {format_compute(peak)}" for dtype, peak in device.compute.items())
        memory, bandwidth = format_bytes(device.memory), format_bandwidth(device.bandwidth)
        price = f"{device.price.per_hour:g} {device.price.currency}" if device.price else ""
        source = f"{device.source}; price: {device.price.source}" if device.price else device.source
        devices.add_row(device.name, memory, bandwidth, peaks, price, source)
    links = Table("link", "each direction", "typical latency", "source", title="Links", title_justify="left")
    for link in LINKS.values():
        links.add_row(link.name, format_bandwidth(link.bandwidth), format_seconds(link.latency), link.source)
    models = Table("model", "parameters", "source", title="Models (model.preset)", title_justify="left")
    for preset in PRESETS.values():
        count = num_parameters(preset_model(preset.name))
        models.add_row(preset.name, f"{count:,}", preset.source)
    parts = ("device", "node", "network", "software", "job")
    failures = Table("failures", *parts, "source", title="Mean time between failures", title_justify="left")
    for rates in FAILURES.values():
        times = (format_duration(1 / rate) if (rate := getattr(rates, part)) else "" for part in parts)
        failures.add_row(rates.name, *times, rates.source)
    console = make_console()
    for table in (scenarios, devices, links, models, failures):
        console.print(table)
