"""Remembers: pages (who owns what), rows (the device's truth about requests), pool (one model's KV)."""
