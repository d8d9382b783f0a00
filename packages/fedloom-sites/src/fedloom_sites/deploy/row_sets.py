"""Sets of rows that a site sums in different analyses and snapshots, compared subject by subject.

Each sum over a set of rows is one equation about the subjects in the set. If the sums of several sets can be combined
so that only a few subjects remain, the combination reveals these subjects. A site therefore remembers its sets, and
answers only if no combination with a new set isolates fewer subjects than the agreed minimum.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.analyses import ClientRows, Schema
from fedloom.values import dump_value

MAX_VERDICTS = 1024
"""Number of recent decisions about sets of rows that a site remembers, together with the subjects of these sets."""
MIN_SUBJECT_DIFFERENCE = 2
"""Minimum difference between two sets in subjects, regardless of the agreed minimum."""
MAX_COMBINATIONS = 4096
"""Maximum number of combinations to try before a new set is refused. Ten analyses with one set each need a few."""
TOLERANCE = 1e-6
"""Largest rounding error of a weight. The weights solve equations whose coefficients are 0 and 1."""
SUBJECT_BYTES = 8
"""Number of bytes in the digest of a subject."""


def judge_row_sets(
    memory: dict[str, Any], name: str, sets: Sequence[ClientRows], columns: str, salt: bytes, least: int
) -> bool:
    """Record a decision about each set of rows, and return True if a site may answer an analysis of these sets.

    Each set must pass `isolates_subjects` together with the sets of other answered analyses. Sets with different
    columns cannot be compared subject by subject. In this case, the number of subjects must be equal to the number in
    each earlier set, in each union of two disjoint sets and in each difference of two nested sets, or differ by at
    least ``least``. Decisions never change.

    Args:
        memory: the site's record, which contains the subjects and columns of ``sets``, and ``verdicts``. It is changed.
        name: name of the analysis in its experiment. Sets of rows that belong to the same analysis are not compared
            with each other.
        sets: sets of rows that the analysis sums (see `Analysis.row_sets`).
        columns: digest of the columns of these rows.
        salt: secret key of the digests, which only the site knows.
        least: minimum difference between two sets, in subjects.
    """
    remembered, verdicts = memory.setdefault("sets", {}), memory.setdefault("verdicts", [])
    answered, verdict_of = [one for one in verdicts if one["of"] != name and one["answered"]], dict[str, bool]()
    least = max(least, MIN_SUBJECT_DIFFERENCE)
    for rows in sets:
        subjects = sorted(_subject_digests(rows, salt))
        key = hashlib.sha256("".join([columns, *subjects]).encode()).hexdigest()
        earlier = next((one for one in verdicts if (one["of"], one["set"]) == (name, key)), None)
        if earlier is not None or not subjects:
            verdict_of[key] = earlier is None or bool(earlier["answered"])
            continue
        comparable, unmatched = dict[str, dict[str, Set[str]]](), dict[str, dict[str, Set[str]]]()
        for one in answered:
            before = remembered[one["set"]]
            is_comparable = before["columns"] == columns
            group = (
                comparable.setdefault(one["of"], {}) if is_comparable else unmatched.setdefault(before["columns"], {})
            )
            group[one["set"]] = {*before["subjects"]}
        distinct = {
            frozenset(group): [*group.values()] for group in comparable.values()
        }  # repeated analyses count once
        gaps = (abs(len(subjects) - n) for group in unmatched.values() for n in _reachable_counts([*group.values()]))
        verdict_of[key] = not isolates_subjects({*subjects}, [*distinct.values()], least) and not any(
            0 < gap < least for gap in gaps
        )
        remembered[key] = {"columns": columns, "subjects": subjects}
        verdicts.append({"of": name, "set": key, "answered": verdict_of[key]})
    del verdicts[:-MAX_VERDICTS]
    memory["sets"] = {key: remembered[key] for key in remembered if any(one["set"] == key for one in verdicts)}
    return all(verdict_of.values())


def isolates_subjects(new: Set[str], earlier: Sequence[Sequence[Set[str]]], least: int) -> bool:
    """Return True if the sum over a new set and earlier sums can be combined to isolate a few subjects.

    A combination is a weighted sum of the new sum and of at most one earlier sum per analysis, since the sums of one
    analysis are about different columns. Subjects that belong to the same sets have the same weight in every
    combination, so one equation per class of such subjects is enough. A combination isolates its subjects if fewer
    than ``least`` subjects have a positive weight and fewer than ``least`` have a negative weight. A subject whose
    rows have changed counts as two.

    If there are too many classes to try, the result is True.

    Args:
        new: digests of the subjects in the new set.
        earlier: digests of the subjects in the sets of each earlier analysis.
        least: minimum number of subjects.
    """
    sets = [new, *(one for analysis in earlier for one in analysis)]
    memberships = dict[str, int]()
    for k, subjects in enumerate(sets):
        for subject in subjects:
            memberships[subject] = memberships.get(subject, 0) | 1 << k
    counts = Counter(memberships.values())
    members = np.array([[code >> k & 1 for k in range(len(sets))] for code in counts], dtype=float)
    sizes, places, start = np.array([*counts.values()]), list[range](), 1
    for analysis in earlier:
        places.append(range(start, start := start + len(analysis)))
    if math.prod(map(len, places)) > MAX_COMBINATIONS:
        places = [range(k, k + 1) for k in range(1, len(sets))]
    return any(_has_small_remainder(members[:, [0, *chosen]], sizes, least) for chosen in product(*places))


def _has_small_remainder(members: NDArray[np.float64], sizes: NDArray[np.int64], least: int) -> bool:
    """Return True if the first column minus a combination of the others is not 0, but only for a few subjects.

    Args:
        members: 1 if the subjects of a class are in a set, otherwise 0. (classes, sets)
        sizes: number of subjects in each class.
        least: minimum number of subjects.
    """
    members, classes = np.unique(members, axis=0, return_inverse=True)
    sizes = np.bincount(classes.ravel(), sizes).astype(np.int64)
    new, basis = members[:, 0], members[:, 1:]
    most, tried = 2 * (least - 1), 0
    small = [k for k in np.flatnonzero(members.any(1)).tolist() if sizes[k] <= most]
    if _remainder_outside(new, basis, small) is None:
        return False
    for count in range(len(small) + 1):
        for left in combinations(small, count):
            tried += 1
            if tried > MAX_COMBINATIONS:
                return True
            if sizes[[*left]].sum() > most:
                continue
            remainder = _remainder_outside(new, basis, left)
            if remainder is not None:
                counts = [int(sizes[sign * remainder > TOLERANCE].sum()) for sign in (1, -1)]
                if max(counts) < least:
                    return max(counts) > 0
        if sizes[sorted(small, key=lambda k: sizes[k])[: count + 1]].sum() > most:
            break
    return False


def _remainder_outside(
    new: NDArray[np.float64], basis: NDArray[np.float64], left: Sequence[int]
) -> NDArray[np.float64] | None:
    """Return ``new`` minus a combination of ``basis`` that is 0 outside the classes ``left``, or None."""
    outside = np.delete(np.arange(len(new)), left)
    weights = np.linalg.lstsq(basis[outside], new[outside], rcond=None)[0]
    remainder = new - basis @ weights
    return None if (abs(remainder[outside]) > TOLERANCE).any() else remainder


def _reachable_counts(sets: Sequence[Set[str]]) -> Iterator[int]:
    """Return the number of subjects in each set, in unions of two disjoint sets and in differences of nested sets."""
    yield from map(len, sets)
    for one, other in permutations(sets, 2):
        if one.isdisjoint(other):
            yield len(one) + len(other)
        elif other < one:
            yield len(one) - len(other)


def columns_digest(schema: Schema) -> str:
    """Return a digest of everything that determines the meaning of cells: columns and levels, but not ranges."""
    columns = [dump_value(column.with_(range=None)) for column in schema.columns]
    content = [columns, schema.task, schema.classes, {name: [*names] for name, names in schema.levels.items()}]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _subject_digests(rows: ClientRows, salt: bytes) -> list[str]:
    """Return each subject's digest, computed from all its rows regardless of their order."""
    cells = torch.cat([rows.x, rows.y, *(codes[:, None].double() for codes in rows.columns.values())], 1).numpy()
    order = np.lexsort((*cells.T, rows.subjects.numpy())).tolist()
    return digest_subjects(((int(rows.subjects[k]), cells[k].tobytes()) for k in order), salt)


def digest_subjects(rows: Iterable[tuple[int, bytes]], salt: bytes) -> list[str]:
    """Return the digest of each subject, with a secret key.

    Args:
        rows: subject and content of each row. The order of a subject's rows matters.
        salt: key for the digests, which only the site knows.
    """
    states = dict[int, Any]()
    for subject, content in rows:
        states.setdefault(subject, hashlib.blake2b(key=salt, digest_size=SUBJECT_BYTES)).update(content)
    return [state.hexdigest() for state in states.values()]
