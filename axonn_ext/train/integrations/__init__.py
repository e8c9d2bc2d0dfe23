"""Puts scripts of other frameworks on a grid: Lightning Fabric and Hugging Face Accelerate.

    from axonn_ext.train.integrations.fabric import AxonnStrategy
    from axonn_ext.train.integrations.accelerate import AxonnAccelerator

Each needs its package; nothing else of axonn_ext does. See docs/frameworks.md.
"""
