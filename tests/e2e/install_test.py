"""cmake --install into an empty folder: what is installed runs, and systemd finds no fault in the units."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BUILD = Path(os.environ["HIERAD_BIN_DIR"]).parent
PROGRAMS = ("hierad", "hierad-agent", "hierctl", "hiera-worker")


class InstallTest(unittest.TestCase):
    def setUp(self):
        self.root = Path(tempfile.mkdtemp(prefix="hierad-install-"))
        self.addCleanup(shutil.rmtree, self.root)
        result = subprocess.run([os.environ.get("CMAKE", "cmake"), "--install", BUILD, "--prefix", "/usr"], capture_output=True, text=True,
                                env={**os.environ, "DESTDIR": str(self.root)})
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_programs_run_where_they_are_installed(self):
        for name in PROGRAMS:
            result = subprocess.run([self.root / "usr/bin" / name, "--version"], capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, 0, f"{name}: {result.stderr}")
        self.assertEqual(subprocess.run([self.root / "usr/bin/hierad-certs", "-h"], capture_output=True).returncode, 0)

    def test_units_are_what_systemd_accepts(self):
        units = sorted((self.root / "usr/lib/systemd/system").iterdir())
        self.assertEqual([unit.name for unit in units], ["hierad-agent.service", "hierad-gpus.service", "hierad.service"])
        if shutil.which("systemd-analyze") is None:
            sys.stderr.write("not run here, for want of systemd: systemd-analyze verify\n")
            return
        for unit in units:
            # verify wants the programs to be there: by their place in the folder.
            unit.write_text(re.sub("ExecStart=(?!-?/)", f"ExecStart={self.root}/usr/bin/", unit.read_text()))
            result = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=120)
            faults = [line for line in (result.stdout + result.stderr).splitlines() if unit.name in line]
            self.assertEqual(faults, [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
