"""A client of hiera-parity: one long-lived process, a line of JSON a request, tensors in safetensors files."""
import json
import os
import select
import shutil
import subprocess
import tempfile

from safetensors.torch import load_file, save_file

import fair

MODEL_KEYS = fair.CONSTRUCTOR_KEYS + ("task", "variant", "mask_ratio", "norm_target")


class Refused(Exception):
    """Ours refuses; the text is its sentence."""


class Broken(Exception):
    """The process died, hung or answered with an internal error."""


def find_binary():
    named = os.environ.get("HIERA_PARITY")
    source = os.environ.get("HIERAD_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..", ".."))
    folders = [os.environ.get("HIERAD_BIN_DIR"), os.path.join(source, "build", "release", "bin"),
               os.path.join(source, "build", "cpu-only", "bin")]
    found = [named] if named else [os.path.join(f, "hiera-parity") for f in folders if f]
    for path in found:
        if os.path.exists(path):
            return path
    raise SystemExit(f"hiera-parity is not built (looked for {', '.join(found)}): cmake --build --preset release "
                     "--target hiera-parity, or name it by HIERA_PARITY")


class Engine:
    def __init__(self, device="cpu", threads=1):
        self.device, self.threads, self.timeout_s = device, threads, 900
        self.folder = tempfile.mkdtemp(prefix="hiera-parity-")
        self.errors = open(os.path.join(self.folder, "stderr"), "w+b")
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        self.process = subprocess.Popen([find_binary()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, env=environment)

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def ask(self, **request):
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], self.timeout_s)[0]:
                self.process.kill()
                raise Broken(f"no answer to {request['cmd']} in {self.timeout_s} s")
            line = self.process.stdout.readline()
        except (BrokenPipeError, OSError):
            line = b""
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            raise Broken(f"hiera-parity ended with {code}: {self.errors.read()[-600:].decode(errors='replace').strip()}")
        reply = json.loads(line)
        if "refused" in reply:
            raise Refused(reply["refused"])
        if "error" in reply:
            raise Broken(reply["error"])
        return reply

    def _path(self, name):
        return os.path.join(self.folder, name + ".safetensors")

    @staticmethod
    def model_spec(args, run):
        """Every argument, resolved: ours must not depend on its own defaults to agree."""
        spec = {k: list(v) if isinstance(v, tuple) else v for k, v in args.items()}
        spec.update(task=run["task"], variant=run["variant"], norm_target=run["norm_target"])
        if run["task"] == "mae":
            spec["mask_ratio"] = run["mask_ratio"]
        return spec

    def check(self, args, run):
        """Raises Refused where ours refuses the model; allocates nothing."""
        self.ask(cmd="table", model=self.model_spec(args, run))

    def build(self, args, run, model, optimizer=None, accumulation=1):
        """Ours with the model's weights. `optimizer`: job.yaml's keys; default: one that lays gradients open."""
        weights = self._path("weights")
        save_file({k: v.detach().float().cpu().contiguous() for k, v in model.named_parameters()}, weights)
        request = {"seed": run["weights_seed"], "device": self.device, "threads": self.threads, "weights": weights,
                   "step": {"mode": run["mode"], "precision": run["dtype"], "sdpa_backend": run["sdpa_backend"],
                            "batch_per_rank": run["batch"], "accumulation": accumulation}}
        if optimizer:
            request["optimizer"] = optimizer
        try:
            return self.ask(cmd="build", model=self.model_spec(args, run), **request)["describe"]
        finally:
            os.remove(weights)

    def draw(self, epoch, visits):
        """The engine's own masks, drop-path and dropout draws."""
        self.ask(cmd="draw", epoch=epoch, visits=visits, out=self._path("drawn"))
        return load_file(self._path("drawn"))

    def send(self, cmd, epoch, inputs):
        """The results by name (fp32, CPU); of trace: the operations."""
        save_file({k: v.cpu().contiguous() for k, v in inputs.items()}, self._path("in"))
        if cmd == "trace":
            return self.ask(cmd=cmd, epoch=epoch, inputs=self._path("in"))["trace"]
        self.ask(cmd=cmd, epoch=epoch, inputs=self._path("in"), out=self._path("out"))
        results = load_file(self._path("out"))
        os.remove(self._path("out"))
        return results

    def initial(self, model_spec, seed):
        self.ask(cmd="init", model=model_spec, seed=seed, device=self.device, out=self._path("init"))
        results = load_file(self._path("init"))
        os.remove(self._path("init"))
        return results
