"""The default list: distinct legal cases, drawn from a seed, that cover every feasible pair of axis values, and each
variant at full depth and 224 in each mode. The tool itself (compare.py) knows nothing of it."""
import itertools
import json
import math
import random

MODES = ("eager", "optimized", "graph_safe", "fused")
FULL_DEPTH_MODES = ("eager", "optimized", "graph_safe")   # fused at full depth: on a GPU, see full_depth()
VARIANTS = ("tiny", "small", "base", "base_plus", "large", "huge")
AXES = {
    "task": ("mae", "mae", "classify"),
    "dims": (1, 2, 2, 3),
    "mode": MODES,
    "dtype": ("fp32", "fp32", "fp32", "fp32", "bf16"),
    "variant": VARIANTS,
    "width": ("own", "16", "24", "32"),          # embed_dim; 'own': the variant's
    "stages": ((1, 1), (2, 1), (1, 1, 1), (1, 2, 1), (1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 2, 2), (1, 1, 3, 1), (1, 1, 1, 1, 1)),
    "q_pool": (0, 1, 2, 3, 4),
    "stride": (2, 2, 2, 3, 4),                   # q_stride on the axes that pool
    "pool_time": (False, False, True),           # video classification may pool time as well
    "grid": ("square", "long", "wide", "line"),  # mask units per axis
    "ratio": (0.25, 0.5, 0.6, 0.75, 0.9),
    "chans": (1, 2, 3, 8),
    "patch": ("overlap", "exact", "wide", "one"),
    "patch_stride": (1, 2, 4),
    "attention": ("default", "all", "none", "mixed"),
    "sep_pos_embed": (False, True),
    "heads": ("own", 1, 2),
    "mlp_ratio": (4.0, 2.0, 3.5),
    "drop_path": (0.0, 0.1, 0.5),
    "head_dropout": (0.0, 0.2),
    "norm_target": (True, True, True, False),
    "batch": (1, 2, 3),
    "decoder": ((16, 1, 1), (24, 2, 2), (32, 3, 4), (40, 1, 5)),
    "classes": (2, 10, 1000),
}
MAE_AXES = ("ratio", "decoder", "norm_target")
CLASSIFY_AXES = ("head_dropout", "classes", "pool_time")
MAX_TOKENS = 1600
MAX_POOLED = 40_000     # values that compete in max-pools: near-ties among them flip at a rate of some 1e-6
MAX_TOKENS_BF16 = 400   # over the batch: a bf16 case is 20 and more seeds, each thrice, one of them in fp64


def _draw(rng, axes=AXES):
    return {k: rng.choice(v) for k, v in axes.items()}


def _grid(kind, dims, rng):
    if dims == 1:
        return [{"square": 3, "long": 6, "wide": 10, "line": 2}[kind]]
    plane = {"square": [2, 2], "long": [4, 1], "wide": [2, 3], "line": [1, 5]}[kind]
    return plane if dims == 2 else [rng.choice((1, 2, 3))] + plane


