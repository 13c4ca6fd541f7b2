"""FAIR's Hiera, from pip, built and run as a case says; nothing here knows our engine.

A case's keys are FAIR's constructor arguments by FAIR's names; what is absent takes the default of FAIR's named
constructor for the variant (read from it, live), the video one where the case has three axes. FAIR names no 1-D
model: there the arguments that have a length follow its image models on one axis.
"""
import contextlib
import math
import types
import warnings

import torch
import torch.nn.functional as F

warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
import hiera.hiera as fair_hiera
import hiera.hiera_mae as fair_mae
from hiera.hiera_utils import Unroll, get_resized_mask

GEOMETRY_KEYS = ("input_size", "q_stride", "mask_unit_size", "patch_kernel", "patch_stride", "patch_padding")
CONSTRUCTOR_KEYS = GEOMETRY_KEYS + (
    "embed_dim", "num_heads", "stages", "in_chans", "q_pool", "mask_unit_attn", "mlp_ratio", "sep_pos_embed",
    "decoder_embed_dim", "decoder_depth", "decoder_num_heads", "num_classes", "drop_path_rate", "head_dropout")
OTHER_KEYS = ("id", "task", "variant", "mask_ratio", "batch", "dtype", "mode", "weights_seed", "input_seed",
              "norm_target", "sdpa_backend")
MAE_KEYS = ("decoder_embed_dim", "decoder_depth", "decoder_num_heads")
VARIANTS = ("tiny", "small", "base", "base_plus", "large", "huge")
ONE_AXIS = {"input_size": (224,), "q_stride": (2,), "mask_unit_size": (8,), "patch_kernel": (7,),
            "patch_stride": (4,), "patch_padding": (3,)}
PERTURBATION = 0.3  # of a parameter's own spread; see build()


class BadCase(ValueError):
    """The case is not written as the tool's keys ask."""


def _named_constructor(task, variant, video):
    """What FAIR's named constructor passes to the class, without building anything."""
    module = fair_mae if task == "mae" else fair_hiera
    cls = "MaskedAutoencoderHiera" if task == "mae" else "Hiera"
    seen = {}
    original = getattr(module, cls)
    setattr(module, cls, lambda **kw: seen.update(kw))
    try:
        getattr(module, ("mae_" if task == "mae" else "") + f"hiera_{variant}_" + ("16x224" if video else "224"))()
    finally:
        setattr(module, cls, original)
    return seen


def _class_defaults(task):
    import inspect
    found = {}
    for cls in (fair_hiera.Hiera, fair_mae.MaskedAutoencoderHiera)[: 2 if task == "mae" else 1]:
        init = cls.__init__
        closure = [c.cell_contents for c in (init.__closure__ or ()) if callable(c.cell_contents)]
        for name, p in inspect.signature(closure[0] if closure else init).parameters.items():
            if p.default is not inspect.Parameter.empty:
                found[name] = p.default
    return found


def resolve(case):
    """FAIR's full constructor arguments, and the tool's own keys, of a case."""
    unknown = sorted(set(case) - set(CONSTRUCTOR_KEYS) - set(OTHER_KEYS))
    if unknown:
        raise BadCase(f"unknown key {unknown[0]!r}; known: {', '.join(OTHER_KEYS + CONSTRUCTOR_KEYS)}")
    run = {"task": "mae", "variant": "base", "mask_ratio": 0.6, "batch": 2, "dtype": "fp32", "mode": "eager",
           "weights_seed": 0, "input_seed": 0, "norm_target": True, "sdpa_backend": "auto"}
    run.update({k: v for k, v in case.items() if k in OTHER_KEYS and k != "id"})
    for key, allowed in (("task", ("mae", "classify")), ("variant", VARIANTS), ("dtype", ("fp32", "bf16"))):
        if run[key] not in allowed:
            raise BadCase(f"{key} is {run[key]!r}; it must be one of {', '.join(allowed)}")
    dims = next((len(case[k]) for k in GEOMETRY_KEYS if k in case), 2)
    args = _class_defaults(run["task"])
    args = {k: v for k, v in args.items() if k in CONSTRUCTOR_KEYS}
    args.update(_named_constructor(run["task"], run["variant"], False))
    if dims == 3:  # FAIR has no tiny and small video models; their blocks are those of the image models
        video = _named_constructor(run["task"], "base", True)
        args.update({k: v for k, v in video.items() if k not in ("embed_dim", "num_heads", "stages")})
    elif dims == 1:
        args.update(ONE_AXIS)
    for key, value in case.items():
        if key in CONSTRUCTOR_KEYS:
            args[key] = tuple(value) if isinstance(value, list) else value
    if "mask_unit_attn" not in case:  # FAIR's default is four flags long
        n = len(args["stages"])
        args["mask_unit_attn"] = (tuple(args["mask_unit_attn"]) + (False,) * n)[:n]
    if run["task"] == "mae":
        args.pop("num_classes", None)
        args.pop("head_dropout", None)
    else:
        for key in MAE_KEYS:
            args.pop(key, None)
    return args, run


