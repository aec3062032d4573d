"""How deepspan-tiny is made: data, optimiser, training loop, export. The package never imports it."""
