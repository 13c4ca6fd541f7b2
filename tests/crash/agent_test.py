"""The agent: killed, it takes every rank with it and the job goes on elsewhere or later; restarted, it takes them back.
And the end of a job is the end of everything that the job has started.
"""
import os
import signal
import stat
import sys
import textwrap

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../e2e"))
import cluster
from cluster import BIN, wait_for


class AgentKilledTest(cluster.ClusterTest):
    def test_killed_agent_leaves_no_orphan_and_the_job_goes_on(self):
        c = self.cluster
        c.pace(10)
        job_id = c.submit(steps=800, every=20, attempts=5)
        c.wait_state(job_id, "RUNNING")
        folder, pids = c.run_folder(job_id), c.rank_pids(job_id)
        c.wait_checkpoint(job_id, 40)
        agent = c.agent_pid()
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: not any(cluster.alive(pid) for pid in pids.values()), "its ranks are gone", 10)
        wait_for(lambda: c.agent_pid() not in (0, agent), "hierad has started a new agent", 20)
        c.pace(0)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 2)
        self.assertGreater(int(done["first_step"]), 40)
        self.assert_steps_once(folder, 800)
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 10)

    def test_agent_and_hierad_killed_together(self):
        c = self.cluster
        c.pace(10)
        job_id = c.submit(steps=800, every=20)
        c.wait_state(job_id, "RUNNING")
        folder = c.run_folder(job_id)
        c.wait_checkpoint(job_id, 20)
        os.kill(c.agent_pid(), signal.SIGKILL)
        c.kill_hierad()
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 10)
        c.pace(0)
        c.start()
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 2)
        self.assertGreater(int(done["first_step"]), 20)
        self.assert_steps_once(folder, 800)

    def test_restarted_agent_takes_its_ranks_back(self):
        c = self.cluster
        c.pace(10)
        job_id = c.submit(steps=1500, every=500)
        c.wait_state(job_id, "RUNNING")
        folder, pids, agent = c.run_folder(job_id), c.rank_pids(job_id), c.agent_pid()
        os.kill(agent, signal.SIGTERM)
        wait_for(lambda: not cluster.alive(agent), "the agent has left", 10)
        self.assertTrue(all(cluster.alive(pid) for pid in pids.values()), "its ranks go on")
        wait_for(lambda: c.agent_pid() not in (0, agent), "hierad has started a new agent", 20)
        before = c.step(folder)
        c.wait_step(folder, before + 20)
        self.assertEqual(c.rank_pids(job_id), pids)
        c.pace(0)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(int(done["attempt"]), 1)
        self.assert_steps_once(folder, 1500)

    def test_frozen_rank_does_not_hold_a_job_for_ever(self):
        c = self.cluster
        job_id = c.submit(steps=1000000, every=1000000)
        c.wait_state(job_id, "RUNNING")
        pids = c.rank_pids(job_id)
        os.kill(pids[1], signal.SIGSTOP)
        self.assertEqual(c.ctl("cancel", job_id).returncode, 0)
        c.wait_state(job_id, "CANCELLED", 30)
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 10)


class StubbornWorkerTest(cluster.ClusterTest):
    """The real worker under a wrapper that leaves deaf children about."""

    def setUp(self):
        # hierad starts the agent beside itself, and that the worker beside itself: so a folder of links with one changed.
        self.bin = cluster.tempfile.mkdtemp(prefix="hierad-bin-", dir="/tmp")
        self.addCleanup(cluster.shutil.rmtree, self.bin)
        for name in os.listdir(BIN):
            source = os.path.realpath(os.path.join(BIN, name))
            if os.path.isfile(source) and name != "hiera-worker":
                # Copies: a program finds what is beside it by /proc/self/exe, which sees through links.
                cluster.shutil.copy2(source, os.path.join(self.bin, name)) if name.startswith("hierad") else \
                    os.symlink(source, os.path.join(self.bin, name))
        wrapper = os.path.join(self.bin, "hiera-worker")
        with open(wrapper, "w") as out:
            out.write(textwrap.dedent(f"""\
                #!/bin/sh
                trap '' TERM
                (setsid env -i /bin/sh -c 'trap "" TERM HUP INT; echo $$ > hidden-'$RANK'.tmp; mv hidden-'$RANK'.tmp hidden-'$RANK'; while :; do sleep 1; done' &)
                (trap '' TERM; while :; do sleep 1; done) &
                {os.path.join(os.path.abspath(BIN), "hiera-worker")} "$@"
                exit $?
                """))
        os.chmod(wrapper, 0o755)
        self.old, cluster.BIN = cluster.BIN, self.bin
        self.addCleanup(setattr, cluster, "BIN", self.old)
        super().setUp()

    def hidden(self, folder):
        found = []
        for rank in (0, 1):
            path = os.path.join(folder, f"hidden-{rank}")
            wait_for(lambda: os.path.exists(path), f"{path} is there", 20)
            found.append(int(cluster.read_text(path)))
        return found

    def test_cancel_leaves_no_survivor_within_the_grace(self):
        c = self.cluster
        job_id = c.submit(steps=1000000, every=1000000)
        c.wait_state(job_id, "RUNNING")
        hidden = self.hidden(c.run_folder(job_id))
        self.assertTrue(all(cluster.alive(pid) for pid in hidden))
        self.assertEqual(c.ctl("cancel", job_id).returncode, 0)
        c.wait_state(job_id, "CANCELLED", 20)
        self.assertFalse([pid for pid in hidden if cluster.alive(pid)])
        wait_for(lambda: not c.marked(), lambda: f"no process is left: {c.marked()}", 5)

    def test_finished_job_leaves_no_survivor(self):
        c = self.cluster
        job_id = c.submit(steps=20)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertFalse([pid for pid in self.hidden(done["run_folder"]) if cluster.alive(pid)])

    def test_killed_agent_leaves_no_survivor(self):
        c = self.cluster
        job_id = c.submit(steps=1000000, every=1000000)
        c.wait_state(job_id, "RUNNING")
        hidden = self.hidden(c.run_folder(job_id))
        c.kill_hierad()
        os.kill(c.agent_pid(), signal.SIGKILL)
        wait_for(lambda: not [pid for pid in hidden if cluster.alive(pid)] and not c.marked(),
                 lambda: f"no process is left: {c.marked()}", 10)


if __name__ == "__main__":
    cluster.main()
