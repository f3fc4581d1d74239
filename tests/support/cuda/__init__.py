"""A stand-in for CUDA that runs on the host and records the order of operations.

- `device` replaces torch.cuda's streams, events and graphs, `nccl` CuPy's NCCL, and `one_sided` its puts and signals.
- A `recorder` also notes what each operation reads and writes. `operators` replaces torch's operators and allocator,
  and `kernels` the launch of Triton kernels. Their tensors lie in host memory and claim to be on a GPU.
- `graph` turns the log into a graph of operations, finds races, deadlocks and redundant waits, and orders operations.
- `replay` executes the operations in any order that the graph allows.
- `ring` runs the ring on the stand-in, `cases` lists what the proof covers, and `implied` lists redundant waits.
"""
