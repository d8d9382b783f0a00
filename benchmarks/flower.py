"""Compare fedloom's FedAvg strategy with Flower's: time per round and bytes per message for the same app.

All nodes run in this process, one after another. Every message is serialized and parsed again. Blocks of rounds of both
strategies alternate. A round lasts from one request for training to the next, so it includes everything that a
strategy does in `start`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Proto
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedloom_sites.flower import Local, Strategy, client

NODES, SAMPLES, CLASSES, LR, BLOCK = 2, 32, 10, 0.1, 6


class LocalGrid:
    """Flower grid whose nodes run in this process."""

    run = None

    def __init__(self, app: ClientApp) -> None:
        self.app, self.bytes, self.times = app, list[int](), list[tuple[float, float]]()
        self.contexts = {
            k: Context(run_id=1, node_id=k, node_config={"partition-id": k}, state=RecordDict(), run_config={})
            for k in range(1, 1 + NODES)
        }

    def get_node_ids(self) -> list[int]:
        return [*self.contexts]

    def _wire(self, message: Message) -> Message:
        data = message_to_proto(message).SerializeToString()
        self.bytes.append(len(data))
        return message_from_proto(Proto.FromString(data))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies, messages = [], list(messages)
        if messages and messages[0].metadata.message_type == "train":
            self.times.append((time.perf_counter(), time.process_time()))
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            node = message.metadata.dst_node_id
            reply = self._wire(self.app(self._wire(message), self.contexts[node]))
            reply.metadata.__dict__["_src_node_id"] = node
            replies.append(reply)
        return replies


def make_network(width: int) -> nn.Module:
    return nn.Linear(width, width)


def make_samples(k: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return torch.randn(SAMPLES, width, generator=g), torch.randint(CLASSES, (SAMPLES,), generator=g)


def plain_app(width: int) -> ClientApp:
    """Return a client app like the app in Flower's quickstart, which takes one SGD step on all samples."""
    app, data = ClientApp(), {k: make_samples(k, width) for k in range(1, 1 + NODES)}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = make_network(width)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = data[context.node_id]
        nn.functional.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=LR).step()
        metrics = MetricRecord({"num-examples": SAMPLES})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def loom_app(width: int) -> ClientApp:
    app = ClientApp()

    @client(app)
    def local(context: Context) -> Local:
        return Local(make_network(width), make_samples(context.node_id, width), nn.CrossEntropyLoss())

    return app


def run_block(strategy: Any, arrays: ArrayRecord, grid: LocalGrid) -> tuple[ArrayRecord, list[tuple[float, float]]]:
    """Run a block of rounds, and return the new model, and the wall-clock and processor time of each measured round."""
    grid.times.clear()
    new = strategy.start(grid, arrays, num_rounds=BLOCK).arrays
    return new, [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(grid.times[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--parameters", type=int, nargs="+", default=[10**4, 10**7])
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with suppress(ImportError):  # older releases do not have this module
        identity = import_module("flwr.supercore.task_identity").TaskIdentity
        identity.run_id = identity.task_id = identity.node_id = 1
    for d in options.parameters:
        width = math.isqrt(d)
        start = ArrayRecord(make_network(width).state_dict())
        local = {"lr": LR, "batch_size": "full", "steps": 1}
        sides: list[list[Any]] = [
            [FedAvg(fraction_evaluate=0.0), start, LocalGrid(plain_app(width)), []],
            [
                Strategy("fedavg", make_network(width), local=local, evaluate_every=0),
                start,
                LocalGrid(loom_app(width)),
                [],
            ],
        ]
        for number in range(1 + options.blocks):
            for side in sides:
                if number == 1:  # drop the measurements of the warm-up block
                    side[2].bytes.clear()
                    side[3].clear()
                side[1], rounds = run_block(side[0], side[1], side[2])
                side[3].append([median(column) for column in zip(*rounds, strict=True)])
        apart = max(
            float((a - b).abs().max())
            for a, b in zip(*(side[1].to_torch_state_dict().values() for side in sides), strict=True)
        )
        print(f"{d} parameters; models differ by {apart:.1e}")
        for k, what in enumerate(("clock", "processor")):
            flower, loom = ([pair[k] for pair in side[3]] for side in sides)
            gap = median(b - a for a, b in zip(flower, loom, strict=True)) / NODES
            share = median(b / a for a, b in zip(flower, loom, strict=True)) - 1
            print(
                f"  {what}: flower {1e3 * median(flower):.1f} ms a round, fedloom {1e3 * median(loom):.1f} ms; paired "
                f"{1e3 * gap:+.1f} ms a node, {100 * share:+.0f} %"
            )
        sizes = [median(side[2].bytes) for side in sides]
        print(f"  bytes a message: flower {sizes[0]:.0f}, fedloom {sizes[1]:.0f}")


if __name__ == "__main__":
    main()
