"""Imports of Flower's private parts, all in this module, so that nothing else changes if a release moves them.

Every name is imported when it is first used, because Flower starts a process for each message to a site. Flower apps
need only a few of the names, and older releases provide only these.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedloom.lazy import make_getattr

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.app.message import make_message as make_message
    from flwr.clientapp import ClientApp
    from flwr.common.args import add_args_flwr_app_common as add_args_flwr_app_common
    from flwr.common.args import try_obtain_flwr_app_token as try_obtain_flwr_app_token
    from flwr.common.constant import TIMESTAMP_HEADER as TIMESTAMP_HEADER
    from flwr.common.constant import ErrorCode as ErrorCode
    from flwr.proto.fleet_pb2 import ActivateNodeRequest as ActivateNodeRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest as ConfirmMessageReceivedRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest as PullAppMessagesRequest
    from flwr.serverapp import Grid
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER as FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER as FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE as SYSTEM_MESSAGE_TYPE
    from flwr.supercore.date import now as now
    from flwr.supercore.exit import ExitCode as ExitCode
    from flwr.supercore.exit.exit_code import EXIT_CODE_HELP as EXIT_CODE_HELP
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree as iterate_object_tree
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_pull_object_fn_protobuf as make_pull_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError as ObjectPullError
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents as inflate_object_from_contents
    from flwr.supercore.inflatable.inflatable_utils import pull_objects as pull_objects
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes as public_key_to_bytes
    from flwr.supercore.primitives.asymmetric import sign_message as sign_message
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE as PROTOBUF_MEDIA_TYPE
    from flwr.supercore.superexec.run_superexec import run_superexec as run_superexec
    from flwr.supercore.utils import disable_process_dumping as disable_process_dumping
    from flwr.supernode.cli.flower_supernode import flower_supernode as flower_supernode
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor as NodeAuthHttpInterceptor

if not TYPE_CHECKING:
    __getattr__ = make_getattr(__name__)


def encode_records(records: RecordDict) -> bytes:
    """Encode records as bytes, in Flower's message format."""
    from flwr.common.serde import recorddict_to_proto

    message: bytes = recorddict_to_proto(records).SerializeToString()
    return message


def decode_records(message: bytes) -> RecordDict:
    """Decode records encoded by `encode_records`."""
    from flwr.common.serde import recorddict_from_proto
    from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

    return recorddict_from_proto(ProtoRecordDict.FromString(message))


def task_program() -> ModuleType:
    """Import and return the module of the program that runs a site's tasks. `pinned` replaces some of its functions."""
    from flwr.supernode.runtime import run_clientapp

    return run_clientapp


def set_message_id(message: Message, id_: str) -> None:
    """Set Flower's ID of a message."""
    message.metadata.__dict__["_message_id"] = id_


def get_connection(grid: Grid) -> Any:
    """Return a grid's connection to Flower's server, or None if there is none.

    A grid within a single process has no connection.
    """
    return getattr(grid, "_runtime_client", None)


def get_mods(app: ClientApp) -> list[Any]:
    """Return the mods of a client app."""
    return [*getattr(app, "_mods", ())]
