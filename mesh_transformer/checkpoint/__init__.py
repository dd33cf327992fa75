"""Checkpoints: where, when and which (`store`), the published npz layout (`layout`, `npz`, `shards`), what a step's
manifest says (`manifest`), and what its files hold (`inventory`)."""
