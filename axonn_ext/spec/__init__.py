"""What a model, a grid and a way to run the one on the other are; numbers and rules, no Torch.

    grid.py      the axes, the sizes of a grid, every grid of a number of ranks
    model.py     the sizes of a model, its Linears, its parameters and its arithmetic
    family.py    what the models of a family have in common, and the list of all families
    parallel.py  the options of a run: layouts, algorithms, roles of Linears, overlap
    rules.py     which model runs on which grid
    presets.py   models by name

The modules, the trainer and the planner take all of this from here, so that none can disagree.
"""
