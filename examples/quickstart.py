"""Compare ring attention with PyTorch's: on one device, on virtual ranks, or under torchrun."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ringattn import LocalWorld, ring_attention, shard
from ringattn.comm import GroupLike


def largest_error(group: GroupLike = None) -> float:
    """Return the largest error of this rank's output and gradients, compared with PyTorch's."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)  # the same q, k and v on every rank
    qkv = [torch.randn(1, 1024, heads, 64, generator=generator).to(device) for heads in (8, 2, 2)]
    shards = [shard(x, layout="zigzag", group=group).requires_grad_() for x in qkv]
    out = ring_attention(*shards, layout="zigzag", group=group, causal=True)  # [B, S, H, D]
    ours = [out, *torch.autograd.grad(out.sum(), shards)]

    q, k, v = (x.requires_grad_().transpose(1, 2) for x in qkv)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    expected = [out, *torch.autograd.grad(out.sum(), qkv)]
    expected = [shard(x, layout="zigzag", group=group) for x in expected]
    return max((x - y).abs().max().item() for x, y in zip(ours, expected, strict=True))


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group()
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: error {largest_error():.0e}")
        dist.destroy_process_group()
    else:
        with LocalWorld(4) as world:
            errors = world.run(largest_error)
            print(f"one device: error {largest_error():.0e}, four virtual ranks: {max(errors):.0e}")
