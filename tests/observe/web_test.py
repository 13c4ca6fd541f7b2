"""The web page in a real browser: what it shows, that a thousand jobs are fine, and who is refused."""
import encodings.idna   # before it is another user, who may not read the Python that root runs
import json
import os
import re
import socket
import subprocess
import sys
import unittest
import urllib.error
import urllib.request
from pathlib import Path

import observe
from cluster import wait_for

SHOTS = os.environ.get("HIERAD_SHOTS")   # a folder: screenshots are kept there


def browse(folder, url, shot=None, size="1400,1100"):
    """The page's DOM after a few seconds of its own time."""
    program = next((p for p in map(observe.shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if program is None:
        raise AssertionError("chromium is not installed; tools/setup installs it")
    words = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder}/browser",
             f"--window-size={size}", "--virtual-time-budget=5000", "--enable-logging=stderr"]
    if shot:
        path = os.path.join(SHOTS or folder, shot)
        subprocess.run([*words, f"--screenshot={path}", url], capture_output=True, timeout=120, check=True)
        assert os.path.getsize(path) > 5000, path
    result = subprocess.run([*words, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True)
    errors = re.findall(r"CONSOLE.*", result.stderr)
    assert not errors, errors
    return result.stdout


def answer_as(uid, port, path, source=None):
    """The answer's code and body to a process of this user, from this address and port."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setuid(uid)
            with socket.create_connection(("127.0.0.1", port), timeout=30, source_address=source) as connection:
                connection.sendall(f"GET /{path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
                while block := connection.recv(65536):
                    os.write(write, block)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    head, _, body = text.partition("\r\n\r\n")
    return int(head.split()[1]), body


class WebTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.port = observe.free_port()
        cls.c = c = observe.FakeCluster(web=f"127.0.0.1:{cls.port}", slots=8, rate=20)
        cls.addClassCleanup(c.close)
        c.add_node("gpu-bad", 1, 20, faulty=1)
        cls.url = f"http://127.0.0.1:{cls.port}/"
        cls.good = c.submit_fake("good", ranks=2)
        cls.data = c.submit_fake("data-bound", source="synthetic")
        cls.nan = c.submit_fake("nan-loss")
        cls.short = c.submit_fake("short", steps=40)
        cls.waits = c.submit_fake("waits", ranks=12)
        c.wait_state(cls.short, "SUCCEEDED")
        wait_for(lambda: c.job(cls.good)["step"] > 150, "steps", 60)

    def answer(self, path="", host=None, method="GET"):
        request = urllib.request.Request(self.url + path, method=method, headers={"Host": host} if host else {})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers

    def test_the_list_and_one_job_are_shown(self):
        dom = browse(self.c.folder, self.url, "list.png")
        for text in ("good", "data-bound", "nan-loss", "SUCCEEDED", "QUEUED", "slots busy", "gpu-1", "out of use for a fault", "hierctl undrain gpu-bad"):
            self.assertIn(text, dom)
        self.assertRegex(dom, r'class="slot faulty" title="GPU-fake-0 [^"]*Xid 79[^"]*">faulty<')
        self.assertRegex(dom, r"RUNNING !")
        dom = browse(self.c.folder, f"{self.url}#{self.data}", "job.png")
        self.assertIn("waits for input", dom)
        self.assertIn("synthetic (random numbers)", dom)
        self.assertRegex(dom, r'<path d="M[\d. ML]+')   # the loss
        self.assertRegex(dom, r"waiting for input 4\d\.\d %")
        self.assertIn("GPU-fake-", dom)
        browse(self.c.folder, f"{self.url}#{self.nan}", "nan.png", "900,1400")

    def test_answers_are_right_and_bounded(self):
        code, text, headers = self.answer("api/overview")
        self.assertEqual(code, 200)
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        overview = json.loads(text)
        states = {job["name"]: job["state"] for job in overview["jobs"]}
        self.assertEqual(states["waits"], "QUEUED")
        self.assertEqual((overview["totals"]["slots"], overview["totals"]["slots_faulty"]), (9, 1))
        faults = {(node["name"], slot["fault"] != "") for node in overview["nodes"] for slot in node["slots"]}
        self.assertEqual(faults, {("gpu-1", False), ("gpu-bad", True)})
        self.assertEqual({job["name"]: job["loss"] for job in overview["jobs"]}["nan-loss"], "NaN")
        job = json.loads(self.answer(f"api/jobs/{self.good}")[1])
        self.assertEqual(len(job["ranks"]), 2)
        self.assertAlmostEqual(sum(job["budget"].values()), 1, 6)
        points = json.loads(self.answer(f"api/jobs/{self.good}/metrics")[1])["points"]
        self.assertLessEqual(len(points), 601)
        history = {m["step"]: m["loss"] for m in self.c.json("metrics", self.good)["metrics"]}
        for point in points:
            self.assertEqual(point["loss"], history[point["step"]])
        folder = self.c.run_folder(self.good)
        os.makedirs(folder, exist_ok=True)
        Path(folder, "rank-1.log").write_bytes(b"".join(b"line %d \xff<b>\n" % i for i in range(1000)))
        log = json.loads(self.answer(f"api/jobs/{self.good}/log?rank=1")[1])["text"]
        self.assertTrue(log.endswith("line 999 \ufffd<b>\n"))
        self.assertEqual(log.count("\n"), 300)
        for path, wanted in (("api/jobs/4711", 404), ("api/jobs/x", 404), ("api/jobs/1/../../etc/passwd", 404), (f"api/jobs/{self.good}/log?rank=7", 400),
                             (f"api/jobs/{self.good}/log?rank=x", 400), ("nothing", 404), ("page.css", 200), ("page.js", 200)):
            self.assertEqual(self.answer(path)[0], wanted, path)

    def test_a_foreign_site_another_user_and_a_change_are_refused(self):
        self.assertEqual(self.answer("api/overview", host="evil.example")[0], 403)
        self.assertEqual(self.answer("api/overview", host=f"localhost:{self.port}")[0], 200)
        self.assertEqual(self.answer("api/overview", method="POST")[0], 405)
        if os.geteuid() != 0:
            print("not root: that another user is refused was not tried", file=sys.stderr)
            return
        self.assertEqual(answer_as(65534, self.port, "api/overview")[0], 403)
        self.assertEqual(answer_as(0, self.port, "api/overview")[0], 200)

    def test_z_a_thousand_jobs(self):
        subprocess.run([os.path.join(observe.cluster.BIN, "fake-cluster"), "--server", self.c.server, "--node", "other", "--slots", "1", "--seconds", "1",
                        "--kind", "cpu", "--submit", "1000"], check=True, timeout=120)
        code, text, _ = self.answer("api/overview")
        self.assertEqual(code, 200)
        jobs = json.loads(text)["jobs"]
        self.assertEqual(len(jobs), 1000)   # those with workers, then the newest
        self.assertIn(self.good, [job["id"] for job in jobs])
        self.assertLess(len(text), 500_000)
        dom = browse(self.c.folder, self.url, "thousand.png")
        shown = sum(job["name"].startswith("load-") for job in jobs)
        self.assertGreater(shown, 990)
        self.assertAlmostEqual(dom.count("load-"), 2 * shown, delta=4)   # name and tooltip; some may have begun or ended meanwhile
        self.assertRegex(dom, r'data-shown="[2-9]"')   # and it goes on refreshing


class SharedTest(unittest.TestCase):
    """access: everyone: on the page, too, a user who may submit sees its own jobs only."""

    def test_a_submitter_sees_its_own_jobs(self):
        if os.geteuid() != 0:
            self.skipTest("only root can ask as another user")
        port = observe.free_port()
        c = observe.cluster.Cluster(agent="none", web=f"127.0.0.1:{port}", settings="access: everyone\n", mode=0o755)
        self.addCleanup(c.close)
        job = c.submit(name="of-root")   # queued: there is no node
        code, text = answer_as(0, port, "api/overview")
        self.assertEqual((code, [j["name"] for j in json.loads(text)["jobs"]]), (200, ["of-root"]))
        code, text = answer_as(65534, port, "api/overview")
        overview = json.loads(text)
        self.assertEqual((code, overview["jobs"], overview["only_of"]), (200, [], "nobody"))
        for what in ("", "/metrics", "/log"):
            self.assertEqual(answer_as(65534, port, f"api/jobs/{job}{what}")[0], 403)
        self.assertEqual(answer_as(65534, port, "")[0], 200)
        # Root has the same port of another loopback address: addresses count too.
        with socket.create_connection(("127.0.0.1", port)) as of_root:
            for host in range(2, 34):
                code, text = answer_as(65534, port, "api/overview", (f"127.0.0.{host}", of_root.getsockname()[1]))
                self.assertEqual((code, json.loads(text)["only_of"]), (200, "nobody"), host)


if __name__ == "__main__":
    unittest.main(verbosity=2)
