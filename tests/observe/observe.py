"""A hierad with a node of fake ranks, and a real Prometheus that scrapes it: what dashboards, alerts and pages are tried on."""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(os.environ.get("HIERAD_SOURCE_DIR") or Path(__file__).resolve().parents[2])
sys.path.insert(0, str(ROOT / "tests/e2e"))
import cluster  # noqa: E402


def need(program, package):
    path = shutil.which(program)
    if not path:
        raise AssertionError(f"{program} is not installed; it comes with the Debian package {package}, which tools/setup installs")
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read()


class FakeCluster(cluster.Cluster):
    """hierad without an agent of its own, and a node of fake ranks on H200s that are not there."""

    def __init__(self, slots=10, rate=20, web="off", **flags):
        self.metrics_port = free_port()
        super().__init__(agent="none", web=web, metrics=f"127.0.0.1:{self.metrics_port}", **flags)
        self.nodes = {}
        self.add_node("gpu-1", slots, rate)

    def add_node(self, name, slots, rate, kind="cuda", faulty=0):
        log = open(os.path.join(self.folder, f"{name}.log"), "w")
        self.nodes[name] = subprocess.Popen(
            [os.path.join(cluster.BIN, "fake-cluster"), "--server", self.server, "--node", name, "--slots", str(slots),
             "--rate", str(rate), "--kind", kind, "--faulty", str(faulty)], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        log.close()
        cluster.wait_for(lambda: any(n["name"] == name and n["connected"] for n in self.json("nodes")["nodes"]),
                         f"node {name} is connected", 30)

    def remove_node(self, name):
        process = self.nodes.pop(name)
        process.kill()
        process.wait()

    def submit_fake(self, name, ranks=1, steps=1000000, every=100, source="npy", **settings):
        words = [w for key, value in settings.items() for w in ("--set", f"{key.replace('__', '.')}={value}")]
        return self.submit("--set", "resources.device=cuda", *words, name=name, ranks=ranks, steps=steps, every=every, source=source)

    def close(self):
        for name in list(self.nodes):
            self.remove_node(name)
        super().close()


class Prometheus:
    """On the rules of deploy/prometheus, but scraping and judging every second, and without waiting before an alert."""

    def __init__(self, folder, target):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        for name in ("rules.yaml", "alerts.yaml"):
            text = (ROOT / "deploy/prometheus" / name).read_text()
            Path(folder, name).write_text(re.sub(r"\n( +)for: \w+\n", "\n", text))
        config = (ROOT / "deploy/prometheus/prometheus.yaml").read_text()
        config = config.replace("_interval: 15s", "_interval: 1s").replace("127.0.0.1:9464", target)
        Path(folder, "prometheus.yaml").write_text(config)
        self.log = Path(folder, "prometheus.log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [need("prometheus", "prometheus"), f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/prometheus",
                 f"--web.listen-address=127.0.0.1:{self.port}", "--query.lookback-delta=15s"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        cluster.wait_for(self.ready, lambda: f"Prometheus is ready\n{self.log.read_text()[-2000:]}", 60)

    def ready(self):
        if self.process.poll() is not None:
            raise AssertionError("Prometheus ended:\n" + self.log.read_text()[-2000:])
        try:
            return get(self.url + "/-/ready")
        except OSError:
            return False

    def api(self, path, **parameters):
        try:
            answer = json.loads(get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        return answer["data"]

    def query(self, expression):
        return self.api("query", query=expression)["result"]

    def query_range(self, expression, start, end, step=1):
        return self.api("query_range", query=expression, start=start, end=end, step=step)["result"]

    def value(self, expression):
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def firing(self):
        return {(a["labels"]["alertname"], a["labels"].get("job_id")) for a in self.api("alerts")["alerts"] if a["state"] == "firing"}

    def close(self):
        self.process.terminate()
        self.process.wait(60)


def panels(board, job_id):
    """(title, expression) of every query of a dashboard, its variables filled in."""
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$job", str(job_id)).replace("$__rate_interval", "1m")
            yield panel["title"], target["legendFormat"], expression
