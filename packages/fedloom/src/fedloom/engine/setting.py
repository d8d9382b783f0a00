"""Setting: all choices that define a run.

Its fields correspond to the tables of an experiment file, and their values identify the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Unpack

from pydantic import AfterValidator, Field, PlainValidator, model_validator
from torch import nn

from fedloom.algorithms import REGISTRY, Algorithm, Preset, PresetMethod, get_role
from fedloom.choose import MIXERS, SAMPLERS, WEIGHERS, Mixer, Sampler, SharesWeigher, Uniform, UniformWeigher, Weigher
from fedloom.data.partitions import PARTITIONS, Partition
from fedloom.engine.checks.moved import check_moved
from fedloom.engine.early_stop import EarlyStop
from fedloom.engine.tables import NamedMethod, SettingTable
from fedloom.hints import KeyPlaces, unknown_name_error
from fedloom.local import LocalSGD
from fedloom.models import MODEL_CLASSES, Augment, ModelSpec, Softmax
from fedloom.rows.aggregators import AGGREGATORS, Aggregator
from fedloom.rows.attacks import ATTACKS, Attack
from fedloom.rows.channels import CHANNELS, Channel
from fedloom.schedule import DEVICES, SCHEDULES, Devices, Schedule, Synchronous
from fedloom.tasks import Objective
from fedloom.values import Value, dump_value, fields_of, flatten_document, make

Part = Literal["train", "validation", "test"]


class Evaluate(Value):
    """Options that determine when scores are computed, on which data parts, and for which models.

    These options do not affect training.
    """

    @model_validator(mode="before")
    @classmethod
    def _analyses_apart(cls, options: object) -> object:
        check_moved("evaluate", options)
        return options

    every: int = Field(5, ge=1, description="number of rounds between evaluations. The last round is always evaluated")
    select_on: Literal["validation", "test"] = Field(
        "validation",
        description="data part used to select the hybrid model. 'test' follows FLAME's protocol, which the report "
        "mentions",
    )
    parts: tuple[Part, ...] = Field(
        ("train", "validation", "test"),
        description="parts of each client's data on which models are scored",
        min_length=1,
    )
    clients: int | None = Field(
        None,
        ge=1,
        description="maximum number of clients to score (default: all). They are drawn once and are the same in every "
        "round",
    )
    batchnorm_stats: Literal["averaged", "own"] = Field(
        "averaged",
        description=(
            "normalization statistics for scoring the global model: the average over the round's clients (like "
            "Flower's averaged buffers) or each client's own (like PFLlib)"
        ),
    )
    personal_on_common: bool = Field(False, description="also score personal models on the common test set")
    personal_at_start: bool = Field(
        False,
        description=(
            "train personal models before round 1 and evaluate them instead of the initial models. Methods such as "
            "FedAvg-FT, FedBABU and Per-FedAvg then also fine-tune"
        ),
    )


def _check_workers(workers: int | Literal["auto"]) -> int | Literal["auto"]:
    """Raise an error if the number of workers is less than 1."""
    if workers != "auto" and workers < 1:
        raise ValueError(f"must be at least 1 or 'auto', got {workers}")
    return workers


class Engine(Value):
    """Options that control how a run is computed.

    The number of workers does not affect results. The options for hardware and precision affect results only by
    rounding.
    """

    free: ClassVar[tuple[str, ...]] = ("workers", "checkpoint_every", "state_memory_mib")

    workers: Annotated[int | Literal["auto"], AfterValidator(_check_workers)] = Field(
        1,
        description="number of single-threaded processes on this machine (at most two per core). Under torchrun, the "
        "number of ranks",
        union_mode="left_to_right",
    )
    gradient_engine: Literal["auto", "compiled", "vmap", "loop"] = Field(
        "auto",
        description=(
            "engine that computes gradients: compiled loops for linear layers, torch.func.vmap over clients, or a "
            "loop over clients. auto: the first engine that supports the model"
        ),
    )
    clients_per_batch: int | None = Field(
        None, ge=1, description="maximum number of clients that are computed together (default: set by a fixed rule)"
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    dtype: Literal["float32", "float64"] = Field("float32", description="data type of models and samples")
    precision: Literal["full", "tf32", "bf16"] = Field(
        "full",
        description=(
            "precision of gradients: full (that of dtype), TF32 for all products on a GPU, or bfloat16 for training "
            "steps with convolutions. The clients' model vectors always have dtype"
        ),
    )
    checkpoint_every: float = Field(30.0, gt=0, description="time between checkpoints, in seconds")
    state_memory_mib: int = Field(
        1024, ge=0, description="maximum client state in memory, in MiB. The rest is stored in files"
    )
    quorum: float = Field(0.5, gt=0, le=1, description="minimum fraction of a cohort that must send usable updates")
    norm_bound: float | None = Field(None, gt=0, description="maximum norm of an accepted upload")


DATA_KEY_NAMES = (
    "target", "client_column", "categorical", "drop", "columns", "missing", "impute", "classes", "channels_last",
    "layout",
)  # fmt: skip
"""Options of `fedloom.Dataset.create` that users often pass to a run by accident."""
NAMED_SHARES = r"clusters(-[1-9]\d*)?( every [1-9]\d*)?|groups by .+"
Shares = (
    Literal["samples", "uniform", "groups"]
    | Annotated[str, Field(pattern=f"^({NAMED_SHARES})$")]
    | tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]
)
GivenModel = str | ModelSpec | nn.Module | Callable[..., nn.Module]
"""Name or specification of a model, or a user-defined module, class or function."""
Options = Mapping[str, Any] | None
"""Options in a table of an experiment file. None selects the defaults."""


class Choices(TypedDict, total=False):
    """Keyword arguments of `fedloom.simulate`: fields of `Setting` as values, kind names or tables of options."""

    rounds: int | None
    seed: int | None
    task: Objective | Options
    local: LocalSGD | Options
    sampler: Sampler | str | Options
    aggregation_weights: Weigher | str | Options
    personalized_aggregation: Mixer | str | Options
    aggregator: Aggregator | str | Options
    attack: Attack | str | Options
    upload_transform: Channel | str | Options
    augment: Augment | Options
    client_weights: str | Sequence[float] | None
    devices: Devices | str | Options
    schedule: Schedule | str | Options
    evaluate: Evaluate | Options
    engine: Engine | Options
    early_stop: EarlyStop | Options


Rounds = Annotated[int, Field(ge=1, description="communication rounds")]
Method = Annotated[Algorithm | PresetMethod, PlainValidator(lambda method: NamedMethod.read(method, {}).value)]


class Setting(Value):
    """All choices for a run of one method on any data. Each choice is a key or a table in an experiment file.

    A new field in this class is automatically read from and written to experiment files, accepted by
    `fedloom.simulate`, included in a checkpoint's fingerprint, and named in the error for a directory that contains a
    different run.
    """

    per_method: ClassVar[tuple[str, ...]] = (
        "model", "task", "local", "sampler", "aggregation_weights", "personalized_aggregation", "aggregator", "attack",
        "upload_transform", "rounds", "client_weights", "schedule",
    )  # fmt: skip
    """Fields that can be set separately for each method in an experiment."""

    algorithm: Method = Field(description="method, or preset that combines several components")
    model: Annotated[ModelSpec, SettingTable(ModelSpec, MODEL_CLASSES, "softmax")] = Field(
        default_factory=Softmax, description="name of a model, or a model specification"
    )
    rounds: Rounds = 100
    seed: int = Field(0, ge=0, description="seed of all random draws")
    task: Annotated[Objective, SettingTable(Objective)] = Field(
        default_factory=Objective, description="custom loss, class weights and additional metrics"
    )
    local: Annotated[LocalSGD, SettingTable(LocalSGD)] = Field(
        default_factory=LocalSGD, description="settings of the clients' local training"
    )
    sampler: Annotated[Sampler, SettingTable(Sampler, SAMPLERS, "uniform")] = Field(
        default_factory=Uniform, description="selection of the clients that take part in a round"
    )
    aggregation_weights: Annotated[Weigher, SettingTable(Weigher, WEIGHERS, "shares")] = Field(
        default_factory=SharesWeigher,
        description="weights of client uploads in the cohort's mean: the clients' shares, or weights set by a rule",
    )
    personalized_aggregation: Annotated[Mixer | None, SettingTable(Mixer, MIXERS)] = Field(
        None,
        description="rule that mixes the clients' last models for each client (None: all receive the server's model)",
    )
    aggregator: Annotated[Aggregator | None, SettingTable(Aggregator, AGGREGATORS)] = Field(
        None, description="rule that combines uploads (None: their weighted mean)"
    )
    attack: Annotated[Attack | None, SettingTable(Attack, ATTACKS)] = Field(
        None, description="behavior of malicious clients"
    )
    upload_transform: Annotated[Channel | None, SettingTable(Channel, CHANNELS)] = Field(
        None, description="transformation of client uploads, such as compression or noise"
    )
    augment: Annotated[Augment, SettingTable(Augment)] = Field(
        default_factory=Augment, description="random augmentation of training images"
    )
    client_weights: Shares = Field(
        "samples",
        description=(
            "weight alpha_i of each client in the objective, and thus in every mean and local problem. samples: "
            "proportional to training samples. uniform: 1/n. groups: equal weights for planted groups, or for the "
            "levels of a column with 'groups by region'. clusters-3: equal weights for three clusters of activations "
            "that are found before round 1 and, with 'clusters-3 every 10', again every 10 rounds. clusters: the same "
            "with an estimated number of clusters. A list: one number per client"
        ),
    )
    devices: Annotated[Devices | None, SettingTable(Devices, DEVICES)] = Field(
        None, description="speed and availability of the clients' devices (None: the run has no simulated clock)"
    )
    schedule: Annotated[Schedule, SettingTable(Schedule, SCHEDULES, "synchronous")] = Field(
        default_factory=Synchronous,
        description="rule that determines how many uploads the server waits for before each step in simulated time",
    )
    evaluate: Annotated[Evaluate, SettingTable(Evaluate)] = Field(
        default_factory=Evaluate, description="rounds, models and data parts to score"
    )
    engine: Annotated[Engine, SettingTable(Engine)] = Field(
        default_factory=Engine, description="computation settings, such as processes and devices"
    )
    early_stop: Annotated[EarlyStop | None, SettingTable(EarlyStop)] = Field(
        None, description="rule that ends a run whose validation metric no longer improves (None: run all rounds)"
    )

    @classmethod
    def create(
        cls, algorithm: Algorithm | PresetMethod | str, model: GivenModel | None = None, **choices: Unpack[Choices]
    ) -> Setting:
        """Create a setting for a method. Choices that are None keep their defaults.

        Raises:
            ConfigError: a choice is unknown, has the wrong type or is out of range.
        """
        return cls.read({"algorithm": algorithm, "model": model, **choices}, places=cls.places(algorithm))

    def changed(self, choices: Mapping[str, Any]) -> Setting:
        """Return a copy of the setting with some choices changed. Choices that are None remain unchanged.

        Raises:
            ConfigError: a choice is unknown, has the wrong type or is out of range.
        """
        return self.read(choices, places=self.places(self.algorithm), base=self)

    @classmethod
    def read(
        cls, mapping: Mapping[str, Any], where: str = "", places: KeyPlaces | None = None, base: Setting | None = None
    ) -> Setting:
        """Create a setting from a mapping.

        All keyword arguments, tables and files are converted to settings by this function.

        Args:
            mapping: ``algorithm`` (see `NamedMethod.read`) with its options, and fields of a setting as values, names
                or tables. None keeps a default.
            where: name of the file or call, for messages.
            places: other allowed keys, and their notation. None if the mapping was created in Python.
            base: setting that provides the choices that are missing from the mapping. None selects the defaults.

        Raises:
            ConfigError: a key is unknown, has the wrong type or is out of range.
        """
        places = places or cls.places()
        chosen = {key: value for key, value in mapping.items() if value is not None}
        method, allowed, tables = chosen.pop("algorithm", None), cls.model_fields.keys() & {*places.keys}, cls.tables()
        options = {key: chosen.pop(key) for key in [*chosen] if key not in allowed}
        for key, value in options.items():
            if method is None or not (places.method or key == "defaults"):
                raise unknown_name_error("key", key, places.keys, where, places.hint(key, value))
        if method is not None:
            chosen["algorithm"] = NamedMethod.read(method, options, where, places).value
        for name in [name for name in chosen if name in tables]:
            at = ": ".join(filter(None, (where, places.name_table(name))))
            chosen[name] = tables[name].read(chosen[name], at, name, places)
        return make(cls if base is None else base.with_, chosen, where, cls.model_fields)

    @classmethod
    def places(cls, algorithm: Any = None, **changes: Any) -> KeyPlaces:
        """Return the keys that the Python interface accepts, and where every other key belongs.

        Args:
            algorithm: method whose options must not be passed separately, or None if they may be.
            changes: fields of the result to replace.
        """
        tables = {name: table.keys() for name, table in cls.tables().items()}
        tables["partition"] = SettingTable(Partition, PARTITIONS, "iid").keys()
        method = algorithm.algorithm if isinstance(algorithm, Setting) else algorithm
        entry: Any = REGISTRY.get(method) if isinstance(method, str) else type(method)
        options = fields_of(entry) if isinstance(entry, Preset) or hasattr(entry, "model_fields") else ()

        def special(key: str, value: object) -> str:
            if key not in options:
                return ""
            one = f"algorithms.{entry.__name__}" if isinstance(entry, type) else f"algorithms.REGISTRY[{method!r}]"
            return f"it is an option of the method. Pass fl.{one}({key}={value!r}) instead"

        names = (*cls.model_fields,)
        facts = {"plain": {*names} - {"algorithm"}, "keys": names, "method": algorithm is None}
        methods = {name: fields_of(one) for name, one in REGISTRY.items()}
        facts |= {"tables": {**tables, "data": {"": DATA_KEY_NAMES}}, "methods": methods, "special": special}
        return KeyPlaces(**{**facts, **changes})

    @classmethod
    def tables(cls) -> dict[str, SettingTable]:
        """Return the fields that are tables in an experiment file."""
        parts = {
            name: [m for m in field.metadata if isinstance(m, SettingTable)] for name, field in cls.model_fields.items()
        }
        return {name: matches[0] for name, matches in parts.items() if matches}

    @classmethod
    def plain(cls) -> list[str]:
        """Return the fields that are plain keys in an experiment file.

        They do not include the seed, because a file lists several seeds.
        """
        return [name for name in cls.model_fields if name not in ("algorithm", "seed", *cls.tables())]

    def document(self) -> dict[str, Any]:
        """Return all choices except method and seed, including defaults, in the notation of an experiment file."""
        tables, entries = type(self).tables(), dict[str, Any]()
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in tables and value is not None:
                entries[name] = {**tables[name].kind(value), **dump_value(value)}
            elif name not in tables and name not in ("algorithm", "seed") and value is not None:
                entries[name] = value
        if self.local.steps is not None:
            entries["local"].pop("epochs")
        return entries

    def numbers(self) -> dict[str, Any]:
        """Return all values that affect a run's results, keyed by dotted name."""
        run = self.resolved()
        algorithm = {"class": type(run.algorithm).__qualname__, **dump_value(run.method)}
        entries = flatten_document({**run.document(), "algorithm": algorithm, "seed": run.seed})
        free = {f"{name}.{key}" for name, table in type(self).tables().items() for key in table.base.free}
        return {key: value for key, value in entries.items() if key not in free}

    @property
    def method(self) -> Algorithm:
        """The run's algorithm, which may be part of a preset."""
        return self.algorithm.algorithm if isinstance(self.algorithm, PresetMethod) else self.algorithm

    @property
    def role(self) -> str:
        """The method's role in a comparison (see `fedloom.algorithms.get_role`)."""
        return get_role(self.algorithm)

    @property
    def pooled(self) -> bool:
        """True if the run pools the data of all clients."""
        return isinstance(self.algorithm, PresetMethod) and self.algorithm.pooled

    def resolved(self) -> Setting:
        """Return the setting with a preset replaced by its method, sampler and aggregation weights.

        If a sampler already draws clients in proportion to their samples, all clients of a cohort get equal weights.
        """
        parts, preset = dict[str, Any](), self.algorithm
        if isinstance(preset, PresetMethod):
            sampler = preset.sampler.sized_like(self.sampler) if preset.sampler else self.sampler
            parts = {
                "algorithm": preset.algorithm,
                "sampler": sampler,
                "aggregation_weights": preset.weigher or self.aggregation_weights,
            }
        if (
            parts.get("sampler", self.sampler).by_samples
            and parts.get("aggregation_weights", self.aggregation_weights).kind == "shares"
        ):
            parts["aggregation_weights"] = UniformWeigher()
        return self.with_(**parts) if parts else self
