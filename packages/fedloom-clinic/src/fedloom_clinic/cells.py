"""Cells of frequency tables: groups, and the levels of coded columns.

Cells in which too few clients have enough rows are merged before anything is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.analyses import AnalysisTerms, ClientRows, Rules, Schema
from fedloom.errors import Refused
from fedloom.hints import unknown_name_error

OTHER_LEVEL, MISSING_LEVEL = "other", "missing"
BLANK_LEVELS = ("", MISSING_LEVEL)
"""Names of the cell for rows without a code, in a group column and in a feature."""
CLIENT_GROUP = "client"
"""Value that turns each client into a group."""
RANGE_GROWTH = 5
"""Factor between the widths of nested ranges of bins. For each range, clients state whether they have enough rows."""


class MergedCells(NamedTuple):
    """Cells of a table after merging.

    Attributes:
        names: names of the cells.
        merged_index: index of the merged cell for each original cell, ``[L]``. An original cell that has been merged
            belongs to the cell "other".
    """

    names: tuple[str, ...]
    merged_index: Tensor

    @property
    def members(self) -> Tensor:
        """Matrix ``[cells, L]`` that is 1 where an original cell belongs to a merged cell."""
        return torch.nn.functional.one_hot(self.merged_index, len(self.names)).T.double()

    @property
    def named(self) -> int:
        """Number of cells, excluding a last cell for rows without a level."""
        return len(self.names) - (self.names[-1] in BLANK_LEVELS)

    def reached(self, flags: Tensor) -> Tensor:
        """Return a mask ``[cells]`` of the cells that contain rows.

        The cell for missing values contains no rows if no client counts it.

        Args:
            flags: flags of the original cells ``[n, L]``, see `merge_small_cells`.
        """
        empty = self.names[-1] in BLANK_LEVELS and not bool(flags[:, self.merged_index == len(self.names) - 1].any())
        return torch.arange(len(self.names)) < len(self.names) - empty


def unmerged_cells(names: Sequence[str]) -> MergedCells:
    """Return the cells without merging any of them."""
    return MergedCells(tuple(names), torch.arange(len(names)))


def groups_of(schema: Schema, group: str | None, clients: Sequence[str]) -> tuple[str, ...]:
    """Return the names of groups of rows.

    If the groups are the levels of a feature, the last group contains the rows with a missing value.

    Raises:
        ConfigError: the table has no column with this name, or the column has no levels.
    """
    if group is None:
        return ("all",)
    if group == CLIENT_GROUP:
        return tuple(clients)
    if group in schema.levels:
        return tuple(schema.levels[group])
    place = schema.place(group)
    coded = [column.name for column in schema.columns if column.levels]
    if place is None or not schema.columns[place].levels:
        raise unknown_name_error("group", group, (CLIENT_GROUP, *coded, *schema.levels), rule="groups-column")
    return (*map(str, schema.columns[place].names), MISSING_LEVEL)


def group_codes(client: ClientRows, terms: AnalysisTerms, group: str | None) -> Tensor:
    """Return the index of each row's group, ``[N]``.

    If fewer subjects lack a group than the rules allow to be counted, their rows are added to the client's most
    frequent group instead.
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
    """Return the codes of a column, ``[N]``. A missing code becomes the number after the last level."""
    return torch.where(values.isnan(), float(levels), values).long()


def count_subjects(codes: Tensor, subjects: Tensor, cells: int) -> Tensor:
    """Return the number of subjects ``[cells]`` that have a row in each cell.

    Args:
        codes: cell of each row ``[N]``.
        subjects: subject of each row ``[N]``.
        cells: number of cells.
    """
    pairs = torch.stack([codes, subjects], 1).unique(dim=0)
    return torch.bincount(pairs[:, 0], minlength=cells).double()


def forbids_small_cells(rules: Rules) -> bool:
    """Return True if the rules forbid small cells."""
    return rules.min_clients > 1 or rules.min_subjects > 1


