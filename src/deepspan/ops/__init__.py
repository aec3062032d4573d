"""Operations of the network: signature, torch reference, tolerance, and the registry of their providers."""
