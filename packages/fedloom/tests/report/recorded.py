"""Writes run directories as the running floor would: random, but with structure that a report should show."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ("fedavg", "fedprox", "local", "ditto", "flame", "fedacs", "scaffold", "feddyn", "equitable-fl", "apfl")
PERSONAL = {"local", "ditto", "flame", "fedacs", "apfl"}
GLOBAL = set(NAMES) - {"local", "fedacs"}
METRICS = {
    "classification": ("loss", "accuracy", "macro_f1"),
    "binary": ("loss", "accuracy", "f1", "auroc", "auprc", "calibration_error"),
    "regression": ("loss", "mae", "rmse", "r2"),
}
SPLIT = pa.schema(
    {**dict.fromkeys(("seed", "client", "size", "group"), pa.int64()), "name": pa.string(), "attacks": pa.bool_()}
    | {"counts": pa.list_(pa.int64())}
)


@dataclass(frozen=True)
class Recording:
    """What to write; `write` gives the directory back."""

    methods: int = 6
    seeds: int = 3
    clients: int = 10
    rounds: int = 60
    every: int = 5
    task: str = "classification"
    classes: int = 10
    aggregates: bool = True
    diverged: str | None = None
    interrupted: str | None = None
    name: str = "quickstart"
    extras: bool = False
    attack: float = 0.0
    seed: int = 0

    def labels(self) -> list[str]:
        return [
            NAMES[i % len(NAMES)] + (f" {i // len(NAMES) + 1}" if i >= len(NAMES) else "") for i in range(self.methods)
        ]

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        gen = np.random.default_rng(self.seed)
        rows: list[tuple[str, int, int, int, str, str, str, float]] = []
        times: list[tuple[str, int, int, float]] = []
        runs = []
        counts = [self._counts(gen) for _ in range(self.seeds)]
        for index, label in enumerate(self.labels()):
            kind = label.split()[0]
            models = [m for m, own in (("global", kind in GLOBAL), ("personal", kind in PERSONAL)) if own]
            models += ["hybrid"] if len(models) == 2 else []
            for seed in range(self.seeds):
                last, status = self.rounds, "done"
                if label == self.diverged and seed == self.seeds - 1:
                    last, status = min(7, self.rounds), "diverged"
                if label == self.interrupted:
                    last, status = self.rounds // 2, "interrupted"
                skill = gen.normal(0, 0.08, self.clients)
                for round in range(1, last + 1):
                    times.append((label, seed, round, 0.02 + 0.01 * index + 0.002 * gen.random()))
                    if round % self.every and round != last:
                        continue
                    for model in models:
                        bad = status == "diverged" and round == last
                        rows += self._clients(gen, label, index, seed, round, model, skill, bad)
                    rows += self._totals(label, index, seed, round)
                runs.append(
                    {
                        "method": label,
                        "algorithm": kind,
                        "seed": seed,
                        "status": status,
                        "reason": "diverged: the loss of the model is not finite"
                        if status == "diverged"
                        else "all rounds done",
                        "rounds": last,
                        "oracle": "fused",
                        "chunk": 5,
                        "final": {},
                        "parameters": 7850,
                    }
                )
        self._store(path, rows, times, runs, counts)
        return path

    def _counts(self, gen: np.random.Generator) -> list[list[int]]:
        if self.task == "regression":
            return [[] for _ in range(self.clients)]
        share = gen.dirichlet(np.full(self.classes, 0.4), self.clients)
        size = gen.dirichlet(np.full(self.clients, 2.0)) * 120 * self.clients + 10
        return [[int(x) for x in s * z] for s, z in zip(share, size, strict=True)]

    def _clients(self, gen, label, index, seed, round, model, skill, bad):
        lift = {"global": 0.0, "personal": 0.09, "hybrid": 0.10}[model] - 0.004 * index
        speed = 0.05 + 0.01 * (index % 4)
        level = np.clip(
            0.35 + (0.42 + lift) * (1 - math.exp(-speed * round)) + skill + gen.normal(0, 0.01, self.clients),
            0.02,
            0.995,
        )
        if model == "personal":
            level = 1 - (1 - level) * 0.8
        rows = []
        for part in ("train", "validation", "test"):
            own = np.clip(
                level + {"train": 0.02, "validation": 0, "test": -0.005}[part] + gen.normal(0, 0.006, self.clients),
                0,
                1,
            )
            values = {
                "loss": -np.log(own) * 1.4,
                "accuracy": own,
                "macro_f1": own * 0.97,
                "f1": own * 0.95,
                "auroc": np.sqrt(own),
                "auprc": own**0.8,
                "calibration_error": 0.2 * (1 - own),
                "mae": 1.1 - own,
                "rmse": 1.4 * (1.1 - own),
                "r2": own * 1.2 - 0.3,
            }
            for name in METRICS[self.task]:
                value = values[name].copy()
                if bad:
                    value[:] = math.nan
                if part != "train" and self.clients > 4:
                    value[1] = math.nan  # a client without this part
                rows += [(label, seed, round, c, model, part, name, float(v)) for c, v in enumerate(value)]
                if self.aggregates and not np.isnan(value).all():
                    rows.append((label, seed, round, -1, model, part, f"{name}/mean", float(np.nanmean(value))))
        if self.extras and model == "global":
            rows.append((label, seed, round, -1, model, "test", "nmi", float(1 - math.exp(-0.1 * round))))
            rows.append((label, seed, round, -1, model, "common", "accuracy", float(np.nanmean(level))))
            rows.append((label, seed, round, -1, model, "test", "accuracy/sigma", float(np.nanstd(level))))
        return rows

    def _totals(self, label, index, seed, round):
        idle = label.startswith("local")
        each = 7850 * 4 * self.clients * (2 if label.startswith(("scaffold", "flame")) else 1)
        work = {
            "steps": round * 50 * self.clients * (2 if label.startswith(("ditto", "flame")) else 1),
            "samples_backward": round * 1000 * self.clients * (2 if label.startswith(("ditto", "flame")) else 1),
            "samples_forward": round * 1000 * self.clients,
            "bytes_up": 0 if idle else round * each,
            "bytes_down": 0 if idle else round * 7850 * 4 * self.clients,
            "bytes_up_paper": 0 if idle else round * each,
            "bytes_down_paper": 0 if idle else round * 7850 * 4 * self.clients,
            "dropped": 0,
        }
        return [(label, seed, round, -1, "", "", name, float(v)) for name, v in work.items()]

    def _store(self, path: Path, rows: list, times: list, runs: list, counts: list) -> None:
        names = ("method", "seed", "round", "client", "model", "part", "metric", "value")
        pq.write_table(
            pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), path / "metrics.parquet"
        )
        names = ("method", "seed", "round", "seconds")
        pq.write_table(
            pa.table(dict(zip(names, map(list, zip(*times, strict=True)), strict=True))), path / "timings.parquet"
        )
        summary = {
            "name": self.name,
            "runs": runs,
            "select_on": "validation",
            "warnings": [],
        }
        (path / "summary.json").write_text(json.dumps(summary))
        split = [
            {
                "seed": seed,
                "client": c,
                "name": f"site {c}",
                "size": sum(row),
                "group": -1,
                "attacks": False,
                "counts": row,
            }
            for seed, table in enumerate(counts)
            for c, row in enumerate(table)
        ]
        pq.write_table(pa.Table.from_pylist(split, SPLIT), path / "partition.parquet")
        attack = f'[attack]\nkind = "sign-flip"\nfraction = {self.attack}\n' if self.attack else ""
        (path / "experiment.toml").write_text(
            f'name = "{self.name}"\nrounds = {self.rounds}\nseeds = {list(range(self.seeds))}\n\n'
            '[data]\nsource = "digits"\n\n'
            f'[partition]\nkind = "mixed"\nclients = {self.clients}\nalpha = 0.5\n\n{attack}'
            + "".join(
                f'[[method]]\nalgorithm = "{r["algorithm"]}"\nlabel = "{r["method"]}"\n\n'
                for r in runs
                if r["seed"] == 0
            )
            + '[resolved]\nfedloom = "0.1.0"\ntorch = "2.13.0"\noracle = "fused"\n'
        )
