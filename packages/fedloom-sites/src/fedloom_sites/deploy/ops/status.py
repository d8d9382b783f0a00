"""Status of a deployment, read only from the server's files: audit log, checkpoints and results.

Reading the status neither locks nor writes anything.

`serve_metrics` provides the same numbers in Prometheus' format.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import pyarrow as pa
from cryptography import x509

from fedloom.errors import ConfigError, RunDirError, Stop
from fedloom.metrics import SUMMARY_METRICS
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.disk import check_regular_file
from fedloom.storage.locks import is_in_use
from fedloom_sites.deploy.audit import read_entries
from fedloom_sites.deploy.ops.analyses import analysis_states, describe_analysis
from fedloom_sites.deploy.ops.keys import EXPIRY_NOTICE
from fedloom_sites.deploy.ops.table import mean_table, site_table
from fedloom_sites.deploy.setting_files import SERVER_FILE, SITE_FILE, describe_folder, read_server
from fedloom_sites.deploy.settings import Server

END_STATES = {stop.value: "stopped" if stop.is_resumable else stop.status for stop in Stop}
"""States that a run can be in after its end, keyed by the reason for the end. A run that was stopped can be resumed."""
CERTIFICATE_HINT_BY_NAME = {
    "server's certificate": "run 'fedloom deploy renew' on the deployment's directory, where the folder authority/ is "
    "kept, copy the new server.crt and server.key to the server, reload the reverse proxy and restart the superlink's "
    "unit",
    "authority's certificate": "start a new deployment",
}
"""Advice on replacing an expiring certificate."""
TRAINING_MESSAGES = ("train", "masked")
"""Kinds of messages whose replies show that a site took part in a round."""


@contextmanager
def _explain_unexpected_content() -> Iterator[None]:
    """Convert errors that are caused by unexpected file contents to a `RunDirError` with an explanation."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise RunDirError(f"the server's log and checkpoints are inconsistent ({what}). Nothing was changed") from None


def find_server(folder: Path) -> Server:
    """Return the server's settings from a deployment's directory or from the server's folder.

    Raises:
        ConfigError: the settings do not exist.
    """
    return read_server(server_file(folder))


def server_file(folder: Path) -> Path:
    """Return the path of the server's TOML file in a deployment's directory or in the server's folder.

    Raises:
        ConfigError: the file does not exist.
    """
    files = [path for path in (folder / "server" / SERVER_FILE, folder / SERVER_FILE) if path.is_file()]
    if not files:
        at_site = ". A site does not have them, so ask the coordinator" if (folder / SITE_FILE).exists() else ""
        raise ConfigError(
            f"{folder} {describe_folder(folder)}. Pass the directory that 'fedloom deploy init' wrote, or the server's "
            f"folder{at_site}"
        )
    return files[0]


def summarize_clients(
    log: Sequence[Mapping[str, Any]], members: Mapping[int, str], rounds: int
) -> dict[int, dict[str, Any]]:
    """Summarize the audit log separately for each client.

    Args:
        log: lines of the audit log.
        members: names of the sites, keyed by client.
        rounds: rounds done. Replies that were accepted for a later round do not yet have an effect.

    Returns:
        ``accepted`` and ``missed`` rounds, ``last_reply`` (time as ISO 8601, or None), ``mute``, ``staleness`` (mean
        over the site's uploads, None except in a buffered run), and ``rejected``: the number of replies and the latest
        ``reason``, keyed by step of the check.
    """
    blank: dict[str, Any] = {"last_reply": None, "mute": False, "node": None}
    stale: dict[str, list[int]] = {}
    for line in log:
        if line.get("what") == "step" and line["round"] <= rounds:
            for site, staleness in line["staleness"].items():
                stale.setdefault(site, []).append(staleness)
    rows = {c: {"accepted": 0, "missed": 0, **blank, "rejected": dict[str, Any]()} for c in sorted(members)}
    accepted: dict[int, set[int]] = {c: set() for c in rows}
    missed: dict[int, set[int]] = {c: set() for c in rows}
    lost = {line.get("round", 0) for line in log if line.get("what") == "given up"}
    for line in log:
        c, what = line.get("client"), line.get("what")
        if c not in rows or line.get("site", members[c]) != members[c]:
            continue
        one, number = rows[c], line.get("round", 0)
        if what == "accepted":
            one |= {"last_reply": line["time"], "mute": False, "node": line.get("node", one["node"])}
            if line.get("kind") in TRAINING_MESSAGES and number <= rounds:
                accepted[c].add(number)
        elif what == "mute":
            one["mute"] = True
        elif what == "missed":
            missed[c].add(number)
        elif what == "rejected":
            step = one["rejected"].setdefault(str(line.get("step", 0)), {"count": 0})
            step |= {"count": step["count"] + 1, "reason": line.get("reason", "")}
    for c, one in rows.items():
        one |= {"accepted": len(accepted[c] - lost), "missed": len(missed[c] - accepted[c])}
        one["staleness"] = mean(stale[members[c]]) if members[c] in stale else None
    return rows


