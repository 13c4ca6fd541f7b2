"""The units of deploy/systemd: what systemd says of them, and that a hierad of root does all its work within their limits."""
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
for folder in ("../e2e", "../crash"):
    sys.path.insert(0, os.path.join(HERE, folder))
import cancel_test
import cluster

UNITS = [os.path.join(HERE, "../../deploy/systemd", name) for name in ("hierad.service", "hierad-agent.service", "hierad-gpus.service")]
MOST_EXPOSURE = 40   # tenths: systemd calls 10 to 49 OK
SETTINGS = """\
access: everyone
worker_user: nobody
runs_folder: FOLDER/runs
"""


class Restricted(cluster.Cluster):
    def command(self):
        return [sys.executable, os.path.join(HERE, "as_unit.py"), UNITS[0], *super().command()]


class UnitsTest(unittest.TestCase):
    def setUp(self):
        if shutil.which("systemd-analyze") is None:
            self.skipTest("systemd-analyze is not here: apt install systemd")

    def test_their_exposure_is_ok(self):
        for unit in UNITS:
            result = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSURE}", unit],
                                    capture_output=True, text=True)
            if "Unknown option" in result.stderr or "unrecognized option" in result.stderr:
                self.skipTest("this systemd-analyze does not know security --offline (it is older than 250)")
            verdict = [line for line in result.stdout.splitlines() if "Overall exposure" in line]
            self.assertEqual(result.returncode, 0, f"{verdict}\n{result.stderr}")
            self.assertRegex(verdict[0], r"\b[1-4]\.\d OK\b")

    # Ranks of another account, on two slots, one job ended in the middle: start, signals, /proc, files of others' folders.
    def test_hierad_of_root_works_within_their_limits(self):
        if os.geteuid() != 0:
            self.skipTest("only root has the capabilities that are taken here")
        if subprocess.run(["test", "-x", os.path.realpath(cluster.TEST_WORKER)], user="nobody").returncode != 0:
            self.skipTest(f"nobody cannot enter the build folder {cluster.BIN}: ranks of that account cannot be shown here")
        folder = tempfile.mkdtemp(prefix="hierad-stubborn-", dir="/tmp")
        self.addCleanup(shutil.rmtree, folder)
        os.chmod(folder, 0o755)
        worker, deaf = cancel_test.stubborn(folder)   # with children that ignore SIGTERM and leave its session
        c = Restricted(worker=worker, settings=SETTINGS, mode=0o755)
        self.addCleanup(c.close)
        os.mkdir(os.path.join(c.folder, "runs"))
        os.chmod(os.path.join(c.folder, "runs"), 0o1777)
        status = cluster.read_text(f"/proc/{c.hierad.pid}/status")
        self.assertIn("Seccomp:\t2\n", status)
        self.assertNotIn("CapBnd:\t000001ffffffffff\n", status)
        nobody = pwd.getpwnam("nobody").pw_uid
        first = c.submit(name="job-step20", steps=100, ranks=2)
        c.wait_state(first, "RUNNING")
        folder = c.run_folder(first)
        c.wait_step(folder, 3)
        for pid in c.rank_pids(first).values():   # of the wrapper around the rank
            self.assertIn(f"Uid:\t{nobody}\t{nobody}", cluster.read_text(f"/proc/{pid}/status"))
        c.wait_state(first, "SUCCEEDED")
        os.chmod(folder, 0o700)   # nobody's alone: hierad reads logs there all the same
        self.assertEqual(c.ctl("logs", first).returncode, 0)
        second = c.submit(name="job-step20", steps=100000, ranks=2)
        c.wait_state(second, "RUNNING")
        c.wait_step(c.run_folder(second), 3)
        self.assertGreater(len(cancel_test.processes(deaf)), 2, "the children are there to be missed")
        self.assertEqual(c.ctl("cancel", second, "--now").returncode, 0)
        c.wait_state(second, "CANCELLED")
        self.assertEqual(c.marked(), {})
        self.assertEqual(cancel_test.processes(deaf), [])


if __name__ == "__main__":
    cluster.main(os.path.join("tests", "hiera-test-worker"))
