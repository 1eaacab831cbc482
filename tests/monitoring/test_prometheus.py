"""A real Prometheus with the shipped configuration scrapes a real run, and has everything the dashboards show.

Ray's Metrics tab asks it, and a Grafana started by launch/grafana.sh: the installed one, or GRAFANA, or else a program that
answers for its health only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import distill_rl
from tests.helpers.command import DEADLINE_S, running, until
from tests.helpers.ray_nodes import free_port
from tests.helpers.suites import write_suite

pytest.importorskip("aiohttp_cors", reason="Ray's metrics agent is not installed: bash launch/test.sh monitoring")

LAUNCH = Path(distill_rl.__file__).parents[1] / "launch"
PROGRAM = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
DASHBOARD = json.loads((LAUNCH / "monitoring" / "grafana-dashboard.json").read_text())
GRAFANA = os.environ.get("GRAFANA") or shutil.which("grafana-server") or shutil.which("grafana")
HEALTHY = """\
#!{python}
import configparser, http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{{"database": "ok"}}')
ini = configparser.ConfigParser()
ini.read(sys.argv[sys.argv.index("--config") + 1])
http.server.HTTPServer((ini["server"]["http_addr"], int(ini["server"]["http_port"])), Health).serve_forever()
"""
RUN = "monitored"

needs_prometheus = pytest.mark.skipif(not PROGRAM, reason="Prometheus is not installed: set PROMETHEUS to its path")


def expressions() -> list[str]:
    """Every query of every panel, for this run."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [target["expr"].replace("$run", RUN) for target in targets]


@dataclass(frozen=True)
class Monitor:
    """A Prometheus server, and the process of the run that it scrapes."""

    port: int
    grafana_port: int
    root: psutil.Process
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The current samples of an expression: labels and values."""
        arguments = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{arguments}", timeout=10) as response:
            reply = json.load(response)
        assert reply["status"] == "success", reply
        return reply["data"]["result"]

    def is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5).close()
        except OSError:
            return False
        return True


@contextmanager
def started(script: str, run: Path, log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A script of launch/, with the run as its argument."""
    with log.open("wb") as output:
        command = ["bash", LAUNCH / script, run]
        process = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def monitor(material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitor]:
    """A run across tokenizers with every kind of metric, which runs until it is stopped."""
    folder = tmp_path_factory.mktemp("monitored")
    suite = write_suite(folder, count=8)
    settings = [
        f"run.name={RUN}",
        "train.steps=1000000",
        "ray.dashboard=true",
        "aligner.workers=2",
        "evaluate.every=5",
        f"evaluate.suites=[{suite}]",
        f"evaluate.data={suite.parent}",
        "evaluate.suites_every=5",
        "observe.table_every=0",
    ]
    run, port, grafana_port, log = folder / "runs" / RUN, free_port(), free_port(), folder / "log"
    hosts = {"RAY_PROMETHEUS_HOST": f"http://127.0.0.1:{port}", "RAY_GRAFANA_HOST": f"http://127.0.0.1:{grafana_port}"}
    with running("train", "-c", material.config(folder, "foreign"), *settings, log=log, variables=hosts) as process:
        targets = run / "logs" / "prometheus" / "targets.json"
        until(lambda: targets.exists() or process.poll() is not None, "the run starts")
        assert process.poll() is None, log.read_text()
        variables = {"PROMETHEUS": str(PROGRAM), "PROMETHEUS_PORT": str(port), "PROMETHEUS_DATA": str(folder / "data")}
        with started("prometheus.sh", run, folder / "data.log", **variables) as server:
            monitor = Monitor(port, grafana_port, psutil.Process(process.pid), folder)
            until(lambda: monitor.is_ready() or server.poll() is not None, "Prometheus starts")
            assert server.poll() is None, (folder / "data.log").read_text()
            yield monitor
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_S) == 85, log.read_text()


@needs_prometheus
def test_every_dashboard_panel_has_samples(monitor: Monitor) -> None:
    missing = set(expressions())
    assert len(missing) >= 30

    def complete() -> bool:
        assert monitor.root.is_running(), monitor.log
        for expression in list(missing):
            if monitor.query(expression):
                missing.discard(expression)
        return not missing

    try:
        until(complete, "samples for every panel", DEADLINE_S)
    except AssertionError:
        pytest.fail(f"no samples: {sorted(missing)}")


