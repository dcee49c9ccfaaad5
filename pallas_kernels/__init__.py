"""GPU and TPU kernels with their references, usable without sakanajax.

A leaf: it imports jax and numpy (jax_triton only inside the functions that launch a kernel). One folder per
operation, with `reference.py` as its specification and `api.py` as its front door; `gpu_check.py` checks them all on
a GPU.
"""
