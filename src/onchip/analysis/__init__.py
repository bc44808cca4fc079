"""Facts derived from expressions: FLOPs, bytes, kind, demand (halo), traffic, roofline."""
