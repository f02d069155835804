"""Who is measured, each in one file: its schema, its bulk enqueue, its worker process."""
