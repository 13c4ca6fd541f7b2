"""hierad may die at any moment: no acknowledged job is lost, no worker notices, and the run ends as it would have.

HIERAD_ROUNDS: rounds of each random test (default 3; the long test 20); HIERAD_SEED: of the moments, printed.
"""
import os
import random
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../e2e"))
import cluster
from cluster import wait_for

ROUNDS = int(os.environ.get("HIERAD_ROUNDS") or 3)
SEED = int(os.environ.get("HIERAD_SEED") or time.time_ns() % 1000000)


class HieradKilledTest(cluster.ClusterTest):
    def test_running_job_is_adopted_by_the_next_hierad(self):
        c = self.cluster
        c.pace(5)
        job_id = c.submit(steps=1500, every=500)
        c.wait_state(job_id, "RUNNING")
        folder, pids = c.run_folder(job_id), c.rank_pids(job_id)
        self.assertTrue(all(pids.values()), pids)
        c.kill_hierad()
        before = c.step(folder)
        c.wait_step(folder, before + 20)   # the ranks go on without it
        self.assertTrue(all(cluster.alive(pid) for pid in pids.values()))
        c.start()
        wait_for(lambda: c.job(job_id)["state"] in ("RUNNING", "SUCCEEDED") and int(c.job(job_id)["step"]) > before,
                 lambda: f"the job is adopted: {c.job(job_id)}", 20)
        c.pace(0)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 1)
        # An ended rank's pid is as it was, or no longer told.
        for rank, pid in c.rank_pids(job_id).items():
            self.assertIn(pid, (0, pids[rank]))
        self.assert_steps_once(folder, 1500)

    def test_job_that_ends_while_hierad_is_away_is_a_success(self):
        c = self.cluster
        c.pace(10)
        job_id = c.submit(steps=150, every=50)
        c.wait_state(job_id, "RUNNING")
        folder, pids = c.run_folder(job_id), c.rank_pids(job_id)
        c.kill_hierad()
        c.pace(0)
        c.wait_step(folder, 150)
        c.start()
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 1)
        self.assertFalse(any(cluster.alive(pid) for pid in pids.values()))
        self.assert_steps_once(folder, 150)

    def test_random_kills_lose_nothing(self):
        print(f"HIERAD_SEED={SEED} HIERAD_ROUNDS={ROUNDS}", flush=True)
        rng = random.Random(SEED)
        c = self.cluster
        jobs = [c.submit(name=f"job{i}", steps=60, every=20) for i in range(ROUNDS)]
        for _ in range(ROUNDS):
            time.sleep(rng.uniform(0, 2))   # the moment of the kill, not a wait for anything
            c.kill_hierad()
            c.start()
        for job_id in jobs:
            done = c.wait_state(job_id, "SUCCEEDED")
            self.assert_steps_once(done["run_folder"], 60)
        self.assertEqual(len(c.json("list")["jobs"]), ROUNDS)

    def test_acknowledged_submits_survive_a_kill_right_after_the_reply(self):
        c = self.cluster
        acknowledged = []
        for i in range(ROUNDS * 2):
            acknowledged.append(c.submit("--client-key", f"key-{i}", name=f"job{i}", ranks=2, steps=5, every=5))
            c.kill_hierad()
            c.start()
            listed = [int(job["id"]) for job in c.json("list")["jobs"]]
            self.assertEqual(sorted(listed), acknowledged)
            self.assertEqual(c.submit("--client-key", f"key-{i}", name=f"job{i}", ranks=2, steps=5, every=5), acknowledged[-1])
        for job_id in acknowledged:
            c.wait_state(job_id, "SUCCEEDED")

    def test_cancel_during_its_absence_is_done_at_its_return(self):
        c = self.cluster
        job_id = c.submit(steps=1000000, every=1000000)
        c.wait_state(job_id, "RUNNING")
        # Acknowledged, then killed at once: the wish is stored and carried out by the next hierad.
        self.assertEqual(c.ctl("cancel", job_id).returncode, 0)
        c.kill_hierad()
        c.start()
        c.wait_state(job_id, "CANCELLED", 30)
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 10)

    def test_graceful_restart_of_hierad_disturbs_no_run(self):
        c = self.cluster
        c.pace(10)
        job_id = c.submit(steps=600, every=200)
        c.wait_state(job_id, "RUNNING")
        pids, agent = c.rank_pids(job_id), c.agent_pid()
        self.assertEqual(c.stop_hierad(), 0)
        self.assertTrue(all(cluster.alive(pid) for pid in pids.values()))
        c.start()
        c.pace(0)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 1)
        self.assertEqual(c.agent_pid(), agent)


class LongAbsenceTest(cluster.ClusterTest):
    flags = {"hang_after": 5}

    def test_ranks_that_come_back_to_a_hierad_that_was_away_long_are_no_hang(self):
        c = self.cluster
        job_id = c.submit(steps=1000000, every=1000000)
        c.wait_state(job_id, "RUNNING")
        folder = c.run_folder(job_id)
        for away_s in (8, 14):
            c.kill_hierad()
            time.sleep(away_s)   # the absence: ranks' tries grow apart meanwhile
            before = c.step(folder)
            c.start()
            wait_for(lambda: int(c.job(job_id).get("step", 0)) > before, lambda: f"its ranks are back: {c.job(job_id)}")
            self.assertEqual(int(c.job(job_id)["attempt"]), 1, c.job(job_id))


if __name__ == "__main__":
    cluster.main()
