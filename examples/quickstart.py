"""One body alone, on four virtual ranks, or on every process of torchrun, beside PyTorch's."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ringattn import LocalWorld, ring_attention, shard
from ringattn.comm import GroupLike


def error(group: GroupLike = None) -> float:
    """The largest, of this rank's output and gradients."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    same = torch.Generator().manual_seed(0)  # on every rank
    whole = [torch.randn(1, 1024, heads, 64, generator=same).to(device) for heads in (8, 2, 2)]
    shards = [shard(x, layout="zigzag", group=group).requires_grad_() for x in whole]
    out = ring_attention(*shards, layout="zigzag", group=group, causal=True)  # [B, S, H, D]
    ours = [out, *torch.autograd.grad(out.sum(), shards)]

    q, k, v = (x.requires_grad_().transpose(1, 2) for x in whole)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    theirs = [out, *torch.autograd.grad(out.sum(), whole)]
    theirs = [shard(x, layout="zigzag", group=group) for x in theirs]
    return max((x - y).abs().max().item() for x, y in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group()
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: error {error():.0e}")
        dist.destroy_process_group()
    else:
        with LocalWorld(4) as world:
            print(f"alone: error {error():.0e}, four virtual ranks: {max(world.run(error)):.0e}")
