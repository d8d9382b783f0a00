"""Client apps that train, answer and score with a method of fedloom, on the user's model and samples."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedloom.data.input_spec import InputSpec
from fedloom.engine.job import Job
from fedloom.engine.replay import Replay
from fedloom.engine.setup import make_job
from fedloom.errors import ConfigError, FedloomError, Refused, WireError, describe_cause, escape_line
from fedloom.local.oracles.precision import isolate_torch_settings, make_repeatable
from fedloom.local.rows import name_tensors, to_device
from fedloom.rundir import as_path
from fedloom.storage import make_folder
from fedloom.storage.checkpoint import save_tensors
from fedloom.trained.model import open_tensors, running_statistics
from fedloom_sites.deploy.noise import deployed_setting
from fedloom_sites.deploy.protocol.envelope import ARRAYS_RECORD, pack_arrays
from fedloom_sites.deploy.site.local_data import move_client_to_seat, part_sizes
from fedloom_sites.flower.analyses import ANALYZE_ACTION, answer_step
from fedloom_sites.flower.documents import read_setting
from fedloom_sites.flower.local import Local, NodeProblem
from fedloom_sites.flower.records import (
    VALUES_RECORD,
    check_alike,
    describe_shapes,
    head_of,
    make_array_record,
    read_messages,
    read_tensors,
    write_values,
)
from fedloom_sites.flwr_adapter import ErrorCode, get_mods
from fedloom_sites.transport.node import Node

DEFAULT_ACTION = "default"
"""Flower's name for a function that has no name."""
STATE_PREFIX, MODEL_KEY = "fedloom.state.", "fedloom.model"
"""Names of a node's records in Flower's ``context.state``: its states by round, and its latest model."""
SECURE_MODS = {"secagg_mod", "secaggplus_mod"}
"""Mods that belong to Flower's secure aggregation."""
MAX_STORED_RUNS = 64
"""Maximum number of runs of a node that a process keeps in memory."""
LocalFunction = Callable[[Context], Local]
"""Function that returns a node's model and samples. It is called once in each run and process."""


def client(app: ClientApp) -> Callable[[LocalFunction], LocalFunction]:
    """Return a decorator that makes an app's nodes train, answer and score for `fedloom_sites.flower.Strategy`.

    Args:
        app: Flower's app for the nodes. The decorator sets the app's functions for training and evaluation.

    Returns:
        A decorator for the function that returns a node's `Local` from Flower's context.

    Example:
        >>> app = ClientApp()
        >>> @client(app)
        ... def local(context):
        ...     return Local(Net(), trainset, loss=nn.CrossEntropyLoss(), testset=testset)

    Raises:
        ConfigError: the argument is not an app, or the app has, or is later given, a different function for one of
            these messages.
    """
    if not isinstance(app, ClientApp):
        raise ConfigError(f"client needs the app, as in @client(app) after app = ClientApp(), got {app!r:.80}")

    def decorate(function: LocalFunction) -> LocalFunction:
        if not callable(function):
            raise ConfigError(
                f"@client(app) must decorate a function of Flower's context, got {type(function).__name__}"
            )
        node = _Node(function, app)
        answers = {
            "query": {DEFAULT_ACTION: node.hello, "ask": node.ask, ANALYZE_ACTION: node.analyze},
            "train": {DEFAULT_ACTION: node.train},
        }
        for kind, acts in {**answers, "evaluate": {DEFAULT_ACTION: node.evaluate}}.items():
            for action, act in acts.items():
                try:
                    getattr(app, kind)(action)(node.make_handler(act))
                except ValueError as error:
                    raise _already_registered(kind) from error
            setattr(app, kind, _protect_functions(kind, getattr(app, kind), acts))
        return function

    return decorate


