"""The trainer: configuration, the processes of a job, the training loop, and files of a run."""