def build(args, run):
    """FAIR's model in fp32 on the CPU. Its initialisation leaves biases 0 and norms 1, which would hide a dropped bias or
    scale, so every parameter moves by a fraction of its own spread."""
    torch.manual_seed(run["weights_seed"])
    cls = fair_mae.MaskedAutoencoderHiera if run["task"] == "mae" else fair_hiera.Hiera
    model = cls(**args)
    generator = torch.Generator().manual_seed(run["weights_seed"] + 1)
    with torch.no_grad():
        for p in model.parameters():
            spread = float(p.std()) if p.numel() > 1 else 0.0
            p.add_(torch.randn(p.shape, generator=generator) * (PERTURBATION * spread if spread > 1e-6 else 0.05))
        if run["task"] == "classify":  # FAIR's head x 0.001 would drown every gradient behind it
            model.head.projection.weight.mul_(300)
    return model.train()


def draw(model, args, run, seed):
    """Fresh inputs and labels, and a mask and stochastic draws of FAIR's own kind: CPU tensors."""
    g = torch.Generator().manual_seed(seed)
    B = run["batch"]
    x = torch.randn((B, args["in_chans"]) + tuple(args["input_size"]), generator=g)
    # Smooth structure, so that patches differ in mean and variance as real signals do.
    x = x * (0.5 + torch.rand((B, args["in_chans"]) + (1,) * len(args["input_size"]), generator=g)) + 0.3
    out = {"x": x}
    if run["task"] == "mae":
        torch.manual_seed(seed % 2**63)
        out["keep_mask"] = model.get_random_mask(x, run["mask_ratio"])
    else:
        out["labels"] = torch.randint(0, args["num_classes"], (B,), generator=g)
    rates = [float(r) for r in torch.linspace(0, args["drop_path_rate"], sum(args["stages"]))]
    keep = torch.stack([(torch.rand((2, B), generator=g) >= r) for r in rates])
    out["drop_path_keep"] = keep
    if run["task"] == "classify":
        dim = model.head.projection.in_features
        out["dropout_keep"] = torch.rand((B, dim), generator=g) >= args["head_dropout"]
    return out


class _Dropout(torch.nn.Module):
    def __init__(self, keep, rate):
        super().__init__()
        self.keep, self.rate = keep, rate

    def forward(self, x):
        return x * self.keep.to(x.dtype) / (1 - self.rate) if self.training else x


@contextlib.contextmanager
def injected(model, args, inputs):
    """timm's DropPath asks bernoulli_ for its draws, in the order of the blocks: it gets ours."""
    rates = torch.linspace(0, args["drop_path_rate"], sum(args["stages"])).tolist()
    queue = [inputs["drop_path_keep"][i, j] for i, r in enumerate(rates) if r > 0 for j in (0, 1)]
    original = torch.Tensor.bernoulli_

    def bernoulli_(tensor, p=0.5, **_):
        keep = queue.pop(0)
        return tensor.copy_(keep.to(tensor.dtype).view(tensor.shape))

    head = getattr(model, "head", None)
    dropout = head.dropout if head is not None else None
    torch.Tensor.bernoulli_ = bernoulli_
    if isinstance(dropout, torch.nn.Dropout):
        head.dropout = _Dropout(inputs["dropout_keep"], dropout.p).train(model.training)
    try:
        yield queue
    finally:
        torch.Tensor.bernoulli_ = original
        if dropout is not None:
            head.dropout = dropout


