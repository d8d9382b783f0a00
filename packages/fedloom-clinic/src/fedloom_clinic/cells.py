"""Cells of tables: groups and levels of codes. Cells that too few clients reach are merged before any sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.analyses import AnalysisTerms, ClientRows, Rules, Schema
from fedloom.errors import Refused
from fedloom.hints import unknown

OTHER_LEVEL, MISSING_LEVEL = "other", "missing"
BLANK_LEVELS = ("", MISSING_LEVEL)
"""Names of the cell of rows without a code: of a kept column, and of a feature."""
CLIENT_GROUP = "client"
"""Word that makes each client a separate group."""


class MergedCells(NamedTuple):
    """Cells that remain after merging.

    Attributes:
        names: names of the cells.
        of: new cell of each cell before the merge ``[L]``. For a merged cell, it is the cell "other".
    """

    names: tuple[str, ...]
    of: Tensor

    @property
    def members(self) -> Tensor:
        """Matrix ``[cells, L]`` with 1 if a cell before the merge is part of a new cell."""
        return torch.nn.functional.one_hot(self.of, len(self.names)).T.double()

    def reached(self, flags: Tensor) -> Tensor:
        """Return flags of the cells that contain rows. Missing cells that no client counts contain no row.

        Args:
            flags: ``[n, L]`` of the cells before the merge, see `merged_cells`.
        """
        empty = self.names[-1] in BLANK_LEVELS and not bool(flags[:, self.of == len(self.names) - 1].any())
        return torch.arange(len(self.names)) < len(self.names) - empty


def every_cell(names: Sequence[str]) -> MergedCells:
    """Return all cells unchanged."""
    return MergedCells(tuple(names), torch.arange(len(names)))


def groups_of(schema: Schema, group: str | None, clients: int) -> tuple[str, ...]:
    """Return the names of the groups of rows.

    The last group of a feature column contains the rows whose cell is missing.

    Raises:
        ConfigError: the table does not contain a column with this name that has levels.
    """
    if group is None:
        return ("all",)
    if group == CLIENT_GROUP:
        return tuple(f"client {k}" for k in range(clients))
    if group in schema.levels:
        return tuple(schema.levels[group])
    place = schema.place(group)
    coded = [column.name for column in schema.columns if column.levels]
    if place is None or not schema.columns[place].levels:
        raise unknown("group", group, (CLIENT_GROUP, *coded, *schema.levels), rule="groups-column")
    return (*map(str, schema.columns[place].names), MISSING_LEVEL)


def group_codes(client: ClientRows, terms: AnalysisTerms, group: str | None) -> Tensor:
    """Return the index of each row's group ``[N]``.

    Rows without a group are no group of their own if fewer subjects have such rows than the rules allow to be counted.
    They belong to the client's most frequent group then.
    """
    schema = terms.schema
    if group is None or group == CLIENT_GROUP:
        return torch.full((len(client),), 0 if group is None else client.place)
    if group in schema.levels:
        code, blank = client.columns[group].long(), len(schema.levels[group]) - 1
        blank = blank if schema.levels[group][-1] in BLANK_LEVELS else -1
    else:
        place = schema.place(group)
        assert place is not None
        code, blank = level_codes(client.x[:, place], schema.columns[place].levels), schema.columns[place].levels
    some = code == blank
    if 0 < len(client.subjects[some].unique()) < terms.rules.min_subjects and not bool(some.all()):
        code = torch.where(some, code[~some].mode().values, code)
    return code


def level_codes(values: Tensor, levels: int) -> Tensor:
    """Return codes ``[N]`` of a column. A missing code comes after all levels."""
    return torch.where(values.isnan(), float(levels), values).long()


def count_subjects(codes: Tensor, subjects: Tensor, cells: int) -> Tensor:
    """Return the number of subjects ``[cells]`` with a row in each cell.

    Args:
        codes: cell of every row ``[N]``.
        subjects: subject of every row ``[N]``.
        cells: number of cells.
    """
    pairs = torch.stack([codes, subjects], 1).unique(dim=0)
    return torch.bincount(pairs[:, 0], minlength=cells).double()


def merges(rules: Rules) -> bool:
    """Return True if the rules protect cells."""
    return rules.min_clients > 1 or rules.min_subjects > 1


def merged_cells(names: Sequence[str], flags: Tensor, rules: Rules, gaps: bool | None = None) -> MergedCells:
    """Return the cells, with cells that too few clients reach merged into "other".

    One cell that enough clients reach is also merged into "other", so that no sum reveals the merged cells. Missing
    cells, which come last, stay apart if no client has enough of them: a client does not count them then, see
    `group_codes`.

    Args:
        names: names of the cells.
        flags: 1 if a client has at least the smallest allowed number of rows in a cell ``[n, L]``.
        rules: agreed rules.
        gaps: True if a client counts missing cells. None: the flags of the last cell say so.
    """
    if not merges(rules) or len(names) == 1:
        return every_cell(names)
    support = flags.sum(0)
    if names[-1] in BLANK_LEVELS and not (bool(support[-1]) if gaps is None else gaps):
        cells = merged_cells(names[:-1], flags[:, :-1], rules)
        return MergedCells((*cells.names, names[-1]), torch.cat([cells.of, torch.tensor([len(cells.names)])]))
    enough = support - rules.missing >= rules.min_clients
    if bool(enough.all()):
        return every_cell(names)
    ranked = [k for k in support.argsort(stable=True).tolist() if bool(enough[k])]
    joined = (~enough).nonzero().flatten().tolist() + ranked[:1]
    kept = [k for k in range(len(names)) if k not in joined]
    place = {k: at for at, k in enumerate(kept)}
    return MergedCells(
        (*(names[k] for k in kept), OTHER_LEVEL), torch.tensor([place.get(k, len(kept)) for k in range(len(names))])
    )


def merged_bins(filled: Tensor, rules: Rules) -> Tensor:
    """Return the merged bin of each bin ``[B]``.

    A bin is merged with the next bins until each contains rows of enough clients.

    Bins after the last such bin are merged into it.

    Args:
        filled: 1 if a client has at least the smallest allowed number of rows in a bin, for each group ``[n, G, B]``.
        rules: agreed rules.

    Raises:
        ConfigError: no bin contains rows of enough clients in every group.
    """
    bins = filled.shape[2]
    if not merges(rules):
        return torch.arange(bins)
    inside, place, of = torch.zeros(filled.shape[:2], dtype=torch.bool), 0, list[int]()
    for k in range(bins):
        inside |= filled[:, :, k] > 0
        of.append(place)
        if bool((inside.sum(0) - rules.missing >= rules.min_clients).all()):
            inside, place = torch.zeros_like(inside), place + 1
    if not place:
        raise Refused(
            f"no bin has {rules.min_subjects} rows at {rules.min_clients + rules.missing} clients in every group",
            rule="small-cells",
            fix="agree on wider bins, fewer groups, or a smaller minimum count",
        )
    return torch.tensor(of).clamp(max=place - 1)


def summed(values: Tensor, of: Tensor) -> Tensor:
    """Return sums ``[..., cells]`` of values ``[..., L]`` by the cell of each value."""
    cells = int(of.max()) + 1 if len(of) else 0
    return values.new_zeros(*values.shape[:-1], cells).index_add(-1, of, values)
