"""Registry of analyses, keyed by name.

Nothing is imported when the names are listed. Packages can add analyses through the entry point group of this name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedloom.analyses.form import Analysis

GROUP_NAME = "fedloom.analyses"


class AnalysisRegistry(Mapping[str, "type[Analysis]"]):
    """Classes of analyses, keyed by name. Each class is imported when it is first used.

    Args:
        places: import paths of the library's own analyses, as ``"package.module:Class"``.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._own = dict(places)

    @cached_property
    def places(self) -> dict[str, str]:
        """Import paths of all analyses by name, in listing order."""
        added = {entry.name: entry.value for entry in entry_points(group=GROUP_NAME)}
        return dict(sorted({**added, **self._own}.items()))

    def __getitem__(self, name: str) -> type[Analysis]:
        module, _, attribute = self.places[name].partition(":")
        cls: type[Analysis] = getattr(import_module(module), attribute)
        return cls

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


ANALYSES = AnalysisRegistry(
    {
        "confusion": "fedloom.analyses.inspection:Confusion",
        "groups": "fedloom.analyses.patients:Groups",
        "importance": "fedloom.analyses.importance:Importance",
        "pooled-importance": "fedloom.analyses.importance:PooledImportance",
        "predictions": "fedloom.analyses.patients:KeptPredictions",
        "tsne": "fedloom.analyses.inspection:Tsne",
    }
)


def get_analysis_name(analysis: Analysis) -> str:
    """Return an analysis' name in files: its kind or, if it is user-defined, its import path."""
    from fedloom.imports import get_import_path  # pydantic is slow to import, and listing names does not require it
    from fedloom.values import get_kind

    kind = get_kind(analysis)
    if kind in ANALYSES and ANALYSES[kind] is type(analysis):
        return kind
    return get_import_path(type(analysis)) or kind