@needs_prometheus
def test_every_actor_and_the_driver_export_metrics(monitor: Monitor) -> None:
    def actors(metric: str) -> set[str]:
        return {sample["metric"]["actor"] for sample in monitor.query(f'ray_distill_rl_{metric}{{run="{RUN}"}}')}

    expected = {
        "step": {"driver"},
        "teacher_forward_seconds": {"big/dp0-tp0"},
        "student_step_seconds": {"student-dp0-tp0"},
        "aligner_seconds": {"aligner-0", "aligner-1"},
        "evaluator_seconds": {"evaluator"},
    }
    try:
        until(lambda: all(actors(metric) == names for metric, names in expected.items()), "samples of every actor")
    except AssertionError:
        assert {metric: actors(metric) for metric in expected} == expected
    for metric in expected:
        (labels, *_) = (sample["metric"] for sample in monitor.query(f"ray_distill_rl_{metric}"))
        assert labels["run"] == RUN
        assert labels["job"] == "distill_rl"
        assert re.fullmatch(r"[0-9.]+", labels["node"])
        assert not [name for name in labels if name.startswith("otel")]


@needs_prometheus
def test_prometheus_values_match_the_run(monitor: Monitor) -> None:
    logged = {
        round(record["train/kl_loss"], 6)
        for line in (monitor.folder / "runs" / RUN / "metrics.jsonl").read_text().splitlines()
        if "train/kl_loss" in (record := json.loads(line))
    }
    (sample,) = monitor.query(f'ray_distill_rl_train_kl_loss{{run="{RUN}"}}')
    assert round(float(sample["value"][1]), 6) in logged
    parts = {sample["metric"]["of"] for sample in monitor.query(f'ray_distill_rl_timing_seconds{{run="{RUN}"}}')}
    assert {"step", "student", "wait_teachers", "wait_aligner", "other", "big/forward", "student/fetch"} <= parts


@needs_prometheus
def test_the_metrics_tab_finds_prometheus_grafana_and_its_dashboards(monitor: Monitor, tmp_path: Path) -> None:
    found = re.search(r"dashboard (http://127\.0\.0\.1:\d+); its token is in (\S+); elsewhere: ssh -N -L", monitor.log)
    assert found, monitor.log

    def ask(what: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {Path(found[2]).read_text().strip()}"}
        with urllib.request.urlopen(urllib.request.Request(f"{found[1]}/api/{what}", headers=headers), timeout=10) as response:  # fmt: skip
            return json.load(response)

    assert ask("prometheus_health")["result"] is True
    run, program = monitor.folder / "runs" / RUN, tmp_path / "grafana-server"
    program.write_text(HEALTHY.format(python=sys.executable))
    program.chmod(0o755)
    variables = {
        "GRAFANA": GRAFANA or str(program),
        "GRAFANA_PORT": str(monitor.grafana_port),
        "RAY_PROMETHEUS_HOST": f"http://127.0.0.1:{monitor.port}",
        "VENV": sys.prefix,
    }
    with started("grafana.sh", run, tmp_path / "grafana.log", **variables) as grafana:

        def is_healthy() -> bool:
            assert grafana.poll() is None, (tmp_path / "grafana.log").read_text()
            try:
                return bool(ask("grafana_health")["result"])
            except OSError:  # the tab's answer is an error until Grafana answers
                return False

        until(is_healthy, "Grafana")
        told = ask("grafana_health")["data"]
    folder = run / "logs" / "grafana"
    provisioned = {json.loads(file.read_text())["uid"] for file in (folder / "dashboards").glob("*.json")}
    assert {told["dashboardUids"]["default"], DASHBOARD["uid"]} == provisioned
    (source,) = yaml.safe_load((folder / "provisioning" / "datasources" / "default.yml").read_text())["datasources"]
    assert (source["name"], source["url"]) == (told["dashboardDatasource"], f"http://127.0.0.1:{monitor.port}")
    # The panels that the tab embeds ask for the samples of this session.
    session = told["sessionName"]
    until(lambda: monitor.query(f'ray_node_cpu_utilization{{SessionName="{session}"}}'), "samples of Ray's own")


@needs_prometheus
def test_prometheus_listens_on_localhost_only(monitor: Monitor) -> None:
    addresses = {
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == monitor.port
    }
    assert addresses == {"127.0.0.1"}


@needs_prometheus
def test_the_configuration_passes_promtool(tmp_path: Path) -> None:
    promtool = Path(str(PROGRAM)).with_name("promtool")
    if not promtool.exists():
        pytest.skip(f"{promtool} is not installed")
    shutil.copy(LAUNCH / "monitoring" / "prometheus.yml", tmp_path)
    (tmp_path / "targets.json").write_text('[{"targets": ["127.0.0.1:1"]}]')
    result = subprocess.run([promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
