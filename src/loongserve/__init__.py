"""Elastic sequence parallelism for long-context LLM serving, after LoongServe (SOSP 2024).

The six sub-packages stand alone: ``kernels``, ``comm``, ``kvpool``, ``policies``, ``runtime`` and ``cli``. Importing
this package imports none of them.
"""

__version__ = "0.1.0"