def summarize_counters(log: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each counter that was above zero: the number of rounds, and the latest reason."""
    sentences = []
    for what in ("neutral uploads", "clipped uploads"):
        reasons = {line.get("round", 0): str(line.get("reason", "")) for line in log if line.get("what") == what}
        if reasons:
            rounds = "1 round" if len(reasons) == 1 else f"{len(reasons)} rounds"
            sentences.append(f"{what} in {rounds}: {reasons[max(reasons)]}")
    return sentences


@_explain_unexpected_content()
def read_status(server: Server) -> dict[str, Any]:
    """Return a deployment's progress as plain values, which ``fedloom deploy status --json`` prints.

    The keys are:

    - ``state``: "not started", "running", "stopped", "killed", "diverged", "failed" or "done", with ``reason``.
    - ``rounds``: number of completed rounds, out of ``planned``.
    - ``round_seconds``: ``last`` and ``median``.
    - ``epsilon``: epsilon spent by the end of these rounds, or None without a delta.
    - ``epsilon_sites``: epsilon against T - 1 sites that share the noise of a sum, or None if sites do not share noise.
    - ``sites``: see `summarize_clients`, with ``share`` (of the completed rounds), ``samples`` ``[3]`` and the latest
      ``scores``.
    - ``analyses``: for each analysis by sums its ``name``, ``state`` ("waits", "begun", "none" or "done"), the number
      of ``sums`` so far, ``reason``, and the number of ``rows`` if it is done.
    - ``counted``: sentences about the counters of masked sums, see `summarize_counters`.
    - ``means``: latest metrics of the federation, one row per model, see `mean_table`.
    - ``certificates``: when they expire (ISO 8601).
    - ``disk``: bytes by kind of content, and ``free``.
    - ``last_event``: time of the last line in the log.

    Raises:
        RunDirError: the files are inconsistent with each other.
    """
    log, meta = read_entries(server.audit), Checkpoints(server.checkpoints).meta() or {}
    rounds, seconds, more = meta.get("round", 0), meta.get("seconds", []), meta.get("more", {})
    members, document = {m.client: m.site for m in server.sites}, _read_experiment_file(server.experiment)
    scores, means = list[dict[str, Any]](), list[dict[str, Any]]()
    with suppress(OSError, KeyError, pa.ArrowException):  # the files are missing or damaged
        scores = site_table(server.results / "metrics.parquet", members)
        means = mean_table(server.results / "metrics.parquet")
    sizes = more.get("sizes", [])
    sites = []
    for c, tally in summarize_clients(log, members, rounds).items():
        rows = [{k: v for k, v in row.items() if k != "site" and v == v} for row in scores if row["site"] == members[c]]
        size, share = sizes[c] if c < len(sizes) else None, tally["accepted"] / rounds if rounds else 0.0
        sites.append({"site": members[c], "client": c, "samples": size, "share": share, **tally, "scores": rows})
    return {
        "name": server.name, **_run_state(server, log), "rounds": rounds, "planned": _planned_rounds(document),
        "round_seconds": {"last": seconds[-1], "median": median(seconds)} if seconds else None,
        "epsilon": more.get("epsilon"), "epsilon_sites": more.get("epsilon_sites"), "epsilon_limit": server.epsilon,
        "analyses": analysis_states(document, server.checkpoints, log), "sites": sites, "means": means,
        "counted": summarize_counters(log),
        "certificates": _expiries(server), "disk": _disk_usage(server), "last_event": log[-1]["time"] if log else None,
    }  # fmt: skip


@_explain_unexpected_content()
def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Convert a status to a few lines of text. The table of sites is described in `status_table`."""
    seconds, limit, disk = status["round_seconds"], status["epsilon_limit"], status["disk"]
    texts = [f"{status['name']}: {status['state']}{f', {why}' if (why := status['reason']) else ''}"]
    pace = f", {seconds['last']:.1f} s the last, {seconds['median']:.1f} s in the median" if seconds else ""
    texts.append(f"rounds: {status['rounds']} of {status['planned']}{pace}")
    if status["epsilon"] is not None:
        cost = f"epsilon: {status['epsilon']:.4g}{'' if limit is None else f' of {limit:g}'}"
        inside = status["epsilon_sites"]
        texts.append(cost if inside is None else f"{cost}, and {inside:.4g} against all other sites of a smallest sum")
    texts += [f"analysis {one['name']}: {describe_analysis(one)}" for one in status["analyses"]]
    texts += status["counted"]
    for row in status["means"]:
        figures = [f"{k} {row[k]:.4g}" for k in SUMMARY_METRICS if k in row] + (
            [f"of {row['sites']} sites"] if "sites" in row else []
        )
        texts.append(f"{row['model']} model, round {row['round']}, mean over sites: {', '.join(figures)}")
    texts += [
        f"the {name} {'expires' if _parse_time(end) > datetime.now(UTC) else 'expired'} on {end[:10]}: "
        f"{CERTIFICATE_HINT_BY_NAME[name]}"
        for name, end in status["certificates"].items()
        if _parse_time(end) < datetime.now(UTC) + EXPIRY_NOTICE
    ]
    used = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in disk.items())
    return [*texts, f"disk: {used}", f"last event: {_time_since(status['last_event'])}"]