def signal_labels(x, mask, stride, norm=True):
    """The 1-D label, which FAIR lacks: pieces of `stride` samples, sample-major with channels fastest."""
    B, C, T = x.shape
    label = x.transpose(1, 2).reshape(B, T // stride, stride * C)[mask]
    if norm:
        label = (label - label.mean(-1, keepdim=True)) / (label.var(-1, keepdim=True) + 1e-6).sqrt()
    return label


def forward(model, args, run, inputs):
    """loss, pred, label (MAE) or logits, and the encoder's intermediates, by FAIR's own code."""
    intermediates = []
    hook = model.reroll.register_forward_hook(lambda _m, _a, out: intermediates.append(out))
    try:
        x = inputs["x"]
        if run["task"] == "classify":
            logits, _ = model(x, return_intermediates=True)
            return {"loss": F.cross_entropy(logits, inputs["labels"]), "pred": logits}, intermediates
        mask = inputs["keep_mask"]
        if len(args["input_size"]) == 1 or not run["norm_target"]:
            latent, mask = model.forward_encoder(x, run["mask_ratio"], mask=mask)
            pred, pred_mask = model.forward_decoder(latent, mask)
            removed = ~pred_mask
            if len(args["input_size"]) == 1:
                label = signal_labels(x, removed, model.pred_stride, run["norm_target"])
            else:
                label = getattr(model, f"get_pixel_label_{len(args['input_size'])}d")(x, removed, norm=False)
            pred = pred[removed]
            loss = ((pred - label) ** 2).mean()
        else:
            loss, pred, label, _ = model(x, mask_ratio=run["mask_ratio"], mask=mask)
        return {"loss": loss, "pred": pred, "label": label}, intermediates
    finally:
        hook.remove()


def run_model(model, args, run, inputs, autocast=False):
    """One forward and backward: everything that is compared, by name, detached."""
    model.zero_grad(set_to_none=True)
    device = inputs["x"].device.type
    context = torch.autocast(device, dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with injected(model, args, inputs) as queue, context:
        out, intermediates = forward(model, args, run, inputs)
    if queue:
        raise RuntimeError(f"{len(queue)} drop-path draws were not used")
    out["loss"].backward()
    result = {k: v.detach() for k, v in out.items()}
    if run["task"] == "mae":  # of the stages that the decoder sees, as FAIR selects them
        for stage in list(range(args["q_pool"])) + [len(intermediates) - 1]:
            result[f"intermediate.{stage}"] = intermediates[stage].detach()
    for name, p in model.named_parameters():
        result[f"grad.{name}"] = torch.zeros_like(p) if p.grad is None else p.grad.detach()
    result["grad_norm"] = torch.stack([v.double().square().sum() for k, v in result.items() if k.startswith("grad.")]).sum().sqrt()
    model.zero_grad(set_to_none=True)
    return result


@torch.no_grad()
def evaluate(model, args, run, inputs):
    """The model in eval mode: no drop path, no dropout, FAIR's softmax behind the head; and what a probe would see, the
    encoder's last output with nothing masked, averaged over tokens."""
    model.eval()
    try:
        if run["task"] == "classify":
            seen = []
            hook = model.head.register_forward_hook(lambda _m, given, _o: seen.append(given[0]))
            probabilities = model(inputs["x"])
            hook.remove()
            logits = model.head.projection(seen[0])
            return {"eval_pred": probabilities, "eval_loss": F.cross_entropy(logits, inputs["labels"]), "features": seen[0]}
        out, _ = forward(model, args, run, dict(inputs, keep_mask=inputs["eval_keep_mask"]))
        whole = torch.ones_like(inputs["keep_mask"], dtype=torch.bool)
        latent, _ = model.forward_encoder(inputs["x"], run["mask_ratio"], mask=whole)
        return {"eval_loss": out["loss"], "features": latent.flatten(1, -2).mean(1)}
    finally:
        model.train()


def pooling_margin(model, args, run, inputs):
    """The least difference between the largest and the next value in any query or shortcut max-pool."""
    least, hooks = [math.inf], []

    def note(values, axis):
        top = values.detach().topk(2, dim=axis).values
        least[0] = min(least[0], float((top.select(axis, 0) - top.select(axis, 1)).min()))

    def on_qkv(attn):
        def hook(_m, _a, out):
            B, N, _ = out.shape
            windows = N // (attn.q_stride * attn.window_size) if attn.use_mask_unit_attn else 1
            q = out.reshape(B, -1, windows, 3, attn.heads, attn.head_dim).permute(3, 0, 4, 2, 1, 5)[0]
            note(q.reshape(B, attn.heads, windows, attn.q_stride, -1, attn.head_dim), 3)
        return hook

    def on_proj(stride):
        return lambda _m, _a, out: note(out.view(out.shape[0], stride, -1, out.shape[-1]), 1)

    for block in model.blocks:
        if block.attn.q_stride > 1:
            hooks.append(block.attn.qkv.register_forward_hook(on_qkv(block.attn)))
            if hasattr(block, "proj"):
                hooks.append(block.proj.register_forward_hook(on_proj(block.attn.q_stride)))
    try:
        with torch.no_grad(), injected(model, args, inputs):
            forward(model, args, run, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return least[0]


def _boxes(coordinates, extents):
    """Whether each group of coordinates [groups, members, axes] is one aligned box of `extents`."""
    corner = coordinates.amin(1)
    spread = coordinates.amax(1) - corner + 1
    members = coordinates.shape[1]
    distinct = torch.stack([torch.unique(g, dim=0).shape[0] * torch.ones((), dtype=torch.long) for g in coordinates])
    return bool((spread == extents).all() and (corner % extents == 0).all() and (distinct == members).all()
                and members == int(torch.prod(extents)))


def wrong_tokens(args, run):
    """The independent rule: a sentence where FAIR runs but reads wrong tokens, else None. It sends coordinates through
    FAIR's own unrolling, mask, windows and labels and looks where they come out; it asks nothing of our engine."""
    size, stride, units = args["input_size"], args["patch_stride"], args["mask_unit_size"]
    dims = len(size)
    for i, s in zip(size, stride):
        if i % s:
            return f"input_size {i} is not a multiple of patch_stride {s}: FAIR never reads the last {i % s} samples"
    tokens = [i // s for i, s in zip(size, stride)]
    if any(t % u for t, u in zip(tokens, units)):
        return f"{tokens} tokens are not whole mask units of {list(units)}"
    grid = torch.stack(torch.meshgrid(*[torch.arange(t) for t in tokens], indexing="ij"), -1).reshape(1, -1, dims)
    schedule = [args["q_stride"]] * (len(args["stages"]) - 1)
    order = Unroll(size, stride, schedule)(grid)[0]
    N, windows = order.shape[0], math.prod(t // u for t, u in zip(tokens, units))
    extents = torch.tensor(units)
    if run["task"] == "mae":
        kept = order.reshape(-1, windows, dims).transpose(0, 1)  # unit w keeps positions n with n % windows == w
        corners = torch.stack(torch.meshgrid(*[torch.arange(t // u) for t, u in zip(tokens, units)], indexing="ij"),
                              -1).reshape(-1, dims) * extents
        if not _boxes(kept, extents) or not bool((kept.amin(1) == corners).all()):
            return "FAIR's mask keeps tokens outside the kept mask units"
        ids = torch.arange(windows).view(1, 1, *[t // u for t, u in zip(tokens, units)]).float()
        by_pixel = get_resized_mask(torch.Size(size), ids)[0, 0].long().reshape(-1)
        pixel = torch.stack(torch.meshgrid(*[torch.arange(i) for i in size], indexing="ij"), -1).reshape(-1, dims)
        unit = pixel // torch.tensor(stride) // extents
        flat = torch.zeros(len(pixel), dtype=torch.long)
        for axis in range(dims):
            flat = flat * (tokens[axis] // units[axis]) + unit[:, axis]
        if not bool((flat == by_pixel).all()):
            return "FAIR's mask zeroes pixels outside the removed mask units"
    wrong = _wrong_windows(args, order, windows)
    if wrong is None and run["task"] == "mae":
        wrong = _wrong_labels(args, run, tokens, windows)
    return wrong


def _wrong_windows(args, order, windows):
    """Follows the token sets through pooling: each pooled token must cover a box, each window one mask unit."""
    N, dims = order.shape
    cover = order.view(N, 1, dims)
    unit_tokens, flat_stride = math.prod(args["mask_unit_size"]), math.prod(args["q_stride"])
    ends = [sum(args["stages"][: i + 1]) - 1 for i in range(len(args["stages"]))]
    pool_blocks = [e + 1 for e in ends[: args["q_pool"]]]
    stage, pooled = 0, 0
    for block in range(sum(args["stages"])):
        attention = args["mask_unit_attn"][stage]
        starts = block - 1 in ends
        stage += int(starts)
        pools = starts and block in pool_blocks
        if attention:
            groups = cover.shape[0] // (unit_tokens // flat_stride ** pooled)
            members = cover.reshape(-1, groups, cover.shape[1], dims).permute(1, 0, 2, 3).reshape(groups, -1, dims)
            if not _boxes(members, torch.tensor(args["mask_unit_size"])):
                return f"the attention windows of FAIR's block {block} mix tokens of several mask units"
        if pools:
            pooled += 1
            cover = cover.view(flat_stride, -1, cover.shape[1], dims).transpose(0, 1).reshape(
                cover.shape[0] // flat_stride, -1, dims)
            if not _boxes(cover, torch.tensor(args["q_stride"]) ** pooled):
                return f"the pooling of FAIR's block {block} joins tokens that are not neighbours"
    return None


def _wrong_labels(args, run, tokens, windows):
    kept = int(windows * (1 - run["mask_ratio"]))
    if not 0 < kept < windows:
        return f"mask_ratio {run['mask_ratio']} keeps {kept} of {windows} mask units"
    final = [t // s ** args["q_pool"] for t, s in zip(tokens, args["q_stride"])]
    span = [p * s ** args["q_pool"] for p, s in zip(args["patch_stride"], args["q_stride"])]
    if any(t % s ** args["q_pool"] for t, s in zip(tokens, args["q_stride"])):
        return "the pooled tokens do not tile the input"
    size = args["input_size"]
    stand_in = types.SimpleNamespace(pred_stride=args["patch_stride"][-1] * args["q_stride"][-1] ** args["q_pool"],
                                     patch_stride=args["patch_stride"])
    index = torch.arange(math.prod(size)).view(1, 1, *size).float()
    everything = torch.ones(1, math.prod(final), dtype=torch.bool)
    if len(size) == 1:
        labels = signal_labels(index, everything, stand_in.pred_stride, norm=False)
    else:
        get = getattr(fair_mae.MaskedAutoencoderHiera, f"get_pixel_label_{len(size)}d")
        labels = get(stand_in, index, everything, norm=False)
    at = []
    rest = labels.long()
    for extent in reversed(size):
        at.insert(0, rest % extent)
        rest = rest // extent
    own = torch.stack(torch.meshgrid(*[torch.arange(f) for f in final], indexing="ij"), -1).reshape(-1, len(size))
    for axis in range(len(size)):
        if not bool((at[axis] // span[axis] == own[:, axis : axis + 1]).all()):
            return "the labels that FAIR compares with are not the prediction's own pixels"
    return None
