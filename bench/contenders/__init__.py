"""One file per contender: its schema, its bulk enqueue, its worker process."""
