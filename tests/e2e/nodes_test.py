"""Several nodes: agents of their own, one gang across them, and what happens when one loses hierad.

Two nodes are two agents on this machine, each with its own state; over TLS each is in a network namespace of its own where
the system lets this process make them. Elsewhere agents dial hierad through a relay that can be cut.
"""
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

import cluster
from cluster import BIN, read_text, wait_for


ROOT = os.environ.get("HIERAD_SOURCE_DIR") or os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")


class Relay:
    """From a socket of its own to hierad's; cut, nothing passes and nobody is told, as when a cable is pulled."""

    def __init__(self, path, upstream):
        self.path, self.upstream = path, upstream
        self.open = threading.Event()
        self.open.set()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                self.open.wait()
                far.connect(self.upstream)
            except OSError:
                near.close()
                continue
            threading.Thread(target=self.carry, args=(near, far), daemon=True).start()

    def carry(self, near, far):
        with near, far:
            back = threading.Thread(target=self.pump, args=(far, near), daemon=True)
            back.start()
            self.pump(near, far)
            back.join()

    def pump(self, source, target):
        try:
            while data := source.recv(65536):
                self.open.wait()
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self):
        self.open.clear()

    def mend(self):
        self.open.set()


class Node:
    def __init__(self, owner, name, slots=1, prefix=(), server=None, certificates=None, flags=()):
        self.name, self.state = name, os.path.join(owner.folder, "agent-" + name)
        self.log = os.path.join(owner.folder, f"agent-{name}.log")
        self.relay = None
        if not server:
            self.relay = Relay(os.path.join(owner.folder, name + ".sock"), owner.server[len("unix:"):])
            server = "unix:" + self.relay.path
        self.command = [*prefix, os.path.join(BIN, "hierad-agent"), "--server", server, "--node", name,
                        "--state", self.state, "--cpu-slots", str(slots), "--gpus", "none", "--root-ranks", "allow", *map(str, flags)]
        if certificates:
            self.command += ["--certificates", f"{certificates}/agent-{name}", "--worker-certificates", f"{certificates}/worker-all"]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            env={**os.environ, **owner.environment})

    def identity(self):
        return read_text(os.path.join(self.state, "agent.id")).strip()

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


class NodesCluster(cluster.Cluster):
    def __init__(self, prefix=(), **flags):
        self.nodes, self.prefix = {}, prefix
        super().__init__(agent="none", **flags)

    def command(self):
        return [*self.prefix, *super().command()]

    def add(self, name, **options):
        self.nodes[name] = Node(self, name, **options)
        wait_for(lambda: self.node(name).get("connected"), lambda: f"{name} is connected\n" + read_text(self.nodes[name].log), 30)

    def node(self, name):
        return next((node for node in self.json("nodes")["nodes"] if node["name"] == name), {})

    def ranks_of(self, name, job_id, attempt):
        """Living processes of the node's ranks of that attempt."""
        mark = self.nodes[name].identity()
        wanted = f"HIERAD_ATTEMPT={job_id}.{attempt}.".encode()
        found = []
        for entry in os.listdir("/proc"):
            try:
                with open(f"/proc/{entry}/environ", "rb") as environ:
                    variables = environ.read().split(b"\0")
            except OSError:
                continue
            if any(v.startswith(wanted) and v.endswith(mark.encode()) for v in variables) and cluster.alive(int(entry)):
                found.append(int(entry))
        return found

    def close(self):
        for node in self.nodes.values():
            if node.relay:
                node.relay.mend()
            node.kill()
        super().close()

    def logs(self, job_id):
        return super().logs(job_id) + "".join(f"\n--- agent {n.name}\n" + read_text(n.log)[-3000:] for n in self.nodes.values())


def weights(folder, step):
    """Of the exported weights and of all that a resume needs."""
    hashes = {}
    for name in ("exported/model.safetensors", f"checkpoints/step-{step:09d}/model.safetensors",
                 f"checkpoints/step-{step:09d}/optimizer.safetensors"):
        with open(os.path.join(folder, name), "rb") as file:
            hashes[name] = hashlib.sha256(file.read()).hexdigest()
    return hashes


