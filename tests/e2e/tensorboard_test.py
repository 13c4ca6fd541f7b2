"""The event files of a run, opened by TensorBoard itself, across a resume; and the pictures of a run."""
import json
import os
import subprocess
import sys
import unittest

import cluster

PYTHON = os.environ.get("HIERAD_PYTHON", sys.executable)
READ = """
import io, json, sys, warnings
warnings.filterwarnings("ignore")
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
run = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "images": 0})
run.Reload()
tags = run.Tags()
images = {}
for tag in tags["images"]:
    for event in run.Images(tag):
        picture = Image.open(io.BytesIO(event.encoded_image_string))
        picture.load()
        images[event.step] = [picture.width, picture.height, event.width, event.height, len(picture.convert("RGB").getcolors(1 << 24))]
print(json.dumps({"scalars": {tag: [[e.step, e.value] for e in run.Scalars(tag)] for tag in tags["scalars"]}, "images": images}))
"""


class TensorBoardTest(cluster.ClusterTest):
    def read(self, folder):
        result = subprocess.run([PYTHON, "-c", READ, folder], capture_output=True, text=True, timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout.splitlines()[-1])

    def test_tensorboard_reads_every_step_once_across_a_resume(self):
        c = self.cluster
        c.arm("worker.step", "kill 34")
        job_id = c.submit("--set", "output.pictures_every_epochs=2", steps=60, every=20, ranks=1)
        done = c.wait_state(job_id, "SUCCEEDED")
        self.assertEqual(done["attempt"], 2)
        folder = done["run_folder"]
        seen = self.read(folder)
        lines = c.metrics(folder)
        for tag, key in (("loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "lr"), ("time/step_s", "step_s"), ("time/forward_s", "forward_s")):
            points = seen["scalars"][tag]
            self.assertEqual([step for step, _ in points], list(range(1, 61)), tag)
            for (step, value), line in zip(points, lines):
                self.assertAlmostEqual(value, line[key], delta=1e-6 * abs(line[key]) + 1e-12)   # single precision
        # 64 samples in batches of 8: an epoch has 8 steps.
        self.assertEqual(sorted(map(int, seen["images"])), [16, 32, 48, 60])
        names = sorted(os.listdir(os.path.join(folder, "pictures")))
        self.assertEqual(names, [f"step-{step:09d}.png" for step in (16, 32, 48, 60)])
        for width, height, said_width, said_height, colors in seen["images"].values():
            self.assertEqual((width, height), (said_width, said_height))
            self.assertGreaterEqual(colors, 4, "white, shade, input, prediction")

    def test_they_can_be_left_out(self):
        c = self.cluster
        job_id = c.submit("--set", "output.pictures_every_epochs=0", "--set", "output.tensorboard=false", steps=10, ranks=1)
        folder = c.wait_state(job_id, "SUCCEEDED")["run_folder"]
        names = os.listdir(folder)
        self.assertNotIn("pictures", names)
        self.assertFalse([name for name in names if "tfevents" in name])


if __name__ == "__main__":
    cluster.main()
