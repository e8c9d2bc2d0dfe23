"""The families of models, one file of facts each; see spec/family.py."""
