"""A stand-in for CUDA: what is asked of it runs on the host, and its order is kept.

`device` stands beneath torch.cuda's streams, events and graphs, `nccl` beneath CuPy's NCCL, `one_sided` beneath its
puts and signals. A `recorder` also keeps what each operation reads and writes: `operators` stands beneath torch's
operators and allocator, `kernels` beneath the launch of Triton kernels, on memory of the host that says it is on a
GPU. `graph` turns the log into operations with edges, looks for races, deadlocks and waits that nobody needs, and
executes the operations in any order that the edges leave open. `ring` runs the ring on it, `cases` are what the proof
covers, and `implied` has the waits that others imply.
"""
