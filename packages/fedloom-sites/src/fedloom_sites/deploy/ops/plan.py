"""Plan of a deployment, derived from an experiment: one method, one seed, the sites' names, a sample's description."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch

from fedloom.data import DATA_PARTS, SOURCES
from fedloom.data.input_spec import InputSpec
from fedloom.data.new_data import DETECTED_OPTION_DEFAULTS, FIXED_TABLE_OPTIONS
from fedloom.data.sources import DATA_FOLDER_VARIABLE, FileSource
from fedloom.data.sources.table.reading import TableSource
from fedloom.engine.clients.chunk import run_clients
from fedloom.engine.job import Job
from fedloom.engine.privacy import find_accounted_noise
from fedloom.engine.setup import check_learnable, make_job
from fedloom.engine.virtual.check import check_stream
from fedloom.errors import ConfigError, adapt_wording
from fedloom.hints import unknown_name_error
from fedloom.imports import is_path
from fedloom.lab.experiment import Experiment, Method, parse
from fedloom.local.oracles import chunk_count
from fedloom.local.rows import rows_of, to_device
from fedloom.models.spec import weights_content
from fedloom.processes.clients import TrainTask
from fedloom.schedule import Synchronous
from fedloom_sites.deploy.analyses import check_analyses
from fedloom_sites.deploy.code import Code, collect_code
from fedloom_sites.deploy.groups import agreed_groups, check_groups
from fedloom_sites.deploy.protocol.lengths import upload_norms
from fedloom_sites.deploy.secure.changes import MAX_CHANGES
from fedloom_sites.deploy.secure.protocol import MAX_SITES, MIN_SITES, min_threshold, safe_threshold
from fedloom_sites.deploy.secure.vectors import count_earlier_bits
from fedloom_sites.deploy.server.run import check_deployable, sample_count_reason
from fedloom_sites.deploy.settings import NormBound, find_case_twin
from fedloom_sites.deploy.site.local_data import make_blank_federation

DRIFT_MARGIN = 10.0
"""Maximum norm of a difference, as a multiple of the largest norm in the first round. In 20 rounds of the
registry's methods, the largest norm was up to 4 times that of the first round, and up to 7 times that with a channel
that stores its errors, unless a method diverged. FedADMM inexact is an exception: the factor was 22, because its dual
starts at zero."""
CHECKED_DRAW_COUNT = 50
"""Number of rounds whose cohorts are drawn in order to check that all sites train in each round. If a sampler draws
fewer sites, this is soon detected."""
SINGLE_TABLE_OPTIONS = (*FIXED_TABLE_OPTIONS, *DETECTED_OPTION_DEFAULTS, "client_column", "factors")
"""Options of a table that are part of the agreement, or that apply only to one file."""


@dataclass(frozen=True)
class DeploymentPlan:
    """Contents of a deployment.

    Attributes:
        name: the experiment's name.
        experiment: text of the experiment file, with a single method and seed, and without any paths of data.
        sites: names of the sites, in the order of the clients.
        samples: description of a sample.
        data: location of a site's samples.
        data_dir: folder of data sets on this machine.
        share: see `Site`.
        fixed_data: see `Site`.
        code: user code named in the experiment by import path.
        norm_bound: maximum norm of a difference that the server accepts. None if there is no limit.
        threshold: threshold of secure aggregation. None if secure aggregation is off.
        most_samples: maximum number of samples in any part of a site's data. None if sites have their own data and no
            number is given.
        start: file that contains the initial model. None if the initial model is drawn with the run's seed.
        sends: True if sites send anything.
        by_samples: True if a site is weighted by its number of samples.
    """

    name: str
    experiment: str
    sites: tuple[str, ...]
    samples: InputSpec
    data: dict[str, Any]
    data_dir: Path | None
    share: Literal["all", "partition"]
    fixed_data: bool
    code: Code
    norm_bound: NormBound | None
    threshold: int | None = None
    changes: int = MAX_CHANGES
    verify: bool = False
    most_samples: int | None = None
    start: bytes | None = None
    sends: bool = True
    by_samples: bool = False
    data_name: str = "data"


@adapt_wording("file")
def plan_deployment(
    experiment: Experiment,
    sites: int | None = None,
    *,
    names: Sequence[str] = (),
    method: str | None = None,
    seed: int | None = None,
    rounds: int | None = None,
    data_dir: Path | None = None,
    own_data: bool = False,
    fixed_data: bool = False,
    norm_bound: float | None = None,
    most_samples: int | None = None,
    secure_aggregation: bool = False,
    threshold: int | None = None,
    changes: int | None = None,
    verify: bool = False,
    data_name: str = "data",
) -> DeploymentPlan:
    """Return the plan of the deployment of an experiment.

    Args:
        experiment: the comparison. The experiment's data must exist, because they determine what a sample looks like.
        sites: number of sites. If None, there are as many sites as clients in the partition, or one site for each name.
        names: names of the sites. If None, the names are the names of the clients, or site-0, site-1, ...
        method: the method's label. None if the experiment has only one method.
        seed: seed of the run. If None, the first seed is used.
        rounds: number of rounds. If None, the method's own number of rounds is used.
        data_dir: folder of data sets.
        own_data: True if every site has its own data, rather than a share of the experiment's data.
        fixed_data: True to reject a site whose samples change during the run. Otherwise, the change is logged.
        norm_bound: maximum L2 norm of the difference that the server accepts from a site. If None, it is `DRIFT_MARGIN`
            times the largest norm in the first round, which is simulated for this purpose.
        most_samples: maximum number of samples in any part of a site's data. If None, it is the number at the largest
            client, which is unknown if sites have their own data.
        secure_aggregation: True if the server receives masked sums (see `fedloom_sites.deploy.secure.protocol`).
        threshold: minimum number of sites in any sum that is unmasked. If None, more than two thirds of the sites are
            required.
        changes: maximum number of times that a site may leave the masked sums or return to them. None for
            `MAX_CHANGES`.
        verify: True if every site opens the masked sums itself and computes its models from them.
        data_name: name of the data. Sites remember sums and budgets across experiments under this name.

    Raises:
        ConfigError: several methods exist but none is chosen, the number of sites does not match the partition, or
            (Refused) the experiment cannot run at real sites.
        DataError: the data cannot be read.
    """
    one = _restrict_experiment(experiment, method, seed, rounds)
    weights = one.methods[0].setting.model.init_from
    check_deployable(one, masked=secure_aggregation, start=weights is not None, verify=verify)
    seed = one.head.seeds[0]
    agreement = getattr(one.source, "agreement", None)
    sites = len(names) if names and sites is None else sites
    if sites is None and own_data:
        raise ConfigError("the number of sites is unknown if sites bring their own data. Add --sites or --names")
    if agreement is not None and own_data:  # the agreement describes the samples, so no data are read
        samples = InputSpec.agreed(agreement)
        fed = make_blank_federation(samples, torch.ones(sites or 1, len(DATA_PARTS), dtype=torch.long))
    else:
        fed = one.partition(one.source.read(data_dir), seed)
        # the span would reveal the range of the coordinator's data
        samples = InputSpec.create(fed.data).with_(span=None)
    check_stream(one.methods[0].setting.resolved(), fed.n)
    # raises an error if settings cannot be combined
    job, start = make_job(one.methods[0].setting.with_(schedule=Synchronous()), fed)
    if not own_data:
        check_learnable(job.oracle.task, job.fed)
    if sites is not None and sites != fed.n and not own_data:
        raise ConfigError(
            f"the partition of {experiment.head.name} has {fed.n} clients, but {sites} sites were requested. Change "
            "[partition] or --sites, or add --own-data if every site brings its own data"
        )
    if sites is not None and sites < 1:
        raise ConfigError(f"--sites must be at least 1, got {sites}")
    check_groups(job, agreed_groups(one, samples))
    agreed_threshold = _choose_threshold(job, sites or fed.n, secure_aggregation, threshold)
    groups = [name for _, name in agreed_groups(one, samples)]
    first = 0 if agreed_threshold is None else count_earlier_bits(job, groups)
    check_analyses(job, one, samples, sites or fed.n, agreed_threshold, first, job.model_kinds(start))
    if changes is not None and not secure_aggregation:
        raise ConfigError("--changes needs secure aggregation. Add --secure-aggregation, or omit --changes")
    if verify and not secure_aggregation:
        raise ConfigError("--verify needs secure aggregation. Add --secure-aggregation, or omit --verify")
    _check_same_cohorts(job, agreed_threshold is not None, MAX_CHANGES if changes is None else changes)
    folder = data_dir or (Path(os.environ[DATA_FOLDER_VARIABLE]) if os.environ.get(DATA_FOLDER_VARIABLE) else None)
    agreed = one.settings() | {"data": _remove_file_paths(one)}
    if agreement is not None:
        agreed["data"]["agreement"] = agreement.model_dump(mode="json", exclude_none=True)
    agreed["model"] = {key: option for key, option in agreed["model"].items() if key != "init_from"}
    algorithm = job.setting.method  # sites do not know each other's sizes, so values derived from them are written down
    agreed["method"][0] |= {name: getattr(algorithm, name) for name in algorithm.derived(job.ctx(0))}
    return DeploymentPlan(
        name=_safe_folder_name(experiment.head.name),
        experiment=tomli_w.dumps(agreed),
        sites=_check_site_names(names, sites or fed.n)
        if names
        else _folder_names(range(sites or fed.n) if own_data else fed.names),
        samples=samples,
        data=_site_data_table(one) if own_data else _make_paths_absolute(_agreed_data_table(one)),
        data_dir=None if folder is None or own_data else folder.resolve(),
        share="all" if own_data else "partition",
        fixed_data=fixed_data,
        code=collect_code(one.settings()),
        norm_bound=norm_bound or (None if fed.data.name == "blank" else _propose_norm_bound(job, start)),
        threshold=agreed_threshold,
        changes=MAX_CHANGES if changes is None else changes,
        verify=verify,
        data_name=data_name,
        start=None if weights is None else weights_content(weights),
        most_samples=most_samples or (None if own_data else max(int(fed.sizes(part).max()) for part in DATA_PARTS)),
        sends=bool(job.fields),
        by_samples=bool(sample_count_reason(one.methods[0].setting.resolved())),
    )


def _choose_threshold(job: Job, n: int, secure_aggregation: bool, threshold: int | None) -> int | None:
    """Return the chosen or default threshold of secure aggregation for n sites, or None if secure aggregation is off.

    Raises:
        ConfigError: the threshold is too small or too large, the cohorts are smaller than the threshold, or there are
            too few or too many sites.
    """
    if not secure_aggregation:
        if threshold is not None:
            raise ConfigError("--threshold needs secure aggregation. Add --secure-aggregation, or omit --threshold")
        return None
    if not MIN_SITES <= n <= MAX_SITES:
        raise ConfigError(f"secure aggregation works with {MIN_SITES} to {MAX_SITES} sites, got {n}")
    agreed, least = safe_threshold(n) if threshold is None else threshold, min_threshold(n)
    if not least <= agreed <= n:
        raise ConfigError(
            f"--threshold must be from {least} to {n} for {n} sites (more than half of the sites), got {agreed}"
        )
    ctx = job.ctx(1)
    drawn = len(job.setting.sampler.apply(job.setting.sampler.init(ctx), None, ctx)[0].unique())
    if n == job.n and drawn < agreed:
        raise ConfigError(
            f"sampler {job.setting.sampler.kind!r} draws {drawn} of {n} sites, but the threshold is "
            f"{agreed}. Draw more sites, or choose a --threshold of {least} or more"
        )
    return agreed


def _check_same_cohorts(job: Job, masked: bool, changes: int) -> None:
    """Raise an error if the cohorts of masked sums change between rounds, unless their noise is accounted for.

    Raises:
        ConfigError: the sampler does not draw all sites, and the agreed number of changes is too small for this.
    """
    setting, sampler = job.setting, job.setting.sampler
    if (
        not masked
        or find_accounted_noise(setting.upload_transform, setting.aggregator) is not None
        or changes >= setting.rounds
    ):
        return
    for t in range(1, min(setting.rounds, CHECKED_DRAW_COUNT) + 1):
        ctx = job.ctx(t)
        drawn = len(sampler.apply(sampler.init(ctx), None, ctx)[0].unique())
        if drawn < job.n:
            raise ConfigError(
                f"sampler {sampler.kind!r} draws {drawn} of {job.n} sites in round {t}, and two sums over different "
                "sites can reveal one site's upload. Omit the sampler so that all "
                "sites train in every round, or add noise (aggregator 'private-mean' with a delta, "
                "or upload_transform 'gaussian-noise'), or allow as many changes per site as there "
                f"are rounds (--changes {setting.rounds}), which gives up this protection"
            )


def _propose_norm_bound(job: Job, server: Any) -> NormBound | None:
    """Return `DRIFT_MARGIN` times the largest norm of a difference in a first round, to three digits, or None.

    For a method that does not send a difference, the result is None.

    If several fields of an upload have bounds, the result is a dict keyed by field.
    """
    everyone = torch.arange(job.n)
    for store in job.stores.values():
        store.touch(everyone)
    down, longest = job.down(server, 1, everyone), dict[str, float]()
    for place in everyone.tensor_split(chunk_count(job.n, job.chunk)):
        received = to_device(rows_of(down, place), job.oracle.device)
        output = run_clients(job, received, TrainTask(1, place, place, torch.ones(len(place), 1)))
        for name, norm in upload_norms(job, output.upload, received).items():
            longest[name] = max(longest.get(name, 0.0), float(norm.max()))
    bounds = {name: float(f"{DRIFT_MARGIN * most:.3g}") for name, most in longest.items() if 0 < most < math.inf}
    return (bounds if len(longest) > 1 else next(iter(bounds.values()), None)) or None


def _restrict_experiment(experiment: Experiment, label: str | None, seed: int | None, rounds: int | None) -> Experiment:
    """Return an experiment that is restricted to one method and one seed."""
    chosen = _chosen_method(experiment, label)
    method = {**chosen.settings(), "rounds": rounds or chosen.setting.rounds}
    seeds = [experiment.head.seeds[0] if seed is None else seed]
    return parse({**experiment.settings(), "seeds": seeds, "method": [method]})


def _chosen_method(experiment: Experiment, label: str | None) -> Method:
    labels = {m.label: m for m in experiment.methods}
    if label is None:
        if len(labels) > 1:
            raise ConfigError(
                f"a deployment runs one method, but the experiment has {', '.join(labels)}. Choose one with --method"
            )
        return experiment.methods[0]
    if label not in labels:
        raise unknown_name_error("method", label, labels, experiment.head.name)
    return labels[label]


def _folder_names(names: Sequence[object]) -> tuple[str, ...]:
    """Return the clients' names as folder names: the names in the data, or site-K."""
    safe = tuple(_safe_folder_name(str(name)) for name in names)
    plain = any(find_case_twin(name, safe[:k]) for k, name in enumerate(safe)) or all(name.isdigit() for name in safe)
    return tuple(f"site-{k}" for k in range(len(safe))) if plain else safe


