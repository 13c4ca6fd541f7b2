"""tools/quickstart --no-setup: Ctrl-C stops everything it started, and what is missing is said in a sentence."""
import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(os.environ["HIERAD_SOURCE_DIR"])
BIN = Path(os.environ["HIERAD_BIN_DIR"])
DEADLINE_S = 60


def processes_naming(text):
    """By command line, environment, or an open file (a worker's log)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            files = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
            if text.encode() in said or any(name.startswith(text) for name in files):
                found.append(entry.name)
        except OSError:
            pass
    return found


class QuickstartTest(unittest.TestCase):
    def start(self, folder, **environment):
        return subprocess.Popen([ROOT / "tools/quickstart", "--no-setup", "--dir", folder], cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                env=dict(os.environ, HIERAD_BIN=str(BIN), **environment))

    def test_control_c_in_training_leaves_nothing_behind(self):
        with tempfile.TemporaryDirectory(prefix="quickstart.") as folder:
            process = self.start(folder)
            seen = ""
            for line in process.stdout:
                seen += line
                if "RUNNING" in line:
                    break
            self.assertIn("RUNNING", seen)
            # hierad, agent, two keepers, two workers: the check below sees them all
            self.assertGreaterEqual(len(processes_naming(folder)), 6)
            os.killpg(process.pid, signal.SIGINT)   # as a terminal does
            rest = process.stdout.read()
            process.stdout.close()
            self.assertEqual(process.wait(timeout=DEADLINE_S), 130, seen + rest)
            self.assertIn("stopped", rest)
            deadline = time.monotonic() + DEADLINE_S
            while processes_naming(folder) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertEqual(processes_naming(folder), [])

    def test_missing_binaries_are_said(self):
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.run([ROOT / "tools/quickstart", "--no-setup", "--dir", folder], cwd=ROOT, capture_output=True,
                                     text=True, env=dict(os.environ, HIERAD_BIN="/nowhere"))
        self.assertEqual(process.returncode, 1)
        self.assertIn("/nowhere/hierad is missing", process.stderr)


if __name__ == "__main__":
    unittest.main()