def _protect_functions(kind: str, register: Callable[..., Any], actions: Collection[str]) -> Callable[..., Any]:
    """Wrap an app's own decorator for functions, so that it cannot replace fedloom's functions."""

    @wraps(register)
    def keeping(action: str = DEFAULT_ACTION, **options: Any) -> Any:
        if action in actions:
            raise _already_registered(kind)
        return register(action, **options)

    return keeping


def _already_registered(kind: str) -> ConfigError:
    return ConfigError(
        f"@client(app): the app already has a function under @app.{kind}(), or a client_fn, for "
        f"messages that fedloom answers. Remove it, or give it a name, as in @app.{kind}('mine')"
    )


def personal_model(context: Context) -> dict[str, Tensor]:
    """Return the node's last evaluated model as a state dict: the personal model if any, otherwise the global one.

    The statistics of normalization layers are computed from the node's training samples.

    Args:
        context: Flower's context for a node of the app.

    Raises:
        ConfigError: no model is stored yet.
    """
    state = read_tensors(context.state, MODEL_KEY)
    if not state:
        raise ConfigError("this node has no model yet. It receives one when the strategy evaluates")
    return {name: values.clone() for name, values in state.items()}


@dataclass
class _NodeRun:
    """Values that a node computes once for each run."""

    local: Local
    problem: NodeProblem
    shapes: str
    node: Node | None = None
    key: tuple[Any, ...] = ()


