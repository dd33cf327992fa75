"""One run over many hosts: where they come from, the Ray session that joins them, and the actors that compute."""
