"""``specmemo probe``: measure this machine once, for plans."""

from __future__ import annotations

import time

from rich.table import Table

from specmemo_kernels.cli.common import check_output, setting_up, show_tables, terminal, torch_device, write_result
from specmemo_kernels.cli.options import ProbeOptions
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.device_probe import cache_file, probe
from specmemo_kernels.planning.memory_plan import format_bytes


def run_probe(options: ProbeOptions) -> None:
    """Measure a device profile, print it and write it to a file (default: the cache of ``patch`` and ``plan``)."""
    name = str(torch_device(options.device))
    option, path, advice = "--output", options.output, ""
    if path is None:
        option, path, advice = "the profile", cache_file(name), "; give --output FILE, or set XDG_CACHE_HOME"
    check_output(option, path, make_folders=True, advice=advice)
    console, started = terminal(), time.perf_counter()
    with console.status(f"measuring {name}"), setting_up():
        profile = probe(name, options.seconds)
    elapsed = time.perf_counter() - started
    write_result(option, path, profile.save)
    show_tables(console, profile_table(profile))
    console.print(f"measured in {elapsed:.1f} s, written to {path}", soft_wrap=True)


def profile_table(profile: DeviceProfile) -> Table:
    """The profile as a table: rates, and the time of several rows relative to one row."""
    table = Table("property", "value", title=profile.name)
    table.add_row("memory", format_bytes(profile.memory))
    table.add_row("reads", f"{profile.read_rate / 1e9:.1f} GB/s")
    for dtype, rate in profile.matmul_rate.items():
        table.add_row(f"products in {dtype}", f"{rate / 1e12:.2f} TFLOP/s")
    for dtype, curve in profile.curves.items():
        costs = ", ".join(f"{rows}: {cost / curve[0][1]:.1f}" for rows, cost in curve)
        table.add_row(f"rows in {dtype}, relative to one", costs)
    table.add_row("one operator", f"{profile.launch_seconds * 1e6:.1f} us")
    return table
