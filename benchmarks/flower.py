"""FedAvg of fedloom beside Flower's own, on the same app in this process: time per round and bytes per message.

Nodes answer in turn, and every message is written to bytes and read back. Rounds of both strategies alternate.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Proto
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedloom.flower import Local, Strategy, client

NODES, SAMPLES, CLASSES, LR = 2, 32, 10, 0.1


class Nodes:
    """A grid of nodes in this process."""

    run = None

    def __init__(self, app: ClientApp) -> None:
        self.app, self.bytes = app, list[int]()
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
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            node = message.metadata.dst_node_id
            reply = self._wire(self.app(self._wire(message), self.contexts[node]))
            reply.metadata.__dict__["_src_node_id"] = node
            replies.append(reply)
        return replies


def network(width: int) -> nn.Module:
    return nn.Linear(width, CLASSES)


def samples(k: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return torch.randn(SAMPLES, width, generator=g), torch.randint(CLASSES, (SAMPLES,), generator=g)


def plain_app(width: int) -> ClientApp:
    """Flower's quickstart: one step of SGD on all samples."""
    app, data = ClientApp(), {k: samples(k, width) for k in range(1, 1 + NODES)}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = network(width)
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
        return Local(network(width), samples(context.node_id, width), nn.CrossEntropyLoss())

    return app


def one_round(strategy: Any, t: int, arrays: ArrayRecord, grid: Nodes) -> tuple[ArrayRecord, float]:
    start = time.perf_counter()
    replies = grid.send_and_receive(strategy.configure_train(t, arrays, ConfigRecord(), grid))
    new, _ = strategy.aggregate_train(t, replies)
    return new, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parameters", type=int, nargs="+", default=[10**4, 10**7])
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for name in ("run_id", "task_id", "node_id"):
        setattr(TaskIdentity, name, 1)
    for d in options.parameters:
        width = d // CLASSES
        start = ArrayRecord(network(width).state_dict())
        local = {"lr": LR, "batch_size": "full", "steps": 1}
        sides: list[list[Any]] = [
            [FedAvg(fraction_evaluate=0.0), start, Nodes(plain_app(width)), []],
            [Strategy("fedavg", network(width), local=local, evaluate_every=0), start, Nodes(loom_app(width)), []],
        ]
        for t in range(1, 3 + options.rounds):
            for side in sides:
                if t == 3:  # warm
                    side[2].bytes.clear()
                side[1], seconds = one_round(side[0], t, side[1], side[2])
                side[3].append(seconds)
        flower, loom = (side[3][2:] for side in sides)
        sizes = [median(side[2].bytes) for side in sides]
        gap = median(b - a for a, b in zip(flower, loom, strict=True))
        apart = max(
            float((a - b).abs().max())
            for a, b in zip(*(side[1].to_torch_state_dict().values() for side in sides), strict=True)
        )
        print(f"{d} parameters: flower {1e3 * median(flower):.1f} ms a round, fedloom {1e3 * median(loom):.1f} ms")
        print(f"  paired difference {1e3 * gap:+.1f} ms; models differ by {apart:.1e}")
        print(f"  bytes a message: flower {sizes[0]:.0f}, fedloom {sizes[1]:.0f}")


if __name__ == "__main__":
    main()
