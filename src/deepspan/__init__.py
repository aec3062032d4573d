"""deepspan: an inference engine for DeepSeek-V4 Vision."""