class NodesTest(unittest.TestCase):
    def start(self, **flags):
        c = NodesCluster(**flags)
        self.addCleanup(c.close)
        return c

    def run_gang(self, c, name, nodes, steps=40):
        job_id = c.submit(name=name, steps=steps, ranks=2)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(sorted({rank["node"] for rank in done["ranks"]}), nodes)
        self.assertEqual(int(done["attempt"]), 1)
        return weights(done["run_folder"], steps)

    def alone(self, c, steps=40):
        """The same job as two ranks of one agent."""
        c.add("both", slots=2)
        return self.run_gang(c, "alone", ["both"], steps)

    def test_a_gang_across_two_agents_has_the_bits_of_one(self):
        c = self.start()
        c.add("a")
        c.add("b")
        across = self.run_gang(c, "across", ["a", "b"])
        for name in ("a", "b"):
            c.nodes[name].kill()
        self.assertEqual(across, self.alone(c))
        print("ran: two agents as two processes", file=sys.stderr)

    def namespaces(self):
        """Two network namespaces joined by a pair of interfaces: their command prefixes and addresses; None where the
        system does not let this process make them, which is said."""
        names, ends = [f"hrd{os.getpid()}{x}" for x in "ab"], [f"v{os.getpid()}{x}" for x in "ab"]
        addresses = ["10.213.0.1", "10.213.0.2"]
        steps = [["netns", "add", name] for name in names]
        steps.append(["link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]])
        for name, end, address in zip(names, ends, addresses):
            steps += [["-n", name, "addr", "add", address + "/30", "dev", end], ["-n", name, "link", "set", end, "up"],
                      ["-n", name, "link", "set", "lo", "up"]]
        for name in names:
            self.addCleanup(subprocess.run, ["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        for words in steps:
            try:
                made = subprocess.run(["ip", *words], capture_output=True, text=True)
            except OSError as error:
                made = subprocess.CompletedProcess(words, 1, "", str(error))
            if made.returncode != 0:
                print(f"no network namespaces here ({made.stderr.strip()}): two processes on the loopback", file=sys.stderr)
                return None
        return [("ip", "netns", "exec", name) for name in names], addresses

    def certs(self, *words):
        made = subprocess.run([os.path.join(ROOT, "deploy/certs"), *words], capture_output=True, text=True)
        self.assertEqual(made.returncode, 0, made.stderr)

    def test_a_gang_over_tls(self):
        """hierad and one agent here, the other agent over there; nothing but TCP between them."""
        # Ranks are the submitter's where the agents are root's.
        if os.geteuid() == 0 and subprocess.run(["test", "-x", os.path.realpath(os.path.join(BIN, "hiera-worker"))], user="nobody").returncode != 0:
            self.skipTest(f"nobody cannot enter the build folder {BIN}: ranks of that account cannot be shown here")
        made = self.namespaces()
        prefixes, addresses = made or ([(), ()], ["127.0.0.1", "127.0.0.1"])
        pki = tempfile.mkdtemp(prefix="hierad-pki-", dir="/tmp")
        self.addCleanup(shutil.rmtree, pki)
        self.certs(pki, "ca")
        self.certs(pki, "server", addresses[0], "localhost")
        for words in (("agent", "a"), ("agent", "b"), ("worker", "all"), ("submitter", "nobody"), ("viewer", "wall")):
            self.certs(pki, *words)
        with socket.socket() as probe:   # free here now; in a namespace of its own certainly
            probe.bind(("127.0.0.1", 0))
            server = f"{addresses[0]}:{probe.getsockname()[1]}"
        c = self.start(prefix=prefixes[0], tcp=server, certificates=f"{pki}/server", settings="runs_folder: FOLDER/runs\n", mode=0o755)
        os.mkdir(os.path.join(c.folder, "runs"))
        os.chmod(os.path.join(c.folder, "runs"), 0o1777)
        for name, prefix in zip("ab", prefixes):
            c.add(name, prefix=prefix, server=server, certificates=pki)
        # hierctl comes over TLS too: as nobody, whose job it is.
        env = {**os.environ, "HIERAD_SERVER": server, "HIERAD_CERTIFICATES": f"{pki}/submitter-nobody"}

        def ctl(*words, role="submitter-nobody"):
            return subprocess.run([*prefixes[1], os.path.join(BIN, "hierctl"), *map(str, words)], capture_output=True, text=True,
                                  env={**env, "HIERAD_CERTIFICATES": f"{pki}/{role}"}, timeout=120)

        submitted = ctl("submit", c.job_file(name="across", steps=40, ranks=2), "--wait", "-o", "json")
        self.assertEqual(submitted.returncode, 0, submitted.stderr + c.logs(1))
        done = c.job(1)
        self.assertEqual(done["submitter"], "nobody")
        self.assertEqual(sorted({rank["node"] for rank in done["ranks"]}), ["a", "b"])
        across = weights(done["run_folder"], 40)
        refused = ctl("cancel", 1, role="viewer-wall")
        self.assertEqual(refused.returncode, 1)
        self.assertIn("role submitter or admin", refused.stderr)
        self.assertEqual(ctl("list", role="viewer-wall").returncode, 0)
        self.assertEqual(ctl("list", role="missing").returncode, 1)
        for name in ("a", "b"):
            c.nodes[name].kill()
        self.assertEqual(across, self.alone(c))
        print("ran: a gang over TLS, " + ("two network namespaces" if made else "two processes"), file=sys.stderr)

    def alone_storage(self, c):
        """The prefix of an agent that, with its ranks, sees another, empty folder where hierad has its runs."""
        if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode != 0:
            self.skipTest("no mounts are allowed here")
        runs = os.path.join(c.state, "runs")
        os.makedirs(runs, exist_ok=True)
        return ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {runs} && exec "$0" "$@"')

    def test_logs_of_a_node_without_shared_storage_come_from_its_agent(self):
        c = self.start()
        c.add("far", prefix=self.alone_storage(c))
        job_id = c.submit(steps=1500, ranks=1)
        c.wait_state(job_id, "RUNNING")
        self.assertFalse(os.path.exists(os.path.join(c.run_folder(job_id), "rank-0.log")))
        followed = subprocess.run([os.path.join(BIN, "hierctl"), "logs", str(job_id), "--follow"], capture_output=True, text=True, timeout=300,
                                  env={**os.environ, "HIERAD_SERVER": c.server}, stdin=subprocess.DEVNULL)
        self.assertEqual(followed.returncode, 0, followed.stderr)
        whole = c.ctl("logs", job_id)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        self.assertIn(f"---- job {job_id}, attempt 1, rank 0", whole.stdout)
        self.assertIn("end (REASON_COMPLETED)", whole.stdout)
        self.assertEqual(followed.stdout, whole.stdout)
        self.assertEqual(c.ctl("logs", job_id, "--tail", "2").stdout.splitlines(), whole.stdout.splitlines()[-2:])
        c.nodes["far"].kill()
        gone = cluster.wait_for(lambda: (result := c.ctl("logs", job_id)).returncode != 0 and result, "the node is missed")
        self.assertIn("far", gone.stderr)

    def test_logs_of_attempts_on_nodes_without_shared_storage(self):
        c = self.start()
        prefix = self.alone_storage(c)
        c.pace(10)
        c.add("a", prefix=prefix, flags=("--log-bytes", 4096))
        job_id = c.submit("--set", "output.log_level=debug", steps=1000000, every=1000000, ranks=1)   # a checkpoint would tie it to its node
        pieces = {}

        def written(name):
            """What the node keeps of the rank's log, the rotated piece first."""
            folder = f"/proc/{c.nodes[name].process.pid}/root{c.run_folder(job_id)}"
            pieces[name] = [read_text(os.path.join(folder, "rank-0.log" + end)) for end in (".1", "")]
            return "".join(pieces[name])

        followed = tempfile.TemporaryFile("w+")
        self.addCleanup(followed.close)
        follower = subprocess.Popen([os.path.join(BIN, "hierctl"), "logs", str(job_id), "--follow"], stdout=followed, stderr=subprocess.STDOUT,
                                    env={**os.environ, "HIERAD_SERVER": c.server}, stdin=subprocess.DEVNULL)
        self.addCleanup(follower.kill)

        def rotated(name):
            written(name)
            return pieces[name][0] and pieces[name][1]

        c.wait_state(job_id, "RUNNING")
        wait_for(lambda: rotated("a"), "the log is rotated", 60)
        # The next attempt goes elsewhere, while the first node is still there.
        c.ctl("drain", "a")
        c.add("b", prefix=prefix, flags=("--log-bytes", 4096))
        os.kill(c.rank_pids(job_id)[0], signal.SIGKILL)
        wait_for(lambda: int(c.job(job_id)["attempt"]) == 2 and c.job(job_id)["state"] == "RUNNING", lambda: f"attempt 2\n{c.logs(job_id)}")
        self.assertEqual(c.job(job_id)["ranks"][0]["node"], "b")
        wait_for(lambda: rotated("b"), "the log is rotated there too", 60)
        self.assertEqual(c.ctl("cancel", job_id).returncode, 0)
        c.wait_state(job_id, "CANCELLED")

        parts, head = [], "---- job {}, attempt {}, rank 0, "
        for attempt, name in ((1, "a"), (2, "b")):
            text = written(name)
            if not (first := text.partition("\n")[0]).startswith(head.format(job_id, attempt)) or first.endswith(", continued"):
                parts.append(f"---- first lines of attempt {attempt} of rank 0 are gone: newer ones have taken their place (hierad-agent --log-bytes)\n")
            parts.append(text)
        whole = c.ctl("logs", job_id)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        self.assertEqual(whole.stdout, "".join(parts))
        self.assertFalse(os.path.exists(os.path.join(c.run_folder(job_id), "rank-0.log")), "hierad itself sees none of it")
        # Who has followed has seen every line, those that are gone now too.
        self.assertEqual(follower.wait(60 * cluster.slowness()), 0)
        followed.seek(0)
        seen = followed.read()
        self.assertNotIn("gone", seen)
        self.assertNotIn("missing", seen)
        for attempt in (1, 2):
            self.assertIn(head.format(job_id, attempt), seen)
        steps = [int(step) for step in re.findall(r" step (\d+): loss", seen)]
        again = steps.index(1, 1)   # nothing is shared, so the second attempt begins anew
        self.assertEqual(steps, list(range(1, again + 1)) + list(range(1, len(steps) - again + 1)))
        self.assertTrue(seen.endswith(pieces["b"][1]), "to the last line")

        lines = whole.stdout.splitlines()
        self.assertEqual(c.ctl("logs", job_id, "--tail", 3).stdout.splitlines(), lines[-3:])
        of_b = parts[-1].count("\n")
        self.assertEqual(c.ctl("logs", job_id, "--tail", of_b + 2).stdout.splitlines()[:2], parts[-2 if len(parts) == 2 else parts.index(pieces["a"][0] + pieces["a"][1])].splitlines()[-2:])
        self.assertEqual(c.ctl("logs", job_id, "--attempt", 1).stdout, "".join(parts[:parts.index(pieces["a"][0] + pieces["a"][1]) + 1]))
        found = c.ctl("logs", job_id, "--grep", "---- job|first lines").stdout.splitlines()
        self.assertEqual(found, [line for line in lines if line.startswith("---- ")])
        self.assertIn(lines[-1], c.ctl("logs", job_id, "--since", "1h").stdout.splitlines())
        wait_for(lambda: not [line for line in c.ctl("logs", job_id, "--since", "1s").stdout.splitlines() if " step " in line], "no step is of the last second", 20)

        # A node that is gone: what it had is named at its place, and the rest is there.
        c.nodes["a"].kill()
        wait_for(lambda: not c.node("a").get("connected"), "the node is missed", 20)
        partly = c.ctl("logs", job_id)
        self.assertEqual(partly.returncode, 1)
        words = "attempt 1 of rank 0, which ran on node a, is missing: node a is not connected"
        self.assertEqual(partly.stdout.splitlines()[0], "---- " + words)
        self.assertTrue(partly.stdout.endswith(parts[-1]))
        self.assertEqual(partly.stderr, f"hierctl: {words}\n")
        self.assertEqual(c.ctl("logs", job_id, "--attempt", 2).returncode, 0)

    def test_an_agent_that_loses_hierad_keeps_its_ranks(self):
        c = self.start(node_lost_after=20)
        c.add("a")
        c.add("b")
        c.pace(5)
        job_id = c.submit(steps=1500, every=500)
        c.wait_state(job_id, "RUNNING")
        folder, pids = c.run_folder(job_id), c.rank_pids(job_id)
        c.nodes["a"].relay.cut()
        c.nodes["b"].relay.cut()
        c.wait_step(folder, c.step(folder) + 50)   # they train on
        c.kill_hierad()
        c.wait_step(folder, c.step(folder) + 50)
        c.nodes["a"].relay.mend()
        c.nodes["b"].relay.mend()
        c.start()
        wait_for(lambda: c.rank_pids(job_id) == pids and c.node("a").get("connected") and c.node("b").get("connected"),
                 lambda: f"the same ranks are back: {pids}; {c.job(job_id)}", 30)
        c.pace(0)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 1)
        self.assertEqual([int(line["step"]) for line in c.metrics(folder)], list(range(1, 1501)))

    def test_a_lost_node_is_replaced_and_fenced(self):
        c = self.start(node_lost_after=5)
        c.add("a")
        c.add("b")
        c.pace(25)
        job_id = c.submit(steps=1000, every=50, ranks=1)
        c.wait_state(job_id, "RUNNING")
        folder = c.run_folder(job_id)
        c.wait_step(folder, 60)
        lost = c.job(job_id)["ranks"][0]["node"]
        other = "b" if lost == "a" else "a"
        self.assertTrue(c.ranks_of(lost, job_id, 1))
        c.nodes[lost].relay.cut()
        wait_for(lambda: int(c.job(job_id)["attempt"]) == 2, lambda: f"a second attempt\n{c.logs(job_id)}", 30)
        # The old rank hears nothing from hierad; the run folder tells it that it is no longer wanted.
        wait_for(lambda: not c.ranks_of(lost, job_id, 1), "the old rank has ended itself", 20)
        self.assertFalse(c.node(lost).get("connected"))
        c.wait_state(job_id, "RUNNING")
        self.assertEqual(c.job(job_id)["ranks"][0]["node"], other)
        c.nodes[lost].relay.mend()
        wait_for(lambda: c.node(lost).get("connected"), lambda: f"{lost} is back\n{c.logs(job_id)}", 60)
        c.pace(0)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 2)
        self.assertGreater(int(done["first_step"]), 50)
        self.assertEqual([int(line["step"]) for line in c.metrics(folder)], list(range(1, 1001)))

    def test_a_gang_whose_node_was_lost_begins_again_when_it_is_back(self):
        c = self.start(node_lost_after=5)
        c.add("a")
        c.add("b")
        c.pace(25)
        job_id = c.submit(steps=1000, every=50)
        c.wait_state(job_id, "RUNNING")
        c.wait_step(c.run_folder(job_id), 60)
        c.nodes["b"].relay.cut()
        # Its ranks reach each other still, and train; but what hierad cannot see it does not count on.
        wait_for(lambda: c.job(job_id)["state"] == "QUEUED", lambda: f"the job waits for a second node\n{c.logs(job_id)}", 40)
        wait_for(lambda: not c.ranks_of("a", job_id, 1) and not c.ranks_of("b", job_id, 1), "no rank of it is left", 40)
        c.pace(0)
        c.nodes["b"].relay.mend()
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 2)
        self.assertEqual(done["reason"], "COMPLETED")


if __name__ == "__main__":
    cluster.main()
