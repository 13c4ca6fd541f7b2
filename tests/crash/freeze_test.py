"""A frozen process (SIGSTOP: alive, its socket open, its lock held) must not hold a job for ever, and is named."""
import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../e2e"))
import cluster
from cluster import wait_for


class FreezeTest(cluster.ClusterTest):
    def test_frozen_rank_is_named_and_the_job_goes_on(self):
        c = self.cluster
        job_id = c.submit(steps=3000, every=50)
        c.wait_state(job_id, "RUNNING")
        folder, pids = c.run_folder(job_id), c.rank_pids(job_id)
        c.wait_step(folder, 60)
        os.kill(pids[1], signal.SIGSTOP)
        wait_for(lambda: c.job(job_id)["reason"], lambda: f"the attempt ends: {c.job(job_id)}\n{c.logs(job_id)}", 150)
        job = c.job(job_id)
        self.assertIn(job["reason"], ("HANG", "PEER_LOST"))
        self.assertIn("rank 1", job["message"].replace("ranks 1", "rank 1"))
        wait_for(lambda: not cluster.alive(pids[1]), "the frozen rank is ended", 60)
        wait_for(lambda: int(c.job(job_id)["attempt"]) == 2 and c.job(job_id)["state"] == "RUNNING",
                 lambda: f"the job goes on: {c.job(job_id)}", 60)
        self.assertGreater(int(c.job(job_id)["first_step"]), 50)

    def test_frozen_agent_is_given_up_and_taken_back(self):
        c = self.cluster
        job_id = c.submit(steps=1000000, every=1000000)
        c.wait_state(job_id, "RUNNING")
        agent = c.agent_pid()
        os.kill(agent, signal.SIGSTOP)
        self.addCleanup(lambda: cluster.alive(agent) and os.kill(agent, signal.SIGCONT))
        wait_for(lambda: not c.json("nodes")["nodes"][0]["connected"], "the node is given up", 60)
        os.kill(agent, signal.SIGCONT)
        wait_for(lambda: c.json("nodes")["nodes"][0]["connected"], "the node is back", 30)
        self.assertEqual(c.ctl("cancel", job_id).returncode, 0)
        c.wait_state(job_id, "CANCELLED", 60)
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 10)


if __name__ == "__main__":
    cluster.main()
