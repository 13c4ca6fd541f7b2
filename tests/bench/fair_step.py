"""One training step of FAIR's Hiera MAE in Python, timed as hiera-bench times ours: random input, masks drawn anew,
forward, backward, clipping to norm 1, AdamW with timm's decay groups, the loss read back. Prints one line of JSON.

usage: fair_step.py CASE THREADS STEPS BATCH      CASE: quickstart | tiny64 | tiny224
"""
import json
import sys
import time
import warnings

warnings.filterwarnings("ignore")
import torch
from hiera.hiera_mae import MaskedAutoencoderHiera, mae_hiera_tiny_224
from timm.optim import param_groups_weight_decay


class OneAxis(MaskedAutoencoderHiera):
    """FAIR has no 1-D loss: the plain one of configs/quickstart.yaml (targets not normalised)."""

    def forward_loss(self, x, pred, mask):
        b, c, t = x.shape
        label = x.view(b, c, t // self.pred_stride, self.pred_stride).permute(0, 2, 3, 1).flatten(2)[mask]
        return ((pred[mask] - label) ** 2).mean(), pred, label


def build(case, batch):
    if case == "quickstart":
        model = OneAxis(input_size=(224,), in_chans=6, q_stride=(2,), q_pool=2, mask_unit_size=(4,), stages=(1, 1, 2),
                        mask_unit_attn=(True, True, False), embed_dim=32, num_heads=1, patch_kernel=(4,),
                        patch_stride=(4,), patch_padding=(0,), decoder_embed_dim=64, decoder_depth=1, decoder_num_heads=4)
        return model, torch.rand(batch, 6, 224) * 2 - 1
    size = int(case.removeprefix("tiny"))
    return mae_hiera_tiny_224(input_size=(size, size)), torch.rand(batch, 3, size, size) * 2 - 1


def main():
    case, threads, steps, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    model, x = build(case, batch)
    model.train()
    groups = param_groups_weight_decay(model, 0.05, set(model.no_weight_decay()))
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    times = []
    for i in range(steps + 5):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(x)[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        if i >= 5:
            times.append(time.perf_counter() - start)
    times.sort()
    print(json.dumps({"median_ms": 1e3 * times[len(times) // 2], "min_ms": 1e3 * times[0]}))


main()
