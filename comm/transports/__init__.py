"""Transports: NCCL, torch.distributed, and virtual ranks in one process."""
