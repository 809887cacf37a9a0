"""What Prometheus is told of a SuperLink and of a node, over HTTP."""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')
pytest.importorskip("prometheus_client", reason='pip install "promptfed[metrics]"')

import httpx
from deployment import deployed, free_port

from promptfed import UserError
from promptfed.flower import metrics
from promptfed.flower.audit import AuditLog


def asked(port):
    found = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    return dict(line.rsplit(" ", 1) for line in found.splitlines() if not line.startswith("#"))


def test_a_node_tells_the_sums_of_its_log(tmp_path):
    log, port = AuditLog(tmp_path), free_port()
    metrics.serve(port, lambda: metrics.of_node(log.entries()))
    assert asked(port)['promptfed_requests_total{kind="left"}'] == "0.0"
    about = {"run": "first", "number": 1, "task": "training in round 1"}
    log.append(kind="asked", **about, bytes=7, by="")
    log.append(kind="left", **about, bytes=11, names=["up/x"], epsilon=0.5, updates={"8.0": 1})
    log.append(kind="refused", **about, why="it has been answered in this run already")
    found = asked(port)
    assert [found[f'promptfed_requests_total{{kind="{kind}"}}'] for kind in ("asked", "refused", "left")] == ["1.0"] * 3
    assert (found["promptfed_received_bytes_total"], found["promptfed_sent_bytes_total"]) == ("7.0", "11.0")
    assert found["promptfed_epsilon"] == "0.5"
    with pytest.raises(UserError, match=rf"--metrics = {port} cannot be listened on: Address already in use"):
        metrics.serve(port, list)


@pytest.mark.slow
def test_a_link_tells_who_is_connected_and_what_was_refused(tmp_path):
    with deployed(tmp_path, clients=1) as made:
        port = free_port()
        made.link("--metrics", port)
        made.admit(0)
        run = made.server / "runs" / "first"
        run.mkdir(parents=True)
        (run / "rounds.jsonl").write_text('{"round": 1, "left_out": [{"client": 0, "why": "no answer"}]}\n')
        found = asked(port)
        assert found['promptfed_node_online{client="0"}'] == "0.0"
        assert found['promptfed_rounds_total{run="first"}'] == found['promptfed_left_out_total{run="first"}'] == "1.0"
        assert found["promptfed_refused_requests_total"] == "0.0"
        trust = str(made.server / "tls" / "ca.pem")
        with httpx.Client(base_url=f"https://127.0.0.1:{made.port}", verify=trust) as client:
            client.post("/v1/fleet/push-object", content=bytes(1 << 17))
        assert asked(port)["promptfed_refused_requests_total"] == "1.0"
