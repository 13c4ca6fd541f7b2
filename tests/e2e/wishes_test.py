"""What users ask of a job that lives: pause, resume, checkpoint, another rate, cancel at once; of nodes and of old folders.

The worker is the test engine: the same process, session, trainer and checkpoints around a step of a few numbers.
"""
import hashlib
import os
import signal
import subprocess
import time

import cluster
from cluster import wait_for

STEPS = 200


def weights(folder):
    with open(os.path.join(folder, "exported", "model.safetensors"), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class WishesTest(cluster.ClusterTest):
    flags = {"worker": cluster.TEST_WORKER, "hang-after": 5}

    def submit(self, name="job-step20", **job):
        return self.cluster.submit(name=name, steps=job.pop("steps", STEPS), every=job.pop("every", 1000), **job)

    def ok(self, *words):
        result = self.cluster.ctl(*words)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def running(self, **job):
        job_id = self.submit(**job)
        self.cluster.wait_state(job_id, "RUNNING")
        return job_id, self.cluster.run_folder(job_id)

    def test_pause_gives_the_slots_back_and_resume_loses_nothing(self):
        c = self.cluster
        quiet = weights(c.wait_state(self.submit(name="quiet"), "SUCCEEDED")["run_folder"])
        job_id, folder = self.running()
        c.wait_step(folder, 20)
        self.assertIn("checkpoint", self.ok("pause", job_id))
        paused = c.wait_state(job_id, "PAUSED", 20)
        self.assertEqual(c.marked(), {})
        other = c.wait_state(self.submit(name="other", steps=5), "SUCCEEDED")   # the slots are free
        self.assertEqual(int(other["attempt"]), 1)
        c.stop_hierad()
        c.start()
        self.assertEqual(c.job(job_id)["state"], "PAUSED")
        self.ok("resume", job_id)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["first_step"]), int(paused["step"]) + 1)
        self.assert_steps_once(folder, STEPS)
        self.assertEqual(weights(folder), quiet)
        self.assertEqual([a["reason"] for a in c.job(job_id)["attempts"]], ["PREEMPTED", "COMPLETED"])
        self.assertNotEqual(c.ctl("pause", job_id).returncode, 0)

    def test_checkpoint_rate_and_cancel_now(self):
        c = self.cluster
        job_id, folder = self.running(steps=1000000)
        c.wait_step(folder, 5)
        self.ok("checkpoint", job_id)
        saved = c.json("checkpoints", job_id)["checkpoints"]
        self.assertEqual(len(saved), 1)
        before = c.metrics(folder)[-1]
        self.assertIn("0.0006", self.ok("set", job_id, "lr=6e-4"))
        # The warm-up rises on: a fifth of what it would have been.
        wait_for(lambda: c.metrics(folder)[-1]["lr"] < before["lr"], lambda: f"another rate: {before}, {c.metrics(folder)[-1]}", 20)
        self.assertIn("0.0006", self.ok("describe", job_id, "-o", "json"))
        wait_for(lambda: len(c.json("checkpoints", job_id)["checkpoints"]) == 2, "the rate's own checkpoint", 20)
        self.assertEqual(c.ctl("set", job_id, "weight_decay=1").returncode, 1)
        # Its ranks say a line a step from debug on, and no more after warn.
        def steps(rank):
            with open(os.path.join(folder, f"rank-{rank}.log")) as log:
                return log.read().count(" debug ")

        self.assertEqual(steps(0) + steps(1), 0)
        self.ok("set", job_id, "log_level=debug")
        wait_for(lambda: min(steps(0), steps(1)) > 3, "lines of level debug of both ranks", 20)
        self.assertRegex(self.ok("describe", job_id), r"log level +debug")
        self.ok("set", job_id, "log_level=warn")

        def silent():
            before = steps(1)
            time.sleep(0.5)
            return steps(1) == before

        wait_for(silent, "silence after warn", 20)
        os.kill(c.rank_pids(job_id)[0], signal.SIGSTOP)
        self.ok("cancel", "--now", job_id)
        c.wait_state(job_id, "CANCELLED", 10)
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 5)

    def test_hang_is_seen_named_and_tried_again(self):
        c = self.cluster
        job_id, folder = self.running(steps=400, every=20)
        c.wait_step(folder, 45)
        pid = c.rank_pids(job_id)[1]
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: f"rank 1 (pid {pid}" in c.job(job_id)["note"] or c.job(job_id)["reason"] == "HANG", "the stopped rank is seen", 15)
        wait_for(lambda: c.job(job_id)["reason"] == "HANG", lambda: f"the hang is found: {c.job(job_id)}", 30)
        self.assertRegex(c.job(job_id)["message"], rf"rank 1 \(pid {pid} .*no sign of life.*wait in all_reduce of [\d,]+ floats, step \d+")
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertGreater(int(done["first_step"]), 20)
        self.assert_steps_once(folder, 400)
        self.assertFalse(cluster.alive(pid))

    def test_preemption_by_signal_counts_no_failure(self):
        c = self.cluster
        job_id, folder = self.running(attempts=1)
        for attempt, number in ((1, signal.SIGTERM), (2, signal.SIGUSR1), (3, signal.SIGTERM)):
            wait_for(lambda: int(c.job(job_id)["attempt"]) == attempt and c.job(job_id)["state"] == "RUNNING", "the attempt runs", 30)
            os.kill(c.rank_pids(job_id)[attempt % 2], number)   # one rank alone hears it
            if attempt == 3:
                os.kill(c.rank_pids(job_id)[0], number)
            wait_for(lambda: len(c.job(job_id)["attempts"]) == attempt, lambda: f"it ends: {c.job(job_id)}", 30)
            last = c.job(job_id)["attempts"][-1]
            self.assertEqual(last["reason"], "PREEMPTED", last)
            self.assertIn("saved", last["message"])
        c.wait_state(job_id, "SUCCEEDED")
        self.assert_steps_once(folder, STEPS)

    def test_drain_list_logs_gc(self):
        c = self.cluster
        node = c.json("nodes")["nodes"][0]["name"]
        self.assertIn("gets no more work", self.ok("drain", node))
        job_id = self.submit(name="first", steps=5)
        self.assertIn("drained", c.job(job_id)["message"])
        self.ok("undrain", node)
        folder = c.wait_state(job_id, "SUCCEEDED")["run_folder"]
        second = self.submit(name="second", steps=5)
        c.wait_state(second, "SUCCEEDED")
        self.assertEqual(self.ok("list", "--name", "firs", "--columns", "id,name").split(), ["ID", "NAME", str(job_id), "first"])
        self.assertEqual(self.ok("list", "--since", "1h", "--state", "succeeded", "--columns", "id").split(), ["ID", str(second), str(job_id)])
        self.assertIn("there is no column", c.ctl("list", "--columns", "nmae").stderr)
        log = self.ok("logs", job_id, "--grep", "^[-0-9T:.]+Z .* rank=0: end \\(", "--attempt", 1)
        self.assertEqual(len(log.strip().splitlines()), 1, log)
        none = c.ctl("logs", job_id, "--attempt", 2)
        self.assertEqual((none.returncode, none.stdout), (102, ""))
        self.assertIn("no log of attempt 2", none.stderr)
        self.assertEqual(self.ok("logs", job_id, "--since", "1h"), self.ok("logs", job_id).partition("\n")[2])
        self.assertEqual(c.ctl("logs", job_id, "--grep", "(").returncode, 1)
        checkpoints = os.path.join(folder, "checkpoints")
        self.assertIn("would be freed", self.ok("gc", "--dry-run", "--older-than", 0))
        self.assertTrue(os.path.isdir(checkpoints))
        self.assertIn("nothing to remove", self.ok("gc"))
        self.assertIn("freed", self.ok("gc", "--older-than", 0))
        self.assertFalse(os.path.exists(checkpoints))
        self.assertTrue(os.path.exists(os.path.join(folder, "exported", "model.safetensors")))
        self.assertEqual(c.json("checkpoints", job_id)["checkpoints"], [])
        # A run folder goes whole, but not while a job writes inside it.
        inner = c.submit("--set", f"output.folder={folder}/more", name="inner", steps=1000000, every=1000)
        c.wait_state(inner, "RUNNING")
        self.ok("gc", "--whole-runs", "--older-than", 0)
        self.assertTrue(os.path.isdir(f"{folder}/more"))
        self.assertFalse(os.path.exists(c.job(second)["run_folder"]))
        self.ok("cancel", inner)
        c.wait_state(inner, "CANCELLED")
        self.ok("gc", "--whole-runs", "--older-than", 0)
        self.assertFalse(os.path.exists(folder))

    def test_full_disk_lets_nothing_in_and_loses_nothing(self):
        c = self.cluster
        job_id, folder = self.running(every=20, steps=500)
        c.wait_step(folder, 50)
        c.arm("fs.free_bytes", "value 0 1000")
        wait_for(lambda: "nearly full" in c.job(job_id)["note"], lambda: f"the running job says so: {c.job(job_id)}", 15)
        # Within the seconds that a look at a disk holds for.
        refused = wait_for(lambda: (lambda r: r if r.returncode == 1 else None)(c.ctl("submit", c.job_file(name="late", steps=5))), "a job is refused", 10)
        self.assertIn("hierctl gc --dry-run", refused.stderr)
        log = os.path.join(folder, "rank-0.log")
        wait_for(lambda: "could not be written" in cluster.read_text(log), "a save finds no room", 20)
        kept = [name for name in os.listdir(os.path.join(folder, "checkpoints")) if name.startswith("step-")]
        self.assertEqual(len(kept), 2, kept)
        c.disarm("fs.free_bytes")
        c.wait_state(job_id, "SUCCEEDED")
        self.assert_steps_once(folder, 500)
        wait_for(lambda: c.ctl("submit", c.job_file(name="late", steps=5)).returncode == 0, "jobs are let in again", 10)

    def test_shells_complete_and_the_man_page_reads(self):
        c = self.cluster
        script = self.ok("completion", "bash") + """
COMP_WORDS=(hierctl chec); COMP_CWORD=1; _hierctl; echo "${COMPREPLY[*]}"
COMP_WORDS=(hierctl list --sta); COMP_CWORD=2; _hierctl; echo "${COMPREPLY[*]}"
COMP_WORDS=(hierctl completion z); COMP_CWORD=2; _hierctl; echo "${COMPREPLY[*]}"
COMP_WORDS=(hierctl list -o j); COMP_CWORD=3; _hierctl; echo "${COMPREPLY[*]}"
"""
        result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
        self.assertEqual(result.stdout.splitlines(), ["checkpoints checkpoint", "--state", "zsh", "json"], result.stderr)
        for shell in ("zsh", "fish"):
            self.assertIn("checkpoint", self.ok("completion", shell))
        page = self.ok("man")
        for word in (".TH HIERCTL 1", ".SS pause ID", "\\-\\-dry\\-run", ".SH EXIT STATUS"):
            self.assertIn(word, page)
        self.assertIn("did you mean submit?", c.ctl("sumbit", "x").stderr)
        self.assertIn("did you mean --state?", c.ctl("list", "--stat", "x").stderr)


if __name__ == "__main__":
    cluster.main("tests/hiera-test-worker")
