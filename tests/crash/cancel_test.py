"""Jobs cancelled at random moments, whose workers leave deaf children about: none survives.

HIERAD_ROUNDS: how many jobs (default 100; the long test 1,000); HIERAD_SEED: of the moments, printed. The workers are the
test engine under a wrapper that forks, leaves its session, drops its environment and ignores SIGTERM.
"""
import os
import random
import sys
import textwrap
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../e2e"))
import cluster
from cluster import wait_for

ROUNDS = int(os.environ.get("HIERAD_ROUNDS") or 100)
SEED = int(os.environ.get("HIERAD_SEED") or time.time_ns() % 1000000)
AT_ONCE = 4


def stubborn(folder):
    """A hiera-worker with deaf children; what they are called in /proc."""
    mark = f"deaf-{os.getpid()}-{random.randrange(1 << 30)}"
    path = os.path.join(folder, "stubborn")
    with open(path, "w") as out:
        out.write(textwrap.dedent(f"""\
            #!/bin/sh
            trap '' TERM
            deaf='trap "" TERM HUP INT; while :; do sleep 1; done'
            (setsid env -i /bin/sh -c "$deaf" {mark} &)
            (setsid /bin/sh -c "$deaf" {mark} &)
            /bin/sh -c "$deaf" {mark} &
            {os.path.abspath(cluster.TEST_WORKER)} "$@"
            """))
    os.chmod(path, 0o755)
    return path, mark


def processes(mark):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if mark.encode() in file.read().split(b"\0") and cluster.alive(int(entry)):
                        found.append(int(entry))
            except OSError:
                pass
    return found


class CancelTest(cluster.ClusterTest):
    def setUp(self):
        folder = cluster.tempfile.mkdtemp(prefix="hierad-stubborn-", dir="/tmp")
        self.addCleanup(cluster.shutil.rmtree, folder)
        worker, self.mark = stubborn(folder)
        self.flags = {"worker": worker, "cpu-slots": AT_ONCE, "stop-grace": 1}
        super().setUp()

    def test_nothing_survives_a_cancel(self):
        print(f"HIERAD_SEED={SEED} HIERAD_ROUNDS={ROUNDS}", flush=True)
        rng = random.Random(SEED)
        c = self.cluster
        deaf = 0
        for begin in range(0, ROUNDS, AT_ONCE):
            jobs = [c.submit(name=f"job{begin}-step5", ranks=1, steps=1000000, every=20) for _ in range(min(AT_ONCE, ROUNDS - begin))]
            time.sleep(rng.uniform(0, 0.6))   # the moment of the cancel: queued, starting, loading, training, saving
            deaf += len(processes(self.mark))
            for job_id in jobs:
                result = c.ctl("cancel", job_id, *(["--now"] if rng.random() < 0.5 else []))
                self.assertEqual(result.returncode, 0, result.stderr)
            for job_id in jobs:
                c.wait_state(job_id, "CANCELLED", 30)
            # The state says that the whole tree is gone.
            self.assertEqual(processes(self.mark), [], f"of jobs {jobs}")
        self.assertGreater(deaf, ROUNDS // 2, "the children were there to be missed")
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 5)


if __name__ == "__main__":
    cluster.main("tests/hiera-test-worker")
