"""A stand-in for a GPU that writes down what is asked of it, and the checks on what it wrote.

`device` stands beneath torch.cuda's streams and events, `modes` beneath torch's operators and allocator, `engine`
beneath CuPy's NCCL and the CUDA driver's bindings, `kernels` beneath the launch of Triton kernels. What runs on it is
our own code, unmodified, on memory of the host that says it is on a GPU. `graph` turns the log into operations with
edges, `checks` looks for races, deadlocks and waits that nobody needs, and `replay` executes the operations in any
order that the edges leave open. `case` and `ring` run the ring on it, `cases` are what the proof covers, and `implied`
has the waits that others imply.
"""
