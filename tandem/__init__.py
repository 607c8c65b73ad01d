"""Tandem: speculative decoding that never changes a token. `LLM` and `SamplingParams` are where to start.

Names are loaded when first used, so that `import tandem` costs nothing and the parts without tensors need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.config import EngineConfig
    from tandem.errors import EngineFailure, InvalidValue, LoadError, TandemError
    from tandem.llm import LLM
    from tandem.outputs import Choice, Completion, Increment, Usage
    from tandem.sampling import SamplingParams

__all__ = [
    "LLM",
    "Choice",
    "Completion",
    "EngineConfig",
    "EngineFailure",
    "Increment",
    "InvalidValue",
    "LoadError",
    "SamplingParams",
    "TandemError",
    "Usage",
]

_HOMES = {
    "tandem.config": ("EngineConfig",),
    "tandem.errors": ("EngineFailure", "InvalidValue", "LoadError", "TandemError"),
    "tandem.llm": ("LLM",),
    "tandem.outputs": ("Choice", "Completion", "Increment", "Usage"),
    "tandem.sampling": ("SamplingParams",),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
