"""From submit to SUCCEEDED: what a person sees of a run, and what is in its folder."""
import json
import os
import re
import struct
import subprocess

import cluster
from cluster import wait_for

STEPS = 40


class RunTest(cluster.ClusterTest):
    def test_a_run_from_submit_to_the_end(self):
        c = self.cluster
        job_id = c.submit(steps=STEPS, every=10)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(done["reason"], "COMPLETED")
        self.assertEqual(int(done["step"]), STEPS)
        self.assertEqual(int(done["total_steps"]), STEPS)
        self.assertEqual(int(done["attempt"]), 1)
        folder = done["run_folder"]

        # metrics.jsonl: every step once, finite, and the loss falls.
        self.assert_steps_once(folder, STEPS)
        lines = c.metrics(folder)
        for line in lines:
            self.assertGreater(line["loss"], 0)
            self.assertGreater(line["grad_norm"], 0)
            self.assertEqual(int(line["samples"]), 16)
        # hierad's history says the same, to the last bit, and so do the parts of a step.
        history = c.json("metrics", job_id)["metrics"]
        for line in history:
            for key in ("eval_loss", "loss_scale"):   # not of every step, or job
                if line[key] is None:
                    del line[key]
        self.assertEqual(history, lines)
        few = c.ctl("metrics", job_id, "--from", 5, "--to", 30, "--every", 10, "-o", "csv")
        self.assertEqual([row.split(",")[0] for row in few.stdout.splitlines()], ["step", "10", "20", "30"])
        for line in lines:
            parts = sum(line[key] for key in ("data_wait_s", "forward_s", "backward_s", "communication_s", "optimizer_s"))
            self.assertGreater(line["forward_s"], 0)
            self.assertGreater(line["backward_s"], 0)
            self.assertLessEqual(parts, line["step_s"] * 1.01)
        curve = os.path.join(c.folder, "loss.svg")
        self.assertEqual(c.ctl("metrics", job_id, "--plot", "--file", curve).returncode, 0)
        self.assertTrue(cluster.read_text(curve).startswith("<svg "))
        self.assertEqual(c.ctl("metrics", job_id, "--column", "lr", "--file", curve[:-3] + "png").returncode, 0)
        with open(curve[:-3] + "png", "rb") as file:
            self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")
        drawn = c.ctl("metrics", job_id, "--plot").stdout.splitlines()
        self.assertEqual(drawn[0], f"job {job_id}: loss")
        self.assertEqual(drawn[-1].split(), ["1", str(STEPS)])
        self.assertGreater(len(drawn), 15)
        first, last = (sum(line["loss"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
        self.assertLess(last, first * 0.9)

        # The folder as documented.
        names = os.listdir(folder)
        for name in ("checkpoints", "exported", "metrics.jsonl", "pictures", "train.log", "rank-0.log", "rank-1.log", "job.yaml"):
            self.assertIn(name, names)
        saved = sorted(os.listdir(os.path.join(folder, "checkpoints")))
        self.assertEqual((len(saved), saved[-1]), (2, "step-000000040"))   # the newest two
        for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
            self.assertIn(name, os.listdir(os.path.join(folder, "checkpoints", "step-000000040")))
        with open(os.path.join(folder, "exported", "model.safetensors"), "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "mask_token", "decoder_pred.weight"):
            self.assertIn(name, header)

        # The resolved job is itself a job.
        self.assertEqual(c.ctl("validate", os.path.join(folder, "job.yaml")).returncode, 0)

        # watch and logs of an ended job say everything and end; exit codes.
        watched = c.ctl("watch", job_id)
        self.assertEqual(watched.returncode, 0, watched.stderr)
        self.assertIn("SUCCEEDED", watched.stdout.upper())
        log = c.ctl("logs", job_id, "--rank", 1)
        self.assertEqual(log.returncode, 0, log.stderr)
        self.assertEqual(log.stdout, cluster.read_text(os.path.join(folder, "rank-1.log")))

        listed = c.json("list")["jobs"]
        self.assertEqual([int(job["id"]) for job in listed], [job_id])
        checkpoints = c.json("checkpoints", job_id)["checkpoints"]
        self.assertEqual([f"step-{int(info['step']):09d}" for info in checkpoints], saved[::-1])
        nodes = c.json("nodes")["nodes"]
        self.assertEqual(len(nodes), 1)
        self.assertEqual(len(nodes[0]["slots"]), 2)
        for words in (["list"], ["top"], ["describe", job_id], ["metrics", job_id], ["checkpoints", job_id], ["nodes"], ["version"]):
            result = c.ctl(*words)
            self.assertEqual(result.returncode, 0, f"{words}: {result.stderr}")
            self.assertTrue(result.stdout.strip())

    def test_follow_ends_with_the_jobs_exit_code(self):
        c = self.cluster
        good = c.ctl("submit", c.job_file(name="good", steps=20), "--follow")
        self.assertEqual(good.returncode, 0, good.stdout + good.stderr)
        bad = c.ctl("submit", c.job_file(name="bad", data="/nonexistent/x.npy"), "--follow")
        self.assertEqual(bad.returncode, 100, bad.stdout + bad.stderr)
        self.assertIn("/nonexistent/x.npy", bad.stdout + bad.stderr)

    def test_watching_a_run_while_it_runs(self):
        c = self.cluster
        job_id = c.submit(steps=150, every=50)
        watched = c.ctl("watch", job_id, "-o", "json")
        self.assertEqual(watched.returncode, 0, watched.stderr)
        messages = [json.loads(line) for line in watched.stdout.splitlines()]
        self.assertEqual(messages[-1]["job"]["state"], "SUCCEEDED")
        self.assertEqual([metric["step"] for message in messages for metric in message["metrics"]], list(range(1, 151)))
        folder = messages[-1]["job"]["run_folder"]
        self.assertEqual(len(c.metrics(folder)), 150)

        other = c.submit(name="other", steps=60, every=60)
        followed = c.ctl("logs", other, "--follow")
        self.assertEqual(followed.returncode, 0, followed.stderr)
        self.assertEqual(followed.stdout, cluster.read_text(os.path.join(c.run_folder(other), "rank-0.log")))
        self.assertIn("completed 60 steps", followed.stdout)
        tail = c.ctl("logs", other, "--tail", 2)
        self.assertEqual(tail.stdout.splitlines(), followed.stdout.splitlines()[-2:])

    def test_same_seed_same_weights_other_seed_other_weights(self):
        c = self.cluster
        digests = []
        for name, seed in (("a", 5), ("b", 5), ("c", 6)):
            job_id = c.submit(name=name, seed=seed, steps=12, every=12)
            folder = c.wait_state(job_id, "SUCCEEDED")["run_folder"]
            path = os.path.join(folder, "checkpoints", "step-000000012", "model.safetensors")
            digests.append(subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0])
        self.assertEqual(digests[0], digests[1])
        self.assertNotEqual(digests[0], digests[2])

    def test_jobs_wait_their_turn_and_a_queued_one_can_be_cancelled(self):
        c = self.cluster
        running = c.submit(name="long", steps=1000000, every=1000000)
        waiting = c.submit(name="next", steps=10)
        unwanted = c.submit(name="unwanted", steps=10)
        c.wait_state(running, "RUNNING")
        self.assertEqual(c.job(waiting)["state"], "QUEUED")
        self.assertTrue(c.job(waiting)["message"], "why it waits")
        self.assertEqual(c.ctl("cancel", unwanted).returncode, 0)
        self.assertEqual(c.wait_state(unwanted, "CANCELLED")["reason"], "CANCELLED")
        self.assertEqual(c.ctl("cancel", running).returncode, 0)
        c.wait_state(running, "CANCELLED")
        self.assertEqual(c.ctl("watch", running).returncode, 103)
        c.wait_state(waiting, "SUCCEEDED")
        # Ended is ended: cancelling again changes nothing.
        self.assertEqual(c.ctl("cancel", waiting).returncode, 0)
        self.assertEqual(c.job(waiting)["state"], "SUCCEEDED")

    def test_a_retried_submit_makes_no_second_job(self):
        c = self.cluster
        first = c.submit("--client-key", "abc", steps=10)
        self.assertEqual(c.submit("--client-key", "abc", steps=10), first)
        self.assertEqual(len(c.json("list")["jobs"]), 1)

    def test_unknown_job_and_no_hierad_have_their_exit_codes(self):
        c = self.cluster
        missing = c.ctl("describe", 4711)
        self.assertEqual(missing.returncode, 102)
        self.assert_one_sentence(missing.stderr)
        self.assertIn("4711", missing.stderr)
        c.kill_hierad()
        away = c.ctl("list")
        self.assertEqual(away.returncode, 2)
        self.assert_one_sentence(away.stderr)
        self.assertIn(c.server, away.stderr)
        self.assertEqual(c.ctl("no-such-command").returncode, 1)

    def test_stopping_hierad_in_session_lifetime_ends_everything(self):
        self.cluster.close()
        self.cluster = c = cluster.Cluster(agent_lifetime="session")
        self.addCleanup(c.close)
        job_id = c.submit(steps=1000000, every=1000000)
        c.wait_state(job_id, "RUNNING")
        agent = c.agent_pid()
        self.assertEqual(c.stop_hierad(), 0)
        wait_for(lambda: not cluster.alive(agent) and not c.marked(), "agent and workers are gone", 10)


if __name__ == "__main__":
    cluster.main()
