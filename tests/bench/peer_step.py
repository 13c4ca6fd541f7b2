"""A training step of the Python contenders on one GPU, timed as hiera-bench times ours: FAIR's Hiera as it is, and
hiera-optim's `optimize(graph_safe=True)` under `torch.compile(mode="reduce-overhead")`. Full step: the batch's copy to
the device, masks drawn anew, forward and backward under bf16 autocast on fp32 weights, clip to norm 1, fused AdamW; wall
clock between two synchronisations. Memory: the most that torch's allocator held since the start, as tensors of a replayed
graph are counted at its recording alone. Prints one line of JSON.

usage: peer_step.py fair|hiera-optim JSON      JSON: {"variant", "input", "chans", "batch", "q_pool", "patch_stride", "steps", "warmup"}

With "world" in JSON: so many processes under DistributedDataParallel(static_graph=True), as hiera-optim's documentation has
it; "optimizer": adamw or muon (torch.optim.Muon for the blocks' matrices); "accumulation"; "read": behind is the loss of the step
before, now this step's, rarely that of every 32nd. The slowest rank's median counts.

HIERAD_BENCH_LOCK=FILE lets several contenders prepare side by side on one card: each holds FILE shared until its first step is
done, and alone while it is timed.

hiera-optim 0.2.1 needs two repairs beside hiera-transformer 0.1.4: it imports the module names of FAIR's repository, and
reads an attribute that the package's classes lack.
"""
import contextlib
import fcntl
import json
import os
import sys
import time
import types
import warnings

warnings.filterwarnings("ignore")
START = time.perf_counter()
import torch
import hiera
import hiera.hiera_mae
import hiera.hiera_utils
from hiera.hiera_mae import MaskedAutoencoderHiera

WIDTHS = {"tiny": (96, 1, (1, 2, 7, 2)), "small": (96, 1, (1, 2, 11, 2)), "base": (96, 1, (2, 3, 16, 3)),
          "base_plus": (112, 2, (2, 3, 16, 3)), "large": (144, 2, (2, 6, 36, 4)), "huge": (256, 4, (2, 6, 36, 4))}


