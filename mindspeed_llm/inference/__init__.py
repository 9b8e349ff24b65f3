"""Text from a trained model: greedy or sampled continuation with a key/value cache."""

from mindspeed_llm.inference.generation import Sampling, generate, stream_tokens

__all__ = ["Sampling", "generate", "stream_tokens"]
