"""A whole hierad on this machine for one test: own state folder, own unix socket, the binaries of HIERAD_BIN_DIR.

Everything it starts carries the agent's mark in its environment, so that `survivors` finds every process that any
crash may have left, and a test that leaves one fails.
"""
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BIN = os.environ.get("HIERAD_BIN_DIR") or os.path.join(os.path.dirname(__file__), "../../build/release/bin")
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


def slowness():
    """How many times as long things may take as on a machine with nothing else to do, by what is ready to run and at which
    priority this is: 1 to 8."""
    share = os.getloadavg()[0] / (os.cpu_count() or 1) * 1.25 ** max(0, os.nice(0))
    return min(8.0, max(1.0, share))


def wait_for(condition, what, deadline=60.0):
    """Polls until condition() is true; its value. Fails with `what` (a text or a function) after `deadline` seconds; on a busy
    machine after as much longer as it is slower."""
    begin = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() - begin > deadline * slowness():
            raise AssertionError(f"not within {time.monotonic() - begin:.0f} s: {what() if callable(what) else what}")
        time.sleep(0.02)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def read_text(path):
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def write_npy(path, samples=64, channels=4, length=64, seed=1):
    """Waves with noise, float32 [samples, channels, length]: something a model can learn."""
    rng = random.Random(seed)
    values = []
    for _ in range(samples):
        for _ in range(channels):
            level, slope = rng.gauss(0, 1), rng.gauss(0, 1)
            values += [level + slope * (t / length - 0.5) + rng.gauss(0, 0.1) for t in range(length)]
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({samples}, {channels}, {length}), }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    with open(path, "wb") as out:
        out.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
        out.write(struct.pack(f"<{len(values)}f", *values))


def write_ts(path, samples=16, channels=4, length=64, seed=1):
    rng = random.Random(seed)
    lines = ["@problemName made", "@timeStamps false", "@missing false", "@univariate false",
             f"@dimensions {channels}", "@equalLength true", f"@seriesLength {length}", "@classLabel true a b", "@data"]
    for i in range(samples):
        rows = [",".join(f"{rng.gauss(0, 1):.4f}" for _ in range(length)) for _ in range(channels)]
        lines.append(":".join(rows) + (":a" if i % 2 else ":b"))
    with open(path, "w") as out:
        out.write("\n".join(lines) + "\n")


# The smallest model that has everything: two stages, a query pool, a decoder.
JOB = """\
name: {name}
seed: {seed}
model:
  input_size: [64]
  in_chans: 4
  embed_dim: 16
  num_heads: 1
  stages: [1, 1]
  q_pool: 1
  q_stride: [2]
  mask_unit_size: [2]
  mask_unit_attn: [true, false]
  patch_kernel: [4]
  patch_stride: [4]
  patch_padding: [0]
  decoder_embed_dim: 16
  decoder_depth: 1
  decoder_num_heads: 2
  mask_ratio: 0.5
  norm_target: false
data:
  source: {source}{path}
optimizer:
  lr: 3.0e-3
schedule:
  steps: {steps}
step:
  batch_per_rank: 8
resources:
  ranks: {ranks}
  device: cpu
  threads_per_rank: 1
checkpoint:
  every_steps: {every}
  keep_last: {keep}
retry:
  max_attempts: {attempts}
  backoff_s: {backoff}
"""


def bin_with_worker(worker):
    """A folder of our programs with another hiera-worker. hierad starts the agent that is beside it, and that the worker
    beside it; a program finds what is beside it by /proc/self/exe, which sees through symbolic links, not hard ones."""
    folder = tempfile.mkdtemp(prefix="hierad-bin-", dir="/tmp")
    os.chmod(folder, 0o755)   # ranks may be of another account
    for name in ("hierad", "hierad-agent", "hierctl"):
        source, target = os.path.realpath(os.path.join(BIN, name)), os.path.join(folder, name)
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
    os.symlink(os.path.realpath(worker), os.path.join(folder, "hiera-worker"))
    return folder


TEST_WORKER = os.path.join(BIN, "tests", "hiera-test-worker")   # the same worker with a step of a few numbers, without torch