def _check_site_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Check the names given to the sites, and return them.

    Raises:
        ConfigError: the number of names is wrong, a name cannot be used as a folder name, or two names denote the same
            folder.
    """
    if len(names) != count:
        raise ConfigError(f"--names lists {len(names)} names ({', '.join(names)}) for {count} sites")
    for k, name in enumerate(names):
        if _safe_folder_name(name) != name:
            raise ConfigError(
                "--names: a name consists of letters and digits, and may contain '.', '_' or '-', "
                f"but not at its start or end, got {name!r}. Change the name"
            )
        if same := find_case_twin(name, names[:k]):
            why = "is listed twice" if same == name else f"and {same} would share a folder on a case-insensitive disk"
            raise ConfigError(f"--names: {name} {why}. Change one of the names")
    return tuple(names)


def _agreed_data_table(one: Experiment) -> dict[str, Any]:
    """Return the [data] table without the keys that an agreement replaces."""
    agreed = getattr(one.source, "agreement", None) is not None
    return {k: v for k, v in one.source_options.items() if not agreed or k not in FIXED_TABLE_OPTIONS}


def _safe_folder_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:63] or "x"


def _remove_file_paths(one: Experiment) -> dict[str, Any]:
    """Return the [data] table without the path of a file, so that the server and the sites can read it."""
    options, kind = one.source_options, type(one.source)
    if not isinstance(one.source, FileSource) or kind.model_fields["path"].is_required():
        return options
    rest = {key: value for key, value in options.items() if key != "path"}
    named = options["source"] in SOURCES or is_path(options["source"])
    return rest if named else {**rest, "source": next(name for name, one in SOURCES.items() if one is kind)}


def _site_data_table(one: Experiment) -> dict[str, Any]:
    """Return the [data] table of a site with its own data: a file named as in the experiment, next to its settings."""
    path, options = getattr(one.source, "path", None), _remove_file_paths(one)
    if isinstance(one.source, TableSource):  # columns were agreed on, and the file format is detected
        options = {k: v for k, v in options.items() if k not in SINGLE_TABLE_OPTIONS} | one.source.targets
        if "target" not in options:
            with one.source.open() as raw:
                options["target"] = raw.names[-1]
    return options | ({} if path is None else {"path": Path(path).name})


def data_table_for_new_site(options: dict[str, Any]) -> dict[str, Any]:
    """Return the [data] table for an additional site, without values that apply only to another site's file."""
    if issubclass(SOURCES.get(str(options["source"]), object), TableSource):
        options = {k: v for k, v in options.items() if k not in SINGLE_TABLE_OPTIONS}
    return options | ({"path": Path(str(options["path"])).name} if "path" in options else {})


def _make_paths_absolute(options: dict[str, Any]) -> dict[str, Any]:
    """Return the [data] table with absolute paths."""
    keys = ("path",) if options["source"] in SOURCES else ("path", "source")
    paths = {key: Path(options[key]).expanduser() for key in keys if key in options}
    return {**options, **{key: str(path.resolve()) for key, path in paths.items() if path.exists()}}
