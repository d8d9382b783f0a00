"""Values: what every choice of every table refuses."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import Field, ValidationError

import fedloom
from fedloom.errors import ConfigError
from fedloom.values import Value, fields_of, make

NUMBERS = {int, float, type(None)}


class Sizes(Value):
    """Numbers, alone, optional, in a list, in a table, and in a value within."""

    count: int = 1
    rate: float | None = None
    sides: tuple[int, ...] = Field((1,), min_length=1)
    within: Sizes | None = None
    whole: bool = False
    rounds: dict[int, float] = Field(default_factory=dict)


def values() -> Iterator[type[Value]]:
    """All values of the package that can be made."""
    for module in pkgutil.walk_packages(fedloom.__path__, "fedloom."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    left = [Value]
    while left:
        found = left.pop()
        left += found.__subclasses__()
        if found.__module__.startswith("fedloom.") and not inspect.isabstract(found):
            yield found


def places(value: type[Value], options: dict[str, Any]) -> set[object]:
    """The fields that are refused."""
    with pytest.raises(ValidationError) as refused:
        value(**options)
    return {error["loc"][0] for error in refused.value.errors() if error["loc"]}


def test_no_number_of_the_package_takes_text_or_a_truth_value_and_no_truth_value_takes_a_number() -> None:
    wrong = {"numbers": (True, False, "1", "0.5", b"1"), "truth": (0, 1, 1.0, "yes", "true")}
    checked = dict.fromkeys(wrong, 0)
    for value in set(values()):
        for name, field in value.model_fields.items():
            types = set(get_args(field.annotation)) or {field.annotation}
            kind = "numbers" if types <= NUMBERS else "truth" if types <= {bool, type(None)} else None
            if kind:
                checked[kind] += 1
                for item in wrong[kind]:
                    assert name in places(value, {name: item}), (value, name, item)
    assert checked["numbers"] > 200
    assert checked["truth"] > 5


def test_numbers_of_other_libraries_and_integral_floats_are_numbers() -> None:
    made = Sizes(count=np.int64(3), rate=np.float32(0.5), sides=[2.0, np.int32(3)], whole=True)
    assert made == Sizes(count=3, rate=0.5, sides=(2, 3), whole=True)
    assert [type(n) for n in (made.count, made.rate, *made.sides)] == [int, float, int, int]
    assert Sizes(rate=1).rate == 1.0


def test_keys_of_a_table_are_text_in_files() -> None:
    assert make(Sizes, {"rounds": {"1": 0.5}}, "file", fields_of(Sizes)) == Sizes(rounds={1: 0.5})


@pytest.mark.parametrize(
    "options", [{"sides": [1, True]}, {"within": {"count": "2"}}, {"within": {"sides": ["1"]}}, {"rounds": {1: "2"}}]
)
def test_the_rule_holds_in_lists_and_in_values_within(options: dict[str, Any]) -> None:
    assert places(Sizes, options) == set(options)


def test_of_a_list_with_a_wrong_item_the_item_is_the_matter() -> None:
    with pytest.raises(ConfigError) as one:
        make(Sizes, {"sides": [1.5]}, "file", fields_of(Sizes))
    assert (
        str(one.value) == "file: sides.0: input should be a valid integer, got a number with a fractional part, got 1.5"
    )
    with pytest.raises(ConfigError, match="count: input should be a valid integer.*; file: sides: .*at least 1 item"):
        make(Sizes, {"sides": [], "count": "1"}, "file", fields_of(Sizes))
