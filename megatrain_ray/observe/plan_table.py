"""A plan for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatrain_ray.layout import LayerSpec
from megatrain_ray.planner import SPARE_SHARE, Plan

__all__ = ["print_plan"]

_ROWS = {
    "driver": "schedule, tokens; libraries",
    "nvme_store": "read buffers, staging blocks",
    "cpu_optimizer": "masters and moments in RAM",
    "gpu_worker": "host side of the device",
    "object_store": "weights, gradients, state on their way",
    "ray": "Ray's own processes",
}


def print_plan(plan: Plan, layers: Sequence[LayerSpec], console: Console) -> None:
    """Peaks beside limits, placement, step time, what bounds it, wear of the drive."""
    parameters = sum(spec.num_parameters for spec in layers)
    peak, limits = plan.peak_bytes, plan.limits
    table = Table("tier", "predicted peak", "limit", "", title=f"{parameters:,} parameters", title_justify="left")
    table.columns[1].justify = table.columns[2].justify = "right"
    for tier, purpose in _ROWS.items():
        limit = size_text(limits["object_store"]) if tier == "object_store" else ""
        on_cpu = tier == "gpu_worker" and "device" not in peak
        table.add_row(tier, size_text(peak[tier]), limit, "activations, gradients" if on_cpu else purpose)
    table.add_row("RAM in all", size_text(peak["total_ram"]), size_text(limits["total_ram"]), _share(
        peak["total_ram"], limits["total_ram"]), style="bold", end_section=True)  # fmt: skip
    if "device" in peak:
        table.add_row("device", size_text(peak["device"]), size_text(limits["device"]), _share(
            peak["device"], limits["device"]), style="bold")  # fmt: skip
    store, checkpoint = f"store {size_text(plan.store_bytes)}", f"a checkpoint {size_text(plan.checkpoint_bytes)}"
    disks = {"disk": (plan.disk_bytes, f"{store}, {checkpoint}")}
    if "output_disk" in limits:
        disks = {"disk": (plan.store_bytes, "store"), "output disk": (plan.disk_bytes - plan.store_bytes, checkpoint)}
    for disk, (needed, parts) in disks.items():
        free = limits[disk.replace(" ", "_")]
        table.add_row(disk, size_text(needed), size_text(free), parts, style="bold")
    console.print(table)
    for line in _decisions(plan):
        console.print(line, highlight=False, soft_wrap=True)


def _decisions(plan: Plan) -> list[str]:
    shape = plan.shape
    paged, total = len(shape.paged), len(shape.trainable)
    where = (
        "in RAM"
        if not paged
        else "in the store"
        if paged == total
        else f"{total - paged} layers in RAM, {paged} in the store"
    )
    lines = [f"masters and moments: {where}"]
    if shape.deferred:
        waiting = len(shape.spilled_grads)
        lines.append(
            "gradients wait for the norm " + (f"in memory, {waiting} layers' in the store" if waiting else "in memory")
        )
    lines.append(
        f"device: prefetch depth {shape.prefetch_depth}, {plan.slots} slots for weights; they "
        + ("stay in host memory" if shape.retain_params else "are made again")
        + " between forward and backward"
    )
    decoders = len(shape.numels) - 2
    lines.append(
        f"activations: {decoders - shape.keep_graph} layers recompute, {shape.keep_graph} keep their graph; "
        + "layer inputs "
        + ("wait in host memory" if plan.offload_inputs else "stay on the device")
    )
    exporting, room = plan.phases["export"]["total_ram"], int(plan.limits["total_ram"] / SPARE_SHARE)
    if exporting > room:
        lines.append(
            f"save_pretrained of the live run would take {size_text(exporting)}, more than {size_text(room)}: export a "
            "checkpoint after the run instead"
        )
    time = plan.time
    if time is not None:
        lines.append(
            f"step: {time_text(time.step_s)} ({plan.tokens / time.step_s:,.0f} tokens/s; {time_text(time.save_step_s)} "
            f"with a checkpoint; speeds {plan.speeds})"
        )
        lines.append(time.explanation)
        moved = f"{size_text(time.nvme_read_bytes)} read, {size_text(time.nvme_write_bytes)} written a step"
        worn = f"{size_text(plan.write_bytes_per_day)} written a day, checkpoints included"
        life = "" if plan.drive_life_years is None else f": the drives last {plan.drive_life_years:.1f} years"
        lines.append(f"store: {moved}; {worn}{life}")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def size_text(nbytes: int) -> str:
    """Bytes with a binary unit."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if value >= 100 or unit in ("B", "KiB") else f"{value:,.1f} {unit}"


def time_text(seconds: float) -> str:
    """Seconds, or minutes where they are many."""
    return f"{seconds:.2f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