class OneAxis(MaskedAutoencoderHiera):
    """FAIR has no 1-D loss; this one is ours, without a boolean index so that it can be captured."""

    def forward_loss(self, x, pred, mask):
        b, c, t = x.shape
        label = x.view(b, c, t // self.pred_stride, self.pred_stride).permute(0, 2, 3, 1).flatten(2).float()
        label = (label - label.mean(-1, keepdim=True)) / (label.var(-1, keepdim=True) + 1e-6).sqrt()
        weight = mask.to(torch.float32)[..., None].expand_as(label)
        loss = (((pred.float() - label) ** 2) * weight).sum() / weight.sum()
        return loss, pred, label


def build(row):
    embed, heads, stages = WIDTHS[row["variant"]]
    common = dict(input_size=tuple(row["input"]), in_chans=row["chans"], embed_dim=embed, num_heads=heads, stages=stages,
                  q_pool=row["q_pool"])
    if len(row["input"]) == 2:
        return MaskedAutoencoderHiera(**common)
    stride = row["patch_stride"]
    kernel, padding = (stride, 0) if stride >= 16 else (7, 3)
    return OneAxis(q_stride=(2,), mask_unit_size=(8,), patch_kernel=(kernel,), patch_stride=(stride,), patch_padding=(padding,), **common)


def repair():
    """The names under which hiera-optim looks for FAIR's code."""
    source = sys.modules["hiera.hiera"]
    models, module = types.ModuleType("models"), types.ModuleType("models.hiera")
    for name in ("Hiera", "HieraBlock", "MaskUnitAttention", "PatchEmbed", "Head"):
        if hasattr(source, name):
            setattr(module, name, getattr(source, name))
    module.MaskedAutoencoderHiera = MaskedAutoencoderHiera
    module.apply_fusion_head = hiera.hiera_mae.apply_fusion_head
    models.hiera = module
    utils, inner = types.ModuleType("utils"), types.ModuleType("utils.hiera_utils")
    for name in dir(hiera.hiera_utils):
        if not name.startswith("__"):
            setattr(inner, name, getattr(hiera.hiera_utils, name))
    utils.hiera_utils = inner
    sys.modules.update({"models": models, "models.hiera": module, "utils": utils, "utils.hiera_utils": inner})


def prepare_shared():
    """The lock that HIERAD_BENCH_LOCK names, held shared; None without it."""
    path = os.environ.get("HIERAD_BENCH_LOCK")
    lock = open(path, "a") if path else None
    if lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


@contextlib.contextmanager
def alone(lock):
    if lock:
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    if lock:
        lock.close()


def optimizers(model, name):
    adamw = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    if name != "muon":
        return [torch.optim.AdamW(model.parameters(), **adamw)]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    chosen = {id(p) for p in matrices}
    return [torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([p for p in model.parameters() if id(p) not in chosen], **adamw)]


def timed(step, row, reads):
    """Medians in ms by the way of reading, in turns."""
    times, before = {read: [] for read in reads}, None
    turns = 3 if len(reads) > 1 else 1
    for turn in range(turns):
        for read in reads:
            torch.cuda.synchronize()
            for i in range((row["steps"] + turns - 1) // turns):
                start = time.perf_counter()
                loss = step(i)
                if read == "now":
                    loss.item()
                elif read == "behind" and before is not None:
                    before.item()
                elif read == "rarely" and i % 32 == 31:
                    loss.item()
                before = loss.detach().clone()
                times[read].append(1e3 * (time.perf_counter() - start))
            torch.cuda.synchronize()
    return {read: sorted(values)[len(values) // 2] for read, values in times.items()}


def models(contender, row):
    """The model, and what a step calls: hiera-optim's is compiled."""
    torch.manual_seed(1)
    model = build(row).cuda().train()
    if contender != "hiera-optim":
        return model, model
    repair()
    from hiera_optim import optimize
    model._grad_checkpointing = False
    optimize(model, graph_safe=True)
    return model, torch.compile(model, mode="reduce-overhead", dynamic=False)


def rank_main(rank, contender, row, port):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=row["world"])
    model, step_model = models(contender, row)
    if row["world"] > 1:
        step_model = DistributedDataParallel(step_model, device_ids=[rank], static_graph=True)
    updates = optimizers(model, row.get("optimizer", "adamw"))
    torch.manual_seed(2 + rank)
    pool = [torch.rand(row["batch"], row["chans"], *row["input"]).mul_(2).sub_(1).pin_memory() for _ in range(4)]
    accumulation = row.get("accumulation", 1)

    def step(i):
        for micro in range(accumulation):
            x = pool[(i + micro) % len(pool)].cuda(non_blocking=True)
            if contender == "hiera-optim":
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16):
                loss = step_model(x, mask_ratio=0.6)[0]
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for update in updates:
            update.step()
            update.zero_grad(set_to_none=True)   # gradients kept would be memory of a graph that runs again
        return loss

    first = float(step(0))
    first_step_s = time.perf_counter() - START
    for i in range(1, row["warmup"]):
        step(i)
    torch.cuda.synchronize()
    medians = timed(step, row, row.get("read", "behind").split(","))
    slowest = torch.tensor([medians[read] for read in medians], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    reference = flat.clone()
    dist.broadcast(reference, 0)
    difference = (flat - reference).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        medians = dict(zip(medians, slowest.tolist()))
        print(json.dumps({"full_step_median_ms": next(iter(medians.values())), **{f"read_{read}_median_ms": ms for read, ms in medians.items()},
                          "first_step_s": first_step_s, "peak_memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30,
                          "weight_difference": float(difference), "loss_first": first, "loss_last": float(step(0))}), flush=True)
    else:
        step(0)
    dist.destroy_process_group()


def ranks_main(contender, row):
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, args=(contender, row, port), nprocs=row["world"])


def main():
    contender, row = sys.argv[1], json.loads(sys.argv[2])
    if not torch.cuda.is_available():
        sys.exit("peer_step: no GPU")
    if "world" in row:
        return ranks_main(contender, row)
    lock = prepare_shared()
    model, step_model = models(contender, row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    pool = [torch.rand(row["batch"], row["chans"], *row["input"]).mul_(2).sub_(1).pin_memory() for _ in range(4)]

    def step(i):
        x = pool[i % len(pool)].cuda(non_blocking=True)
        if contender == "hiera-optim":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            loss = step_model(x, mask_ratio=0.6)[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)   # gradients kept would be memory of a graph that runs again
        return loss

    first = float(step(0))
    torch.cuda.synchronize()
    first_step_s = time.perf_counter() - START
    with alone(lock):
        for i in range(1, row["warmup"]):
            step(i)
        torch.cuda.synchronize()
        times = []
        for i in range(row["steps"]):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = step(i)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    print(json.dumps({"full_step_median_ms": times[len(times) // 2], "full_step_min_ms": times[0], "first_step_s": first_step_s,
                      "peak_memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30, "loss_first": first, "loss_last": float(loss)}))


if __name__ == "__main__":
    main()
