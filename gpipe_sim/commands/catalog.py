"""`gpipe catalog`: the devices and links that scenarios can name."""


def catalog() -> None:
    """List the devices and links that scenarios can name, with their peak figures and where they come from."""
    from rich.table import Table

    from gpipe_sim.catalog import LINKS, device_names, find_device
    from gpipe_sim.terminal import make_console
    from gpipe_sim.units import format_bandwidth, format_bytes, format_compute, format_seconds

    devices = Table("device", "memory", "bandwidth", "peak compute", "source", title="Devices", title_justify="left")
    for device in map(find_device, device_names()):
        peaks = ", ".join(f"{dtype} {format_compute(peak)}" for dtype, peak in device.compute.items())
        memory, bandwidth = format_bytes(device.memory), format_bandwidth(device.bandwidth)
        devices.add_row(device.name, memory, bandwidth, peaks, device.source)
    links = Table("link", "each direction", "typical latency", "source", title="Links", title_justify="left")
    for link in LINKS.values():
        links.add_row(link.name, format_bandwidth(link.bandwidth), format_seconds(link.latency), link.source)
    console = make_console()
    console.print(devices)
    console.print(links)
