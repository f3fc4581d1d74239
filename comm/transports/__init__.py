"""Transports: NCCL, torch.distributed, virtual ranks in one process, and the copy engines of one node."""
