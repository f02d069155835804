"""PostgreSQL: the migrations, the store over asyncpg, its twin in memory, and the embedded server."""
