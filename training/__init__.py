"""From data to a folder that AutoModel loads: `nlq train`, `nlq generate`, `nlq evaluate`, `nlq params`."""