def _case(p, rng):
    """The case of a point of the axes, or None where the point is not legal."""
    mae, dims, stages = p["task"] == "mae", p["dims"], list(p["stages"])
    if p["q_pool"] >= len(stages) or (p["sep_pos_embed"] and dims != 3):
        return None
    if p["pool_time"] and (mae or dims != 3):
        return None
    q_stride = [p["stride"]] * dims
    if dims == 3 and not p["pool_time"]:
        q_stride[0] = 1
    unit = [s ** (len(stages) - 1) for s in q_stride]
    grid = _grid(p["grid"], dims, rng)
    tokens = [u * g for u, g in zip(unit, grid)]
    count = 1
    for t in tokens:
        count *= t
    patch_stride = [p["patch_stride"]] * dims
    if dims == 3:
        patch_stride[0] = min(2, p["patch_stride"])
    if count > MAX_TOKENS or (count * p["patch_stride"] ** min(dims, 2) > 30000):
        return None
    if p["dtype"] == "bf16" and count * p["batch"] > MAX_TOKENS_BF16:
        return None
    kernel, padding = [], []
    for s in patch_stride:
        k = {"overlap": 2 * s - 1 if s > 1 else 3, "exact": s, "wide": 2 * s + 3, "one": 1}[p["patch"]]
        # tokens == input // stride: the smallest padding that gives it
        pad = max(0, (k - s + 1) // 2)
        if not 0 <= (k - 2 * pad - 1) < s:
            return None
        kernel.append(k)
        padding.append(pad)
    units = 1
    for g in grid:
        units *= g
    if mae and not 1 <= int(units * (1 - p["ratio"])) < units:
        return None
    if mae and p["norm_target"]:
        pred = p["patch_stride"] * p["stride"] ** p["q_pool"]
        if pred ** min(2, dims) * p["chans"] < 4:   # a variance of two or three numbers amplifies rounding
            return None
    case = {"task": p["task"], "variant": p["variant"], "mode": p["mode"], "dtype": p["dtype"], "stages": stages,
            "q_pool": p["q_pool"], "q_stride": q_stride, "mask_unit_size": unit,
            "input_size": [t * s for t, s in zip(tokens, patch_stride)], "in_chans": p["chans"],
            "patch_kernel": kernel, "patch_stride": patch_stride, "patch_padding": padding,
            "mlp_ratio": p["mlp_ratio"], "sep_pos_embed": p["sep_pos_embed"], "drop_path_rate": p["drop_path"],
            "batch": p["batch"]}
    own_width = {"tiny": 96, "small": 96, "base": 96, "base_plus": 112, "large": 144, "huge": 256}[p["variant"]]
    own_heads = {"tiny": 1, "small": 1, "base": 1, "base_plus": 2, "large": 2, "huge": 4}[p["variant"]]
    width = own_width if p["width"] == "own" else int(p["width"])
    heads = own_heads if p["heads"] == "own" else p["heads"]
    if width % heads or (width > 32 and (len(stages) > 3 or sum(stages) > 4)):
        return None
    if p["q_pool"] and count * 2 * width * p["batch"] * (1 - p["ratio"] if mae else 1) > MAX_POOLED:
        return None
    if p["width"] != "own":
        case["embed_dim"] = width
    if p["heads"] != "own":
        case["num_heads"] = heads
    n = len(stages)
    if p["attention"] != "default":
        case["mask_unit_attn"] = {"all": [True] * n, "none": [False] * n, "mixed": [i % 2 == 1 for i in range(n)]}[p["attention"]]
    if mae:
        dim, depth, decoder_heads = p["decoder"]
        case.update(mask_ratio=p["ratio"], norm_target=p["norm_target"], decoder_embed_dim=dim, decoder_depth=depth,
                    decoder_num_heads=decoder_heads)
    else:
        case.update(head_dropout=p["head_dropout"], num_classes=p["classes"])
    return case


def _pairs(p):
    skip = CLASSIFY_AXES if p["task"] == "mae" else MAE_AXES
    items = [(k, v) for k, v in p.items() if k not in skip]
    return set(itertools.combinations(items, 2))


def _legal_point(rng, axes=AXES):
    while True:
        p = _draw(rng, axes)
        case = _case(p, rng)
        if case is not None:
            return p, case


def feasible_pairs(rng, draws=40000):
    found = set()
    for _ in range(draws):
        found |= _pairs(_legal_point(rng)[0])
    return found


def pairwise(seed, count, axes=AXES, cover=True, draws=40000):
    """(cases, pairs covered, pairs feasible): at least `count` distinct cases, and more where the pairs need them."""
    rng = random.Random(seed)
    feasible = feasible_pairs(random.Random(f"{seed} pairs"), draws) if cover else set()
    open_pairs, cases, seen = set(feasible), [], set()
    tries = 0
    while len(cases) < count or (open_pairs and tries < 60):
        best = max((_legal_point(rng, axes) for _ in range(25 if open_pairs else 1)),
                   key=lambda pc: len(_pairs(pc[0]) & open_pairs))
        key = json.dumps(best[1], sort_keys=True)
        if key in seen:
            continue
        gained = len(_pairs(best[0]) & open_pairs)
        if gained == 0 and len(cases) >= count:
            tries += 1
            continue
        tries = 0
        open_pairs -= _pairs(best[0])
        seen.add(key)
        case = dict(best[1], weights_seed=rng.randrange(1 << 30), input_seed=rng.randrange(1 << 30))
        case["id"] = f"{seed}-{len(cases)}"
        cases.append(case)
    return cases, len(feasible) - len(open_pairs), len(feasible)


def full_depth(seed, device="cpu"):
    """Each variant as FAIR names it, at 224, in each mode (fused: on a GPU); Huge with a small input where memory is small."""
    rng = random.Random(f"{seed} full")
    cases = []
    for variant, mode in itertools.product(VARIANTS, MODES if device == "cuda" else FULL_DEPTH_MODES):
        case = {"id": f"{seed}-{variant}-{mode}", "task": "mae", "variant": variant, "mode": mode, "batch": 1,
                "weights_seed": rng.randrange(1 << 30), "input_seed": rng.randrange(1 << 30)}
        if variant == "huge" and device == "cpu":
            case.update(input_size=[64, 64], mask_ratio=0.5)
        cases.append(case)
    for variant in ("tiny", "base"):  # classification, video and one axis at full depth
        base = {"variant": variant, "batch": 1, "weights_seed": rng.randrange(1 << 30), "input_seed": rng.randrange(1 << 30)}
        mode = rng.choice(FULL_DEPTH_MODES)
        cases.append(dict(base, id=f"{seed}-{variant}-classify", task="classify", mode=mode, drop_path_rate=0.1))
        cases.append(dict(base, id=f"{seed}-{variant}-signal", task="mae", mode=mode, input_size=[1024], in_chans=8))
    cases.append({"id": f"{seed}-base-video", "task": "mae", "variant": "base", "mode": rng.choice(FULL_DEPTH_MODES), "batch": 1,
                  "input_size": [16, 224, 224], "mask_ratio": 0.9, "weights_seed": 1, "input_seed": 1})
    return cases


def fast(seed):
    """A subset for every commit: fp32 over all pairs of the axes that change the computation, some bf16."""
    axes = dict(AXES, dtype=("fp32",), stages=tuple(s for s in AXES["stages"] if sum(s) <= 5))
    cases, _, _ = pairwise(seed, 110, axes, cover=True, draws=4000)
    cases = cases[:110]
    small = dict(axes, dtype=("bf16",), width=("16", "24"), patch_stride=(1, 2), batch=(1, 2))
    drawn, _, _ = pairwise(f"{seed} bf16", 60, small, cover=False)
    for i, mode in enumerate(MODES):   # of each mode the one with the least input
        bf16 = min((c for c in drawn if c["mode"] == mode), key=lambda c: c["batch"] * math.prod(c["input_size"]))
        cases.append(dict(bf16, id=f"{seed}-bf16-{i}"))
    whole = [c for c in full_depth(seed) if c["variant"] == "tiny" and c["task"] == "mae" and "input_size" not in c]
    return cases + [random.Random(f"{seed} whole").choice(whole)]


def default(seed, count, device="cpu"):
    cases, covered, feasible = pairwise(seed, count)
    return cases + full_depth(seed, device), covered, feasible
