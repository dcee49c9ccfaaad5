"""sakanajax: the Sakana AI papers of ICML 2026 as one JAX-native, functional research stack."""

__version__ = "0.1.0"