class _Node:
    """A node's answers to messages from the server."""

    def __init__(self, function: LocalFunction, app: ClientApp) -> None:
        self._function, self._app, self._runs = function, app, dict[tuple[int, int], _NodeRun]()

    def make_handler(self, act: Callable[[dict[str, Any], Message, Context], RecordDict]) -> Callable[..., Message]:
        """Return a handler for Flower that reports a failure as a readable message, at the node and at the server."""

        def handler(message: Message, context: Context) -> Message:
            if VALUES_RECORD not in message.content:
                reason = (
                    "this node runs fedloom_sites.flower, but the message comes from another "
                    "strategy. Use fedloom_sites.flower.Strategy"
                )
                return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
            try:
                values = head_of(message.content)
                self._run(context)  # calls the app's function with the app's PyTorch settings
                with isolate_torch_settings():
                    return Message(act(values, message, context), reply_to=message)
            except Exception as error:
                sentence = str(error) if isinstance(error, FedloomError) else describe_cause(error)
                sys.stderr.write(f"fedloom: node {context.node_id}: {escape_line(sentence)}\n")
                reply = write_values(error=sentence, lost=isinstance(error, _LostState))
                return Message(RecordDict({VALUES_RECORD: reply}), reply_to=message)

        return handler

    def hello(self, values: dict[str, Any], message: Message, context: Context) -> RecordDict:
        """Return the schema of the node's samples, the module's signature, and the number of samples per part."""
        mods = [getattr(mod, "__name__", "") for mod in get_mods(self._app)]
        for name in SECURE_MODS & {*mods}:
            raise Refused(
                f"{name} needs the server workflow of Flower's secure aggregation, but strategies of Flower's message "
                "API have no such workflow. Omit it, and use fedloom deploy for secure sums"
            )
        run = self._run(context)
        check_alike(run.shapes, values["parameters"])
        fed, signature = run.problem.fed, run.problem.signature.text()
        # the range of the samples stays at the node
        schema = InputSpec.create(fed.data).with_(span=None).model_dump_json()
        return RecordDict({VALUES_RECORD: write_values(schema=schema, signature=signature, sizes=part_sizes(fed, 0))})

    def ask(self, values: dict[str, Any], message: Message, context: Context) -> RecordDict:
        """Return the node's answer about the global model, which a sampler has requested."""
        node, job = self._node(values, message, context)
        answer, work = node.answer(job, read_messages(message.content)[0], values["round"])
        return RecordDict({VALUES_RECORD: write_values(work=work), ARRAYS_RECORD: pack_arrays([answer])})

    def analyze(self, values: dict[str, Any], message: Message, context: Context) -> RecordDict:
        """Return the answer to a step of an analysis by sums."""
        run = self._run(context)
        return answer_step(values, run.local.analyses, run.problem.fed, context.state)

    def train(self, values: dict[str, Any], message: Message, context: Context) -> RecordDict:
        """Train from the state that the server names as accepted, and return the upload.

        The new state is pending until the next message.
        """
        (node, job), t = self._node(values, message, context), values["round"]
        try:
            down = to_device(node.forms.read_down(read_messages(message.content)[0]), job.oracle.device)
        except WireError as error:
            raise Refused(f"the server's message does not fit this node's method: {error}") from error
        with make_repeatable(job.oracle.device, job.setting.engine.precision):
            output = node.train(job, down, t)
        upload = self._run(context).local.clip_upload(job, output.upload, down)
        context.state[f"{STATE_PREFIX}{t}"] = make_array_record(
            {name: rows[0] for name, rows in name_tensors(output.state).items()}
        )
        self._save_states(context, values.get("run", ""))
        return RecordDict(
            {
                VALUES_RECORD: write_values(round=t, client=values["client"], work=output.work[0].tolist()),
                ARRAYS_RECORD: pack_arrays([node.forms.write_up(output._replace(upload=upload))]),
                "metrics": MetricRecord({"num-examples": part_sizes(job.fed, values["client"])[0]}),
            }
        )

    def evaluate(self, values: dict[str, Any], message: Message, context: Context) -> RecordDict:
        """Return the models' scores on the node's samples, and store the latest model."""
        (node, job), t = self._node(values, message, context), values["round"]
        models = node.read_models(job, read_messages(message.content), t, common=values["global"])
        scores = node.score_hybrid(job, node.score(job, models, t))
        if models.row is not None:
            local = self._run(context).local
            folder, model_state = local.folder, _state_dict(local.model, job, models.row, node.ids)
            context.state[MODEL_KEY] = make_array_record(model_state)
            if folder is not None:
                about = {"kind": models.kind, "round": t, "run": context.run_id}
                path = Path(folder) / f"{context.node_id}.safetensors"
                save_tensors(path, model_state, {name: str(value) for name, value in about.items()})
        metrics: dict[str, int | float | list[int] | list[float]] = {
            f"{kind}/{part}/{name}": float(value[0])
            for (kind, part), figures in scores.items()
            if part
            for name, value in figures.items()
            if bool(value[0].isfinite())
        }
        sizes = part_sizes(job.fed, values["client"])
        metrics["num-examples"] = sizes[2] or sizes[0]
        return RecordDict(
            {VALUES_RECORD: write_values(round=t, client=values["client"]), "metrics": MetricRecord(metrics)}
        )

    def _run(self, context: Context) -> _NodeRun:
        """Return the node's model and samples, which are read once in each run."""
        key = (context.run_id, context.node_id)
        if key not in self._runs:
            local = self._function(context)
            if not isinstance(local, Local):
                raise ConfigError(
                    f"the function decorated with @client must return a Local, got {type(local).__name__}"
                )
            if local.folder is not None:
                make_folder(as_path(local.folder, "folder", ", or None for no file"))
            while len(self._runs) >= MAX_STORED_RUNS:
                self._runs.pop(next(iter(self._runs)))
            with isolate_torch_settings():
                problem = local.read()
                self._runs[key] = _NodeRun(local, problem, describe_shapes(local.model))
            for note in problem.fed.remarks:
                sys.stderr.write(f"fedloom: node {context.node_id}: {note}\n")
        return self._runs[key]

    def _node(self, values: dict[str, Any], message: Message, context: Context) -> tuple[Node, Job]:
        """Return the run at this node, and its job, with the node's share and the state that the server accepted."""
        run, seat = self._run(context), values["client"]
        start = read_tensors(message.content, "start")
        check_alike(run.shapes, values["parameters"])
        key = (seat, values["document"], *values["sizes"])
        if start or run.key != key:
            model, objective = run.problem.model, run.problem.objective
            setting = read_setting(values["document"], model, values["rounds"], task=objective)
            setting = setting.with_(
                engine=setting.engine.with_(device=str(run.local.device), workers=1, clients_per_batch=1)
            )
            setting = run.local.add_noise_floor(setting)
            fed, initial = (
                move_client_to_seat(run.problem.fed, 0, seat, torch.tensor(values["sizes"])),
                start.get("start"),
            )
            replay = Replay() if initial is None else Replay(initial=initial)
            job, server = make_job(setting, fed, replay=replay)
            run.node, run.key = Node(replace(job, setting=deployed_setting(job.setting)), server, seat, dense=True), key
        node = run.node
        assert node is not None
        alpha = torch.tensor(values["weights"], dtype=torch.float64)[:, None].to(node.job.alpha)
        job = replace(node.job, alpha=alpha)
        node.load_state(job, self._accepted_state(job, context, values["accepted"], values.get("run", "")))
        return node, job

    def _save_states(self, context: Context, run: str) -> None:
        """Write the node's states to its folder, provided that the run can be resumed."""
        folder = self._run(context).local.folder
        if not run or folder is None:
            return
        rounds = [name.removeprefix(STATE_PREFIX) for name in context.state if name.startswith(STATE_PREFIX)]
        rows = {
            f"{t}/{name}": row
            for t in rounds
            for name, row in read_tensors(context.state, f"{STATE_PREFIX}{t}").items()
        }
        save_tensors(_rows_file(folder, context), rows, {"run": run, "rounds": " ".join(rounds)})

    def _restore_state(self, context: Context, run: str, accepted: int) -> None:
        """Read the state of a round of a resumed run from the node's folder, if it is stored there."""
        folder = self._run(context).local.folder
        if not run or folder is None or not _rows_file(folder, context).exists():
            return
        with open_tensors(_rows_file(folder, context)) as file:
            about = file.metadata() or {}
            if about.get("run") == run and str(accepted) in about.get("rounds", "").split():
                names = [name for name in file.keys() if name.startswith(f"{accepted}/")]  # noqa: SIM118  # no dict
                rows = {name.partition("/")[2]: file.get_tensor(name) for name in names}
                context.state[f"{STATE_PREFIX}{accepted}"] = make_array_record(rows)

    def _accepted_state(self, job: Job, context: Context, accepted: int, run: str) -> dict[str, Tensor] | None:
        """Return the accepted state, and delete all other states.

        Raises:
            _LostState: the node does not have this state, and its method needs one.
        """
        newest = f"{STATE_PREFIX}{accepted}"
        for name in [name for name in context.state if name.startswith(STATE_PREFIX) and name != newest]:
            del context.state[name]
        if accepted and newest not in context.state:
            self._restore_state(context, run, accepted)
        if not accepted or not any(store.template for store in job.state_stores.values()):
            return None
        if newest not in context.state:
            raise _LostState(f"the state of round {accepted} is no longer on this node, so the node starts again")
        return read_tensors(context.state, newest)


class _LostState(FedloomError):
    """Error: the node has lost the state that the server expects."""


def _rows_file(folder: Path | str, context: Context) -> Path:
    return Path(folder) / f"{context.node_id}.rows.safetensors"


def _state_dict(model: nn.Module, job: Job, row: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Return the module's state dict with the given parameters ``[d]`` and with statistics from a client's samples."""
    job.oracle.set_statistics(row, ids)
    module = copy.deepcopy(model).to(device="cpu", dtype=job.oracle.dtype)
    job.oracle.layout.load(module, row.cpu())
    for target, value in zip(running_statistics(module), running_statistics(job.oracle.module), strict=True):
        target.copy_(value)
    return dict(module.state_dict())
