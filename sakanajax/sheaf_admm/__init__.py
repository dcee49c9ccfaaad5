"""Sheaf-ADMM: agents that negotiate over a cellular sheaf (arXiv 2605.31005, ICML 2026).

Every agent sees a part of a board, turns it into a convex objective and into restriction maps, and ADMM finds states that are good
for each agent and agree, through the maps, along every edge. Start at `model.py` for the networks, at `solve.py` for a
problem of your own; WORKSPACE.md lists the modules.

Where we deviate from the paper or its released code, and why (2026-11-30):
  - x-update: the exact closed form of the released code, not fifty accelerated proximal-gradient steps as in the paper's appendix.
  - Start: x = z = h, u = 0 as released; the paper's algorithm starts z at 0.
  - The Laplacian is computed by slots, with one GEMM to all slots and one back, instead of edge by edge; `sheaf.laplacian_scatter`
    is the edge form, and tests hold the two equal. LoRA-modulated maps are multiplied out once where that is cheaper.
  - K is a run-time value in training and evaluation. Backward recomputes each iteration from its starting state
    (`loop.iterate`), which is the gradient of full unrolling, or of its last iterations.
  - Batches shuffle single boards, each under a random symmetry; the released loader puts all eight symmetries of a puzzle into one batch.
  - Train and test boards share no symmetry class; the released splits compare raw grids only.
  - At laptop scale the penalty starts at rho = 3 (mazes) and 1 (digits), not at 0.25 and 0.12: with the published values the same
    number of steps solves 13 % instead of 75 % of the mazes of twice the size (arm `paper_rho` against `sheaf_half`), and
    gradients overflow now and then; only the last 20 iterations carry gradient in mazes. Scales gpu and paper keep the paper's.
  - Averages of the weights are debiased, so that short runs are not judged by their initial weights.
  - Patch drop is not specified anywhere. `acc_dropN` blackens what the lost agents alone see, for every model;
    `acc_dropN_removed` also takes the agents out of the graph and of the vote.
  - The CNN baseline's architecture is not given anywhere; ours is `cnn.py`, with average and with max pooling.
"""