class Cluster:
    def __init__(self, worker=None, environment=None, settings="", mode=0o700, **flags):
        """settings: a text for --config, in which FOLDER stands for the cluster's own folder, of this mode."""
        self.bin = bin_with_worker(worker) if worker else BIN
        # Short: a unix socket's path has at most 107 bytes.
        self.folder = tempfile.mkdtemp(prefix="hierad-", dir="/tmp")
        os.chmod(self.folder, mode)
        self.environment = {"HIERAD_FAILPOINTS": os.path.join(self.folder, "points"), **(environment or {})}
        self.points = self.environment["HIERAD_FAILPOINTS"]   # of hierad, and of the agents and workers under it
        os.makedirs(self.points, exist_ok=True)
        self.state = os.path.join(self.folder, "state")
        self.server = "unix:" + os.path.join(self.folder, "h.sock")
        self.log = os.path.join(self.folder, "hierad.log")
        self.flags = {"cpu-slots": 2, "stop-grace": 3, "node-lost-after": 5, "metrics": "off",
                      "agent-lifetime": "service", "disk-reserve": 0.05, **({"root-ranks": "allow"} if os.geteuid() == 0 else {}),
                      **{k.replace("_", "-"): v for k, v in flags.items()}}
        if settings:
            self.flags["config"] = os.path.join(self.folder, "hierad.yaml")
            with open(self.flags["config"], "w") as out:
                out.write(settings.replace("FOLDER", self.folder))
        self.hierad = None
        self.data = os.path.join(self.folder, "train.npy")
        write_npy(self.data)
        self.start()

    # Processes.

    def command(self):
        words = [os.path.join(self.bin, "hierad"), "--state", self.state, "--listen", self.server]
        for flag, value in self.flags.items():
            words += [f"--{flag}", str(value)]
        return words

    def start(self):
        with open(self.log, "a") as log:
            self.hierad = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                           env={**os.environ, **self.environment})
        wait_for(lambda: self.ctl("version").returncode == 0 or self.hierad.poll() is not None,
                 lambda: "hierad answers\n" + read_text(self.log), 90)
        if self.hierad.poll() is not None:
            raise AssertionError("hierad ended at its start:\n" + read_text(self.log))

    def kill_hierad(self):
        self.hierad.send_signal(signal.SIGKILL)
        self.hierad.wait()

    def stop_hierad(self):
        self.hierad.send_signal(signal.SIGTERM)
        return self.hierad.wait(60)

    def agent_pid(self):
        """The living local agent's; 0: none."""
        text = read_text(os.path.join(self.state, "agent", "agent.lock")).strip()
        return int(text) if text.isdigit() and alive(int(text)) else 0

    def marked(self):
        """Living processes of any rank of this cluster: {pid: (job, attempt, rank, command line)}."""
        identity = read_text(os.path.join(self.state, "agent", "agent.id")).strip()
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or not identity:
                continue
            try:
                with open(f"/proc/{entry}/environ", "rb") as environ:
                    variables = environ.read().split(b"\0")
                with open(f"/proc/{entry}/cmdline", "rb") as cmdline:
                    words = cmdline.read().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            for variable in variables:
                match = re.fullmatch(rb"HIERAD_ATTEMPT=(\d+)\.(\d+)\.(\d+)\.(\w+)", variable)
                if match and match[4].decode() == identity and alive(int(entry)):
                    found[int(entry)] = (int(match[1]), int(match[2]), int(match[3]), words)
        return found

    def close(self):
        """Ends everything by the hardest means; what still lives then is a fault of the product."""
        if self.hierad.poll() is None:
            self.kill_hierad()
        agent = self.agent_pid()
        if agent:
            os.kill(agent, signal.SIGKILL)
        try:
            wait_for(lambda: not self.marked(), lambda: f"no rank outlives its agent: {self.marked()}", 20)
        finally:
            for pid in self.marked():
                os.kill(pid, signal.SIGKILL)
            if not os.environ.get("HIERAD_KEEP"):
                shutil.rmtree(self.folder, ignore_errors=True)
                if self.bin != BIN:
                    shutil.rmtree(self.bin, ignore_errors=True)

    # hierctl.

    def ctl(self, *words, timeout=120, **popen):
        env = {**os.environ, "HIERAD_SERVER": self.server}
        return subprocess.run([os.path.join(BIN, "hierctl"), *map(str, words)], capture_output=True, text=True, env=env, cwd="/",
                              timeout=timeout * slowness(), stdin=subprocess.DEVNULL, **popen)

    def json(self, *words):
        result = self.ctl(*words, "-o", "json")
        if result.returncode not in (0, 100, 101, 103):
            raise AssertionError(f"hierctl {words}: exit code {result.returncode}: {result.stderr}")
        return json.loads(result.stdout)

    def job_file(self, name="tiny", steps=40, every=10, ranks=2, seed=1, keep=2, attempts=5, backoff=0.1, source="npy",
                 data=None, extra=""):
        path = os.path.join(self.folder, f"{name}.yaml")
        with open(path, "w") as out:
            out.write(JOB.format(name=name, steps=steps, every=every, ranks=ranks, seed=seed, keep=keep,
                                 attempts=attempts, backoff=backoff, source=source,
                                 path="" if source == "synthetic" else f"\n  path: {data or self.data}") + extra)
        return path

    def submit(self, *words, **job):
        """Queues a job; its id."""
        reply = self.json("submit", self.job_file(**job), *words)
        return int(reply["job"]["id"])

    def job(self, job_id):
        return self.json("describe", job_id)["job"]

    def wait_state(self, job_id, states, deadline=90):
        states = (states,) if isinstance(states, str) else states
        last = {}

        def there():
            last.update(self.job(job_id))
            if last["state"] not in states and last["state"] in TERMINAL:
                raise AssertionError(f"job {job_id} is {last['state']}, not {states}: {last.get('message')}\n" + self.logs(job_id))
            return last if last["state"] in states else None

        return wait_for(there, lambda: f"job {job_id} is {states}; it is {last}\n{self.logs(job_id)}", deadline)

    def logs(self, job_id):
        """Everything that helps to see why."""
        folder = self.run_folder(job_id)
        parts = ["--- hierad.log", read_text(self.log)[-3000:],
                 "--- agent.log", read_text(os.path.join(self.state, "agent", "agent.log"))[-3000:]]
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            if name.endswith(".log"):
                parts += [f"--- {name}", read_text(os.path.join(folder, name))[-3000:]]
        return "\n".join(parts)

    def run_folder(self, job_id):
        return self.job(job_id)["run_folder"]

    def metrics(self, folder):
        """The lines of metrics.jsonl so far (the last may still be in the writing)."""
        lines = []
        for line in read_text(os.path.join(folder, "metrics.jsonl")).splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                pass
        return lines

    def step(self, folder):
        lines = self.metrics(folder)
        return int(lines[-1]["step"]) if lines else 0

    def wait_step(self, folder, step, deadline=60):
        wait_for(lambda: self.step(folder) >= step,
                 lambda: f"step {step}, in {folder}, at {self.step(folder)}\n{read_text(os.path.join(folder, 'rank-0.log'))}", deadline)

    def wait_checkpoint(self, job_id, step, deadline=60):
        """A checkpoint of that step or a later one is durable, which may be well after its step: it is written beside the steps."""
        wait_for(lambda: any(int(point["step"]) >= step for point in self.json("checkpoints", job_id)["checkpoints"]), f"the checkpoint of step {step}", deadline)

    def arm(self, point, text):
        """base/failpoint.h says what the text may be."""
        path = os.path.join(self.points, point)
        with open(path + ".new", "w") as out:
            out.write(text)
        os.rename(path + ".new", path)

    def disarm(self, point):
        os.remove(os.path.join(self.points, point))

    def pace(self, milliseconds):
        """From now on a step takes that much longer, so that what a test does while a job runs comes before its end on any machine;
        0: as long as it takes."""
        self.arm("worker.pace", f"value 0 {milliseconds}") if milliseconds else self.disarm("worker.pace")

    def rank_pids(self, job_id):
        return {int(rank.get("rank", 0)): int(rank.get("pid", 0)) for rank in self.job(job_id).get("ranks", [])}


class ClusterTest(unittest.TestCase):
    """One cluster per test."""
    flags = {}   # hierad's, and Cluster's own arguments

    def setUp(self):
        self.cluster = Cluster(**self.flags)
        self.addCleanup(self.cluster.close)

    def assert_one_sentence(self, text):
        """What a person reads: no stack trace, no second paragraph, no raw status."""
        lines = [line for line in text.strip().splitlines() if line.strip()]
        self.assertEqual(len(lines), 1, text)
        for bad in ("terminate called", "what():", "INTERNAL:", "absl::", "Traceback"):
            self.assertNotIn(bad, text)
        self.assertNotRegex(text, r"\b0x[0-9a-f]{6}")   # an address; folders have random names

    def assert_steps_once(self, folder, steps):
        self.assertEqual([int(line["step"]) for line in self.cluster.metrics(folder)], list(range(1, steps + 1)))


def main(worker="hiera-worker"):
    for name in ("hierad", "hierad-agent", "hierctl", worker):
        if not os.access(os.path.join(BIN, name), os.X_OK):
            sys.exit(f"{os.path.join(BIN, name)} is missing; build it, or set HIERAD_BIN_DIR")
    unittest.main(verbosity=2)
