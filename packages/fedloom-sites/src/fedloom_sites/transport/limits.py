"""Limits of real clients: choices that only a simulation can compute, and that deployments and Flower apps reject."""

from __future__ import annotations

from fedloom.algorithms import upload_fields
from fedloom.choose.shares import column_of_shares, uses_clusters
from fedloom.engine import Setting
from fedloom.errors import Refused
from fedloom.schedule import Stream, Synchronous


def check_real_clients(name: str, setting: Setting, party: str, *, streams: bool = False) -> None:
    """Raise an error if a method or a choice needs something that real clients cannot provide.

    Args:
        name: name of the method for messages.
        setting: the run.
        party: plural noun for the clients in messages.
        streams: True if clients may answer at any time, so that buffered schedules work.

    Raises:
        Refused: the method needs all samples in one place, simulated time, or models that stay at the clients.
    """
    schedule, weights = setting.schedule, setting.client_weights
    if setting.pooled:
        raise Refused(
            f"{name} pools the data of all clients, but {party} do not share their data",
            rule="deploy-pooled-data",
            fix="choose another method",
        )
    own_time, buffered = f"but {party} take the time that they need", ", or set {schedule = 'buffered'}" * streams
    if setting.devices is not None:
        raise Refused(f"devices simulate times, {own_time}", rule="deploy-devices", fix="leave {devices} out")
    if not isinstance(schedule, Synchronous | Stream if streams else Synchronous):
        raise Refused(
            f"schedule {schedule.kind!r} needs simulated time, {own_time}",
            rule="deploy-schedule",
            fix=f"leave {{schedule}} out{buffered}",
        )
    if (clusters := uses_clusters(weights)) or column_of_shares(weights):
        reader, more = "finds the clusters", ", or {weigher = 'equitable'}, which finds them in every round" * clusters
        raise Refused(
            f"client_weights = {weights!r} works only in simulations, because fedloom "
            f"{reader if clusters else 'reads the column'} where all samples are in one place",
            rule="deploy-weights",
            fix=f"set one number for each client in {{weights}}{more}",
        )
    resolved = setting.resolved()
    kinds = upload_fields(type(resolved.method)).values()
    if resolved.sampler.learns and any(k.primary and k.base.startswith("rows.") for k in kinds):
        raise Refused(
            f"sampler {resolved.sampler.kind!r} reads the clients' models, but clients of {name} "
            "upload only differences from a state that stays with the client",
            rule="deploy-sampler-models",
            fix="choose another {sampler}",
        )
