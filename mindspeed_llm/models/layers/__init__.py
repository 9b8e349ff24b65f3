"""The building blocks of a decoder-only transformer, one concept a file. They know sizes and tensors; sharding and
quantization come from outside.
"""
