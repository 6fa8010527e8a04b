"""The workstation half: from a checkpoint and a folder of images to INT8 stages with early exits."""
