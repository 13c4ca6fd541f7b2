"""tools/quickstart --no-setup: Ctrl-C stops everything it started, and what is missing is said in a sentence."""
import os
import shutil
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

    def test_the_tests_are_built_after_a_quickstart(self):
        """Both configure build/release, the quickstart without tests, and CMake remembers."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("tools", "bin"):
                os.mkdir(f"{folder}/{name}")
            shutil.copy(ROOT / "tools/test", f"{folder}/tools/test")
            for name in ("cmake", "ctest"):
                Path(f"{folder}/bin/{name}").write_text(f'#!/bin/sh\necho {name} "$@" >>{folder}/calls\n')
                os.chmod(f"{folder}/bin/{name}", 0o755)
            process = subprocess.run([f"{folder}/tools/test", "--no-setup", "-R", "job"], capture_output=True, text=True,
                                     env=dict(os.environ, PATH=f"{folder}/bin:{os.environ['PATH']}"))
            calls = Path(f"{folder}/calls").read_text().splitlines()
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertEqual(calls[0], "cmake --preset release -DHIERAD_TESTS=ON")
        self.assertIn("-R job", calls[2])

    def test_missing_binaries_are_said(self):
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.run([ROOT / "tools/quickstart", "--no-setup", "--dir", folder], cwd=ROOT, capture_output=True,
                                     text=True, env=dict(os.environ, HIERAD_BIN="/nowhere"))
        self.assertEqual(process.returncode, 1)
        self.assertIn("/nowhere/hierad is missing", process.stderr)


if __name__ == "__main__":
    unittest.main()
