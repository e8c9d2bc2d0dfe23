"""`axonn-ext plan`."""

from axonn_ext.cli.plan.command import add_parser as add_parser
