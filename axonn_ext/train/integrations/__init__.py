"""Puts scripts of other frameworks on a grid: Lightning Fabric and Hugging Face Accelerate; and
models on a grid into lm-evaluation-harness.

    from axonn_ext.train.integrations.fabric import AxonnStrategy
    from axonn_ext.train.integrations.accelerate import AxonnAccelerator
    from axonn_ext.train.integrations.lm_eval import AxonnLM

Each needs its package; nothing else of axonn_ext does. See docs/frameworks.md and
docs/evaluation.md.
"""
