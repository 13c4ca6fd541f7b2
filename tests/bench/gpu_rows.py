"""The rows of docs/performance.md: `tools/bench gpu`, and on several GPUs of one machine `tools/bench gpu --world 1,2,4,8`
(one B = 128 a rank, and --strong: 4,096 samples a step over all ranks). Every contender of a row runs in this one call, on
the same cards, one after the other, for each number of ranks and each optimizer; a line of JSON each goes to the file named by --out, and what stands there already for the same
row, contender, commit and card is not run again, so an interrupted call goes on where it ended."""
import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def row(variant, batch, input=(224, 224), chans=8, q_pool=2, patch_stride=4, steps=30, warmup=10):
    return {"variant": variant, "batch": batch, "input": list(input), "chans": chans, "q_pool": q_pool,
            "patch_stride": patch_stride, "steps": steps, "warmup": warmup}


ROWS = {
    "base": row("base", 128), "tiny": row("tiny", 128), "small": row("small", 128),
    "large64": row("large", 64), "large128": row("large", 128),
    **{f"{v}_q{q}": row(v, 128, q_pool=q) for v in ("tiny", "small", "base") for q in (1, 3)},
    "base8": row("base", 8), "base1024": row("base", 1024, steps=30, warmup=5),
    # Activations computed again: stage 3, stages 2 and 3, the decoder. By step.mode fused alone.
    **{f"base1024_{name}": dict(row("base", 1024, steps=30, warmup=5), **keys)
       for name, keys in (("again3", {"again": [3]}), ("again23", {"again": [2, 3]}), ("againdec", {"again_decoder": True}))},
    "signal128": row("base", 128, input=(1024,), patch_stride=16), "signal512": row("base", 512, input=(1024,), patch_stride=16),
}
STRONG, STRONG_MOST = 4096, 1024   # samples of a step; of them at once on a card at most
OURS = ("fused", "fused --tune", "graph_safe --any-order", "graph_safe", "optimized", "eager")
PEERS = ("fair", "hiera-optim")


def job_yaml(name, spec, mode):
    """The row as a job, since patch_stride has no option of its own."""
    model = {"variant": spec["variant"], "input_size": spec["input"], "in_chans": spec["chans"], "q_pool": spec["q_pool"],
             "mask_ratio": 0.6}
    if len(spec["input"]) == 1 and spec["patch_stride"] == 16:
        model.update(patch_kernel=[16], patch_stride=[16], patch_padding=[0])
    return {"name": name.replace("_", "-"), "model": model, "data": {"source": "synthetic"}, "schedule": {"steps": 100},
            "step": {"batch_per_rank": spec["batch"], "accumulation": spec.get("accumulation", 1), "precision": "bf16", "mode": mode,
                     "shard_optimizer": spec.get("shard", False), "checkpoint_decoder": spec.get("again_decoder", False),
                     **({"checkpoint_stages": spec["again"]} if "again" in spec else {})},
            "optimizer": {"name": spec.get("optimizer", "adamw")}, "resources": {"ranks": spec.get("world", 1)}}


def card():
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "no GPU"


def commit(binary):
    words = subprocess.run([binary, "--version"], capture_output=True, text=True).stdout.split()
    return words[-1].strip("()") if words else "unknown"


