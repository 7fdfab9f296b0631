"""What the Postgres sink is made of: its connections, types, staging tables and promotion."""
