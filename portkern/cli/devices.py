"""``portkern devices``."""

from __future__ import annotations

import click

from portkern.cli._output import emit, size, table
from portkern.cli._parameters import common


@click.command(short_help="The GPUs here, and the targets to compile for.")
@common
def command(as_json: bool) -> None:
    """The GPUs here, and the targets to compile for."""
    from portkern.discovery import visibility
    from portkern.plugins import targets
    from portkern.runtime import current

    runtime = current()
    devices = runtime.devices
    references = [runtime.backend(target).reference_device() for target in targets(runtime.plugins)]
    visible = visibility(runtime.plugins)
    data = {
        "devices": [
            {**device.to_json(), "index": device.index, "note": runtime.backend(device.target).note}
            for device in devices
        ],
        "targets": [{**each.target.to_json(), "reference": each.slug} for each in references],
        "environment": [each._asdict() for each in visible],
    }
    headers = ("device", "name", "target", "slug", "units", "memory", "shared", "driver", "identity", "note")
    rows = [
        (f"cuda:{device.index}", device.name, device.target.arch, device.slug, device.units,
         size(device.memory_bytes), size(device.shared_bytes), device.driver, device.identity,
         runtime.backend(device.target).note)
        for device in devices
    ]  # fmt: skip
    parts = [table(headers, rows, ("note",)) if rows else "No GPU here that a plugin serves."]
    if visible:
        parts.append("\n".join(f"{each.name}={each.value!r}: {'; '.join(each.remarks)}" for each in visible))
    offline = [
        (each.target.arch, each.target.backend, each.target.warp_size, each.name, each.slug) for each in references
    ]
    parts.append(table(("target", "backend", "lanes", "planned for", "slug"), offline))
    emit("devices", data, "\n\n".join(parts), as_json)
