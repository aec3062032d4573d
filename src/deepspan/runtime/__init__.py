"""What runs a model: device choice, batch building, sampling."""