def merge_small_cells(names: Sequence[str], flags: Tensor, rules: Rules, gaps: bool | None = None) -> MergedCells:
    """Return the cells with small cells (in which too few clients have enough rows) merged into "other".

    One larger cell is also merged, so that no sum reveals the content of the merged cells. The last cell, for missing
    values, is not merged if no client has enough rows in it, because clients then do not count it (see `group_codes`).

    Args:
        names: names of the cells.
        flags: 1 where a client has at least the minimum number of rows in a cell, ``[n, L]``.
        rules: agreed-upon rules.
        gaps: True if at least one client counts the cell for missing values. If None, the flags of the last cell
            determine this.
    """
    if not forbids_small_cells(rules) or len(names) == 1:
        return unmerged_cells(names)
    support = flags.sum(0)
    if names[-1] in BLANK_LEVELS and not (bool(support[-1]) if gaps is None else gaps):
        cells = merge_small_cells(names[:-1], flags[:, :-1], rules)
        return MergedCells((*cells.names, names[-1]), torch.cat([cells.merged_index, torch.tensor([len(cells.names)])]))
    enough = support - rules.missing >= rules.min_clients
    if bool(enough.all()):
        return unmerged_cells(names)
    ranked = [k for k in support.argsort(stable=True).tolist() if bool(enough[k])]
    joined = (~enough).nonzero().flatten().tolist() + ranked[:1]
    kept = [k for k in range(len(names)) if k not in joined]
    place = {k: at for at, k in enumerate(kept)}
    return MergedCells(
        (*(names[k] for k in kept), OTHER_LEVEL), torch.tensor([place.get(k, len(kept)) for k in range(len(names))])
    )


def range_widths(bins: int) -> list[int]:
    """Return the widths of nested ranges of bins: 1, the powers of `RANGE_GROWTH`, and all bins."""
    widths = [1]
    while widths[-1] * RANGE_GROWTH < bins:
        widths.append(widths[-1] * RANGE_GROWTH)
    return list(dict.fromkeys([*widths, bins]))


def merge_bins(
    filled: Tensor, rules: Rules, widths: Sequence[int], bins: int, what: str, fix: str = "wider bins or fewer groups"
) -> Tensor:
    """Return the index of each bin's merged bin, ``[B]``.

    A bin is merged with subsequent bins until enough clients each have enough rows in a range inside the merged bin.
    The bins after the last merged bin are added to it.

    Args:
        filled: 1 where a client has at least the minimum number of rows in a range of bins, otherwise 0, for each
            group, ``[n, G, R]``.
        rules: agreed-upon rules.
        widths: widths of the ranges. The ranges of each width divide the bins, and are ordered by width and place.
        bins: number of bins B.
        what: description of the rows, for messages.
        fix: change of the agreement that avoids the error, other than a smaller minimum count.

    Raises:
        Refused: in some group, no range contains rows of enough clients.
    """
    if not forbids_small_cells(rules):
        return torch.arange(bins)
    ranges = [(low, min(low + width, bins)) for width in widths for low in range(0, bins, width)]
    inside, start, place, of = torch.zeros(filled.shape[:2], dtype=torch.bool), 0, 0, list[int]()
    for k in range(bins):
        for at, (low, high) in enumerate(ranges):
            if low >= start and high == k + 1:
                inside |= filled[:, :, at] > 0
        of.append(place)
        if bool((inside.sum(0) - rules.missing >= rules.min_clients).all()):
            inside, start, place = torch.zeros_like(inside), k + 1, place + 1
    if not place:
        raise Refused(
            f"fewer than {rules.min_clients + rules.missing} clients have {rules.min_subjects} {what}",
            rule="small-cells",
            fix=f"agree on {fix} or on a smaller minimum count",
        )
    return torch.tensor(of).clamp(max=place - 1)


def sum_by_cell(values: Tensor, of: Tensor) -> Tensor:
    """Return the sum ``[..., cells]`` of the values ``[..., L]`` in each cell."""
    cells = int(of.max()) + 1 if len(of) else 0
    return values.new_zeros(*values.shape[:-1], cells).index_add(-1, of, values)
