"""Simulated time: how long clients take, when they are available, and which uploads the server uses in each step."""

from fedloom.schedule.devices import DEVICES, Classes, DeviceClass, Devices, Equal, LogNormal, Trace
from fedloom.schedule.fleet import FORWARD_COST, Fleet
from fedloom.schedule.presence import Presence
from fedloom.schedule.schedules import (
    SCHEDULES,
    Asynchronous,
    Buffered,
    Deadline,
    OverSelection,
    Schedule,
    Stream,
    Synchronous,
)

__all__ = [
    "DEVICES", "FORWARD_COST", "SCHEDULES", "Asynchronous", "Buffered", "Classes", "Deadline", "DeviceClass", "Devices",
    "Equal", "Fleet", "LogNormal", "OverSelection", "Presence", "Schedule", "Stream", "Synchronous", "Trace",
]  # fmt: skip