def scaled(name, spec, options):
    """The row for each number of ranks and each optimizer: as it is where --world is not given."""
    if not options.world:
        yield name, spec
        return
    for optimizer in options.optimizers.split(","):
        for world in options.world:
            batch, accumulation = spec["batch"], 1
            if options.strong:
                batch = min(STRONG // world, STRONG_MOST)
                accumulation = STRONG // (batch * world)
            yield (f"{name}_strong" if options.strong else name), dict(
                spec, batch=batch, accumulation=accumulation, world=world, optimizer=optimizer, read=options.read,
                **({"channels": options.channels} if options.channels else {}), **({"shard": True} if options.shard else {}))


def command_of(contender, name, spec, folder, bench, python, device):
    if contender in PEERS:
        return [python, str(HERE / "peer_step.py"), contender, json.dumps(spec)]
    mode, *flags = contender.split()
    path = folder / f"{name}-{mode}-{spec.get('optimizer', 'adamw')}-{spec.get('world', 1)}.json"     # JSON is YAML
    if "world" in spec:
        flags += ["--world", str(spec["world"]), "--read", spec["read"], "--channels", str(spec.get("channels", 0))]
    path.write_text(json.dumps(job_yaml(name, spec, mode)))
    return [str(bench), "--config", str(path), "--steps", str(spec["steps"]), "--warmup",
            str(spec["warmup"]), "--device", device, *flags]


def last_json(text):
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return None


def print_scaling(results):
    """What more ranks cost: each row against the same contender's on one card, in this call."""
    alone = {(r["row"], r["contender"], r["optimizer"]): r for r in results if r["world"] == 1 and "error" not in r}
    print(f"{'row':14} {'contender':14} {'optimizer':9} {'ranks':>5} {'ms a step':>10} {'over one':>9} {'exposed ms':>10} {'samples/s':>10} "
          f"{'weights':>9} {'each loss':>9}")
    for r in results:
        begin = f"{r['row']:14} {r['contender']:14} {r['optimizer']:9} {r['world']:5}"
        if "error" in r:
            print(f"{begin} {r['error']}")
            continue
        one = alone.get((r["row"], r["contender"], r["optimizer"]))
        rate = r["batch"] * r["accumulation"] * r["world"] / r["full_step_median_ms"] * 1e3
        # Weak scaling: more time for as much work a rank; strong: less than the share of one's rate.
        over = f"{100 * (rate_of(one) * r['world'] / rate - 1):+8.1f}%" if one else "        -"
        exposed = r.get("communication_median_ms")
        difference = r.get("weight_difference")
        reading = f"{100 * (r['read_now_median_ms'] / r['read_rarely_median_ms'] - 1):+8.2f}%" if "read_now_median_ms" in r and "read_rarely_median_ms" in r else "        -"
        print(f"{begin} {r['full_step_median_ms']:10.2f} {over} {exposed if exposed is not None else float('nan'):10.3f} {rate:10.0f} "
              f"{float(difference if difference is not None else 'nan'):9.1e} {reading}")


def rate_of(r):
    return r["batch"] * r["accumulation"] * r["world"] / r["full_step_median_ms"] * 1e3


def print_table(results):
    print(f"{'row':12} {'contender':14} {'ms a step':>10} {'peak GiB':>9} {'first step s':>13} {'loss':>17}")
    for r in results:
        if "error" in r:
            print(f"{r['row']:12} {r['contender']:14} {r['error']}")
            continue
        print(f"{r['row']:12} {r['contender']:14} {r['full_step_median_ms']:10.2f} {r['peak_memory_gib']:9.2f} "
              f"{r['first_step_s']:13.1f} {r['loss_first']:8.4f} {r['loss_last']:8.4f}")


def main(bench, python, arguments):
    parser = argparse.ArgumentParser(prog="tools/bench gpu", description=__doc__)
    parser.add_argument("--rows", default="base", help=f"comma-separated, or all: {', '.join(ROWS)}")
    parser.add_argument("--modes", default="fused,graph_safe", help=f"comma-separated, or all: {', '.join(OURS)}")
    parser.add_argument("--peer", action="store_true", help="FAIR's Python and hiera-optim too (a compile of some 80 s a row)")
    parser.add_argument("--out", type=Path, default=Path("build/bench_gpu.jsonl"))
    parser.add_argument("--device", default="cuda", help="cpu: to try the tool itself")
    parser.add_argument("--steps", type=int, help="timed steps, instead of the row's")
    parser.add_argument("--batch", type=int, help="instead of the row's")
    parser.add_argument("--world", type=lambda text: [int(n) for n in text.split(",")], help="numbers of ranks, one a GPU: 1,2,4,8")
    parser.add_argument("--strong", action="store_true", help=f"with --world: {STRONG} samples a step over all ranks instead of the row's batch a rank")
    parser.add_argument("--optimizers", default="adamw,muon", help="with --world")
    parser.add_argument("--read", default="behind,now,rarely", help="with --world: when losses are read, in turns")
    parser.add_argument("--channels", type=int, default=0, help="with --world: multiprocessors of an all-reduce at most")
    parser.add_argument("--shard", action="store_true", help="with --world: step.shard_optimizer (adamw alone)")
    options = parser.parse_args(arguments)
    if options.shard:
        options.optimizers = "adamw"
    rows = list(ROWS) if options.rows == "all" else options.rows.split(",")
    contenders = (list(OURS) if options.modes == "all" else options.modes.split(",")) + (list(PEERS) if options.peer else [])
    unknown = [r for r in rows if r not in ROWS] + [c for c in contenders if c not in OURS + PEERS]
    if unknown:
        parser.error(f"there is no row or mode '{unknown[0]}'; rows: {', '.join(ROWS)}; modes: {', '.join(OURS)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    key = {"commit": commit(bench), "card": card()}
    results = []
    show = print_scaling if options.world else print_table
    for row_name in rows:
        base = dict(ROWS[row_name], **{k: v for k, v in (("steps", options.steps), ("batch", options.batch)) if v})
        base["warmup"] = min(base["warmup"], base["steps"])
        again = "again" in base or "again_decoder" in base
        for name, spec, contender in ((n, s, c) for n, s in scaled(row_name, base, options) for c in contenders if c.startswith("fused") or not again):
            what = dict(key, row=name, contender=contender, **spec)
            done = [k for k in known if all(k.get(n) == v for n, v in what.items()) and "error" not in k]
            if done:
                results.append(done[-1])
                continue
            command = command_of(contender, name, spec, options.out.parent, bench, python, options.device)
            start = time.monotonic()
            run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, OMP_WAIT_POLICY="passive"))
            line = dict(what, command=" ".join(command), seconds=round(time.monotonic() - start, 1))
            figures = last_json(run.stdout) if run.returncode == 0 else None
            line.update(figures or {"error": (run.stderr.strip().splitlines() or ["failed"])[-1][:300]})
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            results.append(line)
            show([line])
    print()
    show(results)
    return 1 if any("error" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit("gpu_rows: call tools/bench gpu")
