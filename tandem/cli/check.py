"""`tandem check`: what this machine offers, and which paths will be used."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tandem.bench.roofline import last_level_cache, read_bandwidth
from tandem.config import EngineConfig
from tandem.engine.build import compute_dtype
from tandem.hub import CATALOGUE, Hub
from tandem.kernels import native
from tandem.threads import usable_cores

__all__ = ["check"]

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def check(
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="measure how fast memory is read")] = False,
) -> None:
    """Show cores, instruction sets, precision, memory and models."""
    table = Table("what", "here", show_header=False)
    for name, value in (*_processor(), *_torch(), *_memory(bandwidth), *_models()):
        table.add_row(name, value)
    Console().print(table)


def _processor() -> list[tuple[str, str]]:
    cores = f"{platform.machine()}, {usable_cores()} cores usable"
    return [("processor", cores), ("instruction sets", _instruction_sets()), ("native kernels", _kernels())]


def _kernels() -> str:
    """Which instruction set the kernels use, or why there are none."""
    if (why := native.missing()) is not None:
        return f"none, {why}; torch computes instead"
    fastest, *others = native.paths()
    return f"{fastest}, in bfloat16 on the CPU" + (f" (there are also {', '.join(others)})" if others else "")


def _instruction_sets() -> str:
    """Those that matter, from the kernel's list; torch's own word where there is none."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return torch.backends.cpu.get_cpu_capability()
    flags = next((line.split() for line in file.read_text().splitlines() if line.startswith("flags")), [])
    return " ".join(flag for flag in _FLAGS if flag in flags) or torch.backends.cpu.get_cpu_capability()


def _torch() -> list[tuple[str, str]]:
    dtype = compute_dtype(EngineConfig())
    name = str(dtype).removeprefix("torch.")
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return [
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("precision (dtype auto)", name),
        ("cuda", cuda),
    ]


def _memory(measured: bool) -> list[tuple[str, str]]:
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = file.read_text().partition("[")[2].partition("]")[0] if file.is_file() else "not told"
    cache = last_level_cache()
    rows = [("last-level cache", f"{cache / (1 << 20):.0f} MiB" if cache else "not told"), ("huge pages", mode)]
    if measured:
        rows.append(("memory read", f"{read_bandwidth() / 1e9:.1f} GB/s"))
    return rows


def _models() -> list[tuple[str, str]]:
    hub = Hub()
    present = [name for name, entry in CATALOGUE.items() if (hub.cache / name / entry.file).is_file()]
    return [("model folder", str(hub.cache)), ("models there", ", ".join(present) or "none yet: see tandem pull")]
