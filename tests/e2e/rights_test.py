"""Whose the ranks are and where their paths may lead: worker_user and allowed_roots, with the test engine."""
import json
import os
import pwd
import shutil
import subprocess
import unittest

import cluster

SETTINGS = """\
access: everyone
worker_user: nobody
runs_folder: FOLDER/runs
allowed_roots: FOLDER/runs:FOLDER/data:FOLDER/more
"""


class RightsTest(unittest.TestCase):
    def start(self, settings=SETTINGS, **flags):
        if os.geteuid() != 0:
            self.skipTest("only root can start ranks as another account")
        if subprocess.run(["test", "-x", os.path.realpath(cluster.TEST_WORKER)], user="nobody").returncode != 0:
            self.skipTest(f"nobody cannot enter the build folder {cluster.BIN}: ranks of that account cannot be shown here")
        c = cluster.Cluster(worker=cluster.TEST_WORKER, settings=settings, mode=0o755, **flags)
        self.addCleanup(c.close)
        for name in ("runs", "more", "data"):
            os.mkdir(os.path.join(c.folder, name))
            os.chmod(os.path.join(c.folder, name), 0o1777)
        shutil.move(c.data, os.path.join(c.folder, "data"))
        c.data = os.path.join(c.folder, "data", "train.npy")
        return c

    def test_ranks_are_of_the_configured_account_and_write_as_it(self):
        c = self.start()
        nobody = pwd.getpwnam("nobody").pw_uid
        job_id = c.submit(name="job-step20", steps=200)
        c.wait_state(job_id, "RUNNING")
        folder = c.run_folder(job_id)
        c.wait_step(folder, 5)
        for pid in c.rank_pids(job_id).values():
            status = cluster.read_text(f"/proc/{pid}/status")
            self.assertIn(f"Uid:\t{nobody}\t{nobody}\t{nobody}\t{nobody}\n", status)
            self.assertIn("CapPrm:\t0000000000000000\n", status)
            self.assertIn("NoNewPrivs:\t1\n", status)
        c.wait_state(job_id, "SUCCEEDED")
        for path in (folder, *(os.path.join(folder, name) for name in ("job.yaml", "rank-0.log", "metrics.jsonl", "exported"))):
            self.assertEqual(os.stat(path).st_uid, nobody, path)
        # What the account may not write to is not made for it, though hierad is root.
        os.chmod(os.path.join(c.folder, "more"), 0o755)
        refused = c.submit("--set", f"output.folder={c.folder}/more/run", name="refused")
        failed = c.wait_state(refused, "FAILED")
        self.assertEqual(failed["reason"], "USER_ERROR", failed)
        self.assertFalse(os.path.exists(os.path.join(c.folder, "more", "run")))

    def test_by_default_ranks_are_the_submitters_and_never_roots(self):
        c = self.start("access: everyone\nruns_folder: FOLDER/runs\n", root_ranks="refuse")
        path = c.job_file(name="job-step20", steps=200)
        for word in ("submit", "validate"):
            result = c.ctl(word, path)
            self.assertNotEqual(result.returncode, 0, result.stdout)
            self.assert_says(result.stderr, "ranks do not run as root", "root_ranks: allow")
        result = c.ctl("submit", path, "-o", "json", user="nobody", group="nogroup", extra_groups=[])
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_ranks_are(c, int(json.loads(result.stdout)["job"]["id"]), "nobody")

    def test_roots_own_jobs_run_as_root_where_that_is_said(self):
        c = self.start("access: everyone\nruns_folder: FOLDER/runs\n", root_ranks="allow")
        self.assert_ranks_are(c, c.submit(name="job-step20", steps=200), "root")
        result = c.ctl("submit", c.job_file(name="job-step20", steps=200), "-o", "json", user="nobody", group="nogroup", extra_groups=[])
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_ranks_are(c, int(json.loads(result.stdout)["job"]["id"]), "nobody")

    def assert_says(self, text, *words):
        for word in words:
            self.assertIn(word, text)

    def assert_ranks_are(self, c, job_id, name):
        c.wait_state(job_id, "RUNNING")
        pids = cluster.wait_for(lambda: [pid for pid in c.rank_pids(job_id).values() if pid], "the ranks' processes are known")
        for pid in pids:
            self.assertIn(f"Uid:\t{pwd.getpwnam(name).pw_uid}\t", cluster.read_text(f"/proc/{pid}/status"))
        c.wait_state(job_id, "SUCCEEDED")

    def test_what_a_submitter_may_not_see_no_answer_tells(self):
        c = self.start("access: everyone\nruns_folder: FOLDER/runs\n")
        private = os.path.join(c.folder, "private")
        os.makedirs(os.path.join(private, "run", "checkpoints", "step-000000009"))
        path = c.job_file(extra=f"output:\n  folder: {private}/run\n")
        self.assert_says(c.ctl("validate", path).stderr, "step-000000009")
        os.chmod(private, 0o700)
        for word in ("validate", "submit"):
            result = c.ctl(word, path, user="nobody", group="nogroup", extra_groups=[])
            self.assertNotIn("step-0", result.stdout + result.stderr)

    def test_a_folder_that_somebody_made_beforehand_is_not_written_to(self):
        c = self.start("access: everyone\nruns_folder: FOLDER/runs\n")
        trap = os.path.join(c.folder, "runs", "1-job-step20")
        os.mkdir(trap)
        os.chown(trap, pwd.getpwnam("nobody").pw_uid, -1)
        failed = c.wait_state(c.submit(name="job-step20", steps=20), "FAILED")
        self.assertEqual(failed["reason"], "USER_ERROR", failed)
        self.assert_says(failed["message"], "made beforehand by uid")
        self.assertEqual(os.listdir(trap), [])

    def test_a_link_that_is_put_there_after_the_submission_leads_no_rank_out(self):
        c = self.start()
        outside = os.path.join(c.folder, "outside.npy")
        shutil.copy(c.data, outside)   # whatever the rank's account may read: it is the roots that refuse
        node = c.json("nodes")["nodes"][0]["name"]
        self.assertEqual(c.ctl("drain", node).returncode, 0)
        job_id = c.submit(name="job-step20", steps=20)
        os.remove(c.data)
        os.symlink("../outside.npy", c.data)
        self.assertEqual(c.ctl("undrain", node).returncode, 0)
        failed = c.wait_state(job_id, "FAILED")
        self.assertEqual(failed["reason"], "DATA_ERROR", failed)
        self.assert_says(failed["message"], "allowed_roots", "leads out")

    def test_a_run_folder_that_becomes_a_link_leads_nothing_out(self):
        c = self.start()
        outside = os.path.join(c.folder, "outside")
        os.mkdir(outside)
        os.chmod(outside, 0o777)   # whatever the rank's account may write to: it is the roots that refuse
        node = c.json("nodes")["nodes"][0]["name"]
        self.assertEqual(c.ctl("drain", node).returncode, 0)
        job_id = c.submit("--set", f"output.folder={c.folder}/more/run", name="job-step20", steps=20)
        os.symlink("../outside", os.path.join(c.folder, "more", "run"))
        self.assertEqual(c.ctl("undrain", node).returncode, 0)
        failed = c.wait_state(job_id, "FAILED")
        self.assertEqual(failed["reason"], "USER_ERROR", failed)
        self.assert_says(failed["message"], "allowed_roots", "leads out")
        self.assertEqual(os.listdir(outside), [])

    def test_a_run_folder_that_is_exchanged_while_the_rank_starts_ends_it(self):
        c = self.start()
        outside, run = os.path.join(c.folder, "outside"), os.path.join(c.folder, "more", "run")
        os.mkdir(outside)
        os.chmod(outside, 0o777)
        os.chmod(c.points, 0o777)
        c.arm("worker.begin", "delay 0 3000")
        job_id = c.submit("--set", f"output.folder={run}", name="job-step20", steps=20)
        cluster.wait_for(lambda: os.path.exists(os.path.join(c.points, "worker.begin.fired")), "the rank begins")
        os.rename(run, run + ".away")
        os.symlink("../outside", run)
        failed = c.wait_state(job_id, "FAILED")
        self.assertEqual(failed["reason"], "USER_ERROR", failed)
        self.assert_says(failed["message"], "was exchanged for another")
        self.assertEqual(os.listdir(outside), [])

    def test_gc_removes_for_a_job_only_what_its_account_may_remove(self):
        c = self.start("access: everyone\nruns_folder: FOLDER/runs\n")
        victims = os.path.join(c.folder, "more", "victim", "checkpoints", "step-000000009")
        os.makedirs(victims)
        os.chmod(os.path.join(c.folder, "more", "victim"), 0o700)   # so that the submission cannot see that it holds checkpoints
        path = c.job_file(name="job-step20", steps=20, extra=f"output:\n  folder: {c.folder}/more/victim\n")
        result = c.ctl("submit", path, "-o", "json", user="nobody", group="nogroup", extra_groups=[])
        self.assertEqual(result.returncode, 0, result.stderr)
        failed = c.wait_state(int(json.loads(result.stdout)["job"]["id"]), "FAILED")
        self.assertEqual(failed["reason"], "USER_ERROR", failed)
        for words in (("--dry-run",), ()):
            result = c.ctl("gc", "--older-than", "0", *words)
            self.assert_says(result.stdout + result.stderr, "Permission denied")
            self.assertTrue(os.path.isdir(victims))

    def test_paths_of_jobs_stay_beneath_the_allowed_roots(self):
        c = self.start()
        os.symlink("/etc", os.path.join(c.folder, "more", "out"))
        for path in ("/etc/run", f"{c.folder}/more/out/run", f"{c.folder}/state/run", f"{c.folder}/morerun"):
            result = c.ctl("submit", c.job_file(), "--set", f"output.folder={path}")
            self.assertNotEqual(result.returncode, 0, path)
            self.assertIn("output.folder", result.stderr)
            self.assertIn("allowed_roots", result.stderr)
        result = c.ctl("submit", c.job_file(data="/etc/passwd"))
        self.assertIn("data.path", result.stderr)
        result = c.ctl("submit", c.job_file(), "--set", f"output.folder={c.folder}/more/in/run")
        self.assertEqual(result.returncode, 0, result.stderr)


if __name__ == "__main__":
    cluster.main(os.path.join("tests", "hiera-test-worker"))
