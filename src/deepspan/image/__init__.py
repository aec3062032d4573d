"""Image side of a request: decoding, resize plan, patches, N-layout; numpy only."""
