"""Describes a model, a grid and the options of a run in numbers and rules, without Torch.

    grid.py      the axes, the sizes of a grid, every grid of a number of ranks
    model.py     the sizes of a model, its Linears, its parameters and its arithmetic
    family.py    the common traits of a model family, and the list of all families
    goldfish.py  the options of Goldfish loss
    parallel.py  the options of a run: layouts, algorithms, roles of Linears, overlap
    pipeline.py  the order of a pipeline stage's tasks, and the split of layers into stages
    products.py  the matrix products that one rank of a grid computes
    rules.py     which model runs on which grid
    presets.py   models by name

The modules, the trainer and the planner all take these from here, so that they cannot disagree.
"""
