"""Values: what every choice of every table refuses."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import Field

import fedloom
from fedloom.errors import ConfigError, InvalidValue
from fedloom.options import get_limits, get_options
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


NEVER_GIVEN = {"Speeds", "Table", "TableColumn", "Trial"}
"""Parts of files and messages, which no caller makes."""


def test_help_and_signature_show_every_option() -> None:
    """A plain type, the range, the default and one sentence; the same before and after the first instance."""
    shown = [value for value in set(values()) if value.__name__ not in NEVER_GIVEN]
    for value in shown:
        check_help(value)
    assert len(shown) > 200


def check_help(value: type[Value]) -> None:
    text, signature = inspect.getdoc(value) or "", inspect.signature(value)
    assert list(signature.parameters) == list(get_options(value))
    for name, field in get_options(value).items():
        (line,) = re.findall(rf"^    {name}: (.*)$", text, re.MULTILINE)
        shown = str(signature.parameters[name])
        assert not re.search(r"Annotated|Validator|typing|FieldInfo| at 0x", line + shown), line
        assert all(limit in line for limit in get_limits(field))
        assert field.description, f"{value.__name__}.{name} has no description"
        assert field.description.rstrip(".")[1:] in line
        default = field.get_default(call_default_factory=True)
        assert "required" in line if field.is_required() else (repr(default) in line or "derived by default" in line)
        assert field.is_required() == (signature.parameters[name].default is inspect.Parameter.empty)
    if not any(field.is_required() for field in value.model_fields.values()):
        try:
            value()
        except ConfigError:
            return  # an option that is required for a reason of its own
        assert (inspect.getdoc(value) or "", str(inspect.signature(value))) == (text, str(signature))


def places(value: type[Value], options: dict[str, Any]) -> set[object]:
    """The fields that are refused."""
    with pytest.raises(InvalidValue) as refused:
        value(**options)
    return {error["loc"][0] for error in refused.value.errors() if error["loc"]}


def test_no_number_of_the_package_takes_text_or_a_truth_value_and_no_truth_value_takes_a_number() -> None:
    wrong = {
        "numbers": (True, False, np.True_, torch.tensor(True), "1", "0.5", b"1"),
        "truth": (0, 1, 1.0, "yes", "true"),
    }
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


WRONG = (
    object(),
    -1e300,
    2**70,
    float("nan"),
    None,
    True,
    "no such",
    b"",
    [],
    [object()],
    {},
    {"kind": "no such"},
    {3: 4},
    0,
    False,
    np.array([1.0, 2.0]),
    torch.tensor([1, 2]),
)


def test_every_value_refuses_in_our_words() -> None:
    """A wrong value of every field of every class, an unknown name, and a value without its name."""
    refused = 0
    for value in set(values()):
        fields = value.model_fields
        needed = [name for name, field in fields.items() if field.is_required()]
        for name, field in fields.items():
            said = {}
            for wrong in WRONG:
                try:
                    value(**{**dict.fromkeys(needed, WRONG[0]), name: wrong})
                except ConfigError as error:
                    said[repr(wrong)] = str(error)
            matters = [text for text in said.values() if name in text]
            assert field.annotation is Any or matters, (value, name, said)
            refused += len(matters)
            for text in said.values():
                assert text.startswith(value.__name__), text
                assert not re.search(r"\[type=|pydantic", text), text
        with pytest.raises(ConfigError, match=f"(?m)^{value.__name__}: unknown key 'nonsense'; "):
            value(nonsense=1)
        with pytest.raises(
            ConfigError, match=f"^{value.__name__} needs its options as keyword arguments, got 1. Allowed:"
        ):
            value(1)
    assert refused > 2000


def test_a_value_cannot_be_changed_and_no_copy_of_it_is_unchecked() -> None:
    sizes = Sizes(count=2)
    name, other = partial(setattr, sizes, "count", 3), partial(setattr, sizes, "no", 3)
    for change in (name, other, partial(delattr, sizes, "count")):
        with pytest.raises(
            ConfigError, match="Sizes.* cannot be changed: values are frozen. Make a changed copy with with_"
        ):
            change()
    assert sizes.model_copy() == sizes == Sizes(count=2)
    assert sizes.model_copy(update={"rate": 0.5}) == Sizes(count=2, rate=0.5) == sizes.with_(rate=0.5)
    for copy in (lambda: sizes.model_copy(update={"rate": "x"}), lambda: sizes.with_(rate="x")):
        with pytest.raises(ConfigError, match="Sizes: rate: input should be a valid number, got 'x'"):
            copy()


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
    with pytest.raises(ConfigError, match="count: input should be a valid integer.*\nfile: sides: .*at least 1 item"):
        make(Sizes, {"sides": [], "count": "1"}, "file", fields_of(Sizes))