@_explain_unexpected_content()
def status_table(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one readable row for each site. Losses are measured on the site's test samples."""
    rows = []
    for site in status["sites"]:
        rejected = sum(step["count"] for step in site["rejected"].values())
        last = "none accepted" if rejected and site["last_reply"] is None else _time_since(site["last_reply"])
        row = {
            "site": site["site"],
            "node": str(site.get("node") or ""),
            "last reply": last + (" (mute)" if site["mute"] else ""),
        }
        row |= {"rounds": site["accepted"], "share": f"{site['share']:.0%}", "missed": site["missed"]}
        row |= {} if site["staleness"] is None else {"staleness": f"{site['staleness']:.1f}"}
        losses = {f"{one['model']} loss": one["loss"] for one in site["scores"] if "loss" in one}
        rows.append({**row, "rejected": rejected, **losses})
    return rows


@contextmanager
def serve_metrics(server: Server) -> Iterator[None]:
    """Serve the status over HTTP during a ``with`` block, if the settings name a port.

    The status is read again for each request.

    Raises:
        ConfigError: the port is already in use.
    """
    if server.metrics_port is None:
        yield
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(_Collector(server))
    try:
        http, thread = start_http_server(server.metrics_port, server.metrics_address, registry)
    except OSError as error:
        where = f"{server.metrics_address}:{server.metrics_port}"
        raise ConfigError(
            f"metrics cannot be served on {where} ({error.strerror}). Choose another metrics_port"
        ) from None
    try:
        yield
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


class _Collector:
    """Source of Prometheus metrics, which reads the status at each request."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        def gauge(name: str, about: str, values: Mapping[Any, float | None], *labels: str) -> Any:
            family = GaugeMetricFamily(f"fedloom_{name}", about, labels=labels)
            for key, value in values.items():
                if value is not None:
                    family.add_metric(key, value)
            return family

        status = read_status(self._server)
        sites = {(site["site"],): site for site in status["sites"]}
        seconds = status["round_seconds"] or {}
        yield gauge("rounds_done", "rounds done", {(): status["rounds"]})
        yield gauge("rounds_planned", "rounds of the experiment", {(): status["planned"]})
        yield gauge("round_seconds", "duration of the last round", {(): seconds.get("last")})
        yield gauge("epsilon", "epsilon spent by the client that participated most often", {(): status["epsilon"]})
        replies = {
            k: None if s["last_reply"] is None else _parse_time(s["last_reply"]).timestamp() for k, s in sites.items()
        }
        yield gauge("site_last_reply_timestamp_seconds", "last accepted reply of a site", replies, "site")
        for name, about in (("accepted", "accepted"), ("missed", "missed")):
            counts = {key: site[name] for key, site in sites.items()}
            yield gauge(f"site_rounds_{name}", f"rounds that a site {about}", counts, "site")
        steps = {(*key, step): one["count"] for key, site in sites.items() for step, one in site["rejected"].items()}
        yield gauge("site_replies_rejected", "rejected replies of a site, by check", steps, "site", "step")
        losses = {(*key, row["model"]): row.get("loss") for key, site in sites.items() for row in site["scores"]}
        yield gauge("site_loss", "latest loss on a site's test samples", losses, "site", "model")
        disk = {(what,): size for what, size in status["disk"].items()}
        yield gauge("disk_bytes", "size of the server's files and free disk space", disk, "what")


def _run_state(server: Server, log: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    last = next((line for line in reversed(log) if line.get("what") in ("wait", "start", "stop")), None)
    if last is None:
        return {"state": "not started", "reason": ""}
    if last["what"] == "stop":
        detail = f" ({last['detail']})" if last.get("detail") else ""
        return {"state": END_STATES.get(last["reason"], "stopped"), "reason": f"{last['reason']}{detail}"}
    if not is_in_use(server.checkpoints):
        return {
            "state": "killed",
            "reason": "the server ended without a message, as after 'flwr stop'. Start the run again to continue",
        }
    diverges = [f"diverges: {line['reason']}" for line in log if line.get("what") == "diverges"]
    return {"state": "running", "reason": "is waiting for sites" if last["what"] == "wait" else "".join(diverges[-1:])}


def _expiries(server: Server) -> dict[str, str]:
    """Return the expiry time, as ISO 8601, of every certificate that can be read."""
    ends = {}
    for name, path in (("server's certificate", server.certificate), ("authority's certificate", server.ca)):
        with suppress(OSError, ValueError):
            ends[name] = x509.load_pem_x509_certificate(
                check_regular_file(path).read_bytes()
            ).not_valid_after_utc.isoformat()
    return ends


def _planned_rounds(document: Mapping[str, Any]) -> int | None:
    try:
        return int(document["method"][0].get("rounds", document.get("rounds")))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _read_experiment_file(experiment: Path) -> dict[str, Any]:
    """Return an experiment file as a table. The table is empty if the file cannot be read."""
    try:
        return tomllib.loads(check_regular_file(experiment).read_text())
    except (OSError, ValueError, RecursionError):
        return {}


def _disk_usage(server: Server) -> dict[str, int]:
    places = {"checkpoints": server.checkpoints, "database": server.database, "results": server.results}

    def files(path: Path) -> Iterator[Path]:
        # SQLite stores additional files next to a database
        yield from (path, *path.parent.glob(f"{path.name}-*"), *path.rglob("*"))

    sizes = {name: sum(map(_folder_bytes, files(path))) for name, path in places.items()}
    folder = next((path for path in (server.checkpoints, *server.checkpoints.parents) if path.exists()), Path("/"))
    return {**sizes, "audit": _folder_bytes(server.audit), "free": shutil.disk_usage(folder).free}


def _folder_bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _time_since(text: str | None) -> str:
    if text is None:
        return "never"
    seconds = max(0, round((datetime.now(UTC) - _parse_time(text)).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
