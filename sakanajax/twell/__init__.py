"""TwELL: sparse feed-forward layers, from the penalty that trains them to their use (arXiv 2603.23198, ICML 2026).

An L1 penalty on the activations of a ReLU-gated layer leaves a few dozen of thousands of neurons active; layers that
skip the others are faster and keep less for the backward pass. Start at `ffn.py` for the layer, at `sparsify.py` for a
trained model of your own; the kernels are in `pallas_kernels/twell`; WORKSPACE.md lists the modules.

    body = stack(block(D, attention(D, heads=4), ffn.reglu(D, N)), 4)          # in place of nn.ffn.glu
    loss = loss.lm_loss(lm(V, D, body), Penalty(2e-3))                         # for core.train.fit
    packed = sparsify.sparsify(params, "relu")                                 # for sparsify.sparse_lm

Where we deviate from the paper or its released code, and why (2026-11-30):
  - The penalty is the sum over hidden units, as the released code and its coefficients have it; the mean of the paper's
    equation 2 is `Penalty(form="mean")`.
  - A NaN gate counts as active and propagates, as through a dense ReLU; the released kernels drop it.
  - Dead neurons are read from the gradient, whose column is zero exactly for a neuron that no token of the step
    activated; the paper's step of re-initialisation is not in the released code.
  - Overflow of the sparse training format is answered as the paper says, by more room and a repeated step, from the
    last checkpoint (`fitting.fit`); the released code drops rows and counts them.
  - The switch between dense and sparse decides per layer as released, from the last measurement before each period, but
    a plan is static: a new one is a new compilation.
  - The imposed rules (top-k, threshold) that the paper argues against are measured beside it (`comparisons`).
"""
