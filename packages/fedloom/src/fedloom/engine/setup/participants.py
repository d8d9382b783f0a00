"""First step of creating a job: check that the run's settings are compatible, and prepare the clients' data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import check_declaration
from fedloom.choose import SharesWeigher, Uniform, Weigher
from fedloom.data.federation import Federation
from fedloom.engine.checks.defaults import adapt_defaults
from fedloom.engine.checks.idle import no_effect_sentence
from fedloom.engine.checks.refusals import (
    add_rule_to_errors,
    check_attack,
    check_mixer,
    check_root,
    check_sampler,
    check_together,
)
from fedloom.engine.clients.poisoning import add_triggers, poison_training_data
from fedloom.engine.privacy import check_privacy
from fedloom.engine.setting import Engine, Setting
from fedloom.engine.virtual.check import check_schedule
from fedloom.errors import ConfigError
from fedloom.local.oracles.precision import warm_up_gpu
from fedloom.rows.attacks import Backdoor, Poison
from fedloom.schedule import Synchronous


class Participants(NamedTuple):
    """A run whose settings have been checked, together with its clients.

    Attributes:
        setting: settings of the run, with presets resolved.
        fed: training data on the run's device, already poisoned or pooled if the run requires it.
        eval_fed: federation with the evaluation data.
        attackers: ids of the attackers ``[b]``.
        notes: notes about settings that the run changes or ignores.
    """

    setting: Setting
    fed: Federation
    eval_fed: Federation
    attackers: Tensor
    notes: list[str]


def choose_participants(setting: Setting, fed: Federation) -> Participants:
    """Check everything that can be checked without a model, and move the data to the run's device.

    Raises:
        ConfigError: values are impossible or cannot be combined.
    """
    device, dtype = _device_and_dtype(setting.engine)
    check_declaration(type(setting.resolved().method))
    setting.local.check(setting.rounds)
    eval_fed = fed.to(device, dtype)
    fed = eval_fed.pooled() if setting.pooled else eval_fed
    setting, notes = _check_without_data(setting, fed.n)
    attackers = torch.arange(0) if setting.attack is None else setting.attack.attackers(fed.n, setting.seed)
    if isinstance(setting.attack, Backdoor):
        fed = eval_fed = add_triggers(eval_fed, setting.attack)
    if isinstance(setting.attack, Poison | Backdoor):
        fed = poison_training_data(fed, setting.attack, attackers, setting.seed)
    return Participants(setting, fed, eval_fed, attackers, notes)


def _device_and_dtype(engine: Engine) -> tuple[torch.device, torch.dtype]:
    """Return the device and data type of a run.

    Raises:
        ConfigError: the device does not exist.
    """
    device: torch.device = torch.device(engine.device)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            what = f"this machine has {count} (numbered from 0)" if count else "this machine has no CUDA device"
            use = "cuda:0" if count else "cpu"
            raise ConfigError(
                f"engine.device is {engine.device!r}, but {what}",
                rule="device-missing",
                fix=f"set {{engine.device = {use!r}}}",
            )
        warm_up_gpu(device)
    return device, getattr(torch, engine.dtype)


def _check_weigher_groups(weigher: Weigher) -> Weigher:
    """Check that the weigher does not lack groups, and return it.

    Raises:
        ConfigError: the weigher compares two groups of rows, but no groups are defined.
    """
    try:
        return weigher.with_groups(())
    except ConfigError as error:
        what = str(error).partition(";")[0].replace("weigher.", "aggregation_weights.")
        raise ConfigError(
            what,
            rule="weigher-without-groups",
            fix="name the groups in {aggregation_weights.group}, for example 'sex' or 'age>=75'",
        ) from None


def _check_without_data(setting: Setting, n: int) -> tuple[Setting, list[str]]:
    """Resolve presets, and check everything that can be checked without reading data.

    Return the checked setting, and notes about options that have no effect on pooled data.

    Raises:
        ConfigError: values are impossible or cannot be combined.
    """
    pooled, (setting, notes) = setting.pooled, adapt_defaults(setting.resolved(), n)
    setting = setting.with_(aggregation_weights=_check_weigher_groups(setting.aggregation_weights))
    check_together(
        setting.method, setting.local, setting.aggregation_weights, setting.aggregator, setting.upload_transform
    )
    check_sampler(setting.method, setting.sampler, setting.aggregation_weights)
    if pooled:
        none = dict.fromkeys(("personalized_aggregation", "aggregator", "attack", "upload_transform", "devices"))
        pool = setting.with_(
            sampler=Uniform(),
            aggregation_weights=SharesWeigher(),
            client_weights="samples",
            schedule=Synchronous(),
            **none,
        )
        keys = [
            f"[{name}]"
            for name in ("sampler", "aggregation_weights", "schedule", *none)
            if getattr(pool, name) != getattr(setting, name)
        ]
        notes = [f"pooled data have only one client, so {no_effect_sentence(keys)}"] if keys else []
        setting = pool
    check_privacy(
        setting.method, setting.upload_transform, setting.aggregator, setting.sampler, setting.aggregation_weights
    )
    with add_rule_to_errors(f"sampler-{setting.sampler.kind}"):
        setting.sampler.check(n)
    with add_rule_to_errors(f"weigher-{setting.aggregation_weights.kind}"):
        setting.aggregation_weights.check(n)
    if setting.personalized_aggregation is not None:
        check_mixer(setting.method, setting.personalized_aggregation, setting.aggregator)
        setting.personalized_aggregation.check(n)
    check_schedule(setting, n)
    check_attack(setting)
    check_root(setting.aggregator, n)
    return setting, notes
