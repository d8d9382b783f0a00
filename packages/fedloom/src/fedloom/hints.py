"""Hints at the end of error messages: the name that the user probably meant, or the place where a key belongs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from fedloom.errors import ConfigError, rewrite_keys
from fedloom.lazy import make_dir

ALIAS_NAMES = {
    "learning_rate": "lr", "local_lr": "lr", "client_lr": "lr", "step_size": "lr",
    "local_learning_rate": "lr", "local_epochs": "epochs", "num_epochs": "epochs", "local_ep": "epochs",
    "local_bs": "batch_size", "local_batch_size": "batch_size", "wd": "weight_decay",
    "join_ratio": "fraction", "participation": "fraction", "fraction_fit": "fraction", "fraction_train": "fraction",
    "frac": "fraction", "client_fraction": "fraction", "eligible_perc": "fraction", "global_rounds": "rounds",
    "num_rounds": "rounds", "n_rounds": "rounds", "comm_round": "rounds", "num_clients": "clients",
    "n_clients": "clients", "num_partitions": "clients",
    "personalised": "fedavg-ft", "personalized": "fedavg-ft", "fine-tuning": "fedavg-ft",
    "dir": "dirichlet", "pathological": "shards", "label_skew": "dirichlet", "seed": "seeds",
    "callback": "callbacks", "checkpoint": "folder", "checkpoint_dir": "folder",
}  # fmt: skip
"""Names that are used in papers and other libraries, mapped to the names in fedloom."""
_RENAMED_CHOICES = {
    "weights": "client_weights", "weigher": "aggregation_weights", "mixer": "personalized_aggregation",
    "channel": "upload_transform", "settings": "defaults",
}  # fmt: skip
RENAMED_KEYS: Mapping[str, Mapping[str, str]] = {
    "": _RENAMED_CHOICES,
    "method": _RENAMED_CHOICES,
    "data": {"users": "client_column", "label": "target", "kept": "group_columns"},
    "data synthetic": {"users": "clients", "reading": "spread_unit"},
    "data docstrings": {"most": "max_characters", "least": "min_characters"},
    "partition": {"keep": "max_train_per_client"},
    "partition dirichlet": {"beta": "alpha"},
    "partition quantity-skew": {"beta": "alpha"},
    "partition mixed": {"beta": "alpha", "first": "first_partition", "second": "second_partition"},
    "partition feature-noise": {"reading": "sigma_unit", "draws": "noise_draws"},
    "partition shards": {"variant": "assignment"},
    "model": {"weights": "init_from"},
    "local": {"horizon": "decay_rounds"},
    "personalized_aggregation": {"share": "mixing_weight"},
    "evaluate": {"statistics": "batchnorm_stats"},
    "engine": {"oracle": "gradient_engine", "chunk": "clients_per_batch", "store_budget": "state_memory_mib"},
    "tune": {"defaults": "default_spaces"},
    "analysis groups": {"least": "min_rows"},
    "analysis glm": {"by_site": "by_client"},
    "analysis cox": {"least": "min_events"},
    "analysis conformal": {"share": "calibration_fraction"},
    "analysis ridge": {"largest": "max_input"},
    "rules": {"least": "min_subjects", "fewest": "min_clients"},
    "compare": {"against": "baseline", "models": "compare_model", "progress": "progress_bar"},
    "simulate": {"progress": "callbacks"},
    "early_stop": {"least": "min_delta", "keep": "result"},
    "command": {
        "--against": "--baseline", "--models": "--compare-model", "--keep": "--id-column", "--by": "--client-column",
        "--oracle": "--gradient-engine", "--by-site": "--by-client",
        "--least": "--min-events", "--gate-port": "--proxy-port",
    },
}  # fmt: skip
"""Old names of keys, keyed by location. A location is a table of the experiment file, a Python call, or the command
line. If only one kind of a table contains the key, the location also states the current name of this kind, as in
"partition dirichlet". Recorded documents may contain the old name. A new file with an old name is rejected with a
message that states the new name.
"""
RENAMED_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("partition", "kind"): {
        "column": "by-column", "concept": "label-swap", "few": "femnist-fedprox", "hybrid": "mixed",
        "quality": "feature-noise", "quantity": "quantity-skew", "writers": "natural",
    },
    ("partition", "test_from"): {"users": "clients"},
    ("partition", "noise_draws"): {"once": "per-sample", "anew": "per-batch"},
    ("local", "optimizer_state"): {"kept": "persistent"},
    ("engine", "gradient_engine"): {"fused": "compiled", "stacked": "vmap", "looped": "loop"},
    ("tune", "model"): {"used": "best-on-validation"},
    ("compare", "compare_model"): {"used": "best-on-validation"},
}  # fmt: skip
"""Old names of values, keyed by location and by the current name of the key."""

EARLIER_DEFAULTS: Mapping[str, Mapping[str, object]] = {"fedacs": {"copies": "off"}}
"""Former defaults of method options whose default has changed. In recorded documents that do not contain the option,
the former default applies."""


def _new_names() -> dict[str, tuple[str, ...]]:
    pairs = [pair for table in (*RENAMED_KEYS.values(), *RENAMED_VALUES.values()) for pair in table.items()]
    return {old: tuple(dict.fromkeys(new for one, new in pairs if one == old)) for old, _ in pairs}


_NEW_NAMES = _new_names()


def find_new_name(got: object, allowed: Iterable[object]) -> str:
    """Return the current name of a key or value that has an old name, or "" if the current name is not allowed here.

    >>> find_new_name("weights", ["client_weights", "rounds"]), find_new_name("weights", ["lr"])
    ('client_weights', '')
    """
    names = {*allowed}
    return next((new for new in _NEW_NAMES.get(got, ()) if new in names), "") if isinstance(got, str) else ""


METHOD_FORM = "a method such as fl.algorithms.FedAvg(), or its name"
"""Description of how a method is written in Python."""
MAX_NAMES_BESIDE_A_HINT = 20
"""Maximum number of valid names that a message lists in addition to a suggestion."""
SHOWN_METHODS = 6
"""Maximum number of methods that are named in a hint."""

Hint = Callable[[str, object], str]
"""Function that receives a key and its value, and returns the end of a sentence that states where the key belongs. If
the key is unknown, the text is empty."""


def suggest_nearest(got: object, allowed: Iterable[str]) -> str:
    """Return the end of a sentence, which suggests the closest valid name or lists all valid names.

    >>> suggest_nearest("fedporx", ["fedavg", "fedprox"])
    "did you mean 'fedprox'? allowed: fedavg, fedprox"
    >>> suggest_nearest("learning_rate", ["lr", "clients"])
    "did you mean 'lr'? allowed: clients, lr"
    >>> suggest_nearest("LR", ["lr", "epochs"])
    "did you mean 'lr'? allowed: epochs, lr"
    >>> suggest_nearest("flam", ["equitable-table2", "flame-figure2"])
    "did you mean 'flame-figure2'? allowed: equitable-table2, flame-figure2"
    """
    names = sorted(allowed)
    if not names:
        return "none are allowed"
    if new := find_new_name(got, names):
        return f"its name is now {new!r}"
    equivalent, wanted, folded = ALIAS_NAMES.get(str(got)), str(got).casefold(), {n.casefold(): n for n in names}
    close = [folded[name] for name in get_close_matches(wanted, folded, n=1, cutoff=0.6)]
    close = [equivalent] if equivalent in names else close
    close = close or [name for name in names if len(wanted) > 2 and name.casefold().startswith(wanted)]
    hint = f"did you mean '{close[0]}'?" if close else ""
    if hint and len(names) > MAX_NAMES_BESIDE_A_HINT:
        return hint
    return f"{hint} allowed: {', '.join(names)}".lstrip()


def unknown_name_error(
    what: str, got: object, allowed: Iterable[str], where: str = "", cure: str = "", rule: str = ""
) -> ConfigError:
    """Return the error for an unknown name.

    The message suggests fedloom's own name for it if there is one, or else ``cure``, or else the closest name.
    """
    place, names = f"{where}: " if where else "", list(allowed)
    if new := find_new_name(got, names):
        return ConfigError(f"{place}unknown {what} {got!r}; its name is now {new!r}")
    cure = "" if ALIAS_NAMES.get(str(got)) in names else cure
    message, fix = f"{place}unknown {what} {got!r}", cure or suggest_nearest(got, names)
    error = ConfigError(message, rule=rule, fix=fix)
    error.args = (f"{message}; {rewrite_keys(fix)}",)  # "did you mean" continues the sentence
    return error


def give_no_hint(key: str, value: object) -> str:
    """Return an empty hint for every key."""
    return ""


@dataclass(frozen=True)
class KeyPlaces:
    """Keys that a file or a Python call accepts: where each key belongs, and how it is written.

    Attributes:
        tables: keys of every table, grouped by kind. In each table, the keys that do not depend on the kind come first,
            under an empty name.
        plain: keys that do not belong to any table. In Python, these are the keyword arguments.
        methods: options of every method, keyed by method name.
        keys: valid keys at this location, in addition to the options of a method.
        method: True if the location belongs to a method and contains the method's options.
        file: True if keys are written as in an experiment file, and False if keys are written as in a Python call.
        call: format string that represents a method in Python, with the fields ``name``, ``key`` and ``value``.
        special: function that returns the hints for keys that need a separate hint.
    """

    tables: Mapping[str, Mapping[str, Iterable[str]]]
    plain: Iterable[str]
    methods: Mapping[str, Iterable[str]]
    keys: tuple[str, ...]
    method: bool = False
    file: bool = False
    call: str = "fl.algorithms.REGISTRY[{name!r}]({key}={value!r})"
    special: Hint = give_no_hint

    @property
    def form(self) -> str:
        """Description of how a method is written, for use as the end of a sentence."""
        return 'for example [[method]] and below it algorithm = "fedavg"' if self.file else f"give {METHOD_FORM}"

    def name_table(self, table: str) -> str:
        """Return the name of a table as messages use it."""
        return f"[{table}]" if self.file and not self.method else table

    def select_method(self, *keys: str) -> KeyPlaces:
        """Return the place that describes the table of a method with these keys."""
        return replace(self, keys=keys, method=True, special=give_no_hint)

    def within(self, table: str) -> Hint:
        """Return the hint for keys that do not belong in a table."""
        return lambda key, value: self.hint(key, value, table)

    def hint(self, key: str, value: object, table: str = "") -> str:
        """Return the end of a sentence that states where a key belongs.

        If no table contains the key, the text is empty.

        Args:
            key: the key, which may be a name that papers or other libraries use.
            value: value that was given for the key.
            table: table in which the key was found. Empty if the key is outside all tables.
        """
        names = dict.fromkeys((ALIAS_NAMES.get(key, key), *_NEW_NAMES.get(key, ()), key))
        kinds = [
            repr(kind)
            for kind, keys in self.tables.get(table, {}).items()
            if kind and not names.keys().isdisjoint(keys)
        ]
        other = f"it is an option of kind {' or '.join(kinds)}" if kinds else ""
        if other and (table != "data" or (key in self.tables and not isinstance(value, Mapping))):
            return other
        if key == "defaults" and not self.file:
            return 'it is an argument of the method. Pass it to the method, as in fl.algorithms.FLAME(defaults="paper")'
        if key == "name" and self.method and self.file:
            return f"the name of a method in tables and charts is its label: label = {_toml(value)}"
        places = (self._place(name, value, table) for name in names)
        # options of the data come last, because changing data changes the experiment
        return self.special(key, value) or next(filter(None, places), "") or other or self._option(key, value)

    def _place(self, key: str, value: object, table: str) -> str:
        """Return the end of a sentence that states whether a key is a separate argument, or which tables accept it."""
        line = f"{key} = {_toml(value)}" if self.file else f"{key}={value!r}"
        if (key in self.plain or (self.file and key in self.tables)) and (table or key not in self.keys):
            if not self.file:
                shared = self.method and key not in self.keys
                return (
                    f"all methods share it. Pass compare(..., {line})"
                    if shared
                    else f"it is a separate keyword: {line}"
                )
            at_top = "it belongs at the top of the file, before any table"
            return f"{at_top}: {line}" if key in self.plain else f"it is a separate table: [{key}]"
        homes = [home for home, kinds in self.tables.items() if home != table and any(key in k for k in kinds.values())]
        if not homes or not self.file:
            return (homes and f"it belongs in {' or '.join(self._keyword(home, key, value) for home in homes)}") or ""
        alone = self.method and homes[0] in self.keys and not table
        alone_too = f". For this method alone, {homes[0]} = {{ {line} }}" if alone else ""
        return f"it belongs in {' or '.join(f'[{home}]' for home in homes)}: {line}{alone_too}"

    def _keyword(self, table: str, key: str, value: object) -> str:
        """Return a key as a keyword argument together with its table."""
        kinds = self.tables[table]
        kind = next(kind for kind in kinds if key in kinds[kind])
        if table == "data":
            return f"the data: pass fl.Dataset.create(data, {key}={value!r})"
        if table == "partition":
            kind = kind or "iid"
            return f"the partition, as in fl.partitions.{kind.replace('-', '_')}({key}={value!r})"
        named = {"kind": kind} if kind else {}
        return f"{table}={ {**named, key: value}!r}"

    def _option(self, key: str, value: object) -> str:
        """Return the end of a sentence that names the methods that accept an option."""
        methods = [name for name, options in self.methods.items() if key in options]
        if not methods:
            return ""
        some = ", ".join(methods[:SHOWN_METHODS]) + (", ..." if len(methods) > SHOWN_METHODS else "")
        if self.file:
            return f"it is an option of methods ({some}). Write {key} = {_toml(value)} below algorithm in [[method]]"
        one = self.call.format(name=methods[0], key=key, value=value)
        return f"it is an option of other methods ({some}). Pass it to one of them, as in {one}"


def _toml(value: object) -> str:
    """Return a value in the notation of an experiment file.

    If a table is given where a name is expected, only the name in the table is written.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("name", "kind", "type") if isinstance(value.get(key), str)), None)
    return "..." if value is None else json.dumps(value, default=str)


__dir__ = make_dir(__name__)
