"""The worker: claims tasks, runs their handlers, stays alive while they misbehave."""
