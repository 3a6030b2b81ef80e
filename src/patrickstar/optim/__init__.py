"""AdamW and Adam by one definition of every bit, and the optimizer that a session hands out.

choose_kernel() -> Kernel: Fused, torch's one-pass kernels
choose_kernels() -> Passes  of the host and of a device: TorchPasses, or TritonPasses on a GPU, bit-equal
AdamW, Adam                 on ordinary parameters
check_optimizer, read_state what a user's optimizer brings;  ManagedOptimizer: what the user gets back
GlobalNorm, clip_factor     clipping
"""
