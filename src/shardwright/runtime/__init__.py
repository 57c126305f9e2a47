"""What one device mesh owns: groups, the arena of leased memory, the buckets; and collectives that lease."""
