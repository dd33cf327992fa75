"""One training loop, with its periodic work, metrics and trackers; device_train.py and the pod driver run it."""
