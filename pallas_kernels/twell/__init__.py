"""TwELL: feed-forward layers that compute only the neurons that a ReLU left on (arXiv 2603.23198).

Read `formats.py` (how positives are stored), `reference.py` (the specification), `api.py` (the front door: `ffn`, which
picks an implementation), `train.py` (the differentiable form that saves only what is active).
"""
