"""A killed rank costs nothing but time: the run goes on from the newest checkpoint and ends with the very same bits.

HIERAD_ROUNDS: how many runs are disturbed (default 3; the long test 20); HIERAD_SEED: of the random moments, printed.
"""
import hashlib
import os
import random
import shutil
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../e2e"))
import cluster
from cluster import wait_for

ROUNDS = int(os.environ.get("HIERAD_ROUNDS") or 3)
SEED = int(os.environ.get("HIERAD_SEED") or time.time_ns() % 1000000)
STEPS, EVERY = 150, 9


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def final_weights(folder):
    return os.path.join(folder, "checkpoints", f"step-{STEPS:09d}", "model.safetensors")


def newest_checkpoint(folder):
    steps = [int(name[5:]) for name in os.listdir(os.path.join(folder, "checkpoints")) if name.startswith("step-")]
    return max(steps, default=0)


class ResumeTest(cluster.ClusterTest):
    def test_killed_ranks_change_no_bit(self):
        print(f"HIERAD_SEED={SEED} HIERAD_ROUNDS={ROUNDS}", flush=True)
        rng = random.Random(SEED)
        c = self.cluster
        quiet = c.wait_state(c.submit(name="quiet", steps=STEPS, every=EVERY), "SUCCEEDED")
        wanted = digest(final_weights(quiet["run_folder"]))

        for round_number in range(ROUNDS):
            kill_at = rng.randrange(2 * EVERY + 1, STEPS - 20)
            victims = rng.choice(([0], [1], [0, 1]))
            with self.subTest(round=round_number, kill_at=kill_at, victims=victims):
                c.pace(10)
                job_id = c.submit(name=f"disturbed{round_number}", steps=STEPS, every=EVERY, backoff=2)
                c.wait_state(job_id, "RUNNING")
                folder, pids = c.run_folder(job_id), c.rank_pids(job_id)
                c.wait_checkpoint(job_id, EVERY)   # training goes on while it is written
                c.wait_step(folder, kill_at)
                time.sleep(rng.uniform(0, 0.05))   # anywhere in a step or a save
                for rank in victims:
                    os.kill(pids[rank], signal.SIGKILL)
                c.wait_state(job_id, "QUEUED")
                c.pace(0)
                self.assertFalse(any(cluster.alive(pid) for pid in pids.values()), "the whole gang has ended")
                newest = newest_checkpoint(folder)
                self.assertGreaterEqual(newest, EVERY)
                done = c.wait_state(job_id, "SUCCEEDED")
                self.assertEqual(int(done["attempt"]), 2)
                self.assertEqual(int(done["first_step"]), newest + 1)
                self.assert_steps_once(folder, STEPS)
                self.assertEqual(digest(final_weights(folder)), wanted)

    def test_killed_before_the_first_checkpoint_begins_anew(self):
        c = self.cluster
        c.pace(50)
        job_id = c.submit(name="early", steps=40, every=1000)
        c.wait_state(job_id, "RUNNING")
        folder = c.run_folder(job_id)
        c.wait_step(folder, 3)
        os.kill(c.rank_pids(job_id)[1], signal.SIGKILL)
        c.pace(0)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["first_step"]), 1)
        self.assert_steps_once(folder, 40)

    def test_rank_that_always_dies_ends_the_job_with_a_reason(self):
        c = self.cluster
        job_id = c.submit(name="doomed", steps=1000000, every=1000000, attempts=2)
        for attempt in (1, 2):
            wait_for(lambda: int(c.job(job_id)["attempt"]) == attempt and c.job(job_id)["state"] == "RUNNING",
                     lambda: f"attempt {attempt} runs: {c.job(job_id)}", 60)
            os.kill(c.rank_pids(job_id)[0], signal.SIGKILL)
        done = c.wait_state(job_id, "FAILED")
        self.assertIn(done["reason"], ("CRASHED",))
        self.assertIn("signal 9", done["message"])
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 10)


class DamagedCheckpointTest(cluster.ClusterTest):
    """While no rank runs (retry.backoff_s is long) the checkpoints are spoilt."""

    def interrupted(self, damage):
        c = self.cluster
        c.pace(10)
        job_id = c.submit(name="damaged", steps=400, every=EVERY, keep=4, backoff=4)
        c.wait_state(job_id, "RUNNING")
        folder = c.run_folder(job_id)
        wait_for(lambda: len(c.json("checkpoints", job_id)["checkpoints"]) >= 3, "three checkpoints", 60)
        os.kill(c.rank_pids(job_id)[0], signal.SIGKILL)
        c.wait_state(job_id, "QUEUED")
        c.pace(0)
        names = sorted(name for name in os.listdir(os.path.join(folder, "checkpoints")) if name.startswith("step-"))
        damage([os.path.join(folder, "checkpoints", name) for name in names])
        return job_id, folder, names

    @staticmethod
    def flip(path):
        with open(os.path.join(path, "model.safetensors"), "r+b") as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))

    def test_damaged_newest_is_passed_over(self):
        job_id, folder, names = self.interrupted(lambda paths: self.flip(paths[-1]))
        done = self.cluster.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["first_step"]), int(names[-2][5:]) + 1)
        self.assert_steps_once(folder, 400)

    def test_all_damaged_stops_with_the_reason(self):
        job_id, folder, names = self.interrupted(lambda paths: [self.flip(path) for path in paths])
        done = self.cluster.wait_state(job_id, "FAILED")
        self.assertEqual(done["reason"], "CHECKPOINT", done["message"])
        self.assertIn("checkpoint", done["message"])
        self.assertLessEqual(int(done["attempt"]), 3, "no endless loop")
        self.assertLess(self.cluster.step(folder), 400)

    def test_half_written_checkpoint_is_never_used(self):
        def damage(paths):
            # As a crash during a save leaves it: everything there but the manifest, which comes last.
            torn = paths[-1][:-9] + f"{int(paths[-1][-9:]) + EVERY:09d}"
            shutil.copytree(paths[-1], torn)
            os.remove(os.path.join(torn, "manifest.json"))
        job_id, folder, names = self.interrupted(damage)
        done = self.cluster.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["first_step"]), int(names[-1][5:]) + 1)
        self.assert_steps_once(folder, 400)


if __name__ == "__main__":
    cluster.main()
