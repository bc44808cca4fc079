"""Which operators could be one kernel: regions, legality, refusals, loop nests."""
