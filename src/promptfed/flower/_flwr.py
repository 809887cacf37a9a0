"""All that promptfed uses of Flower, in one place: what a new version of Flower may break.

The documented API is imported at once. Internals are imported when a module first asks for their names: the SuperLink's
take seconds, which a client must not wait for.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

from ..cli import lazy

# Flower and Ray read these as they are imported. Nothing is to be sent to or fetched from anywhere but the federation.
_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's processes are where the work is done
}
if "ray" not in sys.modules:  # otherwise it has read them already, and would be refused by the processes it starts
    _SETTINGS |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

_INTERNALS = {
    "google.protobuf.message": "DecodeError",
    "flwr.simulation": "run_simulation",  # documented, and slow to import
    "flwr.cli.build": "build_fab_from_disk",
    "flwr.common.constant": (
        "ErrorCode SubStatus ISOLATION_MODE_SUBPROCESS SUPERLINK_NODE_ID TIMESTAMP_HEADER TRANSPORT_TYPE_GRPC_RERE "
        "SYSTEM_TIME_TOLERANCE TIMESTAMP_TOLERANCE"
    ),
    "flwr.common.logger": "log",
    "flwr.common.serde": "fab_to_proto user_config_to_proto",
    "flwr.proto.control_pb2": "ListNodesRequest ListRunsRequest RegisterNodeRequest StartRunRequest StopRunRequest",
    "flwr.proto.fleet_pb2": "PushMessagesRequest",
    "flwr.proto.run_pb2": "Run",
    "flwr.proto.runtime_pb2": "AcquireTaskRequest SendTaskHeartbeatRequest",
    "flwr.supercore.cli": "flower_superexec",
    "flwr.supercore.constant": "FLEET_HTTP_PUBLIC_KEY_HEADER FLEET_HTTP_SIGNATURE_HEADER NodeStatus TaskType",
    "flwr.supercore.control": "ControlHttpClient",
    "flwr.supercore.error": "FlowerError",
    "flwr.supercore.fab": "Fab",
    "flwr.supercore.heartbeat": "HeartbeatSender",
    "flwr.supercore.http_logging": "get_uvicorn_log_config",
    "flwr.supercore.interceptors": (
        "RuntimeTokenHttpInterceptor RuntimeVersionHttpInterceptor SuperExecAuthHttpInterceptor"
    ),
    "flwr.supercore.primitives.asymmetric": "bytes_to_public_key public_key_to_bytes verify_signature",
    "flwr.supercore.runtime": "RuntimeHttpClient",
    "flwr.superlink.cli.flower_superlink": "SuperLinkLifespan",
    "flwr.superlink.config_loader": "SuperLinkLifespanConfig load_control_authn_plugin",
    "flwr.superlink.main": "create_app",
    "flwr.supernode.cli": "flower_supernode",
    "flwr.supernode.runtime.run_clientapp": "pull_task_input push_message push_task_output",
}
__getattr__ = lazy.names(__name__, {name: module for module, names in _INTERNALS.items() for name in names.split()})
__all__ = ["Array", "ArrayRecord", "ClientApp", "ConfigRecord", "Context", "Grid", "Message", "RecordDict", "ServerApp"]


def set_heartbeat(seconds: float) -> None:
    """Seconds between signs of life of the SuperNode in this process. A SuperLink takes a node for gone after twice as
    many; Flower's own default is 30."""
    for module in ("flwr.supernode.fleet_http_connection", "flwr.supercore.heartbeat"):
        vars(import_module(module))["HEARTBEAT_DEFAULT_INTERVAL"] = seconds


def hide_tokens() -> None:
    """Has this process's SuperLink start apps through superexec.py."""
    link = vars(import_module("flwr.superlink.cli.flower_superlink"))
    command = link["_get_superexec_command"]
    program = [sys.executable, "-P", "-m", "promptfed.flower.superexec"]
    link["_get_superexec_command"] = lambda **options: [*program, *command(**options)[1:]]


def replace_popen(popen: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Has apps started by another function than subprocess.Popen."""
    executor = vars(import_module("flwr.supercore.superexec.executor.subprocess_executor"))
    executor["subprocess"] = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
