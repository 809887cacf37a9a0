"""All that promptfed uses of Flower, in one place: what a new version of Flower may break.

The documented API is imported at once. Internals are imported when a module first asks for their names: the SuperLink's
take seconds, which a client must not wait for.
"""

import os
import secrets
import sys

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

__getattr__ = lazy.names(
    __name__,
    {
        "run_simulation": "flwr.simulation",  # documented, and slow to import
        "ErrorCode": "flwr.common.constant",
        "log": "flwr.common.logger",
        # A node's tasks.
        "AcquireTaskRequest": "flwr.proto.runtime_pb2",
        "HeartbeatSender": "flwr.supercore.heartbeat",
        "RuntimeHttpClient": "flwr.supercore.runtime",
        "RuntimeTokenHttpInterceptor": "flwr.supercore.interceptors",
        "RuntimeVersionHttpInterceptor": "flwr.supercore.interceptors",
        "SendTaskHeartbeatRequest": "flwr.proto.runtime_pb2",
        "SubStatus": "flwr.common.constant",
        "SuperExecAuthHttpInterceptor": "flwr.supercore.interceptors",
        "TaskType": "flwr.supercore.constant",
        "flower_supernode": "flwr.supernode.cli",
        "pull_task_input": "flwr.supernode.runtime.run_clientapp",
        "push_message": "flwr.supernode.runtime.run_clientapp",
        "push_task_output": "flwr.supernode.runtime.run_clientapp",
        # The SuperLink, and what is asked of it.
        "ControlHttpClient": "flwr.supercore.control",
        "Fab": "flwr.supercore.fab",
        "FlowerError": "flwr.supercore.error",
        "ISOLATION_MODE_SUBPROCESS": "flwr.common.constant",
        "ListNodesRequest": "flwr.proto.control_pb2",
        "ListRunsRequest": "flwr.proto.control_pb2",
        "NodeStatus": "flwr.supercore.constant",
        "RegisterNodeRequest": "flwr.proto.control_pb2",
        "StartRunRequest": "flwr.proto.control_pb2",
        "StopRunRequest": "flwr.proto.control_pb2",
        "SuperLinkLifespan": "flwr.superlink.cli.flower_superlink",
        "SuperLinkLifespanConfig": "flwr.superlink.config_loader",
        "TRANSPORT_TYPE_GRPC_RERE": "flwr.common.constant",
        "build_fab_from_disk": "flwr.cli.build",
        "create_app": "flwr.superlink.main",
        "fab_to_proto": "flwr.common.serde",
        "get_uvicorn_log_config": "flwr.supercore.http_logging",
        "load_control_authn_plugin": "flwr.superlink.config_loader",
        "public_key_to_bytes": "flwr.supercore.primitives.asymmetric",
        "user_config_to_proto": "flwr.common.serde",
    },
)

__all__ = [
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ConfigRecord",
    "Context",
    "Grid",
    "Message",
    "RecordDict",
    "ServerApp",
]
