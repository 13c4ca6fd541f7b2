"""What the documents promise exists: links, files, commands and their flags; commands that need no daemon are run."""
import json
import os
import re
import shlex
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(os.environ["HIERAD_SOURCE_DIR"])
BIN = Path(os.environ["HIERAD_BIN_DIR"])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("hierad", "hierctl", "hierad-agent", "hiera-worker")
WITHOUT_DAEMON = ("validate", "plan")   # and submit --dry-run
DATA = ROOT / ".deps"


def commands(page):
    """Words of each indented command line that starts with one of our programs or tools."""
    for line in page.read_text().splitlines():
        if not line.startswith("    "):
            continue
        text = line.strip().split("   #")[0].rstrip(" &")
        try:
            words = shlex.split(text)
        except ValueError:
            continue
        if words and (Path(words[0]).name in OURS or words[0].startswith(("tools/", "deploy/"))):
            yield text, words


def run(words, timeout=60):
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=timeout)


class DocsTest(unittest.TestCase):
    def test_links_lead_somewhere(self):
        for page in PAGES:
            for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
                if "://" not in target:
                    self.assertTrue((page.parent / target).exists(), f"{page.name}: {target} does not exist")

    def test_named_files_exist(self):
        for page in PAGES:
            for name in re.findall(r"`((?:configs|docs|tools|server|base|worker|proto|tests|deploy)/[\w./-]+\w)`", page.read_text()):
                self.assertTrue((ROOT / name).exists(), f"{page.name}: {name} does not exist")

    def test_commands_and_flags_exist(self):
        seen = 0
        for page in PAGES:
            for text, words in commands(page):
                seen += 1
                if words[0].startswith(("tools/", "deploy/")):
                    self.assertTrue(os.access(ROOT / words[0], os.X_OK), f"{page.name}: {text}")
                    own = ["gpu"] if words[:2] == ["tools/bench", "gpu"] else []   # which has a help of its own
                    help_text = run([ROOT / words[0], *own, "-h"]).stdout
                else:
                    sub = [words[1]] if Path(words[0]).name in ("hierctl", "hiera-worker") and len(words) > 1 else []
                    result = run([BIN / Path(words[0]).name, *sub, "--help"])
                    self.assertEqual(result.returncode, 0, f"{page.name}: {text}: {result.stderr}")
                    help_text = result.stdout
                for flag in re.findall(r"(?<!\S)--?[a-z][\w-]*", " ".join(words[1:])):
                    self.assertIn(flag, help_text, f"{page.name}: {text}: no flag {flag}")
        self.assertGreater(seen, 5)

    def test_commands_without_a_daemon_work(self):
        ran = 0
        for page in PAGES:
            for text, words in commands(page):
                if Path(words[0]).name != "hierctl" or len(words) < 3:
                    continue
                if words[1] not in WITHOUT_DAEMON and not (words[1] == "submit" and "--dry-run" in words):
                    continue
                result = run([BIN / "hierctl", *words[1:]])
                self.assertEqual(result.returncode, 0, f"{page.name}: {text}: {result.stdout}{result.stderr}")
                ran += 1
        self.assertGreaterEqual(ran, 3)

    def test_job_files_in_the_text_are_legal(self):
        ran = 0
        for page in PAGES:
            for text in re.findall(r"^```yaml\n(name: .*?)^```", page.read_text(), re.M | re.S):
                result = subprocess.run([BIN / "hierctl", "validate", "-"], input=text, capture_output=True, text=True, timeout=60)
                self.assertEqual(result.returncode, 0, f"{page.name}:\n{text}{result.stderr}")
                ran += 1
        self.assertGreaterEqual(ran, 1)

    def test_doctor_as_documented(self):
        page = (ROOT / "docs/doctor.md").read_text()
        with tempfile.TemporaryDirectory() as folder:
            job = ["configs/quickstart.yaml", "--set", "data.source=synthetic", "--set", "data.path=null", "--set", "eval.path=null",
                   "--set", "data.mean_pool=null", "--set", "data.normalize=null", "--set", "data.pad=null"]
            result = run([BIN / "hierctl", "doctor", *job, "--folder", folder, "-o", "json"], timeout=240)
            self.assertEqual(os.listdir(folder), [])
        report = json.loads(result.stdout)
        self.assertEqual(result.returncode, 1 if report["verdict"] == "fail" else 0, result.stderr)
        names = {check["name"] for check in report["checks"]}
        self.assertLessEqual({"static shapes", "data rate", "GPU", "/dev/shm", "disk speed"}, names)
        for check in report["checks"]:
            self.assertIn(f"`{check['name']}`", page)
            self.assertEqual(check["advice"] == "", check["verdict"] == "pass", check)
        rate = next(check for check in report["checks"] if check["name"] == "data rate")
        self.assertIn("samples/s read", rate["seen"])


if __name__ == "__main__":
    unittest.main()
