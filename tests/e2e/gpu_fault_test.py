"""A GPU's fault as the driver's library tells it (a fake one), from the agent's ear to what hierctl says of the job."""
import os
import signal
import unittest

import cluster


class GpuFaultTest(unittest.TestCase):
    def test_a_death_after_an_xid_is_of_that_class_and_says_what_to_do(self):
        library = os.environ["HIERAD_FAKE_NVML"]
        folder = cluster.tempfile.mkdtemp(prefix="hierad-nvml-", dir="/tmp")
        self.addCleanup(cluster.shutil.rmtree, folder)
        os.symlink(library, os.path.join(folder, "libnvidia-ml.so.1"))
        events = os.path.join(folder, "events")
        open(events, "w").close()
        c = cluster.Cluster(worker=cluster.TEST_WORKER, environment={"LD_LIBRARY_PATH": folder, "HIERAD_FAKE_NVML_EVENTS": events,
                                                                     "CUDA_VISIBLE_DEVICES": "0,1"})
        self.addCleanup(c.close)
        job_id = c.submit("--set", "resources.device=cuda", name="job-step20", steps=100000, ranks=1, extra="  gpu_fault_retries: 0\n")
        c.wait_state(job_id, "RUNNING")
        slot = c.job(job_id)["ranks"][0]["slot_id"]
        self.assertIn(slot, ("GPU-aaaa-0", "GPU-bbbb-1"))
        with open(events, "a") as file:
            file.write(f"{0 if slot == 'GPU-aaaa-0' else 1} xid 79\n")
        cluster.wait_for(lambda: any("Xid 79" in alert for alert in c.job(job_id).get("alerts", [])), lambda: f"it is known: {c.job(job_id)}", 20)
        os.kill(c.rank_pids(job_id)[0], signal.SIGABRT)
        failed = c.wait_state(job_id, "FAILED")
        self.assertEqual(failed["reason"], "GPU_FAULT", failed)
        for words in (slot, "Xid 79 (the card has fallen off the bus)", "restart the machine", "signal 6"):
            self.assertIn(words, failed["message"])

        # The card gets no more work, also after a restart, until the node is undrained.
        def faults():
            nodes = c.json("nodes")["nodes"]
            return {use["id"]: use["fault"] for node in nodes for use in node["slots"] if node["connected"] and use["kind"] == "CUDA"}

        other = "GPU-bbbb-1" if slot == "GPU-aaaa-0" else "GPU-aaaa-0"
        self.assertIn("Xid 79 (the card has fallen off the bus)", faults()[slot])
        self.assertIsNone(faults()[other])
        self.assertIn("out of use: Xid 79", c.ctl("nodes").stdout)
        open(events, "w").close()
        c.kill_hierad()
        os.kill(c.agent_pid(), signal.SIGKILL)
        c.start()
        cluster.wait_for(lambda: len(faults()) == 2, "the agent is back")
        self.assertIn("Xid 79", faults()[slot])
        on = [c.submit("--set", "resources.device=cuda", name="job-step20", steps=100000, ranks=1) for _ in range(2)]
        c.wait_state(on[0], "RUNNING")
        self.assertEqual(c.job(on[0])["ranks"][0]["slot_id"], other)
        self.assertEqual(c.job(on[1])["state"], "QUEUED")
        self.assertIn("out of use for a fault of its card", c.job(on[1])["message"])
        self.assertEqual(c.ctl("undrain", c.json("nodes")["nodes"][0]["name"]).returncode, 0)
        c.wait_state(on[1], "RUNNING")
        self.assertEqual(c.job(on[1])["ranks"][0]["slot_id"], slot)
        self.assertIsNone(faults()[slot])
        for job in on:
            c.ctl("cancel", job)
            c.wait_state(job, "CANCELLED")


if __name__ == "__main__":
    cluster.main(os.path.join("tests", "hiera-test-worker"))
