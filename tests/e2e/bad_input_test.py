"""What a person gets wrong: each is one sentence that names the thing, with the right class and exit code."""
import os
import socket
import struct
import subprocess

import cluster
from cluster import BIN


class BadDataTest(cluster.ClusterTest):
    def assert_fails(self, reason, needles, **job):
        """The job is accepted, fails at its first attempt and says why."""
        c = self.cluster
        job_id = c.submit(steps=10, **job)
        done = c.wait_state(job_id, "FAILED")
        self.assertEqual(done["reason"], reason, done["message"])
        self.assertEqual(int(done["attempt"]), 1, "never tried again")
        self.assert_one_sentence(done["message"])
        for needle in needles:
            self.assertIn(needle, done["message"])
        watched = c.ctl("watch", job_id)
        self.assertEqual(watched.returncode, 100)

    def test_data_that_cannot_be_used(self):
        c = self.cluster
        missing = os.path.join(c.folder, "missing.npy")
        self.assert_fails("DATA_ERROR", [missing], name="missing", data=missing)

        # Root reads every file: a folder in its place cannot be read by anybody.
        folder = os.path.join(c.folder, "folder.npy")
        os.mkdir(folder)
        self.assert_fails("DATA_ERROR", [folder], name="unreadable", data=folder)

        whole = os.path.join(c.folder, "whole.ts")
        cluster.write_ts(whole)
        text = cluster.read_text(whole)
        cut = os.path.join(c.folder, "cut.ts")
        with open(cut, "w") as out:
            out.write(text[:int(len(text) * 0.6)])
        self.assert_fails("DATA_ERROR", [cut], name="cut", source="ts", data=cut)

        other = os.path.join(c.folder, "six.npy")
        cluster.write_npy(other, channels=6)
        self.assert_fails("USER_ERROR", ["6", "4", "in_chans"], name="channels", data=other)

        short = os.path.join(c.folder, "short.npy")
        with open(c.data, "rb") as file, open(short, "wb") as out:
            out.write(file.read()[:-1000])
        self.assert_fails("DATA_ERROR", [short], name="short", data=short)

        with open(c.data, "rb") as file:
            content = bytearray(file.read())
        content[-4:] = struct.pack("<f", float("nan"))
        spoilt = os.path.join(c.folder, "nan.npy")
        with open(spoilt, "wb") as out:
            out.write(content)
        self.assert_fails("DATA_ERROR", [spoilt], name="nan", data=spoilt)

    def test_job_files_that_are_refused(self):
        c = self.cluster
        good = cluster.read_text(c.job_file(name="good"))
        cases = {
            "unknown key": (good + "trainer: 1\n", ["trainer"]),
            "mistyped key": (good.replace("mask_ratio", "mask_ration"), ["mask_ration", "mask_ratio"]),
            "doubled key": (good + "seed: 2\n", ["seed"]),
            "out of range": (good.replace("mask_ratio: 0.5", "mask_ratio: 1.5"), ["mask_ratio", "1.5"]),
            "illegal geometry": (good.replace("input_size: [64]", "input_size: [63]"), ["input_size", "63"]),
            "keeps nothing": (good.replace("mask_ratio: 0.5", "mask_ratio: 0.99"), ["mask_ratio"]),
            "bad name": (good.replace("name: good", "name: 'a b'"), ["name"]),
        }
        for what, (text, needles) in cases.items():
            with self.subTest(what):
                path = os.path.join(c.folder, "bad.yaml")
                with open(path, "w") as out:
                    out.write(text)
                for command in ("validate", "submit"):
                    result = c.ctl(command, path)
                    self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
                    for needle in needles:
                        self.assertIn(needle, result.stderr)
        self.assertEqual(c.json("list").get("jobs", []), [])
        missing = c.ctl("submit", os.path.join(c.folder, "none.yaml"))
        self.assertEqual(missing.returncode, 1)
        self.assert_one_sentence(missing.stderr)

    def test_more_ranks_than_there_are_slots_waits_and_says_why(self):
        c = self.cluster
        job_id = c.submit(ranks=3, steps=10)
        cluster.wait_for(lambda: "3" in c.job(job_id).get("message", ""), lambda: f"the number of slots is named: {c.job(job_id)}", 20)
        self.assertEqual(c.job(job_id)["state"], "QUEUED")
        # It does not stand in the way of those that fit.
        small = c.submit(name="small", steps=10)
        c.wait_state(small, "SUCCEEDED")
        self.assertEqual(c.ctl("cancel", job_id).returncode, 0)


class BadPlacesTest(cluster.ClusterTest):
    def run_hierad(self, *words):
        return subprocess.run([os.path.join(BIN, "hierad"), "--agent", "none", *map(str, words)], capture_output=True, text=True,
                              timeout=30, stdin=subprocess.DEVNULL)

    def assert_refused(self, result, *needles):
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assert_one_sentence(result.stderr)
        for needle in needles:
            self.assertIn(needle, result.stderr)

    def test_second_hierad_on_a_state_folder(self):
        c = self.cluster
        result = self.run_hierad("--state", c.state, "--listen", f"unix:{c.folder}/other.sock", "--metrics", "off")
        self.assert_refused(result, c.state, "in use", str(c.hierad.pid))

    def test_socket_in_use(self):
        c = self.cluster
        state = os.path.join(c.folder, "state2")
        result = self.run_hierad("--state", state, "--listen", c.server, "--metrics", "off")
        self.assert_refused(result, c.server[len("unix:"):])
        self.assertEqual(c.ctl("version").returncode, 0, "the one that was there is unharmed")

    def test_ports_in_use(self):
        c = self.cluster
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            common = ("--state", os.path.join(c.folder, "state2"), "--listen", f"unix:{c.folder}/o.sock")
            self.assert_refused(self.run_hierad(*common, "--metrics", f"127.0.0.1:{port}"), f"127.0.0.1:{port}", "in use")
            self.assert_refused(self.run_hierad(*common, "--metrics", "off", "--tcp", f"127.0.0.1:{port}", "--certificates", "/nowhere"), f"127.0.0.1:{port}", "in use")
            self.assertFalse(os.path.exists(os.path.join(c.folder, "state2")), "refused before any state changes")

    def test_state_folder_that_cannot_be_used(self):
        c = self.cluster
        file = os.path.join(c.folder, "file")
        with open(file, "w"):
            pass
        for state in (file, os.path.join(file, "below"), "/proc/hierad"):
            result = self.run_hierad("--state", state, "--listen", f"unix:{c.folder}/o.sock", "--metrics", "off")
            self.assert_refused(result, state)

    def test_output_folder_that_cannot_be_made(self):
        c = self.cluster
        file = os.path.join(c.folder, "file")
        with open(file, "w"):
            pass
        result = c.ctl("submit", c.job_file(name="out", steps=10, extra=f"output:\n  folder: {file}/run\n"), "--follow")
        self.assertIn(result.returncode, (1, 100))
        self.assertIn(file, result.stdout + result.stderr)


if __name__ == "__main__":
    cluster.main()
