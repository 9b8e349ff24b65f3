"""Experts: the grouped GEMM over tokens sorted by expert (`grouped_linear`), where the experts lie (`layout`), and how
tokens travel to them (`dispatch`)."""
